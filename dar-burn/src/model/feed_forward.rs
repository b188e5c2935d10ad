use burn::module::{Initializer, Module};
use burn::nn::{Linear, LinearConfig};
use burn::tensor::activation::silu;
use burn::tensor::{Device, Tensor};

use super::config::FeedForwardConfig;
use super::moe::MixtureOfExperts;

/// The feed-forward branch of one layer.
#[derive(Module, Debug)]
pub enum FeedForward {
    /// One network for all tokens.
    Dense(SwiGlu),
    /// A few of many networks for each token.
    MixtureOfExperts(MixtureOfExperts),
}

impl FeedForward {
    /// `output_scale` shrinks the initial output projection.
    pub(super) fn new(config: &FeedForwardConfig, d_model: usize, output_scale: f64, device: &Device) -> Self {
        match config {
            FeedForwardConfig::Dense { d_ff } => Self::Dense(SwiGlu::new(d_model, *d_ff, output_scale, device)),
            FeedForwardConfig::MixtureOfExperts(config) => {
                Self::MixtureOfExperts(MixtureOfExperts::new(config, d_model, output_scale, device))
            }
        }
    }

    /// The branch output, and the balance loss of a mixture of experts.
    ///
    /// # Shapes
    /// - `x`, output: `[batch, sequence, d_model]`
    /// - balance loss: `[1]`
    pub fn forward(&self, x: Tensor<3>) -> (Tensor<3>, Option<Tensor<1>>) {
        match self {
            Self::Dense(network) => (network.forward(x), None),
            Self::MixtureOfExperts(experts) => {
                let (output, balance) = experts.forward(x);
                (output, Some(balance))
            }
        }
    }
}

/// SwiGLU (Shazeer): `(silu(x W_gate) * (x W_up)) W_down`, no biases.
///
/// Parameters: `3 d_model d_ff`.
#[derive(Module, Debug)]
pub struct SwiGlu {
    /// `[d_model, d_ff]`
    pub gate: Linear,
    /// `[d_model, d_ff]`
    pub up: Linear,
    /// `[d_ff, d_model]`
    pub down: Linear,
}

impl SwiGlu {
    fn new(d_model: usize, d_ff: usize, output_scale: f64, device: &Device) -> Self {
        Self {
            gate: linear(d_model, d_ff, 1.0, device),
            up: linear(d_model, d_ff, 1.0, device),
            down: linear(d_ff, d_model, output_scale, device),
        }
    }

    /// # Shapes
    /// - `x`, output: `[batch, sequence, d_model]`
    pub fn forward(&self, x: Tensor<3>) -> Tensor<3> {
        self.down.forward(silu(self.gate.forward(x.clone())) * self.up.forward(x))
    }
}

/// A projection without bias that keeps the variance of its input, times `scale`.
pub(super) fn linear(d_input: usize, d_output: usize, scale: f64, device: &Device) -> Linear {
    LinearConfig::new(d_input, d_output).with_bias(false).with_initializer(normal(d_input, scale)).init(device)
}

/// Normal with standard deviation `scale / sqrt(fan_in)`.
pub(super) fn normal(fan_in: usize, scale: f64) -> Initializer {
    Initializer::Normal { mean: 0.0, std: scale / (fan_in as f64).sqrt() }
}
