//! The composed graph without Burn's fusion, which is a setting of the whole process: in one of its own.

use std::env;
use std::fs;
use std::path::PathBuf;
use std::process::Command;

use crate::support::cli::{Failure, failed, failed_to};
use crate::support::report::KernelsPart;

/// The implementation in reports.
pub const NAME: &str = "composed_unfused";

/// Where the process leaves what it measured.
const HAND_OVER: &str = "DAR_BENCH_UNFUSED";
/// Bytes that an operation may move, so that both processes run the same sizes.
const MOST_BYTES: &str = "DAR_BENCH_UNFUSED_BYTES";
/// Burn's fusion runs what it has not seen before one by one after so many searches for a fused kernel.
const SEARCHES: &str = "BURN_FUSION_MAX_EXPLORATIONS";

/// In that process, the bytes that an operation may move.
pub fn asked() -> Option<u64> {
    env::var(MOST_BYTES).ok()?.parse().ok()
}

/// What another process of this program measures, asked for the same.
pub fn measure(most_bytes: u64) -> Result<KernelsPart, Failure> {
    let folder = tempfile::tempdir().map_err(failed("cannot make a temporary folder"))?;
    let file = folder.path().join("unfused.json");
    let program = env::current_exe().map_err(failed("cannot find this program"))?;
    let mut command = Command::new(program);
    command.args(env::args_os().skip(1)).env(SEARCHES, "0");
    let status = command.env(HAND_OVER, &file).env(MOST_BYTES, most_bytes.to_string()).status();
    if !status.map_err(failed("cannot start a process"))?.success() {
        return Err(Failure::run("the graph without fusion could not be measured"));
    }
    let text = fs::read(&file).map_err(failed_to("read", &file))?;
    serde_json::from_slice(&text).map_err(failed("cannot read what the graph without fusion took"))
}

/// Leaves what this process measured to the one that asked for it.
pub fn hand_over(part: &KernelsPart) -> Result<(), Failure> {
    let file = PathBuf::from(env::var_os(HAND_OVER).unwrap_or_default());
    let text = serde_json::to_string(part).map_err(failed("cannot write what the graph without fusion took"))?;
    fs::write(&file, text).map_err(failed_to("write", &file))
}
