//! Residual pathways for Burn models: swap how a Transformer carries its residual by changing one config line.
//!
//! A model owns its branches (attention, feed-forward) and one [`Residual`]. The residual hands every branch its input
//! and takes its output; what it carries in between is its own affair:
//!
//! ```
//! use burn::nn::{Linear, LinearConfig, RmsNorm, RmsNormConfig};
//! use burn::tensor::{Device, Distribution, Tensor};
//! use dar_burn::{BranchLayout, ResidualConfig};
//!
//! let device = Device::flex();
//! let (d_model, branches) = (16, 8);
//! let residual = ResidualConfig::dar_block(2) // the one line to change
//!     .init(&BranchLayout::new(d_model, branches), &device);
//! let layers: Vec<(RmsNorm, Linear)> = (0..branches)
//!     .map(|_| (RmsNormConfig::new(d_model).init(&device), LinearConfig::new(d_model, d_model).init(&device)))
//!     .collect();
//! let final_norm = RmsNormConfig::new(d_model).init(&device);
//!
//! let embedding = Tensor::<3>::random([2, 5, d_model], Distribution::Default, &device);
//! let mut state = residual.start(embedding);
//! for (norm, linear) in &layers {
//!     state = residual.branch(state, |x| linear.forward(norm.forward(x)).tanh());
//! }
//! let hidden = final_norm.forward(residual.finish(state));
//! assert_eq!(hidden.dims(), [2, 5, d_model]);
//! ```
//!
//! # Where things are
//!
//! * [`nn`]: the schemes, [`ResidualConfig`] and [`Residual`];
//! * [`ops`]: the operations that schemes are made of, with their equations;
//! * [`model`]: dense and sparse-MoE decoders of the papers, with presets and training recipes;
//! * [`diagnostics`]: what the papers measure on trained streams;
//! * [`mod@upcycle`]: a trained plain model goes on with another scheme;
//! * [`device`]: choosing a device at run time.
//!
//! # Features
//!
//! `flex` (CPU) and `wgpu` are on by default; `cuda`, `rocm`, `metal`, `vulkan` and `webgpu` turn on Burn's other
//! backends, `autotune` its kernel tuning.

pub mod device;
pub mod diagnostics;
pub mod model;
pub mod nn;
pub mod ops;
pub mod upcycle;

pub use dar_kernels::{KernelError, Routing};
pub use nn::{BranchLayout, Observer, Pending, Residual, ResidualConfig, ResidualConfigError, ResidualState};

/// Runs the README's code.
#[cfg(doctest)]
#[doc = include_str!("../../README.md")]
struct Readme;
