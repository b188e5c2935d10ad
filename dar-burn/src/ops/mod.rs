//! The operations of the residual pathway on Burn tensors.
//!
//! Every operation is token-wise: batch and sequence flatten to `tokens`. Its body is the equation that it cites,
//! composed of Burn's ordinary operations, so it runs and differentiates on every backend. States keep their storage
//! type; sums, norms, softmax and gates are computed in the [`accumulator`] type.
//!
//! These are the reference. The schemes of [`nn`](crate::nn) that keep a history run the same equations fused, with a
//! hand-written backward, unless [`Implementation::Composed`] is chosen.

pub mod history;
pub mod hyper;
pub(crate) mod numeric;
pub(crate) mod pass;
pub mod read;
pub mod retrieve;
pub mod write;

pub use history::{History, pack};
pub use hyper::{
    HyperWeights, MhcWeights, SinkhornOrder, StreamMaps, hyper_maps, mhc_maps, sinkhorn, streams_read, streams_write,
};
pub use numeric::{BranchNorm, accumulator, rms_norm};
pub use pass::{Implementation, Memory};
pub use read::{GateWeights, Gates, ResidualRead, SiteWeights, residual_read, residual_read_first};
pub use retrieve::{Retrieved, attnres_read, merge, output_read, prefix, retrieval_weights};
pub use write::{write, write_first};
