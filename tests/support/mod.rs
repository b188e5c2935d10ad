//! What the tests share.

pub mod devices;
#[path = "../../examples/conformance/golden/mod.rs"]
pub mod golden;
pub mod host;

use std::panic::{AssertUnwindSafe, catch_unwind};

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
