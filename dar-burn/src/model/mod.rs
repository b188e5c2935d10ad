//! The papers' backbones: dense and sparse-MoE decoders that take any residual scheme.
//!
//! ```
//! use burn::tensor::{Device, Int, Tensor};
//! use dar_burn::ResidualConfig;
//! use dar_burn::model::{DecoderConfig, FeedForwardConfig};
//!
//! let device = Device::flex();
//! let feed_forward = FeedForwardConfig::Dense { d_ff: 32 };
//! let residual = ResidualConfig::dar_block(2); // the one line to change
//! let decoder = DecoderConfig::new(100, 16, 4, 4, 2, feed_forward, residual).init(&device);
//!
//! let tokens = Tensor::<2, Int>::from_data([[3, 14, 15, 92, 65]], &device);
//! assert_eq!(decoder.forward(tokens).logits.dims(), [1, 5, 100]);
//! ```
//!
//! A layer is two residual branches, each behind its own norm:
//!
//! ```text
//! state  = start(sqrt(d_model) * embedding[token])
//! layer:   state = branch(state, |x| attention(norm(x)))
//!          state = branch(state, |x| feed_forward(norm(x)))
//! logits = norm(finish(state)) * embedding^T
//! ```
//!
//! Norms have a learnable gain, there are no biases, and input and output share the embedding. Norms, softmax and loss
//! are computed in the [`accumulator`](crate::ops::accumulator) type of the states, whose type is the embedding's.
//!
//! * [`DecoderConfig`] → [`Decoder`]: whole passes, loss, and steps with a [`KvCache`];
//! * [`Preset`], [`Method`], [`Recipe`]: the sizes, methods and training settings of the paper's tables;
//! * [`stream_separation`]: the model of the Bregman conditioning paper.

mod attention;
mod cache;
mod config;
mod decoder;
mod feed_forward;
mod moe;
mod norm;
mod positions;
mod presets;

pub use attention::Attention;
pub use cache::KvCache;
pub use config::{DecoderConfig, FeedForwardConfig, ModelConfigError, MoeConfig};
pub use decoder::{Decoder, DecoderLayer, DecoderOutput, ObservedOutput};
pub use feed_forward::{FeedForward, SwiGlu};
pub use moe::MixtureOfExperts;
pub use norm::RmsNorm;
pub use presets::{Method, Preset, Recipe, UnknownName, stream_separation};
