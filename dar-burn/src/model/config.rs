use burn::config::Config;
use burn::tensor::Device;
use serde::{Deserialize, Serialize};
use thiserror::Error;

use super::decoder::Decoder;
use crate::nn::{BranchLayout, ResidualConfig, ResidualConfigError};

/// A decoder-only Transformer. The papers' sizes are in [`Preset`](super::Preset).
///
/// A saved configuration may leave out every field that [`new`](Self::new) gives a default: one that was saved before a
/// field existed loads with what models were then. (Burn's derive has no such thing, so this is written by hand.)
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct DecoderConfig {
    /// Number of token ids.
    pub vocab_size: usize,
    /// Width of the model.
    pub d_model: usize,
    /// Transformer layers, each an attention and a feed-forward branch.
    pub layers: usize,
    /// Query heads, each of `d_model / heads`.
    pub heads: usize,
    /// Key-value heads; each serves `heads / kv_heads` query heads.
    pub kv_heads: usize,
    /// The feed-forward branches.
    pub feed_forward: FeedForwardConfig,
    /// How the residual is carried: the one line to change.
    pub residual: ResidualConfig,
    /// Base of the rotary position encoding; 10 000 by default.
    #[serde(default = "rope_base")]
    pub rope_base: f64,
    /// Attention branches scale each head's output by a gate of their input; see [`Attention`](super::Attention). Not
    /// by default.
    #[serde(default)]
    pub gated_attention: bool,
    /// Epsilon of the branch norms and the final norm; 1e-6 by default.
    #[serde(default = "norm_eps")]
    pub norm_eps: f64,
}

fn rope_base() -> f64 {
    1e4
}

fn norm_eps() -> f64 {
    1e-6
}

impl Config for DecoderConfig {}

/// The feed-forward branches of a decoder, all SwiGLU: `(silu(x W_gate) * (x W_up)) W_down`.
#[derive(Config, Debug, PartialEq, Eq)]
pub enum FeedForwardConfig {
    /// One feed-forward network for all tokens.
    Dense {
        /// Inner width.
        d_ff: usize,
    },
    /// A few of many networks for each token.
    MixtureOfExperts(MoeConfig),
}

/// Sizes of a sparse mixture of experts.
#[derive(Config, Debug, PartialEq, Eq)]
pub struct MoeConfig {
    /// Number of experts.
    pub experts: usize,
    /// Experts that each token is routed to.
    pub experts_per_token: usize,
    /// Inner width of one expert.
    pub d_expert: usize,
}

/// Why a decoder configuration was refused.
#[derive(Debug, Clone, PartialEq, Eq, Error)]
pub enum ModelConfigError {
    /// A size or number of the decoder itself.
    #[error("DecoderConfig: `{field}` is {got}, expected {expected}")]
    Field {
        /// The field that does not fit.
        field: &'static str,
        /// The value that came.
        got: String,
        /// The values that fit.
        expected: String,
    },
    /// The residual scheme does not fit the decoder.
    #[error(transparent)]
    Residual(#[from] ResidualConfigError),
}

impl DecoderConfig {
    /// A decoder of these sizes, with the defaults of the other fields.
    pub fn new(
        vocab_size: usize,
        d_model: usize,
        layers: usize,
        heads: usize,
        kv_heads: usize,
        feed_forward: FeedForwardConfig,
        residual: ResidualConfig,
    ) -> Self {
        Self {
            vocab_size,
            d_model,
            layers,
            heads,
            kv_heads,
            feed_forward,
            residual,
            rope_base: rope_base(),
            gated_attention: false,
            norm_eps: norm_eps(),
        }
    }

    /// The same with another [`rope_base`](Self::rope_base).
    pub fn with_rope_base(self, rope_base: f64) -> Self {
        Self { rope_base, ..self }
    }

    /// The same with or without [`gated_attention`](Self::gated_attention).
    pub fn with_gated_attention(self, gated_attention: bool) -> Self {
        Self { gated_attention, ..self }
    }

    /// The same with another [`norm_eps`](Self::norm_eps).
    pub fn with_norm_eps(self, norm_eps: f64) -> Self {
        Self { norm_eps, ..self }
    }

    /// Refuses a configuration that no decoder can have, with the reason.
    pub fn validate(&self) -> Result<(), ModelConfigError> {
        positive("vocab_size", self.vocab_size)?;
        positive("d_model", self.d_model)?;
        positive("layers", self.layers)?;
        positive("heads", self.heads)?;
        positive("kv_heads", self.kv_heads)?;
        expect(
            self.d_model.is_multiple_of(2 * self.heads),
            "heads",
            self.heads,
            format!("heads of equal and even width (rotary encoding) in d_model = {}", self.d_model),
        )?;
        expect(
            self.heads.is_multiple_of(self.kv_heads),
            "kv_heads",
            self.kv_heads,
            format!("a divisor of heads = {}", self.heads),
        )?;
        match &self.feed_forward {
            FeedForwardConfig::Dense { d_ff } => positive("feed_forward.d_ff", *d_ff)?,
            FeedForwardConfig::MixtureOfExperts(MoeConfig { experts, experts_per_token, d_expert }) => {
                positive("feed_forward.experts", *experts)?;
                expect(
                    (1..=*experts).contains(experts_per_token),
                    "feed_forward.experts_per_token",
                    experts_per_token,
                    format!("from 1 to experts = {experts}"),
                )?;
                positive("feed_forward.d_expert", *d_expert)?;
            }
        }
        expect(self.rope_base.is_finite() && self.rope_base > 0.0, "rope_base", self.rope_base, "a finite number > 0")?;
        expect(self.norm_eps.is_finite() && self.norm_eps >= 0.0, "norm_eps", self.norm_eps, "a finite number ≥ 0")?;
        Ok(self.residual.validate(&self.layout())?)
    }

    /// The branches as the residual sees them: attention and feed-forward in turn, and a final norm.
    pub fn layout(&self) -> BranchLayout {
        BranchLayout::new(self.d_model, 2 * self.layers)
    }

    /// The decoder on `device`; its parameters are drawn when first used, or by
    /// [`Decoder::initialize`].
    ///
    /// # Panics
    /// If [`validate`](Self::validate) refuses, with its message.
    pub fn init(&self, device: &Device) -> Decoder {
        if let Err(error) = self.validate() {
            panic!("{error}");
        }
        Decoder::new(self, device)
    }
}

fn positive(field: &'static str, value: usize) -> Result<(), ModelConfigError> {
    expect(value > 0, field, value, "at least 1")
}

fn expect(
    fits: bool,
    field: &'static str,
    got: impl ToString,
    expected: impl Into<String>,
) -> Result<(), ModelConfigError> {
    if fits { Ok(()) } else { Err(ModelConfigError::Field { field, got: got.to_string(), expected: expected.into() }) }
}
