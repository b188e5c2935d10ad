//! `target/bench-report`: what the benchmarks measured last, as tables, pictures and numbers.
//!
//! ```text
//! throughput.json  kernels.json     each benchmark's own numbers, replaced when it runs again
//! report.md  report.csv  *.svg      made of both, whenever one of them changes
//! ```

mod csv;
mod markdown;
mod pictures;

use std::fs;
use std::path::Path;

use serde::de::DeserializeOwned;
use serde::{Deserialize, Serialize};

use super::machine::Machine;
use super::statistics::Spread;
use crate::support::cli::{Failure, failed, failed_to};

pub use markdown::{kernel_table, throughput_table};

/// What `benches/throughput` measured.
#[derive(Debug, Clone, Serialize, Deserialize)]
pub struct ThroughputPart {
    pub machine: Machine,
    pub models: Vec<ModelTable>,
}

/// Every scheme on one model.
#[derive(Debug, Clone, Serialize, Deserialize)]
pub struct ModelTable {
    pub model: String,
    pub sizes: String,
    pub dtype: String,
    /// A step.
    pub tokens: usize,
    pub rounds: usize,
    /// Timed steps of a scheme a round.
    pub steps: usize,
    pub rows: Vec<SchemeRow>,
}

/// One scheme on one model.
#[derive(Debug, Clone, Serialize, Deserialize)]
pub struct SchemeRow {
    pub name: String,
    pub parameters: usize,
    pub residual_parameters: usize,
    /// Of a step.
    pub seconds: Spread,
    pub tokens_per_s: Spread,
    /// To the standard scheme's tokens/s, over rounds.
    pub ratio: Option<Spread>,
    /// Of a pass of the residual pathway alone, forward and backward.
    pub pathway_seconds: Spread,
    /// Kernels of dar-kernels that a step launches.
    pub launches: u64,
    pub memory: Option<MemoryUse>,
    pub paper: Option<Paper>,
}

/// The most memory of one process.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
pub struct MemoryUse {
    /// What the device's pool held, or all of the process where the device has no pool.
    pub bytes: u64,
    /// Of that in allocations, sampled every millisecond.
    pub in_use: Option<u64>,
}

/// What the paper measured.
#[derive(Debug, Clone, Copy, PartialEq, Serialize, Deserialize)]
pub struct Paper {
    /// To the plain residual's tokens/s.
    pub ratio: f64,
    /// Peak memory beyond the plain residual's.
    pub more_gib: f64,
}

/// What `benches/kernels` measured.
#[derive(Debug, Clone, Serialize, Deserialize)]
pub struct KernelsPart {
    pub machine: Machine,
    pub copies: Vec<CopyPoint>,
    pub results: Vec<KernelResult>,
}

/// A copy.
#[derive(Debug, Clone, Copy, Serialize, Deserialize)]
pub struct CopyPoint {
    /// Read and written.
    pub bytes: u64,
    pub seconds: Spread,
}

/// One operation, one direction, one implementation, one size.
#[derive(Debug, Clone, Serialize, Deserialize)]
pub struct KernelResult {
    /// As criterion names it.
    pub group: String,
    pub implementation: String,
    pub dtype: String,
    pub entries: usize,
    pub queries: usize,
    pub tokens: usize,
    pub streams: usize,
    pub d_model: usize,
    /// Tokens of the shape that this was scaled down from, if it was.
    pub full_tokens: usize,
    /// That must move: every operand once.
    pub bytes: u64,
    pub seconds: Spread,
    /// Bandwidth of a copy of about as many bytes, in the same run.
    pub copy_bytes_per_s: f64,
}

impl KernelResult {
    pub fn bytes_per_s(&self) -> f64 {
        self.bytes as f64 / self.seconds.median
    }

    pub fn share_of_copy(&self) -> f64 {
        self.bytes_per_s() / self.copy_bytes_per_s
    }

    /// The size really run.
    pub fn size(&self) -> String {
        let Self { entries, queries, tokens, streams, d_model, .. } = self;
        let depth = match (entries, queries) {
            (0, _) => String::new(),
            (entries, 0) => format!("{entries}r_"),
            (entries, queries) => format!("{entries}r_{queries}q_"),
        };
        format!("{depth}{tokens}t_{streams}s_{d_model}d")
    }
}

/// Replaces the numbers of `benches/throughput`.
pub fn write_throughput(folder: &Path, part: &ThroughputPart) -> Result<(), Failure> {
    write_part(folder, THROUGHPUT, part)
}

/// Replaces the numbers of `benches/kernels`.
pub fn write_kernels(folder: &Path, part: &KernelsPart) -> Result<(), Failure> {
    write_part(folder, KERNELS, part)
}

const THROUGHPUT: &str = "throughput.json";
const KERNELS: &str = "kernels.json";

fn write_part(folder: &Path, name: &str, part: &impl Serialize) -> Result<(), Failure> {
    fs::create_dir_all(folder).map_err(failed_to("make", folder))?;
    let json = serde_json::to_string_pretty(part).map_err(failed("cannot write the report"))?;
    write(&folder.join(name), &json)?;

    let throughput: Option<ThroughputPart> = read_part(&folder.join(THROUGHPUT));
    let kernels: Option<KernelsPart> = read_part(&folder.join(KERNELS));
    let pictures = pictures::draw(folder, throughput.as_ref(), kernels.as_ref())?;
    write(&folder.join("report.md"), &markdown::report(throughput.as_ref(), kernels.as_ref(), &pictures))?;
    write(&folder.join("report.csv"), &csv::report(throughput.as_ref(), kernels.as_ref()))
}

/// The numbers of the other benchmark, if it ran with this version.
fn read_part<T: DeserializeOwned>(path: &Path) -> Option<T> {
    serde_json::from_slice(&fs::read(path).ok()?).ok()
}

fn write(path: &Path, text: &str) -> Result<(), Failure> {
    fs::write(path, text).map_err(failed_to("write", path))
}
