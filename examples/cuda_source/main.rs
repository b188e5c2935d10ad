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
#[expect(dead_code, reason = "what runs kernels is of the tests")]
mod offline;
#[path = "../../benches/kernels/shapes.rs"]
#[expect(dead_code, reason = "of the benchmarks")]
mod shapes;
mod writer;

use std::path::PathBuf;
use std::process::ExitCode;
use std::thread;

use clap::Parser;
use indicatif::{MultiProgress, ProgressBar, ProgressStyle};

#[cfg(feature = "cuda")]
use crate::offline::Architecture;
use crate::offline::{Language, client};
use crate::writer::{Writer, Written};

/// Writes the source of every kernel that the sizes of the benchmarks launch, in every element type and launch choice:
/// CUDA C++ as CubeCL makes it for an H100, WGSL for what WebGPU promises, which is validated, and with feature `cuda` the
/// PTX of CubeCL's LLVM, for which `CUDA_PATH` names the folder of `nvvm/libdevice`. No GPU or driver is needed, and no
/// buffer takes memory.
///
/// A file is named by its kernel, element type, units of a cube, columns of a unit and a hash of the rest. The first
/// line of a file says the rest.
///
/// Exits with 1 if a kernel does not compile.
#[derive(Parser)]
#[command(name = "cuda_source", verbatim_doc_comment)]
struct Args {
    /// Where the folders go: `cuda`, `wgsl`, `ptx-sm_90a` and so on.
    #[arg(long, value_name = "DIR")]
    out: PathBuf,
    /// One width and a few of the benchmarks' sizes.
    #[arg(long)]
    few: bool,
    /// Only of launches whose name contains this, as `prefix forward bf16` or `a pass`.
    #[arg(long, value_name = "TEXT", default_value = "")]
    filter: String,
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
    let bars = MultiProgress::new();
    let languages = [
        Language::Cuda,
        Language::Wgsl,
        #[cfg(feature = "cuda")]
        Language::Ptx(Architecture::Ampere),
        #[cfg(feature = "cuda")]
        Language::Ptx(Architecture::Hopper),
        #[cfg(feature = "cuda")]
        Language::Ptx(Architecture::Blackwell),
    ];
    let written: Vec<Result<Written, String>> = thread::scope(|scope| {
        let write = |language: Language, index| {
            let bar = bars.add(ProgressBar::no_length());
            scope.spawn(move || write(language, index, args, &bar))
        };
        let threads: Vec<_> = languages.into_iter().zip(0..).map(|(language, index)| write(language, index)).collect();
        threads.into_iter().map(|thread| thread.join().expect("what panics is caught")).collect()
    });
    let mut failed = 0;
    for (language, written) in languages.into_iter().zip(written) {
        let Written { kernels, failures } = written?;
        failures.iter().for_each(|failure| println!("FAIL  {failure}"));
        println!("{} sources in {}", kernels.values().sum::<usize>(), args.out.join(language.name()).display());
        kernels.iter().for_each(|(kernel, count)| println!("{count:>6}  {kernel}"));
        failed += failures.len();
    }
    Ok(failed)
}

fn write(language: Language, index: u16, args: &Args, bar: &ProgressBar) -> Result<Written, String> {
    let (writer, written) = Writer::new(language, &args.out.join(language.name()))?;
    let client = client(writer, language.name(), index);
    let mut all = launches::all(&client, args.few);
    all.retain(|launch| launch.name().contains(&args.filter));
    if all.is_empty() {
        return Err(format!("no launch's name contains `{}`; try `prefix forward` or `a pass`", args.filter));
    }
    bar.set_length(all.len() as u64);
    bar.set_style(ProgressStyle::with_template("{prefix} {bar:30} {pos}/{len} {wide_msg}").expect("a template"));
    bar.set_prefix(language.name());
    for launch in &all {
        bar.set_message(launch.name());
        launch.run(&client).map_err(|error| format!("{}: {error}", launch.name()))?;
        bar.inc(1);
    }
    // Launches go on behind; whoever reads waits for them.
    client.read_one(client.empty(1)).map_err(|error| error.to_string())?;
    bar.finish_and_clear();
    Ok(std::mem::take(&mut *written.lock().expect("no launch panicked")))
}
