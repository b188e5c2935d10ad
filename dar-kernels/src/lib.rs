//! Portable CubeCL kernels of the residual pathway of Transformers, and their tensor contract.
//!
//! Every operation of this workspace is token-wise: batch and sequence flatten to `tokens`, and the softmax runs over
//! *depth* (the entries of a history), not over positions.
//!
//! # A pass
//!
//! A pass over a model has `branches` reads, one before each branch, and one output read: `reads = branches + 1`. What
//! belongs to a read lies in buffers with a row for every read (*arenas*): an operation takes the whole arena and the
//! row, and touches no other. Forward:
//!
//! ```text
//! pack_site                     once a site
//! pack_fwd                      the embedding, entry 0
//! for each block:
//!   prefix_fwd with `mix`       all of its reads at once, and the input of the first branch
//!   read_fwd with `open`        of every later branch, after the write of the branch before
//!   close_fwd                   the write of the last branch, as the next entry
//! prefix_fwd                    the output, with `mix`; if the last block is open, read_fwd with `open` comes after it
//! ```
//!
//! Without `mix` a `read_fwd` without `open` makes the same of the stored state.
//!
//! Backward, in the order of the walk back: `read_bwd` of the output; for each block `prefix_bwd_history` of its entry,
//! `write_bwd` of its last branch, `read_bwd` of its branches; `prefix_bwd_history` of the embedding, summed over the
//! streams; `prefix_bwd_query` for all queries. Retrieved states and the gradient of the open state are replaced in
//! place.
//!
//! # Layouts
//!
//! All operands are row-major and contiguous, the last axis fastest.
//!
//! | operand | shape | type |
//! |---|---|---|
//! | history, of which `entries` are there | `[capacity, tokens, streams, d_model]` | states' |
//! | inverse RMS of the history | `[capacity, tokens, streams]` | f32 |
//! | keys of the history, where they are [packed](pack::Key) | `[capacity, tokens, outputs, d_model]` | states' |
//! | state of the open block, one entry | `[tokens, streams, d_model]` | states' |
//! | branch input, branch output | `[tokens, d_model]` | states' |
//! | queries | `[reads, outputs, d_model]` | f32 |
//! | logits, their gradients | `[capacity, reads, tokens, outputs]` | f32 |
//! | log-sum-exp | `[reads, tokens, outputs]` | f32 |
//! | retrieved states, one a slot | `[slots, tokens, outputs, d_model]` | states' |
//! | a [site's](site) parameters | `[10 * d_model + 8]` | f32 |
//! | gates alpha, beta, rho | `[reads, tokens, 5]` | f32 |
//! | gradients of beta, shifts, gradients of log-sum-exp | `[reads, tokens, 2 + 2 * outputs]` | f32 |
//!
//! A slot is where a read's retrieved state lies: a row of its own where a backward follows, or one that the next block
//! uses again. Outputs are the streams of a query; they are the history's but in one case of [`prefix`].
//!
//! # Element types
//!
//! States are stored in f32, f16 or bf16 and always accumulated in f32; parameters and scalars of a token are f32. f64
//! exists for host-side references only; kernels refuse it. The caller allocates every output, of which a kernel writes
//! its rows in full.
//!
//! # Launching
//!
//! An operation is a function on [`Operand`]s and a CubeCL client. It checks shapes, types and buffers
//! ([`KernelError`]), chooses a launch that suits the device ([`Tuning`] overrides), and launches; [`launches`] counts.
//! Without tokens it launches nothing, but for [`read_bwd`](read::read_bwd), whose gradients of parameters are zero
//! then. Equal calls on one device give equal bits. No kernel has more than 12 operands.
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
//!         key: None,
//!         query: Operand::new(&query, &[branches, streams, d_model], F32),
//!         lse: Operand::new(&lse, &[branches, tokens, streams], F32),
//!         logit: Operand::new(&logit, &[entries, branches, tokens, streams], F32),
//!         state: Operand::new(&state, &[branches, tokens, streams, d_model], F32),
//!         mix: None,
//!         entries,
//!         first: 0,
//!         count: branches,
//!         slot: 0,
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

mod columns;
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
