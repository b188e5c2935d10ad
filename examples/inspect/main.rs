//! Looks inside a model that the example `train` saved:
//! `cargo run --release --example inspect -- --checkpoint runs/tiny/dar_block`.
//!
//! ```text
//! main     arguments → model and text → one recorded pass → measurements, one after the other → the page
//! model    passes: recorded, changed, and read at the end of every layer
//! streams  what the streams do: retrieval, likeness, rescue, gates, routes, mixers, balance
//! needs    what the model needs: interventions and their perplexity
//! geometry what each layer predicts: loss, covariance of the softmax, concept directions, steering
//! sweep    steering of every layer at every scale on tasks
//! report   the page and its tables        picture  SVG
//! ```

mod geometry;
mod model;
mod needs;
mod picture;
mod report;
mod streams;
#[path = "../support/mod.rs"]
mod support;
mod sweep;

use std::fs;
use std::path::PathBuf;
use std::process::ExitCode;

use clap::Parser;
use dar_burn::diagnostics::{LAST_TOKENS, SEQUENCES};
use indicatif::{ProgressBar, ProgressStyle};

use crate::model::Subject;
use crate::report::Report;
use crate::support::checkpoint::Checkpoint;
use crate::support::cli::{self, DeviceArgument, Failure, failed_to};
use crate::support::text::Text;

const EXAMPLES: &str = "\
Examples:
  inspect --checkpoint runs/tiny/dar_block
  inspect --checkpoint runs/tiny/mhc --text book.txt --report mhc
  inspect --checkpoint runs/tiny/cascade --pairs examples/inspect/capitals.txt
  inspect --checkpoint runs/tiny/cascade --tasks mine.txt --scales=-0.5,-0.25,0.25,0.5";

/// Measures and draws what the residual pathway of a trained model does.
#[derive(Parser, Debug)]
#[command(name = "inspect", after_help = EXAMPLES)]
struct Cli {
    /// The folder of a scheme, or the `checkpoint` folder in it
    #[arg(long, value_name = "DIR")]
    checkpoint: PathBuf,

    /// Text that the model was not trained on: a file, or a folder with everything in it [default: what its training
    /// held out]
    #[arg(long, value_name = "PATH")]
    text: Option<PathBuf>,

    /// Where the page, tables and pictures go
    #[arg(long, value_name = "DIR", default_value = "report")]
    report: PathBuf,

    /// Sequences whose last tokens are recorded
    #[arg(long, value_name = "N", default_value_t = SEQUENCES, value_parser = positive)]
    sequences: usize,

    /// Recorded tokens at the end of a sequence, if it has as many
    #[arg(long, value_name = "N", default_value_t = LAST_TOKENS, value_parser = positive)]
    last: usize,

    /// Tokens a sequence [default: as in training]
    #[arg(long, value_name = "N", value_parser = positive)]
    sequence: Option<usize>,

    /// Sequences on which perplexity is measured
    #[arg(long, value_name = "N", default_value_t = 32, value_parser = positive)]
    windows: usize,

    /// Contexts whose predictions give the covariance of the softmax
    #[arg(long, value_name = "N", default_value_t = 480, value_parser = positive)]
    contexts: usize,

    /// Pairs of words, `base target` a line, each one token of the model: measures the direction from base to target
    #[arg(long, value_name = "FILE")]
    pairs: Option<PathBuf>,

    /// Contexts from which every layer is steered along that direction
    #[arg(long, value_name = "N", default_value_t = 10)]
    steered: usize,

    /// Tasks on which every layer is steered, in the form that examples/inspect/tasks.txt explains [default: that file:
    /// coreference, induction, recency and capitalization]
    #[arg(long, value_name = "FILE")]
    tasks: Option<PathBuf>,

    /// Prompts of each task that are steered; 0 leaves the sweeps out
    #[arg(long, value_name = "N", default_value_t = 8)]
    prompts: usize,

    /// Step sizes of the sweeps, comma-separated, as shares of the state's length; below 0 steers away
    #[arg(
        long,
        value_name = "LIST",
        value_delimiter = ',',
        default_values_t = [0.1, 0.2, 0.3, 0.4, 0.5, 0.6],
        value_parser = scale,
        allow_negative_numbers = true
    )]
    scales: Vec<f64>,

    #[command(flatten)]
    device: DeviceArgument,
}

fn scale(text: &str) -> Result<f64, String> {
    match text.parse::<f64>() {
        Ok(scale) if scale != 0.0 && scale.is_finite() => Ok(scale),
        _ => Err("expected a number other than 0".into()),
    }
}

fn positive(text: &str) -> Result<usize, String> {
    match text.parse() {
        Ok(0) | Err(_) => Err("expected a whole number from 1".into()),
        Ok(number) => Ok(number),
    }
}

fn main() -> ExitCode {
    cli::exit(inspect(&Cli::parse()))
}

fn inspect(cli: &Cli) -> Result<ExitCode, Failure> {
    let checkpoint = Checkpoint::find(&cli.checkpoint)?;
    let config = checkpoint.load_config()?;
    let vocabulary = checkpoint.vocabulary()?;
    let trained = Training::of(&checkpoint)?;
    let sequence = cli.sequence.unwrap_or(trained.sequence);
    let pairs = cli.pairs.as_deref().map(|path| geometry::Pairs::read(path, &vocabulary)).transpose()?;
    let tasks = sweep::Task::read(cli.tasks.as_deref(), &vocabulary)?;
    let text = match &cli.text {
        Some(path) => Text::unseen(path, &vocabulary, sequence)?,
        None => Text::load(trained.text.as_deref(), &vocabulary, sequence)?,
    };
    let opened = cli.device.open()?;
    println!("device  {}", opened.name);
    println!("text    {}", text.description);
    let subject = Subject {
        model: checkpoint.load_model(&opened.device)?,
        device: &opened.device,
        text: &text,
        sequence,
        batch: trained.batch,
    };

    let scheme = config.residual.name();
    let mut report = Report::new(&cli.report, &format!("Inside a model with the {scheme} residual"))?;
    report.say(format!(
        "{} layers of width {}, saved after step {} in `{}`. Residual: `{:?}`.\n\nText: {}{}.",
        config.layers,
        config.d_model,
        trained.step,
        checkpoint.folder().display(),
        config.residual,
        text.description,
        if cli.text.is_none() && trained.fingerprint != text.fingerprint {
            "; **not the text of the training run, so parts of it may have been trained on**"
        } else if cli.text.is_none() {
            ", of which the part that training held out"
        } else {
            ""
        }
    ));
    let last = cli.last.min(sequence);
    report.say(format!(
        "Recorded: the last {last} tokens of {} sequences of {sequence}. Branch 2l is the attention of layer l, branch \
         2l + 1 its feed-forward.",
        cli.sequences
    ));

    let captured = subject.capture(cli.sequences, last);
    streams::retrieval(&mut report, &subject, &captured)?;
    streams::likeness(&mut report, &subject, &captured)?;
    streams::rescue(&mut report, &subject, &captured)?;
    streams::routes(&mut report, &subject, &captured)?;
    let mixers = streams::mixers(&mut report, &subject, &captured)?;
    streams::balance(&mut report, &captured)?;
    needs::interventions(&mut report, &subject, &captured, mixers, cli.windows)?;
    geometry::layers(&mut report, &subject, cli.contexts, pairs.as_ref(), cli.steered)?;
    sweep::tasks(&mut report, &subject, &tasks, cli.prompts, &cli.scales)?;
    let page = report.finish()?;
    println!("report  {}", page.display());
    Ok(ExitCode::SUCCESS)
}

/// What the training left beside the model.
struct Training {
    step: u64,
    sequence: usize,
    batch: usize,
    text: Option<PathBuf>,
    fingerprint: support::text::Fingerprint,
}

impl Training {
    fn of(checkpoint: &Checkpoint) -> Result<Self, Failure> {
        let path = checkpoint.state();
        let json = fs::read(&path).map_err(failed_to("read", &path))?;
        let state: serde_json::Value = serde_json::from_slice(&json).map_err(failed_to("read", &path))?;
        let arguments = &state["arguments"];
        let size = |name: &str| arguments[name].as_u64().filter(|&size| size > 0).map(|size| size as usize);
        let whole = || {
            Some(Self {
                step: state["step"].as_u64()?,
                sequence: size("sequence")?,
                batch: size("batch")?,
                text: arguments["text"].as_str().map(PathBuf::from),
                fingerprint: serde_json::from_value(state["text"].clone()).ok()?,
            })
        };
        whole().ok_or_else(|| Failure::run(format!("{} is not the state of a training run", path.display())))
    }
}

/// A bar on the terminal.
fn progress(name: &'static str, steps: usize) -> ProgressBar {
    let style = ProgressStyle::with_template("{prefix:<16} {bar:32} {pos}/{len} [{elapsed}, {eta} left]");
    ProgressBar::new(steps as u64).with_style(style.expect("the template is valid")).with_prefix(name)
}
