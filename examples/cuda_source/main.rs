//! The source of every kernel, compiled for a GPU that is not here.
//!
//! ```text
//! cargo run --release --example cuda_source -- --out sources
//! ```
//!
//! ```text
//! launches   what the benchmarks and a pass over a model launch, on buffers without memory
//! offline    the runtime that takes these launches
//! writer     compiles each new kernel and writes it down
//! ```

#[path = "../../benches/kernels/buffer.rs"]
#[expect(dead_code, reason = "of the benchmarks")]
mod buffer;
#[path = "../../benches/kernels/composed.rs"]
#[expect(dead_code, reason = "of the benchmarks")]
mod composed;
#[path = "../../benches/kernels/fused.rs"]
#[expect(dead_code, reason = "of the benchmarks")]
mod fused;
mod launches;
mod offline;
#[path = "../../benches/kernels/shapes.rs"]
#[expect(dead_code, reason = "of the benchmarks")]
mod shapes;
mod writer;

use std::path::{Path, PathBuf};
use std::process::ExitCode;

use clap::Parser;
use indicatif::{ProgressBar, ProgressStyle};

use crate::offline::{Language, client};
use crate::writer::Writer;

/// Writes the source of every kernel that the sizes of the benchmarks launch, in every element type and launch choice:
/// CUDA C++ as CubeCL compiles it for an H100, and WGSL for what WebGPU promises, which is validated. No GPU, driver or
/// toolkit is needed, and no buffer takes memory.
///
/// A file is named by its kernel, element type, units of a cube, columns of a unit and a hash of the rest. The first
/// line of a file says the rest.
///
/// Exits with 1 if a kernel does not compile.
#[derive(Parser)]
#[command(name = "cuda_source", verbatim_doc_comment)]
struct Args {
    /// Where the folders `cuda` and `wgsl` go.
    #[arg(long, value_name = "DIR")]
    out: PathBuf,
    /// One size of each operation only.
    #[arg(long)]
    few: bool,
}

fn main() -> ExitCode {
    match run(&Args::parse()) {
        Ok(0) => ExitCode::SUCCESS,
        Ok(failed) => {
            eprintln!("error: {failed} kernels do not compile");
            ExitCode::FAILURE
        }
        Err(reason) => {
            eprintln!("error: {reason}");
            ExitCode::FAILURE
        }
    }
}

/// How many kernels do not compile.
fn run(args: &Args) -> Result<usize, String> {
    let mut failed = 0;
    for (index, language) in [Language::Cuda, Language::Wgsl].into_iter().enumerate() {
        failed += write(language, index as u16, &args.out, args.few)?;
    }
    Ok(failed)
}

fn write(language: Language, index: u16, out: &Path, few: bool) -> Result<usize, String> {
    let folder = out.join(language.name());
    let (writer, written) = Writer::new(language, folder.clone())?;
    let client = client(writer, index);
    let all = launches::all(&client, few);
    let bar = ProgressBar::new(all.len() as u64);
    bar.set_style(ProgressStyle::with_template("{prefix} {bar:30} {pos}/{len} {wide_msg}").expect("a template"));
    bar.set_prefix(language.name());
    for launch in &all {
        bar.set_message(launch.name());
        launch.run(&client).map_err(|error| format!("{}: {error}", launch.name()))?;
        bar.inc(1);
    }
    bar.finish_and_clear();

    let written = written.lock().expect("no launch panicked");
    for failure in &written.failures {
        println!("FAIL  {failure}");
    }
    println!("{} sources in {}", written.sources(), folder.display());
    for (kernel, count) in &written.kernels {
        println!("{count:>6}  {kernel}");
    }
    Ok(written.failures.len())
}
