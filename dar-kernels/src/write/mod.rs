//! Gated write with constrained transport (17).
//!
//! ```text
//! P'^j = rho P^j + (1 - rho) P^(1-j) + beta^j y      (17, i > 1)
//! P'^j = beta^j y                                    (17, i = 1)
//! close:  value[entry] = P';  inv_rms[entry] = 1 / sqrt(mean(P'²) + eps)     (A.1)
//!
//! backward:  dy = sum over j of beta^j dP'^j;  dP = M(rho) dP'
//!            d_beta^j = <dP'^j, y>;  d_rho = <dP'^0 - dP'^1, P^0 - P^1>
//! ```
//!
//! The transported state is never stored on its own. Bytes moved, in units of `tokens × d_model`: the branch output and two
//! for the partial state are read, two are written. Closing a block writes the same two straight into the history. The backward reads five and writes three.

mod bwd;
mod fwd;

pub use bwd::{WriteBwd, write_bwd};
pub use fwd::{CloseFwd, WriteFwd, close_fwd, write_fwd};
