//! Portable CubeCL kernels of the residual pathway of Transformers, and their tensor contract.
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
//! | logits | `[entries, branches, tokens, streams]` |
//! | log-sum-exp | `[branches, tokens, streams]` |
//! | retrieved states | `[branches, tokens, streams, d_model]` |
//! | branch input, branch output | `[tokens, d_model]` |
//! | gates | `[tokens, 2]` (alpha, beta), `[tokens, 1]` (rho) |
//!
//! # Element types
//!
//! States are stored in f32, f16 or bf16 and always accumulated in f32; f64 is accumulated in f64 and exists for
//! host-side references only; kernels refuse it. The caller allocates every output, which a kernel writes in full.
//!
//! # Launching
//!
//! An operation is a function on [`Operand`]s and a CubeCL client. It checks shapes, types and buffers ([`KernelError`]),
//! chooses a launch that suits the device ([`Tuning`] overrides), and launches; without tokens it launches nothing. Equal
//! calls on one device give equal bits.
//!
//! ```
//! use cubecl::Device;
//! use dar_kernels::prefix::{PrefixFwd, prefix_fwd};
//! use dar_kernels::{F32, Operand, Routing, Tuning};
//!
//! // Programs choose a runtime by a feature of cubecl. Looking comes first: a client of a missing device panics.
//! let devices = std::panic::catch_unwind(Device::enumerate_all).unwrap_or_default();
//! let Some(device) = devices.first() else {
//!     return Ok(println!("no device here"));
//! };
//! let client = device.client();
//!
//! // Two entries of one token; the streams point in different directions, and all have RMS 1.
//! let (entries, tokens, streams, d_model, branches) = (2, 1, 2, 2, 1);
//! let upload = |values: &[f32]| {
//!     client.create_from_slice(&values.iter().flat_map(|x| x.to_ne_bytes()).collect::<Vec<u8>>())
//! };
//! let value = upload(&[1.0, 1.0, 1.0, -1.0, -1.0, 1.0, -1.0, -1.0]);
//! let inv_rms = upload(&[1.0; 4]);
//! let query = upload(&[10.0, 0.0, 0.0, 0.0]);
//! let [lse, logit, state] = [2, 4, 4].map(|length| upload(&vec![f32::NAN; length]));
//! prefix_fwd(
//!     &client,
//!     PrefixFwd {
//!         value: Operand::new(&value, &[entries, tokens, streams, d_model], F32),
//!         inv_rms: Operand::new(&inv_rms, &[entries, tokens, streams], F32),
//!         query: Operand::new(&query, &[branches, streams, d_model], F32),
//!         lse: Operand::new(&lse, &[branches, tokens, streams], F32),
//!         logit: Operand::new(&logit, &[entries, branches, tokens, streams], F32),
//!         state: Operand::new(&state, &[branches, tokens, streams, d_model], F32),
//!         entries,
//!     },
//!     Routing::CrossKey,
//!     Tuning::default(),
//! )?;
//!
//! let state = client.read_one(state).expect("a handle of this client");
//! let state: Vec<f32> = state.chunks_exact(4).map(|x| f32::from_ne_bytes(x.try_into().unwrap())).collect();
//! // Stream 0 asks for keys along the first axis and finds entry 0; stream 1 asks for nothing and finds the mean.
//! let expected = [1.0, 1.0, 0.0, -1.0];
//! assert!(state.iter().zip(expected).all(|(got, expected)| (got - expected).abs() < 1e-5), "{state:?}");
//! # Ok::<(), dar_kernels::KernelError>(())
//! ```

mod dims;
mod error;
mod launch;
mod numeric;
mod operand;
pub mod pack;
pub mod prefix;
pub mod read;
mod reduce;
mod routing;
mod rows;
pub mod site;
mod softmax;
pub mod write;

pub use dims::Dims;
pub use error::KernelError;
pub use launch::{Tuning, launches};
pub use operand::{F32, Operand};
pub use reduce::Reduction;
pub use routing::Routing;
