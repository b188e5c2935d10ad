//! Where a benchmark runs: the device, and what its numbers are labelled with.

use std::env;
use std::path::{Path, PathBuf};
use std::process::Command;

use dar_burn::device::{DeviceChoice, OpenDevice, open};
use indicatif::{ProgressBar, ProgressStyle};
use serde::{Deserialize, Serialize};

use super::cli::{self, Failure};

/// Names the device, as `--device` of the examples does.
pub const DEVICE: &str = "DAR_BENCH_DEVICE";
/// Asks for quick mode, as `--quick` does.
pub const QUICK: &str = "DAR_BENCH_QUICK";

/// What every measured number comes with.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Machine {
    pub device: String,
    /// The processor and how many threads it runs.
    pub host: String,
    /// Of the checkout, with a mark if files in it were changed.
    pub commit: String,
    /// Few repetitions of small sizes: the numbers only show that the benchmark works.
    pub quick: bool,
}

impl Machine {
    pub fn new(device: &OpenDevice, quick: bool) -> Self {
        Self { device: device.name.clone(), host: host(), commit: commit(), quick }
    }
}

/// The device that `DAR_BENCH_DEVICE` names, else the best that starts here.
pub fn device() -> Result<OpenDevice, Failure> {
    cli::open(choice()?)
}

/// The device with CubeCL kernels that `DAR_BENCH_DEVICE` names, else the best: without a GPU, a software adapter.
pub fn kernel_device() -> Result<OpenDevice, Failure> {
    let opened = device()?;
    match (choice()?, opened.choice) {
        (DeviceChoice::Auto, DeviceChoice::Flex) => cli::open(DeviceChoice::Wgpu),
        (_, DeviceChoice::Flex) => Err(Failure::usage(format!(
            "{DEVICE} is `flex`, which has no kernels: name a device such as `wgpu`, or none"
        ))),
        _ => Ok(opened),
    }
}

fn choice() -> Result<DeviceChoice, Failure> {
    match env::var(DEVICE) {
        Ok(name) => name.trim().parse().map_err(|error| Failure::usage(format!("{DEVICE}: {error}"))),
        Err(_) => Ok(DeviceChoice::Auto),
    }
}

/// The CPU, which computes in f64 what other devices are checked against.
pub fn truth_device() -> Result<OpenDevice, Failure> {
    open(DeviceChoice::Flex).map_err(|error| Failure::run(error.to_string()))
}

/// Whether the environment asks for quick mode.
pub fn quick_by_environment() -> bool {
    env::var(QUICK).is_ok_and(|value| !matches!(value.trim(), "" | "0"))
}

/// The folder of the report, in the target folder; where the program was only copied to, in `target` of the current one.
pub fn report_folder() -> PathBuf {
    // Cargo's folder for the files of tests and benchmarks.
    let scratch = Path::new(env!("CARGO_TARGET_TMPDIR"));
    let target = scratch.parent().filter(|target| target.is_dir()).unwrap_or(Path::new("target"));
    target.join("bench-report")
}

/// A bar for `length` things, on the screen if there is one.
pub fn progress(length: usize, what: &str) -> ProgressBar {
    let style = ProgressStyle::with_template("{prefix:<12} {bar:32} {pos}/{len} {msg} [{elapsed}, {eta} left]");
    ProgressBar::new(length as u64).with_style(style.expect("the template is valid")).with_prefix(what.to_owned())
}

fn host() -> String {
    let threads = std::thread::available_parallelism().map_or(1, usize::from);
    let cpus = std::fs::read_to_string("/proc/cpuinfo").unwrap_or_default();
    let model = cpus.lines().find_map(|line| line.strip_prefix("model name")?.split_once(':'));
    let model = model.map_or(env::consts::ARCH, |(_, name)| name.trim());
    format!("{model}, {threads} threads")
}

/// Of the checkout that cargo runs the benchmark in, or that `CARGO_MANIFEST_DIR` names.
fn commit() -> String {
    let checkout = env::var_os("CARGO_MANIFEST_DIR").unwrap_or_else(|| env!("CARGO_MANIFEST_DIR").into());
    let git = |arguments: &[&str]| {
        let output = Command::new("git").arg("-C").arg(&checkout).args(arguments).output().ok()?;
        output.status.success().then(|| String::from_utf8_lossy(&output.stdout).trim().to_owned())
    };
    let Some(commit) = git(&["rev-parse", "--short", "HEAD"]) else { return "unknown".into() };
    let changed = git(&["status", "--porcelain", "--untracked-files=no"]).is_some_and(|files| !files.is_empty());
    if changed { format!("{commit} with changes") } else { commit }
}
