//! Completed-history prefix (A.2–A.5): what every query of a block finds in the history, in one pass over it.
//!
//! ```text
//! for each token:                                            one cube
//!   for each chunk of entries r:                             online, history read once
//!     a[r,s,j] = inv_rms[r,key(j)] <q[s,j], C[r,key(j)]>     (A.1)  one sum over the cube for the whole chunk
//!     m' = max(m, a);  scale what is there by exp(m - m')    (A.2)
//!     Z += exp(a - m');  U += exp(a - m') C[r,value(j)]      (A.3, A.4)
//!   lse[s,j] = m + ln Z;  state[s,j] = U / Z                 (A.5)
//! ```
//!
//! `key(j)` and `value(j)` are the streams of the [`Routing`]. A unit owns the same columns of all streams, as one stream's
//! values are the other one's keys. Bytes moved: `2 b` units of `tokens × d_model` are read and `2 S` written for b
//! entries, S queries and two streams, beside the scalars of each token.

mod config;
mod fwd;

pub use fwd::{PrefixFwd, prefix_fwd};
