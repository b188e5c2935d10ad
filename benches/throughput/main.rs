//! Whole training steps of every residual scheme: `cargo bench --bench throughput`.
//!
//! ```text
//! for each model:                                            arguments: sizes follow the device
//!   memory    a process for each scheme: its peak, from a clean pool
//!   rounds    all schemes in turn, so that drift of the machine hits all; forth, then back, then forth, …
//!     turn    the same backbone → warm-up steps → timed steps → the residual pathway on its own
//! report      target/bench-report: tables and pictures, beside the paper's Table 3
//! ```
//!
//! A turn checks its model before it counts: schemes start as the plain residual, so the first loss is the standard
//! scheme's; the same batch in every step is learnt, so the last loss is lower.

mod arguments;
mod memory;
#[path = "../../examples/train/optimiser.rs"]
mod optimiser;
mod pathway;
mod rows;
#[path = "../support/mod.rs"]
mod support;
mod training;

use std::collections::BTreeMap;
use std::process::ExitCode;

use burn::tensor::Device;
use clap::Parser;

use crate::arguments::{Arguments, Cli, Model};
use crate::rows::Row;
use crate::support::cli::{self, Failure};
use crate::support::machine::{self, Machine};
use crate::support::report::{self, MemoryUse, ModelTable, SchemeRow, ThroughputPart};
use crate::support::statistics::Spread;
use crate::training::Turn;

fn main() -> ExitCode {
    cli::exit(run(&Cli::parse()))
}

fn run(cli: &Cli) -> Result<ExitCode, Failure> {
    let (arguments, opened) = Arguments::new(cli)?;
    let device = opened.device.clone().autodiff();
    if let Some(row) = &cli.memory_of {
        memory::print_own(&arguments.models[0], row, &device)?;
        return Ok(ExitCode::SUCCESS);
    }
    if arguments.rows.is_empty() {
        return Ok(ExitCode::SUCCESS);
    }
    let machine = Machine::new(&opened, arguments.quick);
    println!("device  {}", machine.device);
    println!("host    {}", machine.host);
    let mut part = ThroughputPart { machine, models: Vec::new() };
    for model in &arguments.models {
        println!("\n{}", model.describe());
        part.models.push(measure(&arguments, model, &device)?);
        // What is measured is kept, should a larger model fail.
        report::write_throughput(&machine::report_folder(), &part)?;
    }
    println!("\n{}", report::throughput_table(&part));
    println!("report in {}", machine::report_folder().display());
    Ok(ExitCode::SUCCESS)
}

fn measure(arguments: &Arguments, model: &Model, device: &Device) -> Result<ModelTable, Failure> {
    let rows = &arguments.rows;
    let bar = machine::progress(rows.len() * (arguments.rounds + 1), &model.name);
    let mut peaks = BTreeMap::new();
    for row in rows {
        bar.set_message(format!("memory of {}", row.name()));
        peaks.insert(row.name(), memory::of(arguments, model, row)?);
        bar.inc(1);
    }

    let mut turns: BTreeMap<String, Vec<Turn>> = BTreeMap::new();
    let mut first_loss = None;
    for round in 0..arguments.rounds {
        let order: Vec<&Row> = if round % 2 == 0 { rows.iter().collect() } else { rows.iter().rev().collect() };
        for row in order {
            bar.set_message(row.name());
            let turn = training::turn(arguments, model, row, device)?;
            turn.check(row, *first_loss.get_or_insert(turn.first_loss), model.dtype)?;
            turns.entry(row.name()).or_default().push(turn);
            bar.inc(1);
        }
    }
    bar.finish_and_clear();

    let standard = turns.get(&Row::standard().name());
    let rows = rows.iter().map(|row| summary(model, row, &turns[&row.name()], standard, peaks[&row.name()]));
    Ok(ModelTable {
        model: model.name.clone(),
        sizes: model.describe(),
        dtype: format!("{:?}", model.dtype),
        tokens: model.batch * model.sequence,
        rounds: arguments.rounds,
        steps: arguments.steps,
        rows: rows.collect(),
    })
}

fn summary(
    model: &Model,
    row: &Row,
    turns: &[Turn],
    standard: Option<&Vec<Turn>>,
    peak: Option<MemoryUse>,
) -> SchemeRow {
    let tokens = (model.batch * model.sequence) as f64;
    let steps: Vec<f64> = turns.iter().flat_map(|turn| turn.steps.clone()).collect();
    let pathway: Vec<f64> = turns.iter().flat_map(|turn| turn.pathway.clone()).collect();
    // A round's steps against the same round's: what changes from round to round hits both.
    let median = |turn: &Turn| Spread::of(&turn.steps).median;
    let ratios = standard.map(|standard| {
        let rounds = standard.iter().zip(turns);
        rounds.map(|(standard, turn)| median(standard) / median(turn)).collect::<Vec<_>>()
    });
    SchemeRow {
        name: row.name(),
        parameters: turns[0].parameters,
        residual_parameters: turns[0].residual_parameters,
        seconds: Spread::of(&steps),
        tokens_per_s: Spread::of(&steps).map(|seconds| tokens / seconds),
        ratio: ratios.map(|ratios| Spread::of(&ratios)),
        pathway_seconds: Spread::of(&pathway),
        launches: turns[0].launches,
        memory: peak,
        paper: row.paper(),
    }
}
