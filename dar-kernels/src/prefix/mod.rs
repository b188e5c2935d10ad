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
//! Backward, with `p = exp(a - lse)`; d_value holds the whole gradient of an entry, formed once in f32:
//!
//! ```text
//! shift[s,j]   = d_lse[s,j] - <d_state[s,j], state[s,j]>
//! d_a[r,s,j]   = p (<d_state[s,j], C[r,value(j)]> + shift[s,j])
//! d_key[r,i]   = sum of d_a[r,s,j] q[s,j] over key(j) = i
//! d_value[r,i] = sum of p d_state[s,j] over value(j) = i
//!                + inv_rms (d_key - key <d_key, key> / d_model)       key = inv_rms C[r,i]; <d_key, key> = sum of d_a a
//! d_query[s,j] = sum over r and tokens of d_a[r,s,j] key[r,key(j)]    in two stages
//! ```
//!
//! `key(j)` and `value(j)` are the streams of the [`Routing`](crate::Routing). A unit owns the same columns of all streams, as one stream's
//! values are the other one's keys. Bytes moved: `2 b` units of `tokens × d_model` are read and `2 S` written for b
//! entries, S queries and two streams, beside the scalars of each token. The
//! backward reads `4 S` for the shift, `2 + 2 S` an entry for its gradient and `2 b` for the queries, and writes `2 b`.

mod bwd;
mod config;
mod fwd;

pub use bwd::{PrefixBwdHistory, PrefixBwdQuery, prefix_bwd_history, prefix_bwd_query};
pub use fwd::{PrefixFwd, prefix_fwd};
