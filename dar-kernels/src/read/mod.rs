//! Residual read (A.6–A.10, 13–16): merge with the partial state, gates and branch input.
//!
//! ```text
//! for each token:                                                          one cube
//!   a^j      = inv_rms(P^key(j)) <q^j, P^key(j)>                           (A.8)   first sum over the cube
//!   rho      = sigmoid(s_rho norm([P0; P1]) W_rho + b_rho)                 (16)    of the same sum
//!   h^j      = softmax merge of (lse^j, hist^j) with (a^j, P^value(j))     (A.9, A.10)
//!   alpha^j  = sigmoid(s_alpha norm([h0; h1]) W_alpha^j + b_alpha^j)       (13, 14) second sum
//!   beta^j   = 2 sigmoid(s_beta norm([h0; h1]) W_beta^j + b_beta^j)        (13, 14)
//!   input    = alpha0 h0 + alpha1 h1                                       (15)
//! ```
//!
//! Backward, every cube walking many tokens with the site's gradients in registers; x̂ is the norm of x, n its factor:
//!
//! ```text
//!   through a norm:  d_x = n (d_x̂ - x̂ <d_x̂, x̂> / length);  <d_x̂, x̂> is known from the forward's sums
//!   d_h^j    = alpha^j d_input + (norm of [h0; h1]): sum of s W d_gate_logit          (13–15)
//!   d_hist^j = lambda^j d_h^j;  d_lse^j = lambda^j (1 - lambda^j) <d_h^j, hist^j - P^value(j)>;  d_a^j = -d_lse^j
//!   d_P      = (1 - lambda^j) d_h^j at value(j), (norm of P^key(j)): d_a^j q^j, (norm of [P0; P1]): s W_rho d_rho_logit
//!   d_W, d_q, d_bias, d_scale: a row a cube, then the sum of the rows
//! ```
//!
//! A block's first branch has no partial state: h is the retrieved state, and rho is 1 (unused). The norms are taken of
//! whole pairs of streams; as they are scalars of a token, the products with W need no normalised copy. Bytes moved, in
//! units of `tokens × d_model`: two for the retrieved state and two for the partial one are read, one is written.

mod bwd;
mod config;
mod fwd;

pub use bwd::{OpenBwd, ReadBwd, read_bwd};
pub use fwd::{Open, ReadFwd, read_fwd};
