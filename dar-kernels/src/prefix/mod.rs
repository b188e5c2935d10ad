//! Completed-history prefix (A.2–A.5): what the queries of a block find in the history, in one pass over it.
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
//! With a [`Mix`] the first query is that of a block's first branch or of an output read with all blocks complete, and
//! has no open state to be merged with: the same pass takes its retrieved state on, unrounded, to gates and branch input.
//!
//! ```text
//!   alpha, beta of [state[0,0]; state[0,1]];  input = alpha0 state[0,0] + alpha1 state[0,1]      (13–15)
//!   without a site: input = sum over j of state[0,j]
//! ```
//!
//! Keys are values times inverse RMS, or lie in a buffer of their own if they were [packed](crate::pack::Key).
//!
//! Queries, `lse` and `logit` are arenas of all reads of a pass, of which one launch serves a range. `key(j)` and
//! `value(j)` are the streams of the [`Routing`](crate::Routing) for output j. There are as many outputs as streams,
//! but for Attention Residuals with projected values (21), whose history holds two streams, the state that gives the
//! key and the projected value, for one output.
//!
//! Backward, with `p = exp(a - lse)`, after [`read_bwd`](crate::read::read_bwd) has put d_state in the place of the
//! retrieved states. Nothing accumulates in half precision: d_value is the whole gradient of one entry, formed once in
//! f32 from all reads that saw it.
//!
//! ```text
//! shift[s,j]   = d_lse[s,j] - <d_state[s,j], state[s,j]>              from `read_bwd`
//! d_a[r,s,j]   = p (<d_state[s,j], C[r,value(j)]> + shift[s,j])
//! d_key[r,i]   = sum of d_a[r,s,j] q[s,j] over key(j) = i
//! d_value[r,i] = sum of p d_state[s,j] over value(j) = i
//!                + inv_rms (d_key - key <d_key, key> / d_model)       key = inv_rms C[r,i]; <d_key, key> = sum of d_a a
//! d_a[r,s,j]   -= p (sum of d_a[r,s,j] over r - d_lse[s,j])
//! d_query[s,j] += sum of d_a[r,s,j] key[r,key(j)] over tokens and the entries r ≤ s / branches_per_block, in two stages
//! ```
//!
//! The correction of d_a is zero but for rounding: the shift is taken of a retrieved state as it is stored, and in half
//! types the sum of d_a over the entries would miss d_lse by more than the sum over tokens forgives.
//!
//! A unit owns the same columns of all streams, as one stream's values are the other one's keys. The softmax of a head,
//! and the scalars of its backward, are made by one unit between the two barriers of a sum, which tells the others the
//! factor and the weights: every unit would need the registers and instructions of all heads. The last chunk's carry 1
//! / Z.
//!
//! Bytes moved: `2 b` units of `tokens × d_model` are read and `2 S` written for b entries, S queries and two streams,
//! beside the scalars of each token; packed keys are `2 b` more to read. A mix writes 1 more in the place of a read
//! that reads 2 and writes 1, and 2 less where the state is not kept. The backward of an entry reads `2 + 2 L` for the
//! L reads that saw it and writes 2 (the embedding: 1); that of the queries reads `2 b`, once for every 16 queries ×
//! outputs.

mod bwd;
mod config;
mod fwd;

pub use bwd::{PrefixBwdHistory, PrefixBwdQuery, prefix_bwd_history, prefix_bwd_query};
pub use fwd::{Mix, PrefixFwd, prefix_fwd};
