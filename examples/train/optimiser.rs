//! AdamW without decay on gains, embeddings and residual parameters; clipping by the norm of all gradients together; a
//! warm-up and cosine schedule that scales with the run.

use std::f64::consts::PI;

use burn::module::{Module, ModuleVisitor, Param, ParamGroup, ParamId};
use burn::optim::{AdamWConfig, GradientsParams, ModuleOptimizer};
use burn::tensor::Tensor;
use dar_burn::model::Decoder;

/// Weight decay of the backbone's matrices.
const WEIGHT_DECAY: f32 = 0.1;
/// Longest norm of the gradient of all parameters together.
const LONGEST_GRADIENT: f64 = 1.0;
/// Share of the steps that warm up.
const WARM_UP: f64 = 0.1;
/// Learning rate at the end, as a share of the peak.
const LAST_RATE: f64 = 0.1;

/// The optimiser of `model`; parameters keep their ids when a checkpoint is loaded, so make it after loading.
pub fn adamw(model: &Decoder) -> ModuleOptimizer {
    let adamw = AdamWConfig::new().with_beta_1(0.9).with_beta_2(0.95).with_epsilon(1e-8);
    let decaying = adamw.clone().with_weight_decay(WEIGHT_DECAY).build();
    ModuleOptimizer::from(adamw.with_weight_decay(0.0).build()).with_group(
        ParamGroup::from_ids(backbone_matrices(model)),
        decaying,
        None,
    )
}

/// The weights of the branches: no gains, no embedding, nothing of the residual pathway.
fn backbone_matrices(model: &Decoder) -> Vec<ParamId> {
    struct Matrices(Vec<ParamId>);
    impl ModuleVisitor for Matrices {
        fn visit_float<const D: usize>(&mut self, param: &Param<Tensor<D>>) {
            if D >= 2 {
                self.0.push(param.id);
            }
        }
    }
    let mut matrices = Matrices(Vec::new());
    model.layers.visit(&mut matrices);
    matrices.0
}

/// Learning rate of `step`, counted from 0, in a run of `steps`: a linear warm-up, then half a cosine.
pub fn learning_rate(peak: f64, step: usize, steps: usize) -> f64 {
    let (step, steps) = (step as f64, steps as f64);
    let warm_up = (steps * WARM_UP).ceil().max(1.0);
    if step < warm_up {
        return peak * (step + 1.0) / warm_up;
    }
    let progress = (step - warm_up) / (steps - warm_up).max(1.0);
    peak * (LAST_RATE + (1.0 - LAST_RATE) * 0.5 * (1.0 + (PI * progress).cos()))
}

/// Shortens all gradients by one factor where their common norm is longer than 1. Burn's own clipping looks at one
/// tensor at a time, which changes the direction.
pub fn clip_global_norm(model: &Decoder, mut grads: GradientsParams) -> GradientsParams {
    let mut squares = Squares { grads: &grads, sum: None };
    model.visit(&mut squares);
    let Some(sum) = squares.sum else { return grads };
    // Stays on the device: nothing waits for the norm.
    let factor = (sum.sqrt() + 1e-12).recip().mul_scalar(LONGEST_GRADIENT).clamp_max(1.0);
    model.visit(&mut Scale { grads: &mut grads, factor });
    grads
}

struct Squares<'a> {
    grads: &'a GradientsParams,
    sum: Option<Tensor<1>>,
}

impl ModuleVisitor for Squares<'_> {
    fn visit_float<const D: usize>(&mut self, param: &Param<Tensor<D>>) {
        if let Some(grad) = self.grads.get::<D>(param.id) {
            let square = grad.square().sum();
            self.sum = Some(match self.sum.take() {
                Some(sum) => sum + square,
                None => square,
            });
        }
    }
}

struct Scale<'a> {
    grads: &'a mut GradientsParams,
    factor: Tensor<1>,
}

impl ModuleVisitor for Scale<'_> {
    fn visit_float<const D: usize>(&mut self, param: &Param<Tensor<D>>) {
        if let Some(grad) = self.grads.remove::<D>(param.id) {
            self.grads.register(param.id, grad * self.factor.clone().reshape([1; D]));
        }
    }
}
