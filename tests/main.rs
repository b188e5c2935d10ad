//! The tests of dar-kernels and dar-burn in one binary; folders carry the names of `src`.

mod conformance;
#[cfg(any(feature = "wgpu", feature = "cuda", feature = "rocm", feature = "metal", feature = "vulkan"))]
mod cuda;
mod diagnostics;
mod examples;
#[cfg(any(feature = "wgpu", feature = "cuda", feature = "rocm", feature = "metal", feature = "vulkan"))]
mod kernels;
mod model;
mod nn;
mod ops;
mod support;
mod upcycle;
