//! The CUDA source of the kernels, run on the host.
//!
//! ```text
//! offline    a client whose launches are compiled to CUDA C++, as for a GPU   (shared with the example `cuda_source`)
//! toolkit    NVIDIA's headers and a C++ compiler: a source becomes a shared object, once
//! host       memory, and the launches of a shared object
//! shim       what the source sees: a fibre a thread, barriers, shuffles; poisoned memory, drawn orders
//! ```
//!
//! A kernel that leaves out a barrier, reads shared memory that nobody wrote, writes past a buffer or touches memory of
//! nobody fails here. What a GPU adds is not tested: its compiler, its memory model and its speed.

mod host;
#[path = "../../examples/cuda_source/offline/mod.rs"]
#[expect(dead_code, unused_imports, reason = "the example compiles for WebGPU too")]
mod offline;
mod toolkit;

use std::sync::OnceLock;
use std::sync::atomic::{AtomicU16, AtomicUsize, Ordering};

use cubecl::prelude::*;

use self::host::Host;
use self::toolkit::Toolkit;

/// The name of its clients.
pub const NAME: &str = "CUDA source on the host";

/// A client that runs CUDA source on the host; why there is none.
///
/// There are as many devices as cores, which are given out in turn: tests that run at once compile and run at once.
pub fn client() -> Result<Client, String> {
    static CLIENTS: OnceLock<Result<Vec<Client>, String>> = OnceLock::new();
    static NEXT: AtomicUsize = AtomicUsize::new(0);
    let cores = std::thread::available_parallelism().map_or(1, usize::from);
    let clients = CLIENTS.get_or_init(|| (0..cores).map(|_| edited_client(str::to_owned)).collect());
    let clients = clients.as_ref().map_err(String::clone)?;
    Ok(clients[NEXT.fetch_add(1, Ordering::Relaxed) % clients.len()].clone())
}

/// A client of a new device that edits every source before it compiles it.
pub fn edited_client(edit: fn(&str) -> String) -> Result<Client, String> {
    static TOOLKIT: OnceLock<Result<Toolkit, String>> = OnceLock::new();
    static NEXT: AtomicU16 = AtomicU16::new(0);
    let toolkit = TOOLKIT.get_or_init(Toolkit::find).clone()?;
    Ok(offline::client(Host::new(toolkit, edit), NAME, NEXT.fetch_add(1, Ordering::Relaxed)))
}
