//! Sizes, methods and training settings of the DAR paper (Tables A.1–A.6).

use std::fmt;
use std::str::FromStr;

use thiserror::Error;

use super::config::{DecoderConfig, FeedForwardConfig, MoeConfig};
use crate::nn::{AttnResConfig, DarConfig, HyperConfig, MhcConfig, ResidualConfig, SeparateValues, Tying};
use dar_kernels::Routing;

/// Vocabulary of every model (Table A.4; the counts of Table A.3 imply the same for the dense ones).
const VOCAB_SIZE: usize = 131_072;

/// Value maps of the separate-value control: what its feed-forward width in the 0.5B ablation pays for.
const SEPARATE_VALUE_MAPS: usize = 6;

/// A backbone of the DAR paper, named after its parameters without the vocabulary.
///
/// Tables A.1 and A.2 print embedding sizes below `d_model` for three models; the counts of Table A.3 leave no room for a
/// factorised embedding, so there is none here.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum Preset {
    /// 0.1B dense (Table A.2).
    Dense01B,
    /// 0.3B dense (Table A.2).
    Dense03B,
    /// 0.5B dense (Table A.2).
    Dense05B,
    /// 1B dense (Table A.1).
    Dense1B,
    /// 7B sparse mixture of experts (Table A.4).
    Moe7B,
}

/// A residual method of the DAR paper's tables, or one of the methods that it builds on.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum Method {
    /// Plain pre-norm residual.
    Residual,
    /// Attention Residuals over blocks of [`Preset::layers_per_block`] layers.
    AttnResBlock,
    /// Attention Residuals over every branch output.
    AttnResFull,
    /// [`AttnResFull`](Self::AttnResFull) with six value maps (equation 21, Table 4) and a feed-forward width that pays
    /// for them.
    AttnResSepV,
    /// Dual Attention Residuals over blocks of [`Preset::layers_per_block`] layers.
    DarBlock,
    /// Dual Attention Residuals over every layer.
    DarFull,
    /// [`DarFull`](Self::DarFull) whose streams read themselves (equation 22, Table 4).
    DarSelfKv,
    /// [`DarFull`](Self::DarFull) with opposite-stream values (equation 22, Table 4).
    DarCrossV,
    /// [`DarFull`](Self::DarFull) with stream 0 for keys and stream 1 for values (equation 22, Table 4).
    DarFixedKv,
    /// Manifold-constrained hyper-connections of four streams.
    Mhc,
    /// Manifold-constrained hyper-connections of two streams (analysed at 0.5B).
    Mhc2,
    /// Dynamic hyper-connections of four streams; in none of the tables.
    HyperConnections,
    /// Stream separation; in none of the tables.
    Cascade,
}

/// A name that no preset or method has.
#[derive(Debug, Clone, PartialEq, Eq, Error)]
#[error("{what} is {got:?}, expected one of {expected}")]
pub struct UnknownName {
    what: &'static str,
    got: String,
    expected: String,
}

/// How the models of one table were trained. Optimiser: AdamW.
#[derive(Debug, Clone, PartialEq)]
pub struct Recipe {
    /// Training tokens.
    pub tokens: u64,
    /// Tokens a sequence.
    pub sequence: usize,
    /// Sequences an optimiser step.
    pub batch: usize,
    /// Sequences that a device processes at once; gradients of several such make a step.
    pub micro_batch: usize,
    /// Learning rate after the warm-up.
    pub peak_learning_rate: f64,
    /// Learning rate at the end of the decay.
    pub min_learning_rate: f64,
    /// Steps until the peak.
    pub warmup_steps: usize,
    /// AdamW weight decay. The paper names no exceptions; queries, gates and biases of a residual scheme should be one.
    pub weight_decay: f64,
    /// AdamW decay rate of the first moment.
    pub beta_1: f64,
    /// AdamW decay rate of the second moment.
    pub beta_2: f64,
    /// AdamW epsilon.
    pub eps: f64,
    /// Largest norm of the whole gradient.
    pub clip_norm: f64,
    /// Random seed.
    pub seed: u64,
    /// Weight of [`balance_loss`](super::DecoderOutput::balance_loss) beside the cross entropy.
    pub balance_coefficient: Option<f64>,
}

/// The model of *Stream separation improves Bregman conditioning in transformers* (B.4): 6 layers, 6 heads, width 516, gated
/// attention, the 50 257 tokens of GPT-2 and 45.4 M parameters, with any residual; its 2 × 2 crosses
/// [`ResidualConfig::Standard`] and [`ResidualConfig::Cascade`] with the per-layer loss
/// ([`layer_loss_weights`](crate::diagnostics::layer_loss_weights)).
///
/// The paper prints neither the feed-forward's width nor how attention is gated. Taken here: one gate a head, and SwiGLU of
/// width 1408, which is `8 d_model / 3` rounded up to a multiple of 64; that gives the printed total.
pub fn stream_separation(residual: ResidualConfig) -> DecoderConfig {
    DecoderConfig::new(50_257, 516, 6, 6, 6, FeedForwardConfig::Dense { d_ff: 1408 }, residual)
        .with_gated_attention(true)
}

impl Preset {
    /// All presets, small to large.
    pub const ALL: [Self; 5] = [Self::Dense01B, Self::Dense03B, Self::Dense05B, Self::Dense1B, Self::Moe7B];

    /// The name in the tables.
    pub fn name(self) -> &'static str {
        match self {
            Self::Dense01B => "0.1B",
            Self::Dense03B => "0.3B",
            Self::Dense05B => "0.5B",
            Self::Dense1B => "1B",
            Self::Moe7B => "7B-MoE",
        }
    }

    /// Layers in a block of the block forms, K.
    pub fn layers_per_block(self) -> usize {
        match self {
            Self::Moe7B => 3,
            _ => 2,
        }
    }

    /// The backbone with any residual.
    ///
    /// The rotary base is 10⁶ for the mixture of experts (Table A.4); the paper names none for the dense models, which
    /// get the usual 10⁴.
    pub fn decoder(self, residual: ResidualConfig) -> DecoderConfig {
        let (layers, heads, kv_heads, d_model) = match self {
            Self::Dense01B => (16, 10, 5, 640),
            Self::Dense03B => (20, 16, 4, 1024),
            Self::Dense05B => (20, 20, 10, 1280),
            Self::Dense1B => (20, 16, 8, 2048),
            Self::Moe7B => (24, 16, 8, 2048),
        };
        let feed_forward = match self {
            Self::Dense01B => FeedForwardConfig::Dense { d_ff: 2560 },
            Self::Dense03B => FeedForwardConfig::Dense { d_ff: 4096 },
            Self::Dense05B => FeedForwardConfig::Dense { d_ff: 5120 },
            Self::Dense1B => FeedForwardConfig::Dense { d_ff: 6656 },
            Self::Moe7B => FeedForwardConfig::MixtureOfExperts(MoeConfig::new(64, 8, 704)),
        };
        let config = DecoderConfig::new(VOCAB_SIZE, d_model, layers, heads, kv_heads, feed_forward, residual);
        match self {
            Self::Moe7B => config.with_rope_base(1e6),
            _ => config,
        }
    }

    /// The residual of a method at this size, with the sites of a block shared by its layers: that is what the papers'
    /// counts say (Tables A.3 and A.5).
    pub fn residual(self, method: Method) -> ResidualConfig {
        let layers = self.layers_per_block();
        let attn_res = |config: AttnResConfig| ResidualConfig::AttnRes(config.with_tying(Tying::PerBlock));
        let dar = |config: DarConfig| ResidualConfig::Dar(config.with_tying(Tying::PerBlock));
        match method {
            Method::Residual => ResidualConfig::Standard,
            Method::AttnResBlock => attn_res(AttnResConfig::block(layers)),
            Method::AttnResFull => attn_res(AttnResConfig::full()),
            Method::AttnResSepV => {
                attn_res(AttnResConfig::full().with_separate_values(SeparateValues::Maps(SEPARATE_VALUE_MAPS)))
            }
            Method::DarBlock => dar(DarConfig::block(layers)),
            Method::DarFull => dar(DarConfig::block(1)),
            Method::DarSelfKv => dar(DarConfig::block(1).with_routing(Routing::SelfKeyValue)),
            Method::DarCrossV => dar(DarConfig::block(1).with_routing(Routing::CrossValue)),
            Method::DarFixedKv => dar(DarConfig::block(1).with_routing(Routing::FixedKeyValue)),
            Method::Mhc => ResidualConfig::Mhc(MhcConfig::new().with_streams(4)),
            Method::Mhc2 => ResidualConfig::Mhc(MhcConfig::new().with_streams(2)),
            Method::HyperConnections => ResidualConfig::Hyper(HyperConfig::new().with_streams(4)),
            Method::Cascade => ResidualConfig::Cascade,
        }
    }

    /// The whole model of a method: [`decoder`](Self::decoder) with [`residual`](Self::residual), and a feed-forward
    /// width that pays for separate values (at 0.5B the paper's 4992; elsewhere rounded to a whole width).
    pub fn model(self, method: Method) -> DecoderConfig {
        let mut config = self.decoder(self.residual(method));
        if method == Method::AttnResSepV {
            let (d_model, layers) = (config.d_model, config.layers);
            let (width, networks) = match &mut config.feed_forward {
                FeedForwardConfig::Dense { d_ff } => (d_ff, layers),
                FeedForwardConfig::MixtureOfExperts(moe) => (&mut moe.d_expert, layers * moe.experts),
            };
            // maps * d_model² parameters, at 3 * d_model for one unit of width of one network
            *width -= (SEPARATE_VALUE_MAPS * d_model + 3 * networks / 2) / (3 * networks);
        }
        config
    }

    /// How the paper trained this size (Table A.1 for 1B, A.2 for the smaller, A.4 and A.6 for the mixture of experts).
    ///
    /// Table A.2 prints no learning rates, betas or clipping; the smaller sizes get those of Table A.1.
    pub fn recipe(self) -> Recipe {
        let dense = Recipe {
            tokens: 50_000_000_000,
            sequence: 4096,
            batch: 256,
            micro_batch: 2,
            peak_learning_rate: 3e-4,
            min_learning_rate: 3e-5,
            warmup_steps: 2000,
            weight_decay: 0.1,
            beta_1: 0.9,
            beta_2: 0.95,
            eps: 1e-8,
            clip_norm: 1.0,
            seed: 42,
            balance_coefficient: None,
        };
        match self {
            Self::Dense01B => Recipe { tokens: 2_000_000_000, warmup_steps: 300, ..dense },
            Self::Dense03B => Recipe { tokens: 6_000_000_000, warmup_steps: 300, ..dense },
            Self::Dense05B => Recipe { tokens: 10_000_000_000, warmup_steps: 300, ..dense },
            Self::Dense1B => dense,
            // 60 000 iterations
            Self::Moe7B => Recipe { tokens: 31_457_280_000, batch: 128, balance_coefficient: Some(0.01), ..dense },
        }
    }
}

impl Recipe {
    /// Optimiser steps that see all tokens.
    pub fn steps(&self) -> u64 {
        self.tokens.div_ceil((self.sequence * self.batch) as u64)
    }
}

impl Method {
    /// All methods.
    pub const ALL: [Self; 13] = [
        Self::Residual,
        Self::AttnResBlock,
        Self::AttnResFull,
        Self::AttnResSepV,
        Self::DarBlock,
        Self::DarFull,
        Self::DarSelfKv,
        Self::DarCrossV,
        Self::DarFixedKv,
        Self::Mhc,
        Self::Mhc2,
        Self::HyperConnections,
        Self::Cascade,
    ];

    /// The name in the tables.
    pub fn name(self) -> &'static str {
        match self {
            Self::Residual => "Residual",
            Self::AttnResBlock => "AttnRes-Block",
            Self::AttnResFull => "AttnRes-Full",
            Self::AttnResSepV => "AttnRes-SepV",
            Self::DarBlock => "DAR-Block",
            Self::DarFull => "DAR-Full",
            Self::DarSelfKv => "DAR-SelfKV",
            Self::DarCrossV => "DAR-CrossV",
            Self::DarFixedKv => "DAR-FixedKV",
            Self::Mhc => "mHC",
            Self::Mhc2 => "mHC-2",
            Self::HyperConnections => "HC",
            Self::Cascade => "CASCADE",
        }
    }
}

impl fmt::Display for Preset {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.pad(self.name())
    }
}

impl fmt::Display for Method {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.pad(self.name())
    }
}

impl FromStr for Preset {
    type Err = UnknownName;

    fn from_str(name: &str) -> Result<Self, UnknownName> {
        find("preset", name, Self::ALL, Self::name)
    }
}

impl FromStr for Method {
    type Err = UnknownName;

    fn from_str(name: &str) -> Result<Self, UnknownName> {
        find("method", name, Self::ALL, Self::name)
    }
}

/// The value with this name, whatever its case.
fn find<T: Copy>(
    what: &'static str,
    got: &str,
    all: impl IntoIterator<Item = T> + Clone,
    name: fn(T) -> &'static str,
) -> Result<T, UnknownName> {
    let found = all.clone().into_iter().find(|&value| name(value).eq_ignore_ascii_case(got.trim()));
    found.ok_or_else(|| {
        let expected = all.into_iter().map(name).collect::<Vec<_>>().join(", ");
        UnknownName { what, got: got.trim().into(), expected }
    })
}
