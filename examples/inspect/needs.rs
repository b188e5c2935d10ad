//! What the model needs of what it does (mHC stream analysis, 4 and Figure 3).

use std::sync::Arc;

use dar_burn::diagnostics::ndarray::Array2;
use dar_burn::diagnostics::{Intervention, perplexity_change};
use dar_burn::nn::Unobserved;

use crate::model::{Captured, Subject};
use crate::progress;
use crate::report::{Report, number};
use crate::streams::wrong;
use crate::support::cli::Failure;

/// Perplexity under every intervention that the residual has something for. `mixers`: the mean of every branch on the
/// recorded tokens.
pub fn interventions(
    report: &mut Report,
    subject: &Subject,
    captured: &Captured,
    mixers: Option<Vec<Option<Array2<f64>>>>,
    windows: usize,
) -> Result<(), Failure> {
    let changes = changes(report, subject, captured, mixers);
    if changes.is_empty() {
        report.leave_out("Interventions", "this residual has neither mixers nor routing weights of several streams.");
        return Ok(());
    }
    let bar = progress("interventions", changes.len() + 1);
    let clean = subject.loss(windows, Arc::new(Unobserved));
    bar.inc(1);
    let mut rows = Vec::new();
    for (name, change) in changes {
        let loss = subject.loss(windows, Arc::new(change));
        let relative = perplexity_change(clean, loss).map_err(wrong)?;
        rows.push(vec![name, number(loss), number(loss.exp()), number(relative)]);
        bar.inc(1);
    }
    bar.finish_and_clear();
    report.section(
        "What does the model need?",
        "Each row changes one thing at every token and measures perplexity again; a change of 0.02 is a rise by 2 %. A small change means that the model does \
         without: mixers replaced by the identity carry every stream on its own, fixed mixers are the same for all tokens \
         (their mean on the recorded tokens), and with the largest weights kept a branch uses fewer streams, rescaled to \
         the same sum (mHC stream analysis, 4).",
    );
    report.say(format!("Unchanged: {clean:.4} nats a token, perplexity {:.3}.", clean.exp()));
    report.table("interventions", &["intervention", "loss", "perplexity", "perplexity_change"], &rows)
}

fn changes(
    report: &mut Report,
    subject: &Subject,
    captured: &Captured,
    mixers: Option<Vec<Option<Array2<f64>>>>,
) -> Vec<(String, Intervention)> {
    let (layers, branches) = (subject.layers(), 2 * subject.layers());
    let half = layers.div_ceil(2);
    let mut changes = Vec::new();
    if let Some(mixers) = mixers {
        let identity = |from: usize, to: usize| Intervention::IdentityMixers(2 * from..2 * to);
        changes.extend(
            (0..layers).map(|layer| (format!("identity mixers from layer {layer} on"), identity(layer, layers))),
        );
        changes.extend(
            (0..layers - 1).map(|layer| (format!("identity mixers up to layer {layer}"), identity(0, layer + 1))),
        );
        for (name, branches) in [("all", 0..branches), ("early", 0..2 * half), ("late", 2 * half..branches)] {
            let fixed = Intervention::FixedMixers { branches, mixers: mixers.clone() };
            changes.push((format!("mean mixers in {name} layers"), fixed));
        }
    }
    for (name, weights, keep) in [
        ("reads", captured.records.values().filter_map(|record| record.reads()).collect::<Vec<_>>(), true),
        ("writes", captured.records.values().filter_map(|record| record.writes()).collect(), false),
    ] {
        let streams = weights.first().map_or(0, |weights| weights.ncols());
        if streams >= 2 && weights.iter().any(|weights| weights.iter().any(|&weight| weight < 0.0)) {
            let why = "some weights are negative, and no scale keeps the sum of signed weights.";
            report.leave_out(&format!("The largest {name} kept"), why);
            continue;
        }
        let change = |kept| if keep { Intervention::KeepReads(kept) } else { Intervention::KeepWrites(kept) };
        changes.extend((1..streams).rev().map(|kept| (format!("{kept} largest {name} kept"), change(kept))));
    }
    changes
}
