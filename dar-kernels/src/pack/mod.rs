//! Packing a state into the history (A.1).
//!
//! ```text
//! value[entry] = state;   inv_rms[entry] = 1 / sqrt(mean(state²) + eps)      one cube a token and stream
//! ```
//!
//! The normalised key of the paper is `inv_rms * value`, so that no second buffer of keys exists. Earlier entries are
//! not touched. Bytes moved: two units of `tokens × d_model` are read and two written for two streams; an embedding,
//! which all streams share, is one unit.

mod fwd;

pub use fwd::{PackFwd, pack_fwd};
