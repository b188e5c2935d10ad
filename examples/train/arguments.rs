//! The command line, and the arguments of a run as they are saved with it.

use std::path::{Path, PathBuf};
use std::str::FromStr;

use clap::Parser;
use dar_burn::ResidualConfig;
use dar_burn::device::DeviceChoice;
use dar_burn::model::{DecoderConfig, FeedForwardConfig, MoeConfig, Preset, stream_separation};
use serde::{Deserialize, Serialize};

use crate::support::cli::Failure;
use crate::support::schemes::Scheme;

const EXAMPLES: &str = "\
Examples:
  cargo run --release --example train             three schemes, a tiny model, a few minutes on a CPU
  … train -- --steps 40 --scheme standard,dar_full
  … train -- --text book.txt --size small --device wgpu
  … train -- --scheme dar_block,mine.json         beside a configuration of your own
  … train -- --output runs/tiny --resume          go on after Ctrl-C";

/// Trains one language model per residual scheme, on the same text in the same order from the same initial backbone, and
/// compares them.
#[derive(Parser, Debug)]
#[command(name = "train", after_help = EXAMPLES)]
pub struct Cli {
    /// Residual schemes, comma-separated [default: standard,attnres_block,dar_block]
    ///
    /// Of standard, attnres_block, attnres_full, attnres_sepv, dar_block, dar_full, dar_self, dar_cross_value, dar_fixed,
    /// mhc, mhc_2, hc, cascade; or files (.json) that `ResidualConfig::save` wrote, named after the file. With --resume they
    /// join the run.
    #[arg(long, value_name = "LIST", value_delimiter = ',')]
    scheme: Option<Vec<Scheme>>,

    /// Layers in a block of the block schemes [default: 2; 3 for 7B-MoE]
    #[arg(long, value_name = "K", value_parser = positive)]
    block: Option<usize>,

    /// Optimiser steps; warm-up and decay of the learning rate scale with them [default: 240]
    #[arg(long, value_name = "N", value_parser = positive)]
    steps: Option<usize>,

    /// The model: tiny, tiny_moe, small, 45.4M, 0.1B, 0.3B, 0.5B, 1B or 7B-MoE [default: tiny]
    #[arg(long)]
    size: Option<Size>,

    /// Text to train on: a file, or a folder with everything in it [default: documentation and sources of the crates
    /// that this program is built from]
    #[arg(long, value_name = "PATH")]
    text: Option<PathBuf>,

    /// A tokenizer.json [default: a token a byte]
    #[arg(long, value_name = "FILE")]
    tokenizer: Option<PathBuf>,

    /// Where metrics, plots and checkpoints go [default: runs/SIZE]
    #[arg(long, value_name = "DIR")]
    output: Option<PathBuf>,

    /// Seed of the initial parameters and of the order of the text [default: 1]
    #[arg(long, value_name = "N")]
    seed: Option<u64>,

    /// Sequences a step [default: 8]
    #[arg(long, value_name = "N", value_parser = positive)]
    batch: Option<usize>,

    /// Tokens a sequence [default: 128; 512 for small and 45.4M; 1024 for the larger]
    #[arg(long, value_name = "N", value_parser = positive)]
    sequence: Option<usize>,

    /// Peak of the learning rate [default: 0.003; 0.001 for small and 45.4M; 0.0003 for the larger]
    #[arg(long, value_name = "RATE", value_parser = rate, allow_negative_numbers = true)]
    lr: Option<f64>,

    /// Also trains the end of every layer on the next token, with weights LAMBDA (l + 1) / L for layers l = 0, 1, … of L
    /// [default: off; LAMBDA is 0.1 if left out]
    #[arg(
        long,
        value_name = "LAMBDA",
        value_parser = rate,
        num_args = 0..=1,
        require_equals = true,
        default_missing_value = "0.1"
    )]
    layer_loss: Option<f64>,

    /// Steps between two evaluations on held-out text, each with a checkpoint [default: 40]
    #[arg(long, value_name = "N", value_parser = positive)]
    eval_every: Option<usize>,

    /// Where to compute: auto, flex (CPU), wgpu, cuda, rocm, metal, vulkan, webgpu [default: auto]
    #[arg(long, value_name = "NAME")]
    device: Option<DeviceChoice>,

    /// Go on with the run in the output folder; arguments that are left out are the run's
    #[arg(long, conflicts_with = "force")]
    pub resume: bool,

    /// Replace the run in the output folder
    #[arg(long)]
    pub force: bool,

    /// Stop every scheme after this step with a checkpoint, as Ctrl-C does
    #[arg(long, value_name = "STEP", value_parser = positive)]
    pub stop_after: Option<usize>,
}

/// A path that also leads there from another folder, should the run be resumed from one.
fn absolute(path: &Path) -> PathBuf {
    std::path::absolute(path).unwrap_or_else(|_| path.to_owned())
}

fn positive(text: &str) -> Result<usize, String> {
    match text.parse() {
        Ok(0) | Err(_) => Err("expected a whole number from 1".into()),
        Ok(number) => Ok(number),
    }
}

fn rate(text: &str) -> Result<f64, String> {
    match text.parse::<f64>() {
        Ok(rate) if rate > 0.0 && rate.is_finite() => Ok(rate),
        _ => Err("expected a number above 0".into()),
    }
}

/// The model without its residual.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Size {
    Tiny,
    TinyMoe,
    Small,
    StreamSeparation,
    Preset(Preset),
}

impl Size {
    /// The model with `residual`, for a vocabulary of `vocab_size`.
    fn decoder(self, vocab_size: usize, residual: ResidualConfig) -> DecoderConfig {
        let dense = |d_ff| FeedForwardConfig::Dense { d_ff };
        let experts = FeedForwardConfig::MixtureOfExperts(MoeConfig::new(4, 2, 96));
        match self {
            Self::Tiny => DecoderConfig::new(vocab_size, 96, 6, 4, 2, dense(256), residual),
            Self::TinyMoe => DecoderConfig::new(vocab_size, 96, 6, 4, 2, experts, residual),
            Self::Small => DecoderConfig::new(vocab_size, 320, 10, 8, 4, dense(896), residual),
            Self::StreamSeparation => DecoderConfig { vocab_size, ..stream_separation(residual) },
            Self::Preset(preset) => DecoderConfig { vocab_size, ..preset.decoder(residual) },
        }
    }

    fn name(self) -> &'static str {
        match self {
            Self::Tiny => "tiny",
            Self::TinyMoe => "tiny_moe",
            Self::Small => "small",
            Self::StreamSeparation => "45.4M",
            Self::Preset(preset) => preset.name(),
        }
    }
}

impl FromStr for Size {
    type Err = String;

    fn from_str(name: &str) -> Result<Self, String> {
        let own = [Self::Tiny, Self::TinyMoe, Self::Small, Self::StreamSeparation];
        if let Some(size) = own.into_iter().find(|size| size.name() == name) {
            return Ok(size);
        }
        let names = || own.map(Self::name).into_iter().chain(Preset::ALL.map(Preset::name)).collect::<Vec<_>>();
        let unknown = |_| format!("unknown size `{name}`: expected one of {}", names().join(", "));
        name.parse().map(Self::Preset).map_err(unknown)
    }
}

/// Everything that makes a run, saved with it.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct Arguments {
    /// Names of schemes, and files of configurations.
    pub scheme: Vec<String>,
    pub block: usize,
    pub steps: usize,
    pub size: String,
    pub text: Option<PathBuf>,
    pub tokenizer: Option<PathBuf>,
    pub seed: u64,
    pub batch: usize,
    pub sequence: usize,
    pub lr: f64,
    /// Factor of the per-layer losses; 0 for none.
    #[serde(default)]
    pub layer_loss: f64,
    pub eval_every: usize,
    pub device: String,
}

/// Arguments without which a resumed run is another run. (The text is told by its fingerprint.)
const FIXED: [&str; 8] = ["block", "steps", "size", "seed", "batch", "sequence", "lr", "layer_loss"];

impl Arguments {
    /// The arguments of the command line, and where it has none those of the saved run, or the defaults.
    pub fn new(cli: &Cli, saved: Option<Self>) -> Self {
        let base = saved.unwrap_or_else(|| Self::defaults(cli.size.unwrap_or(Size::Tiny)));
        // Schemes join a run, so that none of it is forgotten.
        let mut scheme = if cli.resume || cli.scheme.is_none() { base.scheme } else { Vec::new() };
        let named = cli.scheme.iter().flatten().map(|named| named.argument.clone());
        named.for_each(|named| {
            if !scheme.contains(&named) {
                scheme.push(named)
            }
        });
        Self {
            scheme,
            block: cli.block.unwrap_or(base.block),
            steps: cli.steps.unwrap_or(base.steps),
            size: cli.size.map_or(base.size, |size| size.name().into()),
            text: cli.text.as_deref().map(absolute).or(base.text),
            tokenizer: cli.tokenizer.as_deref().map(absolute).or(base.tokenizer),
            seed: cli.seed.unwrap_or(base.seed),
            batch: cli.batch.unwrap_or(base.batch),
            sequence: cli.sequence.unwrap_or(base.sequence),
            lr: cli.lr.unwrap_or(base.lr),
            layer_loss: cli.layer_loss.unwrap_or(base.layer_loss),
            eval_every: cli.eval_every.unwrap_or(base.eval_every),
            device: cli.device.map_or(base.device, |device| device.name().into()),
        }
    }

    fn defaults(size: Size) -> Self {
        let (sequence, lr) = match size {
            Size::Tiny | Size::TinyMoe => (128, 3e-3),
            Size::Small | Size::StreamSeparation => (512, 1e-3),
            Size::Preset(_) => (1024, 3e-4),
        };
        Self {
            scheme: ["standard", "attnres_block", "dar_block"].map(Into::into).to_vec(),
            block: if let Size::Preset(preset) = size { preset.layers_per_block() } else { 2 },
            steps: 240,
            size: size.name().into(),
            text: None,
            tokenizer: None,
            seed: 1,
            batch: 8,
            sequence,
            lr,
            layer_loss: 0.0,
            eval_every: 40,
            device: DeviceChoice::Auto.name().into(),
        }
    }

    /// The model of every scheme, or why one does not fit.
    pub fn models(&self, vocab_size: usize) -> Result<Vec<(Scheme, DecoderConfig)>, Failure> {
        let size: Size = self.size.parse().map_err(Failure::Usage)?;
        let model = |name: &String| {
            let scheme: Scheme = name.parse().map_err(Failure::Usage)?;
            let config = size.decoder(vocab_size, scheme.residual(self.block));
            let refused = |error| Failure::usage(format!("scheme {name} at size {}: {error}", self.size));
            config.validate().map_err(refused)?;
            Ok((scheme, config))
        };
        self.scheme.iter().map(model).collect()
    }

    pub fn device(&self) -> Result<DeviceChoice, Failure> {
        self.device.parse().map_err(|error: dar_burn::device::DeviceError| Failure::usage(error.to_string()))
    }

    /// Refuses to go on with a run of other arguments, and names them.
    pub fn must_continue(&self, saved: &Self) -> Result<(), Failure> {
        let json = |arguments: &Self| serde_json::to_value(arguments).unwrap_or_default();
        let (here, there) = (json(self), json(saved));
        let changes: Vec<String> = FIXED
            .into_iter()
            .filter(|key| here[key] != there[key])
            .map(|key| format!("--{} is {}, was {}", key.replace('_', "-"), here[key], there[key]))
            .collect();
        if changes.is_empty() {
            return Ok(());
        }
        Err(Failure::usage(format!(
            "cannot resume with other arguments ({}): leave them out, or start anew with --force",
            changes.join("; ")
        )))
    }
}

impl Cli {
    /// The output folder.
    pub fn output(&self) -> PathBuf {
        let default = || PathBuf::from("runs").join(self.size.unwrap_or(Size::Tiny).name());
        self.output.clone().unwrap_or_else(default)
    }

    /// Refuses what cannot be meant.
    pub fn validate(&self) -> Result<(), Failure> {
        let mut seen = Vec::new();
        for scheme in self.scheme.iter().flatten() {
            if seen.contains(&&scheme.name) {
                return Err(Failure::usage(format!("--scheme names {} twice", scheme.name)));
            }
            seen.push(&scheme.name);
        }
        Ok(())
    }
}
