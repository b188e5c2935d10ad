use burn::tensor::Tensor;
use dar_kernels::KernelError;

use crate::ops::numeric::require;

/// Keys and values of the tokens that a decoder has seen, for [`Decoder::step`](super::Decoder::step).
///
/// Nothing of the residual is kept: every scheme is token-wise, so the new tokens' histories are built anew. A value: a
/// clone continues on its own.
#[derive(Debug, Clone)]
pub struct KvCache {
    layers: Vec<LayerCache>,
}

/// Keys (after their rotation) and values of one layer.
#[derive(Debug, Clone, Default)]
pub(super) struct LayerCache {
    /// Both `[batch, kv_heads, positions, d_head]`.
    kept: Option<(Tensor<4>, Tensor<4>)>,
}

impl KvCache {
    pub(super) fn new(layers: usize) -> Self {
        Self { layers: vec![LayerCache::default(); layers] }
    }

    /// Positions seen so far.
    pub fn len(&self) -> usize {
        self.shape().map_or(0, |[_, positions]| positions)
    }

    /// Whether no token has been seen.
    pub fn is_empty(&self) -> bool {
        self.len() == 0
    }

    /// Sequences of the batch, once there are tokens.
    pub fn batch(&self) -> Option<usize> {
        self.shape().map(|[batch, _]| batch)
    }

    fn shape(&self) -> Option<[usize; 2]> {
        let (keys, _) = self.layers.first()?.kept.as_ref()?;
        let [batch, _, positions, _] = keys.dims();
        Some([batch, positions])
    }

    pub(super) fn layer(&mut self, index: usize) -> &mut LayerCache {
        &mut self.layers[index]
    }

    /// Panics unless the cache fits a decoder of `layers` layers that is about to see `batch` sequences.
    #[track_caller]
    pub(super) fn check(&self, layers: usize, batch: usize) {
        let operation = "Decoder::step";
        if self.layers.len() != layers {
            let expected = format!("a cache of this decoder's {layers} layers");
            require::<()>(Err(KernelError::value(operation, "cache", expected, format!("of {}", self.layers.len()))));
        }
        if let Some(cached) = self.batch()
            && cached != batch
        {
            let expected = format!("{cached} sequences, as in the cache");
            require::<()>(Err(KernelError::value(operation, "tokens", expected, format!("a batch of {batch}"))));
        }
    }
}

impl LayerCache {
    /// Appends, and returns all keys and values.
    ///
    /// # Shapes
    /// - `keys`, `values`: `[batch, kv_heads, new, d_head]`
    /// - outputs: `[batch, kv_heads, past + new, d_head]`
    pub(super) fn extend(&mut self, keys: Tensor<4>, values: Tensor<4>) -> (Tensor<4>, Tensor<4>) {
        let all = match self.kept.take() {
            Some((old_keys, old_values)) => {
                (Tensor::cat(vec![old_keys, keys], 2), Tensor::cat(vec![old_values, values], 2))
            }
            None => (keys, values),
        };
        self.kept.insert(all).clone()
    }
}
