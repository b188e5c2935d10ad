//! Putting the residual pathway into a model of your own: `cargo run --release --example swap_residual`.
//!
//! The model is a small Mixer, written with Burn's own layers. What makes its residual swappable is three lines:
//!
//! ```text
//! let mut state = self.residual.start(x);                   // where the residual stream used to begin
//! state = self.residual.branch(state, |x| branch(x));       // where it used to say  x = x + branch(x)
//! let x = self.residual.finish(state);                      // where the stream used to end
//! ```
//!
//! and one field of its configuration, which `main` changes.

#[path = "support/mod.rs"]
mod support;

use std::process::ExitCode;

use burn::config::Config;
use burn::module::Module;
use burn::nn::{LayerNorm, LayerNormConfig, Linear, LinearConfig};
use burn::optim::{AdamWConfig, GradientsParams};
use burn::tensor::activation::gelu;
use burn::tensor::{Device, Distribution, Tensor};
use clap::Parser;
use dar_burn::{BranchLayout, Residual, ResidualConfig};
use support::cli::{self, DeviceArgument, Failure};

// ------------------------------------------------------------------------------------------------------- the model

#[derive(Config, Debug)]
struct MixerConfig {
    tokens: usize,
    d_model: usize,
    layers: usize,
    /// The one line to change.
    residual: ResidualConfig,
}

impl MixerConfig {
    fn init(&self, device: &Device) -> Mixer {
        let Self { tokens, d_model, layers, residual } = self;
        let linear = |inputs, outputs| LinearConfig::new(inputs, outputs).init(device);
        let norm = || LayerNormConfig::new(*d_model).init(device);
        let branch = |width| Branch { norm: norm(), up: linear(width, 2 * width), down: linear(2 * width, width) };
        Mixer {
            embed: linear(1, *d_model),
            branches: (0..*layers).flat_map(|_| [branch(*tokens), branch(*d_model)]).collect(),
            residual: residual.init(&BranchLayout::new(*d_model, 2 * layers), device),
            norm: norm(),
            head: linear(*d_model, 1),
        }
    }
}

#[derive(Module, Debug)]
struct Mixer {
    embed: Linear,
    branches: Vec<Branch>, // in turn over tokens and over features
    residual: Residual,
    norm: LayerNorm, // part of the contract: some schemes return the state up to a scale
    head: Linear,
}

#[derive(Module, Debug)]
struct Branch {
    norm: LayerNorm,
    up: Linear,
    down: Linear,
}

impl Mixer {
    /// `[batch, tokens, 1]` → `[batch, tokens, 1]`
    fn forward(&self, x: Tensor<3>) -> Tensor<3> {
        let mut state = self.residual.start(self.embed.forward(x));
        for (index, Branch { norm, up, down }) in self.branches.iter().enumerate() {
            let mix = |x| down.forward(gelu(up.forward(x)));
            state = self.residual.branch(state, |x| match index % 2 {
                0 => mix(norm.forward(x).swap_dims(1, 2)).swap_dims(1, 2),
                _ => mix(norm.forward(x)),
            });
        }
        self.head.forward(self.norm.forward(self.residual.finish(state)))
    }
}

// --------------------------------------------------------------------------------------------------------- its use

const TOKENS: usize = 12;
const BATCH: usize = 64;

/// Trains a small Mixer to sum up a sequence as it goes, with three residual schemes.
#[derive(Parser, Debug)]
#[command(name = "swap_residual")]
struct Cli {
    /// Optimiser steps
    #[arg(long, value_name = "N", default_value_t = 150)]
    steps: usize,

    #[command(flatten)]
    device: DeviceArgument,
}

fn main() -> ExitCode {
    cli::exit(swap(&Cli::parse()))
}

fn swap(cli: &Cli) -> Result<ExitCode, Failure> {
    let opened = cli.device.open()?;
    println!("device  {}\n", opened.name);
    let device = opened.device.autodiff();

    println!("{:<20} {:>10} {:>12} {:>12}", "residual", "parameters", "first loss", "last loss");
    for (name, residual) in [
        ("standard", ResidualConfig::Standard),
        ("attnres_block(2)", ResidualConfig::attnres_block(2)),
        ("dar_block(2)", ResidualConfig::dar_block(2)),
    ] {
        device.seed(1); // the same backbone and the same data for every scheme
        let model = MixerConfig::new(TOKENS, 32, 4, residual).init(&device);
        let parameters = model.num_params();
        let (first, last) = train(model, cli.steps, &device);
        println!("{name:<20} {parameters:>10} {first:>12.4} {last:>12.4}");
    }
    Ok(ExitCode::SUCCESS)
}

/// The losses before the first and after the last step.
fn train(mut model: Mixer, steps: usize, device: &Device) -> (f32, f32) {
    let mut optimiser = AdamWConfig::new().with_weight_decay(0.0).init();
    let (x, y) = examples(device);
    let first = loss(&model, x, y).into_scalar();
    for _ in 0..steps {
        let (x, y) = examples(device);
        let grads = loss(&model, x, y).backward();
        let grads = GradientsParams::from_grads(grads, &model);
        model = optimiser.step(3e-3, model, grads);
    }
    let (x, y) = examples(device);
    (first, loss(&model, x, y).into_scalar())
}

/// Mean squared error.
fn loss(model: &Mixer, x: Tensor<3>, y: Tensor<3>) -> Tensor<1> {
    (model.forward(x) - y).square().mean()
}

/// Random numbers and their running sums, scaled to unit variance at the end. `[batch, tokens, 1]`
fn examples(device: &Device) -> (Tensor<3>, Tensor<3>) {
    let x = Tensor::random([BATCH, TOKENS, 1], Distribution::Normal(0.0, 1.0), device);
    let sums = x.clone().cumsum(1) / (TOKENS as f64).sqrt();
    (x, sums)
}
