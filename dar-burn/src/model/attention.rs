use burn::module::Module;
use burn::nn::Linear;
use burn::tensor::activation::{sigmoid, softmax};
use burn::tensor::{Device, Tensor};

use super::cache::LayerCache;
use super::config::DecoderConfig;
use super::feed_forward::linear;
use super::positions::Positions;
use crate::ops::accumulator;

/// Causal grouped-query self-attention (Ainslie et al.) with rotary positions and no biases.
///
/// Gated attention multiplies what a head mixed by `sigmoid(x W_gate)` of its own (Qiu et al., after the softmax and
/// before the output projection, one gate a head).
///
/// Parameters: `2 d_model² + 2 d_model kv_heads d_model / heads`, and `d_model heads` with gates.
#[derive(Module, Debug)]
pub struct Attention {
    /// `[d_model, d_model]`
    pub query: Linear,
    /// `[d_model, kv_heads * d_head]`
    pub key: Linear,
    /// `[d_model, kv_heads * d_head]`
    pub value: Linear,
    /// `[d_model, d_model]`
    pub output: Linear,
    /// Gates of the heads. `[d_model, heads]`
    pub gate: Option<Linear>,
    heads: usize,
    kv_heads: usize,
}

impl Attention {
    /// `output_scale` shrinks the initial output projection.
    pub(super) fn new(config: &DecoderConfig, output_scale: f64, device: &Device) -> Self {
        let DecoderConfig { d_model, heads, kv_heads, .. } = *config;
        let d_kv = d_model / heads * kv_heads;
        Self {
            query: linear(d_model, d_model, 1.0, device),
            key: linear(d_model, d_kv, 1.0, device),
            value: linear(d_model, d_kv, 1.0, device),
            output: linear(d_model, d_model, output_scale, device),
            gate: config.gated_attention.then(|| linear(d_model, config.heads, 1.0, device)),
            heads,
            kv_heads,
        }
    }

    /// # Shapes
    /// - `x`, output: `[batch, new, d_model]`
    pub(super) fn forward(&self, x: Tensor<3>, positions: &Positions, cache: Option<&mut LayerCache>) -> Tensor<3> {
        let [batch, new, d_model] = x.dims();
        let (dtype, d_head) = (x.dtype(), d_model / self.heads);
        // [batch, heads, new, width]
        let split = |x: Tensor<3>, heads: usize, width: usize| x.reshape([batch, new, heads, width]).swap_dims(1, 2);

        let gate = self.gate.as_ref().map(|gate| split(sigmoid(gate.forward(x.clone())), self.heads, 1));
        let query = positions.rotate(split(self.query.forward(x.clone()), self.heads, d_head));
        let query = (query * (d_head as f64).sqrt().recip()).cast(dtype);
        let key = positions.rotate(split(self.key.forward(x.clone()), self.kv_heads, d_head)).cast(dtype);
        let value = split(self.value.forward(x), self.kv_heads, d_head);
        let (key, value) = match cache {
            Some(cache) => cache.extend(key, value),
            None => (key, value),
        };

        // The query heads of one key-value head stack, so that keys and values are never repeated.
        let (group, keys) = (self.heads / self.kv_heads, key.dims()[2]);
        let query = query.reshape([batch, self.kv_heads, group * new, d_head]);
        let scores = query.matmul(key.swap_dims(2, 3)).cast(accumulator(dtype));
        let scores = positions.mask(scores.reshape([batch * self.kv_heads, group, new, keys]));
        let weights = softmax(scores, 3).cast(dtype).reshape([batch, self.kv_heads, group * new, keys]);
        let mixed = weights.matmul(value).reshape([batch, self.heads, new, d_head]);
        let mixed = match gate {
            Some(gate) => mixed * gate,
            None => mixed,
        };
        self.output.forward(mixed.swap_dims(1, 2).reshape([batch, new, d_model]))
    }
}
