//! Kernels against Burn's graph of the same operation and against a copy: `cargo bench --bench kernels`.
//!
//! ```text
//! shapes       the papers' and the peers' → scaled down to what the device holds and does in reasonable time
//! operation    what it computes, which bytes must move, and the composed graph, in any element type and on any device
//! fused        its kernels on buffers
//! run          for each: check against the composed graph in f64 → criterion → a copy of as many bytes
//! unfused      the composed graph once more in a process of its own, without Burn's fusion
//! ```
//!
//! What is computed depends on a token only through its index modulo a small number, so that a graph of so few tokens on
//! the CPU says what every token of a large run has to be.

mod buffer;
mod composed;
mod fused;
mod run;
mod shapes;
#[path = "../support/mod.rs"]
mod support;
mod unfused;

use std::process::ExitCode;

use crate::run::Bench;
use crate::support::cli::{self, Failure};
use crate::support::machine::{self, Machine};
use crate::support::report;

fn main() -> ExitCode {
    cli::exit(run())
}

fn run() -> Result<ExitCode, Failure> {
    let arguments: Vec<String> = std::env::args().collect();
    let asked = |flag: &str| arguments.iter().any(|argument| argument == flag);
    // Without `--bench`, criterion only tests.
    let quick = asked("--quick") || machine::quick_by_environment() || !asked("--bench");
    let opened = machine::kernel_device()?;
    let machine = Machine::new(&opened, quick);
    if !asked("--list") {
        println!("device  {}", machine.device);
        println!("host    {}", machine.host);
    }
    if let Some(most_bytes) = unfused::asked() {
        let mut bench = Bench::new(&opened, quick, Some(most_bytes))?;
        bench.run_composed(unfused::NAME)?;
        return unfused::hand_over(&bench.finish(machine)).map(|()| ExitCode::SUCCESS);
    }
    let mut bench = Bench::new(&opened, quick, None)?;
    let most_bytes = bench.most_bytes();
    bench.run_all()?;
    let mut part = bench.finish(machine);
    if !asked("--list") {
        part.results.extend(unfused::measure(most_bytes)?.results);
    }
    // Nothing was measured by `--list`, or by a filter that fits nothing.
    if !part.results.is_empty() {
        report::write_kernels(&machine::report_folder(), &part)?;
        println!("\n{}", report::kernel_table(&part));
        println!("report in {}", machine::report_folder().display());
    }
    Ok(ExitCode::SUCCESS)
}
