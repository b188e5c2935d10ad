//! One turn of one scheme: warm-up steps, timed steps, and its residual pathway on its own.

use std::time::Instant;

use burn::module::Module;
use burn::optim::{GradientsParams, ModuleOptimizer};
use burn::tensor::{Device, FloatDType, Int, Tensor, TensorData};
use dar_burn::model::Decoder;
use dar_kernels::launches;
use rand::rngs::SmallRng;
use rand::{Rng, SeedableRng};

use crate::arguments::{Arguments, Model};
use crate::optimiser::{adamw, clip_global_norm, learning_rate};
use crate::pathway;
use crate::rows::Row;
use crate::support::cli::{Failure, failed};

const SEED: u64 = 1;
/// Weight of the router balance beside the cross entropy, for mixtures of experts.
const BALANCE: f64 = 0.01;
/// High enough for a batch to be learnt in a step, low enough for it not to be forgotten.
const PEAK_RATE: f64 = 1e-3;

/// What a turn measured.
pub struct Turn {
    pub parameters: usize,
    pub residual_parameters: usize,
    /// Seconds of every timed step.
    pub steps: Vec<f64>,
    /// Seconds of every pass of the residual pathway alone, forward and backward.
    pub pathway: Vec<f64>,
    /// Kernels of dar-kernels that a step launched.
    pub launches: u64,
    /// Before anything is learnt.
    pub first_loss: f32,
    last_loss: f32,
}

impl Turn {
    /// Refuses the numbers of a model that does not compute what it should. `standard`: the first loss of the plain
    /// residual, which every scheme starts as.
    pub fn check(&self, row: &Row, standard: f32, dtype: FloatDType) -> Result<(), Failure> {
        let Self { first_loss, last_loss, .. } = *self;
        let bound = if dtype == FloatDType::F32 { 1e-3 } else { 3e-2 };
        // NaN is in no range.
        if !(0.0..=bound * standard.abs()).contains(&(first_loss - standard).abs()) {
            return Err(Failure::run(format!(
                "{} starts with a loss of {first_loss}, the first row with {standard}: not timed",
                row.name()
            )));
        }
        if last_loss.is_nan() || last_loss >= first_loss {
            return Err(Failure::run(format!(
                "{} learns nothing: its loss goes from {first_loss} to {last_loss} on the same batch",
                row.name()
            )));
        }
        Ok(())
    }
}

/// A model in training.
pub struct Training<'a> {
    device: &'a Device,
    model: Decoder,
    optimiser: ModuleOptimizer,
    tokens: Tensor<2, Int>,
    targets: Tensor<2, Int>,
    done: usize,
}

impl<'a> Training<'a> {
    /// The model of `row`, whose backbone is every row's.
    pub fn new(model: &Model, row: &Row, device: &'a Device) -> Self {
        device.memory_cleanup();
        device.seed(SEED);
        let decoder = model.decoder(row).init(device);
        decoder.initialize();
        let mut ids = SmallRng::seed_from_u64(SEED);
        let mut batch = || {
            let [batch, sequence] = [model.batch, model.sequence];
            let ids: Vec<i32> = (0..batch * sequence).map(|_| ids.random_range(0..model.vocab_size() as i32)).collect();
            Tensor::<2, Int>::from_data(TensorData::new(ids, [batch, sequence]), device)
        };
        let (tokens, targets) = (batch(), batch());
        Self { device, optimiser: adamw(&decoder), model: decoder, tokens, targets, done: 0 }
    }

    /// One optimiser step on the same batch, with nothing left to do on the device; its loss.
    pub fn step(&mut self) -> Result<f32, Failure> {
        let output = self.model.forward(self.tokens.clone());
        let loss = output.cross_entropy(self.targets.clone());
        let objective = match output.balance_loss {
            Some(balance) => loss.clone() + balance * BALANCE,
            None => loss.clone(),
        };
        let grads = GradientsParams::from_grads(objective.backward(), &self.model);
        let grads = clip_global_norm(&self.model, grads);
        // As after the warm-up of a long run.
        let rate = learning_rate(PEAK_RATE, 1, 10);
        self.model = self.optimiser.step(rate, self.model.clone(), grads);
        self.done += 1;
        self.device.sync().map_err(failed("the training step failed"))?;
        loss.try_into_scalar().map_err(failed("cannot read a loss"))
    }
}

/// One turn of `row`.
pub fn turn(arguments: &Arguments, model: &Model, row: &Row, device: &Device) -> Result<Turn, Failure> {
    let mut training = Training::new(model, row, device);
    let (parameters, residual_parameters) = (training.model.num_params(), training.model.residual.num_params());
    let mut losses = Vec::new();
    for _ in 0..arguments.warm_up {
        losses.push(training.step()?);
    }
    let mut steps = Vec::new();
    let launched = launches();
    for _ in 0..arguments.steps {
        let begin = Instant::now();
        losses.push(training.step()?);
        steps.push(begin.elapsed().as_secs_f64());
    }
    let launches = (launches() - launched) / arguments.steps as u64;
    let residual = training.model.residual.clone();
    drop(training);
    let pathway = pathway::times(&residual, model, device, arguments.steps)?;
    let (first_loss, last_loss) = (losses[0], *losses.last().expect("at least one step"));
    Ok(Turn { parameters, residual_parameters, steps, pathway, launches, first_loss, last_loss })
}
