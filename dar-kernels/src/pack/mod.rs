//! Packing a state into the history (A.1).
//!
//! ```text
//! value[entry] = state;   inv_rms[entry] = 1 / sqrt(mean(state²) + eps)      one cube a token and stream
//! ```
//!
//! The normalised key of the paper is `inv_rms * value`, so that no second buffer of keys is needed. The paper's own
//! packing keeps them all the same, rounded to the type of the states, next to the output that asks for them:
//!
//! ```text
//! key[entry,j] = inv_rms * value[entry,key(j)]      with a `Key`
//! ```
//!
//! Then [`prefix_fwd`](crate::prefix::prefix_fwd) reads twice as much. Backward kernels read values and inverse RMS with
//! either packing. Earlier entries are not touched. Bytes moved: two units of `tokens × d_model` are read and two written
//! for two streams, with keys four; an embedding, which all streams share, is one unit to read.

mod fwd;

pub(crate) use fwd::KeyConfig;
pub use fwd::{Key, PackFwd, pack_fwd};
