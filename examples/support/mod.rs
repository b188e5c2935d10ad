//! What the examples share: errors and exit codes, the device argument, residual schemes by name, checkpoints, text.

#![allow(dead_code, reason = "every example uses its own part")]

pub mod checkpoint;
pub mod cli;
pub mod schemes;
pub mod text;
pub mod vocabulary;
