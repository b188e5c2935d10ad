//! Peak memory of one scheme, in a process of its own: no other scheme's allocations are in the pool.

use std::env;
use std::process::{Command, Stdio};
use std::sync::atomic::{AtomicBool, Ordering};
use std::thread;
use std::time::Duration;

use burn::tensor::Device;

use crate::arguments::{Arguments, Model};
use crate::rows::Row;
use crate::support::cli::{Failure, failed};
use crate::support::report::MemoryUse;
use crate::training::Training;

/// Steps until moments, gradients and activations have all been there together.
const STEPS: usize = 2;

/// The peak of `row`, measured in another process of this program.
pub fn of(arguments: &Arguments, model: &Model, row: &Row) -> Result<Option<MemoryUse>, Failure> {
    let program = env::current_exe().map_err(failed("cannot find this program"))?;
    let mut command = Command::new(program);
    command.args(model.command_line()).args(["--memory-of", &row.name()]);
    if arguments.quick {
        command.arg("--quick");
    }
    let output = command.stderr(Stdio::inherit()).output().map_err(failed("cannot start a process"))?;
    if !output.status.success() {
        return Err(Failure::run(format!("the memory of {} could not be measured", row.name())));
    }
    let last = String::from_utf8_lossy(&output.stdout).lines().last().unwrap_or_default().to_owned();
    serde_json::from_str(&last).map_err(failed("cannot read a memory measurement"))
}

/// Trains a few steps and prints the peak as a line of JSON.
pub fn print_own(model: &Model, row: &Row, device: &Device) -> Result<(), Failure> {
    let done = AtomicBool::new(false);
    let (result, in_use) = thread::scope(|scope| {
        let watch = scope.spawn(|| {
            let mut peak = None;
            while !done.load(Ordering::Relaxed) {
                peak = peak.max(device.memory_pool_usage().map(|usage| usage.bytes_in_use));
                thread::sleep(Duration::from_millis(1));
            }
            peak
        });
        let result = train(model, row, device);
        done.store(true, Ordering::Relaxed);
        (result, watch.join().expect("watching does not fail"))
    });
    result?;
    // A pool does not shrink while it is used: what it holds now is the most that it ever needed.
    let usage = match (device.memory_pool_usage(), in_use) {
        (Some(usage), Some(in_use)) => Some(MemoryUse { bytes: usage.bytes_reserved, in_use: Some(in_use) }),
        _ => most_of_process().map(|bytes| MemoryUse { bytes, in_use: None }),
    };
    println!("{}", serde_json::to_string(&usage).map_err(failed("cannot write a memory measurement"))?);
    Ok(())
}

fn train(model: &Model, row: &Row, device: &Device) -> Result<(), Failure> {
    let mut training = Training::new(model, row, device);
    for _ in 0..STEPS {
        training.step()?;
    }
    Ok(())
}

/// The most memory that this process ever had, where the system says.
fn most_of_process() -> Option<u64> {
    let status = std::fs::read_to_string("/proc/self/status").ok()?;
    let line = status.lines().find_map(|line| line.strip_prefix("VmHWM:"))?;
    let kib: u64 = line.trim().strip_suffix("kB")?.trim().parse().ok()?;
    Some(kib * 1024)
}
