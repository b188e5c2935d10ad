//! Trains one small language model per residual scheme and compares them: `cargo run --release --example train`.
//!
//! ```text
//! main        the run: arguments → text → schemes, one after the other → table and plot
//! arguments   the command line, and what of it a run keeps
//! run         one scheme: steps, evaluations, checkpoints
//! optimiser   AdamW, clipping, schedule
//! files       nothing is saved half-way
//! plot table  what a person looks at
//! ```

mod arguments;
mod files;
mod optimiser;
mod plot;
mod run;
#[path = "../support/mod.rs"]
mod support;
mod table;

use std::fs;
use std::path::Path;
use std::process::ExitCode;
use std::sync::atomic::Ordering;

use clap::Parser;

use crate::arguments::{Arguments, Cli};
use crate::plot::Curve;
use crate::run::{INTERRUPTED, Run, Shared};
use crate::support::cli::{self, Failure, failed, failed_to};
use crate::support::text::Text;
use crate::support::vocabulary::Vocabulary;

/// What shells report of a program that Ctrl-C ended.
const INTERRUPTED_CODE: u8 = 130;

fn main() -> ExitCode {
    restore_optimisers_on_the_cpu();
    cli::exit(train(&Cli::parse()))
}

fn train(cli: &Cli) -> Result<ExitCode, Failure> {
    cli.validate()?;
    let output = cli.output();
    let saved = saved_arguments(cli, &output)?;
    let arguments = Arguments::new(cli, saved.clone());
    if let Some(saved) = &saved {
        arguments.must_continue(saved)?;
    }

    let vocabulary = Vocabulary::open(arguments.tokenizer.as_deref())?;
    let models = arguments.models(vocabulary.size())?;
    let opened = cli::open(arguments.device()?)?;
    println!("device  {}", opened.name);
    let text = Text::load(arguments.text.as_deref(), &vocabulary, arguments.sequence)?;
    println!("text    {}", text.description);
    println!("output  {}", output.display());

    let device = opened.device.autodiff();
    let shared =
        Shared { arguments: &arguments, text: &text, device: &device, output: &output, stop_after: cli.stop_after };
    if cli.resume {
        models.iter().try_for_each(|(scheme, config)| run::check_checkpoint(&shared, &scheme.name, config))?;
    }
    prepare(cli, &output, &arguments)?;
    stop_at_ctrl_c()?;
    let mut summaries = Vec::new();
    for (scheme, config) in models {
        summaries.push(Run::open(&shared, scheme.name, config)?.train()?);
        let curves: Vec<Curve> =
            summaries.iter().map(|summary| Curve { name: &summary.name, rows: &summary.rows }).collect();
        plot::draw(&output, &format!("{} model, {} steps", arguments.size, arguments.steps), &curves)?;
        if INTERRUPTED.load(Ordering::SeqCst) {
            break;
        }
    }

    println!("\n{}", table::table(&summaries));
    let interrupted = INTERRUPTED.load(Ordering::SeqCst);
    if interrupted || summaries.iter().any(|summary| !summary.finished) {
        let folder = output.display();
        println!("\nStopped and saved. To go on: cargo run --release --example train -- --output {folder} --resume");
    }
    Ok(if interrupted { ExitCode::from(INTERRUPTED_CODE) } else { ExitCode::SUCCESS })
}

/// Burn restores optimiser states on its default device, which the machine may not have, before it moves them to the
/// parameters'. The CPU is always there.
fn restore_optimisers_on_the_cpu() {
    #[cfg(feature = "flex")]
    // SAFETY: the first thing that main does, before there is another thread.
    unsafe {
        std::env::set_var("BURN_DEVICE", "flex");
    }
}

/// The arguments of the run to resume; refuses to touch a run that is neither resumed nor replaced.
fn saved_arguments(cli: &Cli, output: &Path) -> Result<Option<Arguments>, Failure> {
    let path = output.join("run.json");
    match (cli.resume, path.is_file()) {
        (true, true) => files::read_json(&path).map(Some),
        (true, false) => {
            Err(Failure::usage(format!("{} holds no run to resume: leave out --resume to start one", output.display())))
        }
        (false, true) if !cli.force => Err(Failure::usage(format!(
            "{} holds a run already: --resume goes on with it, --force replaces it, --output names another folder",
            output.display()
        ))),
        (false, false) if fs::read_dir(output).is_ok_and(|mut entries| entries.next().is_some()) => {
            Err(Failure::usage(format!("{} is not empty and not a run: name another --output", output.display())))
        }
        _ => Ok(None),
    }
}

/// Makes the output folder and keeps the arguments in it.
fn prepare(cli: &Cli, output: &Path, arguments: &Arguments) -> Result<(), Failure> {
    if cli.force && output.exists() {
        fs::remove_dir_all(output).map_err(failed_to("remove", output))?;
    }
    fs::create_dir_all(output).map_err(failed_to("make", output))?;
    files::replace(&output.join("run.json"), |path| files::write_json(path, arguments))
}

/// Ctrl-C finishes the step that is running; a second one does not wait.
fn stop_at_ctrl_c() -> Result<(), Failure> {
    let stop = || {
        if INTERRUPTED.swap(true, Ordering::SeqCst) {
            std::process::exit(i32::from(INTERRUPTED_CODE));
        }
        eprintln!("\nstopping after this step; press Ctrl-C again to stop at once");
    };
    ctrlc::set_handler(stop).map_err(failed("cannot watch for Ctrl-C"))
}
