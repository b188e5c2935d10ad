//! The training of one scheme: steps, evaluations, checkpoints.

use std::fs;
use std::path::Path;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Instant;

use burn::config::Config;
use burn::module::Module;
use burn::optim::{GradientsParams, ModuleOptimizer};
use burn::tensor::{Device, Int, Tensor};
use dar_burn::diagnostics::layer_loss_weights;
use dar_burn::model::{Decoder, DecoderConfig, DecoderOutput, ObservedOutput};
use dar_burn::nn::Unobserved;
use indicatif::{ProgressBar, ProgressStyle};
use serde::{Deserialize, Serialize};

use crate::arguments::Arguments;
use crate::files::{self, replace};
use crate::optimiser::{adamw, clip_global_norm, learning_rate};
use crate::plot::{self, Curve};
use crate::support::checkpoint::Checkpoint;
use crate::support::cli::{Failure, failed, failed_to};
use crate::support::text::{Batch, Fingerprint, Text};

/// Weight of the router balance beside the cross entropy, for mixtures of experts.
const BALANCE: f64 = 0.01;

/// Set by Ctrl-C: finish the step, save, and stop.
pub static INTERRUPTED: AtomicBool = AtomicBool::new(false);

/// One line of `metrics.csv`.
#[derive(Debug, Clone, PartialEq)]
pub struct Row {
    /// Steps done.
    pub step: usize,
    pub train_loss: f32,
    /// On the held-out text, where it was evaluated.
    pub valid_loss: Option<f32>,
    pub tokens_per_s: f64,
    /// Router balance of the training batch, 1 when experts are used evenly; none of a dense model.
    pub auxiliary_loss: Option<f32>,
}

/// What is saved beside a model: enough to go on, or to refuse to.
#[derive(Debug, Serialize, Deserialize)]
struct State {
    /// Steps done.
    step: usize,
    text: Fingerprint,
    arguments: Arguments,
}

/// What all schemes of a run share.
pub struct Shared<'a> {
    pub arguments: &'a Arguments,
    pub text: &'a Text,
    pub device: &'a Device,
    /// The run's folder.
    pub output: &'a Path,
    pub stop_after: Option<usize>,
}

/// A scheme in training.
pub struct Run<'a> {
    shared: &'a Shared<'a>,
    name: String,
    config: DecoderConfig,
    model: Decoder,
    optimiser: ModuleOptimizer,
    rows: Vec<Row>,
    /// Most bytes that the device's allocator held, where it tells.
    peak_memory: Option<u64>,
}

/// What the closing table says of a scheme.
pub struct Summary {
    pub name: String,
    pub parameters: usize,
    pub residual_parameters: usize,
    pub rows: Vec<Row>,
    pub peak_memory: Option<u64>,
    /// All steps are done.
    pub finished: bool,
}

/// Refuses a scheme whose checkpoint is of another run: before anything of the run is touched.
pub fn check_checkpoint(shared: &Shared, name: &str, config: &DecoderConfig) -> Result<(), Failure> {
    if let Some(checkpoint) = files::surviving_checkpoint(&shared.output.join(name).join("checkpoint"))? {
        check_state(shared, name, config, &checkpoint)?;
    }
    Ok(())
}

fn check_state(shared: &Shared, name: &str, config: &DecoderConfig, checkpoint: &Checkpoint) -> Result<State, Failure> {
    let state: State = files::read_json(&checkpoint.state())?;
    shared.arguments.must_continue(&state.arguments)?;
    if state.text != shared.text.fingerprint {
        return Err(Failure::usage(
            "cannot resume with another text or tokenizer than the run's: pass the same --text and --tokenizer, or start \
             anew with --force",
        ));
    }
    if checkpoint.load_config()? != *config {
        return Err(Failure::usage(format!(
            "cannot resume {name} with another configuration than that of {}: name its file as it was, or start anew with \
             --force",
            checkpoint.config().display()
        )));
    }
    Ok(state)
}

impl<'a> Run<'a> {
    /// A fresh model, or the one of the scheme's checkpoint.
    pub fn open(shared: &'a Shared<'a>, name: String, config: DecoderConfig) -> Result<Self, Failure> {
        let folder = shared.output.join(&name);
        let checkpoint = files::surviving_checkpoint(&folder.join("checkpoint"))?;
        // Memory that the scheme before held would count as this one's.
        shared.device.memory_cleanup();
        let mut run = match checkpoint {
            None => {
                shared.device.seed(shared.arguments.seed);
                let model = config.init(shared.device);
                model.initialize();
                let optimiser = adamw(&model);
                Self { shared, name, config, model, optimiser, rows: Vec::new(), peak_memory: None }
            }
            Some(checkpoint) => {
                let state = check_state(shared, &name, &config, &checkpoint)?;
                let model = checkpoint.load_model(shared.device)?;
                let path = checkpoint.optimiser();
                let optimiser = adamw(&model).load(&path).map_err(failed_to("read", &path))?;
                let mut rows = files::read_metrics(&folder.join("metrics.csv"))?;
                rows.retain(|row| row.step <= state.step);
                if rows.len() != state.step {
                    let message = format!("{}/metrics.csv does not reach step {}", folder.display(), state.step);
                    return Err(Failure::run(message));
                }
                Self { shared, name, config, model, optimiser, rows, peak_memory: None }
            }
        };
        run.watch_memory();
        Ok(run)
    }

    /// Trains until the last step, `stop_after` or Ctrl-C.
    pub fn train(mut self) -> Result<Summary, Failure> {
        let arguments = self.shared.arguments;
        let steps = arguments.steps;
        let until = self.shared.stop_after.map_or(steps, |stop| stop.min(steps));
        let bar = progress(&self.name, steps, self.rows.len());
        while self.rows.len() < until {
            let step = self.rows.len() + 1;
            let mut row = self.step(step)?;
            let stop = step == until || INTERRUPTED.load(Ordering::SeqCst);
            if step.is_multiple_of(arguments.eval_every) || step == steps {
                let loss = self.evaluate()?;
                row.valid_loss = Some(loss);
                bar.suspend(|| println!("{:<16} step {step:>5}: held-out loss {loss:.4}", self.name));
            }
            bar.set_message(format!("loss {:.3}, {:.0} tokens/s", row.train_loss, row.tokens_per_s));
            bar.inc(1);
            let evaluated = row.valid_loss.is_some();
            self.rows.push(row);
            if evaluated || stop {
                self.save()?;
            }
            if stop {
                break;
            }
        }
        bar.finish_and_clear();
        Ok(Summary {
            name: self.name,
            parameters: self.model.num_params(),
            residual_parameters: self.model.residual.num_params(),
            finished: self.rows.len() == steps,
            rows: self.rows,
            peak_memory: self.peak_memory,
        })
    }

    /// One optimiser step, counted from 1.
    fn step(&mut self, step: usize) -> Result<Row, Failure> {
        let Shared { arguments, text, device, .. } = *self.shared;
        let Arguments { seed, batch, sequence, .. } = *arguments;
        let begin = Instant::now();

        let Batch { tokens, targets } = text.batch(seed, step, [batch, sequence], device);
        let (output, layer_losses) = match arguments.layer_loss {
            0.0 => (self.model.forward(tokens), None),
            lambda => self.supervised(tokens, &targets, lambda),
        };
        let loss = output.cross_entropy(targets);
        let balance = output.balance_loss;
        let weighed = balance.clone().map(|balance| balance * BALANCE);
        let objective = [weighed, layer_losses].into_iter().flatten().fold(loss.clone(), |sum, term| sum + term);
        self.watch_memory();
        let grads = GradientsParams::from_grads(objective.backward(), &self.model);
        let grads = clip_global_norm(&self.model, grads);
        let rate = learning_rate(arguments.lr, step - 1, arguments.steps);
        self.model = self.optimiser.step(rate, self.model.clone(), grads);
        self.watch_memory();

        let train_loss = scalar(loss)?;
        let auxiliary_loss = balance.map(scalar).transpose()?;
        device.sync().map_err(failed(format!("{}: step {step} failed", self.name)))?;
        if !train_loss.is_finite() {
            return Err(Failure::run(format!(
                "{}: the training loss is {train_loss} at step {step}: try a lower --lr (it is {}) with --force",
                self.name, arguments.lr
            )));
        }
        let tokens_per_s = (batch * sequence) as f64 / begin.elapsed().as_secs_f64();
        Ok(Row { step, train_loss, valid_loss: None, tokens_per_s, auxiliary_loss })
    }

    /// A pass, and the weighted losses at the ends of all layers but the last (Stream separation, B.3).
    fn supervised(
        &self,
        tokens: Tensor<2, Int>,
        targets: &Tensor<2, Int>,
        lambda: f64,
    ) -> (DecoderOutput, Option<Tensor<1>>) {
        let ObservedOutput { output, exits, .. } = self.model.forward_observed(tokens, Arc::new(Unobserved));
        let weights = layer_loss_weights(exits.len(), lambda);
        let loss = |(exit, weight)| {
            let exit = DecoderOutput { logits: self.model.logits(exit), balance_loss: None };
            exit.cross_entropy(targets.clone()) * weight
        };
        (output, exits.into_iter().zip(weights).map(loss).reduce(|sum, loss| sum + loss))
    }

    /// Mean loss on the held-out text.
    fn evaluate(&self) -> Result<f32, Failure> {
        let Shared { arguments, text, device, .. } = *self.shared;
        let device = device.clone().without_autodiff();
        let model = self.model.valid();
        let (mut sum, mut windows) = (0.0, 0);
        for Batch { tokens, targets } in text.held_out([arguments.batch, arguments.sequence], &device) {
            let rows = tokens.dims()[0];
            sum += f64::from(scalar(model.loss(tokens, targets))?) * rows as f64;
            windows += rows;
        }
        Ok((sum / windows as f64) as f32)
    }

    /// Metrics and plot, then the checkpoint: whenever this is cut off, the metrics reach as far as the checkpoint.
    fn save(&self) -> Result<(), Failure> {
        let folder = self.shared.output.join(&self.name);
        fs::create_dir_all(&folder).map_err(failed_to("make", &folder))?;
        replace(&folder.join("metrics.csv"), |path| files::write_metrics(path, &self.rows))?;
        let curve = [Curve { name: &self.name, rows: &self.rows }];
        plot::draw(&folder, &self.name, &curve)?;
        files::replace_folder(&folder.join("checkpoint"), |path| self.write_checkpoint(&Checkpoint::at(path)))
    }

    fn write_checkpoint(&self, checkpoint: &Checkpoint) -> Result<(), Failure> {
        let Shared { arguments, text, .. } = *self.shared;

        let path = checkpoint.config();
        self.config.save(&path).map_err(failed_to("write", &path))?;
        let path = checkpoint.model();
        self.model.valid().save_file(&path).map_err(failed_to("write", &path))?;
        let path = checkpoint.optimiser();
        self.optimiser.save(&path).map_err(failed_to("write", &path))?;
        if let Some(tokenizer) = &arguments.tokenizer {
            let path = checkpoint.tokenizer();
            fs::copy(tokenizer, &path).map_err(failed_to("write", &path))?;
        }
        let state = State { step: self.rows.len(), text: text.fingerprint.clone(), arguments: arguments.clone() };
        files::write_json(&checkpoint.state(), &state)
    }

    fn watch_memory(&mut self) {
        let now = self.shared.device.memory_pool_usage().map(|usage| usage.bytes_reserved);
        self.peak_memory = self.peak_memory.max(now);
    }
}

fn scalar(loss: Tensor<1>) -> Result<f32, Failure> {
    loss.try_into_scalar().map_err(failed("cannot read a loss"))
}

fn progress(name: &str, steps: usize, done: usize) -> ProgressBar {
    let style = ProgressStyle::with_template("{prefix:<16} {bar:32} {pos}/{len} {msg} [{elapsed}, {eta} left]");
    let style = style.expect("the template is valid");
    ProgressBar::new(steps as u64).with_style(style).with_prefix(name.to_owned()).with_position(done as u64)
}
