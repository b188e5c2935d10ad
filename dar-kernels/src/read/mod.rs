//! Residual read (A.6–A.10, 13–16), after the write of the branch before it (17).
//!
//! Between two branches lies one kernel. Where a block is open it first completes the state P of that block by the
//! output of the branch before, stores it, and goes on with what is stored:
//!
//! ```text
//! for each token:                                                          one cube
//!   P        = M(rho) P_before + beta y, of the read before                (17)    see `write`; stored
//!   a^j      = inv_rms(P^key(j)) <q^j, P^key(j)>                           (A.8)   first sum over the cube
//!   rho      = sigmoid(s_rho norm([P0; P1]) W_rho + b_rho)                 (16)    of the same sum
//!   h^j      = softmax merge of (lse^j, hist^j) with (a^j, P^value(j))     (A.9, A.10)
//!   alpha^j  = sigmoid(s_alpha norm([h0; h1]) W_alpha^j + b_alpha^j)       (13, 14) second sum
//!   beta^j   = 2 sigmoid(s_beta norm([h0; h1]) W_beta^j + b_beta^j)        (13, 14)
//!   input    = alpha0 h0 + alpha1 h1                                       (15)
//!   input    = norm(input) gain, if the branch's own norm is folded in             third sum
//! ```
//!
//! What is there decides what a read is:
//!
//! | read | `open` | `site` | `gate` | streams | what differs |
//! |---|---|---|---|---|---|
//! | first branch of a block | | yes | yes | 2 | h is hist, rho is 1 |
//! | later branch | yes | yes | yes | 2 | |
//! | output, all blocks complete | | | | any | input = sum of hist^j |
//! | output, a block open | yes | | yes | 2 | input = sum of h^j |
//! | Attention Residuals, first branch and output | | | | 1 | input = hist |
//! | Attention Residuals, later branch | yes | | | 1 | P = P_before + y, input = h |
//!
//! Backward of the read and of the write before it, every cube walking many tokens with the parameters' gradients in
//! registers; P' is the state after the branch that read, x̂ is the norm of x, n its factor:
//!
//! ```text
//!   through a norm:  d_x = n (d_x̂ - x̂ <d_x̂, x̂> / length);  <d_x̂, x̂> is known from the forward's sums
//!   d_input  = (norm of u = alpha0 h0 + alpha1 h1): gain d_input, if the branch's norm is folded in
//!   d_h^j    = alpha^j d_input + (norm of [h0; h1]): sum of s W d_gate_logit          (13–15)
//!   d_hist^j = lambda^j d_h^j, in hist's place;  d_lse^j = -d_a^j
//!            = lambda^j (1 - lambda^j) <d_h^j, hist^j - P^value(j)>
//!   shift^j  = d_lse^j - <d_hist^j, hist^j>: what the history's backward needs beside d_hist, and d_lse^j that of
//!              the queries
//!   d_rho    = <d_P'^0 - d_P'^1, P^0 - P^1>                                           (17)
//!   d_P      = M(rho) d_P' + (1 - lambda^j) d_h^j at value(j), (norm of P^key(j)): d_a^j q^j,
//!              (norm of [P0; P1]): s W_rho d_rho_logit; in d_P''s place
//!   d_y      = sum over j of beta^j d_P^j;  d_beta^j = <d_P^j, y>, of the branch before
//!   d_W, d_q, d_gain, d_bias, d_scale: a row a cube, then the sum of the rows, into the parameters' own shapes
//! ```
//!
//! The shares of a merge and the gates of a token are made by one unit each, between the two barriers of a sum.
//!
//! The norms are taken of whole pairs of streams; as they are scalars of a token, the products with W need no
//! normalised copy. Bytes moved, in units of `tokens × d_model` with two streams: five are read and three written
//! (first branch: two and one); backward eight and five (three and two). The backward reads the retrieved state and the
//! gradient of the open one twice: registers for them over all of a token's sums would spill, and a cube's own row is
//! still in the cache.

mod bwd;
mod config;
mod fwd;

pub use bwd::{OpenBwd, ReadBwd, read_bwd};
pub use fwd::{Open, ReadFwd, read_fwd};
pub(crate) use fwd::{check_packed, gates_and_gain, mixed, mixing_gates, normalised, sum_of_streams};
