//! Steering of every layer at every scale on tasks (Stream separation, 5, "Downstream validation").

use std::fs;
use std::path::Path;
use std::sync::Arc;

use burn::tensor::{Int, Tensor, TensorData};
use dar_burn::diagnostics::ndarray::{Array2, Array3, Axis, s};
use dar_burn::diagnostics::{
    Recorder, SteeringPrompt, SteeringSites, SteeringSweep, concept_direction, steering_sweep,
};

use crate::model::Subject;
use crate::picture::{self, Axes, Scale};
use crate::progress;
use crate::report::{Report, number};
use crate::streams::wrong;
use crate::support::cli::{Failure, failed_to};
use crate::support::vocabulary::Vocabulary;

/// The tasks of the paper.
const TASKS: &str = include_str!("tasks.txt");

/// Prompts that ask for one ability.
pub struct Task {
    name: String,
    prompts: Vec<SteeringPrompt>,
}

impl Task {
    /// The tasks of a file of the form that `tasks.txt` explains, or of that file. Of that file, what a vocabulary does
    /// not tell apart is left out; one's own is refused then.
    pub fn read(path: Option<&Path>, vocabulary: &Vocabulary) -> Result<Vec<Self>, Failure> {
        let Some(path) = path else { return Self::parse(TASKS, "tasks.txt", vocabulary, false) };
        let text = fs::read_to_string(path).map_err(failed_to("read", path))?;
        Self::parse(&text, &path.display().to_string(), vocabulary, true)
    }

    fn parse(text: &str, source: &str, vocabulary: &Vocabulary, strict: bool) -> Result<Vec<Self>, Failure> {
        let mut tasks: Vec<Self> = Vec::new();
        for line in text.lines().filter(|line| !line.trim().is_empty() && !line.starts_with('#')) {
            let refuse = |why: &str| Err(Failure::usage(format!("{source}: `{line}` {why}")));
            if let Some(name) = line.trim().strip_prefix('[').and_then(|line| line.strip_suffix(']')) {
                if name.contains([',', '|']) || tasks.iter().any(|task| task.name == name) {
                    return refuse("names a task that is there already, or has a comma or a bar in its name");
                }
                tasks.push(Self { name: name.to_owned(), prompts: Vec::new() });
                continue;
            }
            let Some(task) = tasks.last_mut() else {
                return refuse("comes before the first [task]");
            };
            let parts = line.trim_end().strip_suffix('}').and_then(|line| line.rsplit_once('{'));
            let Some((prompt, (target, alternative))) =
                parts.and_then(|(prompt, ways)| Some((prompt, ways.split_once('|')?)))
            else {
                return refuse("is not a text that ends in {target|alternative}");
            };
            match open(&format!("{prompt}{target}"), &format!("{prompt}{alternative}"), vocabulary)? {
                Some(prompt) => task.prompts.push(prompt),
                None if strict => {
                    return refuse("leaves no token open: its two ways have to part, after at least one token");
                }
                None => {}
            }
        }
        match tasks.iter().find(|task| strict && task.prompts.is_empty()) {
            Some(task) => Err(Failure::usage(format!("{source}: [{}] holds no prompts", task.name))),
            None if tasks.is_empty() => Err(Failure::usage(format!("{source} holds no tasks"))),
            None => Ok(tasks),
        }
    }
}

/// The tokens that two texts begin with, and the two in which they part.
fn open(target: &str, alternative: &str, vocabulary: &Vocabulary) -> Result<Option<SteeringPrompt>, Failure> {
    let ids = |text| Ok(vocabulary.encode(text)?.into_iter().map(|id| id as usize).collect::<Vec<_>>());
    let (target, alternative) = (ids(target)?, ids(alternative)?);
    let shared = target.iter().zip(&alternative).take_while(|(a, b)| a == b).count();
    let parted = target.get(shared).zip(alternative.get(shared)).filter(|_| shared > 0);
    Ok(parted.map(|(&to, &from)| SteeringPrompt { tokens: target[..shared].to_vec(), target: to, alternative: from }))
}

/// Steers the first `prompts` prompts of every task.
pub fn tasks(
    report: &mut Report,
    subject: &Subject,
    tasks: &[Task],
    prompts: usize,
    scales: &[f64],
) -> Result<(), Failure> {
    if prompts == 0 {
        report.leave_out("Steering sweeps", "--prompts is 0.");
        return Ok(());
    }
    let (tasks, unseen): (Vec<&Task>, Vec<&Task>) = tasks.iter().partition(|task| !task.prompts.is_empty());
    for task in unseen {
        report.leave_out(
            &format!("Steering sweep of {}", task.name),
            "the tokenizer tells the two ways of no prompt apart; --tasks takes prompts of your own.",
        );
    }
    if tasks.is_empty() {
        return Ok(());
    }
    let sites = SteeringSites::layer_ends(&subject.model.residual);
    let chosen = |task: &Task| task.prompts.len().min(prompts);
    let bar = progress("steering sweeps", tasks.iter().map(|task| chosen(task)).sum::<usize>() * sites.branches.len());
    let mut sweeps = Vec::new();
    for task in tasks {
        let prompts = &task.prompts[..chosen(task)];
        let directions = directions(subject, prompts, &sites)?;
        let pass = |tokens, observer| {
            bar.inc(1);
            subject.model.forward_observed(tokens, observer).output.logits
        };
        let sweep = steering_sweep(prompts, &sites, directions.view(), scales, subject.device, pass);
        sweeps.push((task.name.as_str(), sweep.map_err(wrong)?));
    }
    bar.finish_and_clear();

    report.section(
        "Does steering work at every layer and every step size?",
        "After each layer the state of a prompt's last token is moved along the difference of two tokens' unembeddings, \
         to the target and from the alternative. The effect is the change of ln P(target) - ln P(alternative), in nats: it \
         should have the sign of the scale, and grow with it along a line (Stream separation, 5). The paper leaves the \
         effect open; the log odds are taken because a linear head would make them exactly linear.",
    );
    report.say(format!(
        "Scale 1 moves the state by its own length{}.",
        match sites.stream {
            Some(_) => ", that of token and context together; it is the context that moves",
            None => "; of several streams each one, by the length of their mean",
        }
    ));
    picture_and_tables(report, &sweeps)
}

fn picture_and_tables(report: &mut Report, sweeps: &[(&str, SteeringSweep)]) -> Result<(), Failure> {
    let panels: Vec<_> = sweeps.iter().map(|(name, sweep)| ((*name).to_owned(), sweep.mean_effects())).collect();
    let effects = || panels.iter().flat_map(|(_, map)| map.iter().copied());
    let (low, high) = effects().fold((0.0_f64, 1e-3_f64), |(low, high), effect| (low.min(effect), high.max(effect)));
    let labels: Vec<String> = sweeps[0].1.scales().iter().map(ToString::to_string).collect();
    report.picture("sweep", "Effect of steering by layer and scale", |path| {
        let scale = Scale { name: "nats", low, high };
        let axes = Axes { columns: "scale", rows: "layer", column_labels: &labels };
        picture::heat_maps(path, "Mean change of the log odds of the target", axes, &panels, scale)
    })?;
    report.say(
        "A row is a layer, a column a scale: blue moves the odds to the target, red away from it, and along a row the \
         colour should deepen evenly with the scale.",
    );

    let (mut totals, mut layers, mut cells) = (Vec::new(), Vec::new(), Vec::new());
    for (name, sweep) in sweeps {
        let clean = sweep.clean();
        let preferred = clean.iter().filter(|&&odds| odds > 0.0).count() as f64 / clean.len() as f64;
        let signs = sweep.prompts_sign_correct();
        let of_layers = sweep.layers();
        let straightness: Vec<f64> = of_layers.iter().map(|layer| layer.line.correlation).collect();
        let least = straightness.iter().copied().filter(|r| !r.is_nan()).fold(f64::NAN, f64::min);
        let share = signs.mean().unwrap_or(f64::NAN);
        let mut row = vec![(*name).to_owned(), clean.len().to_string()];
        row.extend([preferred, sweep.sign_correct(), share, least].map(number));
        totals.push(row);
        for (layer, swept) in of_layers.iter().enumerate() {
            let mut row = vec![(*name).to_owned(), layer.to_string()];
            let values = [swept.line.slope, swept.line.correlation, swept.sign_correct, swept.prompts_sign_correct];
            row.extend(values.map(number));
            layers.push(row);
        }
        cells.extend(sweep.mean_effects().indexed_iter().map(|((layer, scale), &effect)| {
            let mut row = vec![(*name).to_owned(), layer.to_string(), sweep.scales()[scale].to_string()];
            row.extend([number(effect), number(signs[[layer, scale]])]);
            row
        }));
    }
    report.say(
        "By task: the share of prompts whose target is preferred unsteered; of layers and scales whose mean effect has \
         the right sign; of single effects that have it; and the correlation of effect and scale at the least linear layer.",
    );
    let header = ["task", "prompts", "target_preferred", "sign_correct", "prompts_sign_correct", "least_correlation"];
    report.table("sweep_tasks", &header, &totals)?;
    report.say("By layer: the slope is the effect of scale 1 in nats, a correlation of 1 is a straight line.");
    let header = ["task", "layer", "slope", "correlation", "sign_correct", "prompts_sign_correct"];
    report.table("sweep_layers", &header, &layers)?;
    report.table("sweep", &["task", "layer", "scale", "effect", "prompts_sign_correct"], &cells)
}

/// From the alternative's unembedding to the target's, as long as the state that is moved. `[layers, prompts, d_model]`
fn directions(subject: &Subject, prompts: &[SteeringPrompt], sites: &SteeringSites) -> Result<Array3<f64>, Failure> {
    let unembedding = subject.unembedding();
    let mut directions = Array3::zeros((sites.branches.len(), prompts.len(), unembedding.ncols()));
    for (index, prompt) in prompts.iter().enumerate() {
        let row = |token| unembedding.select(Axis(0), &[token]);
        let direction = concept_direction(row(prompt.alternative).view(), row(prompt.target).view()).map_err(wrong)?;
        let states = states(subject, prompt, sites);
        for (layer, state) in states.iter().enumerate() {
            let length = sites.length(state.view()).map_err(wrong)?;
            directions.slice_mut(s![layer, index, ..]).assign(&(&direction * length));
        }
    }
    Ok(directions)
}

/// The state of a prompt's last token at every site. `[streams, d_model]` each
fn states(subject: &Subject, prompt: &SteeringPrompt, sites: &SteeringSites) -> Vec<Array2<f64>> {
    let length = prompt.tokens.len();
    let ids: Vec<i64> = prompt.tokens.iter().map(|&token| token as i64).collect();
    let tokens = Tensor::<2, Int>::from_data(TensorData::new(ids, [1, length]), subject.device);
    let recorder = Arc::new(Recorder::new().branches(sites.branches.iter().copied()).tokens([length - 1]));
    subject.model.forward_observed(tokens, recorder.clone());
    let records = recorder.records();
    let states = records.values().filter_map(|record| record.state.as_ref());
    states.map(|state| state.index_axis(Axis(0), 0).to_owned()).collect()
}
