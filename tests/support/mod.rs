//! What the tests share.

pub mod devices;
#[path = "../../examples/conformance/golden/mod.rs"]
pub mod golden;
pub mod host;

use std::env;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::path::{Path, PathBuf};

/// The golden cases of the checkout that cargo runs the tests in. A test program that was built elsewhere takes
/// `CARGO_MANIFEST_DIR` from its environment; without, it looks where it was built.
pub fn golden_folder() -> PathBuf {
    let checkout = env::var_os("CARGO_MANIFEST_DIR").unwrap_or_else(|| env!("CARGO_MANIFEST_DIR").into());
    Path::new(&checkout).join("tests/golden")
}

/// The message with which `run` panics.
#[track_caller]
pub fn panic_message<R>(run: impl FnOnce() -> R) -> String {
    let Err(panic) = catch_unwind(AssertUnwindSafe(run)) else {
        panic!("expected a panic");
    };
    match panic.downcast::<String>() {
        Ok(message) => *message,
        Err(panic) => panic.downcast_ref::<&str>().copied().unwrap_or("no message").to_owned(),
    }
}
