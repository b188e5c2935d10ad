//! A CubeCL runtime without a device: kernels are compiled for a GPU that is not here.
//!
//! ```text
//! Client → Server: memory by id, launches in order → Machine: what becomes of a launch
//! ```
//!
//! [`Machine`] is the only choice: `cuda_source` writes the source of every kernel that is launched and keeps no
//! memory; the tests compile that source for the host and run it. What a kernel is given and how it is compiled is that of
//! CubeCL's own CUDA runtime with its C++ compiler.

mod devices;
mod server;
mod source;

pub use devices::{hopper, webgpu};
pub use server::{Arguments, Machine, Memory, client};
#[cfg(feature = "cuda")]
pub use source::Architecture;
pub use source::{Language, Source};
