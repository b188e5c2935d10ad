//! The contract of the residual-pathway kernels: layouts, element types, errors.
//!
//! Every operation of this workspace is token-wise: batch and sequence flatten to `tokens`, and the softmax runs over
//! *depth* (the entries of a history), not over positions.
//!
//! # Layouts
//!
//! All operands are row-major and contiguous, the last axis fastest.
//!
//! | operand | shape |
//! |---|---|
//! | history | `[entries, tokens, streams, d_model]` |
//! | inverse RMS of the history | `[entries, tokens, streams]` |
//! | partial state, one entry | `[tokens, streams, d_model]` |
//! | queries of a block | `[branches, streams, d_model]` |
//! | log-sum-exp | `[branches, tokens, streams]` |
//! | retrieved states | `[branches, tokens, streams, d_model]` |
//! | branch input, branch output | `[tokens, d_model]` |
//! | gates | `[tokens, 2]` (alpha, beta), `[tokens, 1]` (rho) |
//!
//! # Element types
//!
//! States are stored in f32, f16 or bf16 and always accumulated in f32; f64 is accumulated in f64 and exists for
//! host-side references only. The caller allocates every output.

mod dims;
mod error;
mod routing;

pub use dims::Dims;
pub use error::KernelError;
pub use routing::Routing;
