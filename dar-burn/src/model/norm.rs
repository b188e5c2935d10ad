use burn::module::{Initializer, Module, Param};
use burn::tensor::{Device, Tensor};

use crate::ops::BranchNorm;

/// RMSNorm with a learnable gain, computed in the accumulator type: `gain * x / sqrt(mean(x²) + eps)`.
#[derive(Module, Debug)]
pub struct RmsNorm {
    /// `[d_model]`, starts at one.
    pub gain: Param<Tensor<1>>,
    eps: f64,
}

impl RmsNorm {
    pub(super) fn new(d_model: usize, eps: f64, device: &Device) -> Self {
        Self { gain: Initializer::Ones.init([d_model], device), eps }
    }

    /// Normalises the last axis. The output has the element type of `x`.
    ///
    /// # Shapes
    /// - `x`, output: `[.., d_model]`
    pub fn forward<const D: usize>(&self, x: Tensor<D>) -> Tensor<D> {
        BranchNorm::from(self).apply(x)
    }
}

impl From<&RmsNorm> for BranchNorm {
    fn from(norm: &RmsNorm) -> Self {
        Self { gain: norm.gain.val(), eps: norm.eps }
    }
}
