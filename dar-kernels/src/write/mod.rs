//! Gated write with constrained transport (17), and the plain sum of one stream.
//!
//! ```text
//! P'^j = rho P^j + (1 - rho) P^(1-j) + beta^j y      (17, i > 1)
//! P'^j = beta^j y                                    (17, i = 1)
//! P'   = P + y;  P' = y                              without gates, one stream (Attention Residuals)
//! close:  value[entry] = P';  inv_rms[entry] = 1 / sqrt(mean(P'²) + eps)     (A.1)
//!         key[entry,j] = inv_rms P'^key(j), where keys are packed    see `pack`
//!
//! backward of a block's last branch:  dy = sum over j of beta^j dP'^j;  d_beta^j = <dP'^j, y>
//! ```
//!
//! The transported state is never stored on its own. Inside a block the write is part of the [next read](crate::read),
//! forward and backward; `write_fwd` recomputes a state that was not kept. Bytes moved, in units of `tokens × d_model`:
//! the branch output and two for the state before are read, two are written. Closing a block writes the same two
//! straight into the history. The backward reads three and writes one, as M(rho) and d_rho belong to the backward of
//! the read.

mod bwd;
mod fwd;

pub use bwd::{WriteBwd, write_bwd};
pub(crate) use fwd::written;
pub use fwd::{CloseFwd, WriteFwd, close_fwd, write_fwd};
