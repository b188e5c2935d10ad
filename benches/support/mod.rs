//! What the benchmarks share: where they run, how long they may take, statistics, and the report.

#![allow(dead_code, unused_imports, reason = "every benchmark uses its own part")]

#[path = "../../examples/support/cli.rs"]
pub mod cli;
pub mod machine;
pub mod report;
pub mod statistics;
