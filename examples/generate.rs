//! Continues a prompt with a model that the example `train` saved:
//! `cargo run --release --example generate -- --checkpoint runs/tiny/dar_block --prompt "fn main"`.
//!
//! The prompt goes through the model at once, then a token at a time; the cache keeps the attention's keys and values.
//! The residual scheme keeps nothing between tokens: it works along depth, within each token.

#[path = "support/mod.rs"]
mod support;

use std::io::{self, Write};
use std::path::PathBuf;
use std::process::ExitCode;

use burn::tensor::{Device, Int, Tensor, TensorData};
use clap::Parser;
use rand::distr::weighted::WeightedIndex;
use rand::rngs::SmallRng;
use rand::{Rng, SeedableRng};

use support::checkpoint::Checkpoint;
use support::cli::{self, DeviceArgument, Failure, failed};

const EXAMPLES: &str = "\
Examples:
  generate --checkpoint runs/tiny/dar_block --prompt \"fn main\"
  generate --checkpoint runs/tiny/standard --prompt \"# \" --tokens 500 --temperature 0.8 --top-k 20";

/// Continues a text with a model that the example `train` saved.
#[derive(Parser, Debug)]
#[command(name = "generate", after_help = EXAMPLES)]
struct Cli {
    /// The folder of a scheme, or the `checkpoint` folder in it
    #[arg(long, value_name = "DIR")]
    checkpoint: PathBuf,

    /// The text to continue
    #[arg(long, value_name = "TEXT")]
    prompt: String,

    /// Most tokens to add
    #[arg(long, value_name = "N", default_value_t = 200)]
    tokens: usize,

    /// How bold: 0 always takes the likeliest token
    #[arg(long, value_name = "T", default_value_t = 0.7, value_parser = temperature, allow_negative_numbers = true)]
    temperature: f64,

    /// Choose among the K likeliest tokens only [default: all]
    #[arg(long, value_name = "K", value_parser = clap::value_parser!(u64).range(1..))]
    top_k: Option<u64>,

    /// Seed of the choice
    #[arg(long, value_name = "N", default_value_t = 1)]
    seed: u64,

    #[command(flatten)]
    device: DeviceArgument,
}

fn temperature(text: &str) -> Result<f64, String> {
    match text.parse::<f64>() {
        Ok(temperature) if temperature >= 0.0 && temperature.is_finite() => Ok(temperature),
        _ => Err("expected a number from 0".into()),
    }
}

fn main() -> ExitCode {
    cli::exit(generate(&Cli::parse()))
}

fn generate(cli: &Cli) -> Result<ExitCode, Failure> {
    let checkpoint = Checkpoint::find(&cli.checkpoint)?;
    let vocabulary = checkpoint.vocabulary()?;
    let prompt = vocabulary.encode(&cli.prompt)?;
    if prompt.is_empty() {
        return Err(Failure::usage("--prompt is empty: give the model something to continue"));
    }
    let device = cli.device.open()?.device;
    let model = checkpoint.load_model(&device)?;

    let mut random = SmallRng::seed_from_u64(cli.seed);
    let mut cache = model.cache();
    let mut new = prompt.clone();
    let mut screen = Stream::new(prompt, |tokens| vocabulary.decode(tokens));
    screen.show()?;
    for _ in 0..cli.tokens {
        let logits = model.step(row(&new, &device), &mut cache);
        let token = choose(&last(logits)?, cli.temperature, cli.top_k, &mut random)?;
        if vocabulary.is_end(token) {
            break;
        }
        screen.push(token)?;
        new = vec![token];
    }
    screen.finish()?;
    Ok(ExitCode::SUCCESS)
}

/// `[1, tokens]`
fn row(tokens: &[u32], device: &Device) -> Tensor<2, Int> {
    let ids: Vec<i32> = tokens.iter().map(|&token| token as i32).collect();
    Tensor::from_data(TensorData::new(ids, [1, tokens.len()]), device)
}

/// The logits after the last token. `logits`: `[1, tokens, vocab_size]`
fn last(logits: Tensor<3>) -> Result<Vec<f32>, Failure> {
    let [_, tokens, vocab_size] = logits.dims();
    let row = logits.slice([0..1, tokens - 1..tokens, 0..vocab_size]);
    row.try_into_vec_as().map_err(failed("cannot read the logits"))
}

/// A token by its probability `softmax(logits / temperature)` among the `top_k` likeliest.
fn choose(logits: &[f32], temperature: f64, top_k: Option<u64>, random: &mut impl Rng) -> Result<u32, Failure> {
    let mut order: Vec<usize> = (0..logits.len()).collect();
    order.sort_by(|&a, &b| logits[b].total_cmp(&logits[a]));
    let best = logits[order[0]];
    if !best.is_finite() {
        return Err(Failure::run("the model's logits are not finite: its training diverged"));
    }
    if temperature == 0.0 {
        return Ok(order[0] as u32);
    }
    order.truncate(top_k.map_or(logits.len(), |k| k as usize));
    let weight = |&token: &usize| (f64::from(logits[token] - best) / temperature).exp();
    let weights = WeightedIndex::new(order.iter().map(weight)).map_err(failed("cannot choose a token"))?;
    Ok(order[random.sample(weights)] as u32)
}

/// Prints text as its tokens come, but no character before it is complete.
struct Stream<F> {
    tokens: Vec<u32>,
    decode: F,
    /// Bytes of text on the screen.
    shown: usize,
}

impl<F: Fn(&[u32]) -> Result<String, Failure>> Stream<F> {
    fn new(tokens: Vec<u32>, decode: F) -> Self {
        Self { tokens, decode, shown: 0 }
    }

    fn push(&mut self, token: u32) -> Result<(), Failure> {
        self.tokens.push(token);
        self.show()
    }

    fn show(&mut self) -> Result<(), Failure> {
        let text = (self.decode)(&self.tokens)?;
        // An incomplete character decodes as U+FFFD, and may still change.
        self.print(text.trim_end_matches('\u{fffd}'))
    }

    fn finish(mut self) -> Result<(), Failure> {
        let text = (self.decode)(&self.tokens)?;
        self.print(&(text + "\n"))
    }

    fn print(&mut self, text: &str) -> Result<(), Failure> {
        if let Some(fresh) = text.get(self.shown..) {
            let mut out = io::stdout();
            out.write_all(fresh.as_bytes()).and_then(|()| out.flush()).map_err(failed("cannot print"))?;
            self.shown = text.len();
        }
        Ok(())
    }
}
