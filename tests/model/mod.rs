//! The decoders: counts, whole passes against steps, experts against a plain loop, gradients, configurations.

mod config;
mod decoder;
mod moe;
mod parameters;
mod presets;
mod step;

use burn::module::{Module, ModuleMapper, Param};
use burn::tensor::{DType, Device, Int, Tensor, TensorData};
use dar_burn::ResidualConfig;
use dar_burn::model::{Decoder, DecoderConfig, FeedForwardConfig, Method, MoeConfig, Preset};

use crate::support::host::values;

const VOCAB_SIZE: usize = 37;
const LAYERS: usize = 4;

fn dense() -> FeedForwardConfig {
    FeedForwardConfig::Dense { d_ff: 24 }
}

fn mixture() -> FeedForwardConfig {
    FeedForwardConfig::MixtureOfExperts(MoeConfig::new(6, 2, 8))
}

/// Four query heads of width 4 and two key-value heads; blocks of two layers leave none over, those of three do.
fn config(feed_forward: FeedForwardConfig, residual: ResidualConfig) -> DecoderConfig {
    DecoderConfig::new(VOCAB_SIZE, 16, LAYERS, 4, 2, feed_forward, residual)
}

/// Every method with the sites of a block shared (K = 2), and the block forms with a site for every branch (K = 3).
fn residuals() -> Vec<(String, ResidualConfig)> {
    let shared = Method::ALL.map(|method| (method.to_string(), Preset::Dense05B.residual(method)));
    let own = [
        ("AttnRes, a site a branch".to_owned(), ResidualConfig::attnres_block(3)),
        ("DAR, a site a branch".to_owned(), ResidualConfig::dar_block(3)),
    ];
    shared.into_iter().chain(own).collect()
}

/// A decoder with seeded parameters, those of the residual moved away from their start.
fn decoder(config: &DecoderConfig, device: &Device) -> Decoder {
    let mut decoder = config.init(device);
    let mut noise = Noise { seed: 1, scale: 0.3, keep: true };
    decoder.residual = decoder.residual.map(&mut noise);
    let mut fresh = Noise { seed: 1000, scale: 0.5, keep: false };
    decoder.layers = decoder.layers.map(&mut fresh);
    decoder.embedding = Param::from_tensor(fresh.draw(decoder.embedding.lazy_shape().dims::<2>(), device));
    decoder
}

/// Seeded values, on top of what is there or in its place.
struct Noise {
    seed: u64,
    scale: f64,
    keep: bool,
}

impl Noise {
    fn draw<const D: usize>(&mut self, shape: [usize; D], device: &Device) -> Tensor<D> {
        self.seed += 1;
        let values = values(self.seed, shape.iter().product(), self.scale);
        Tensor::from_data(TensorData::new(values, shape), (device, DType::F32))
    }
}

impl ModuleMapper for Noise {
    fn map_float<const D: usize>(&mut self, param: Param<Tensor<D>>) -> Param<Tensor<D>> {
        let device = param.lazy_device();
        let noise = self.draw(param.lazy_shape().dims(), &device);
        let value = if self.keep || D == 1 { (param.val() + noise).detach() } else { noise };
        Param::initialized(param.id, value.set_require_grad(device.is_autodiff()))
    }
}

/// Seeded token ids. `[batch, sequence]`
fn tokens(seed: u64, [batch, sequence]: [usize; 2], device: &Device) -> Tensor<2, Int> {
    let ids = values(seed, batch * sequence, 1.0).into_iter();
    let ids: Vec<i64> = ids.map(|value| ((value + 1.0) * 0.5 * (VOCAB_SIZE - 1) as f64) as i64).collect();
    Tensor::from_data(TensorData::new(ids, [batch, sequence]), device)
}

fn host<const D: usize>(tensor: Tensor<D>) -> Vec<f64> {
    tensor.try_into_vec_as::<f64>().expect("the tensor can be read")
}
