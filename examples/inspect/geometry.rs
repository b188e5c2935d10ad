//! What each layer predicts, and the geometry of its softmax (Stream separation).

use std::fs;
use std::path::Path;

use dar_burn::diagnostics::ndarray::{Array1, Array2, Axis};
use dar_burn::diagnostics::{
    BinaryConcept, DAMPING, LayerGeometry, LinearSteering, STEERING_STEPS, SoftmaxCovariance, Spectrum, Steering,
    SteeringMethod, TARGET_PROBABILITY, TOP_TOKENS, concept_direction, steer,
};

use crate::model::{Exits, Subject};
use crate::picture::{self, Curve};
use crate::progress;
use crate::report::{Report, number};
use crate::streams::wrong;
use crate::support::cli::{Failure, failed_to};
use crate::support::vocabulary::Vocabulary;

/// Pairs of tokens that differ in one concept.
pub struct Pairs {
    base: Vec<usize>,
    target: Vec<usize>,
}

impl Pairs {
    pub fn read(path: &Path, vocabulary: &Vocabulary) -> Result<Self, Failure> {
        let text = fs::read_to_string(path).map_err(failed_to("read", path))?;
        let (mut base, mut target) = (Vec::new(), Vec::new());
        for line in text.lines().filter(|line| !line.trim().is_empty() && !line.starts_with('#')) {
            let words: Vec<&str> = line.split_whitespace().collect();
            let tokens = words.iter().map(|word| vocabulary.encode(word)).collect::<Result<Vec<_>, _>>()?;
            match tokens.as_slice() {
                [b, t] if b.len() == 1 && t.len() == 1 => {
                    base.push(b[0] as usize);
                    target.push(t[0] as usize);
                }
                _ => {
                    return Err(Failure::usage(format!(
                        "{}: `{line}` is not two words of one token each",
                        path.display()
                    )));
                }
            }
        }
        if base.is_empty() {
            return Err(Failure::usage(format!("{} holds no pairs", path.display())));
        }
        Ok(Self { base, target })
    }

    fn direction(&self, unembedding: &Array2<f64>) -> Result<Array1<f64>, Failure> {
        let rows = |tokens: &[usize]| unembedding.select(Axis(0), tokens);
        concept_direction(rows(&self.base).view(), rows(&self.target).view()).map_err(wrong)
    }
}

/// Loss, covariance of the softmax and, with pairs, the concept direction at the end of every layer.
pub fn layers(
    report: &mut Report,
    subject: &Subject,
    contexts: usize,
    pairs: Option<&Pairs>,
    steered: usize,
) -> Result<(), Failure> {
    let bar = progress("layers", contexts);
    let Exits { losses, logits, states } = subject.exits(contexts, |rows| bar.inc(rows as u64));
    bar.finish_and_clear();
    let unembedding = subject.unembedding();
    let direction = pairs.map(|pairs| pairs.direction(&unembedding)).transpose()?;

    report.section(
        "What does each layer predict?",
        "The model's one head reads the state after every layer, as if the model ended there: the loss says how good that \
         prediction is. The covariance of the unembedding under the predictions is the metric of the softmax: an effective \
         rank far below the width means that few directions change the prediction, a large condition number that they \
         change it very unevenly, a trace near zero that the prediction is certain already (Stream separation, Tables 1 and \
         2, Figure 2).",
    );
    report.say(format!(
        "Predictions after the last token of {contexts} contexts, the likeliest {} of {} tokens of each.",
        TOP_TOKENS.min(unembedding.nrows()),
        unembedding.nrows()
    ));
    let (mut rows, mut ranks) = (Vec::new(), Vec::new());
    for (layer, (logits, loss)) in logits.iter().zip(&losses).enumerate() {
        let mut covariance = SoftmaxCovariance::new(unembedding.view(), TOP_TOKENS).map_err(wrong)?;
        logits.rows().into_iter().try_for_each(|context| covariance.push(context)).map_err(wrong)?;
        let covariance = covariance.finish().map_err(wrong)?;
        let spectrum = Spectrum::of(covariance.view()).map_err(wrong)?;
        ranks.push((layer as f64, spectrum.effective_rank()));
        let mut row = vec![layer.to_string(), number(*loss), number(spectrum.effective_rank())];
        row.extend([format!("{:.4e}", spectrum.condition_number()), number(spectrum.trace())]);
        if let Some(direction) = &direction {
            let geometry = LayerGeometry::measure(covariance.view(), direction.view(), DAMPING).map_err(wrong)?;
            let verdict = match geometry.steering {
                LinearSteering::Unreliable => "unreliable",
                LinearSteering::Undecided => "undecided",
                LinearSteering::Reliable => "reliable",
            };
            row.extend([number(geometry.cosine), verdict.to_owned()]);
        }
        rows.push(row);
    }
    let curve = |name: &str, points| [Curve { name: name.into(), points, joined: true }];
    let of_losses = losses.iter().enumerate().map(|(layer, &loss)| (layer as f64, loss)).collect();
    report.picture("layer_loss", "Loss at the end of every layer", |path| {
        let title = "Loss if the model ended here";
        picture::curves(path, title, ["layer", "nats a token"], &curve("cross entropy", of_losses))
    })?;
    report.picture("effective_rank", "Effective rank by layer", |path| {
        let title = "Effective rank of the softmax covariance";
        picture::curves(path, title, ["layer", "directions"], &curve("effective rank", ranks))
    })?;
    let mut header = vec!["layer", "loss", "effective_rank", "condition_number", "trace"];
    match direction {
        None => report.leave_out("Concept directions", "no pairs were given: --pairs FILE."),
        Some(_) => {
            header.extend(["cosine", "linear_steering"]);
            report.say(
                "The cosine is that of the concept's direction with its natural gradient: below 0.3 a straight step leaks \
                 probability to other tokens, above 0.4 it is reliable (Stream separation, Table 4).",
            );
        }
    }
    report.table("layers", &header, &rows)?;
    match (pairs, direction) {
        (Some(pairs), Some(direction)) if steered > 0 => {
            steering(report, &states, pairs, &direction, &unembedding, steered)
        }
        _ => Ok(()),
    }
}

/// Length of a steering step. A state that the head multiplies has a length near the root of its width.
const STEP: f64 = 0.25;

/// Euclidean against dual steering (Stream separation, Table 3).
fn steering(
    report: &mut Report,
    states: &[Array2<f64>],
    pairs: &Pairs,
    direction: &Array1<f64>,
    unembedding: &Array2<f64>,
    contexts: usize,
) -> Result<(), Failure> {
    let concept = BinaryConcept::new(&pairs.base, &pairs.target, unembedding.nrows()).map_err(wrong)?;
    let contexts = contexts.min(states[0].nrows());
    let bar = progress("steering", states.len() * contexts);
    let mut rows = Vec::new();
    for (layer, states) in states.iter().enumerate() {
        let mut reached = Vec::new();
        for state in states.rows().into_iter().take(contexts) {
            let run = |method| {
                let steering =
                    Steering { method, step_size: STEP, max_steps: STEERING_STEPS, threshold: TARGET_PROBABILITY };
                steer(state, direction.view(), unembedding.view(), &concept, &steering).map_err(wrong)
            };
            let euclidean = run(SteeringMethod::Euclidean)?;
            let dual = run(SteeringMethod::Dual { top: TOP_TOKENS, damping: DAMPING })?;
            reached.extend(euclidean.zip(dual).map(|(euclidean, dual)| (euclidean.off_target_kl, dual.off_target_kl)));
            bar.inc(1);
        }
        let count = reached.len() as f64;
        let euclidean = reached.iter().map(|(euclidean, _)| euclidean).sum::<f64>() / count;
        let dual = reached.iter().map(|(_, dual)| dual).sum::<f64>() / count;
        let mut row = vec![layer.to_string(), reached.len().to_string()];
        row.extend([number(euclidean), number(dual), number(euclidean - dual)]);
        rows.push(row);
    }
    bar.finish_and_clear();
    report.section(
        "What does steering disturb?",
        "The state after a layer is moved until the concept's target words have 80 % of the concept's probability, along a \
         straight line and along the natural gradient. The divergence is how far the other words have moved by then, in \
         nats; a positive advantage means that the straight line disturbs more (Stream separation, Table 3). Contexts count \
         where both ways arrive.",
    );
    report.say(format!("{contexts} contexts a layer, steps of {STEP}, at most {STEERING_STEPS}."));
    report.table("steering", &["layer", "contexts", "euclidean_kl", "dual_kl", "dual_advantage"], &rows)
}
