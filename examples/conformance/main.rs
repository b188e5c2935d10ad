//! Holds a device and an element type against golden cases.
//!
//! ```text
//! cargo run --release --example conformance -- --device wgpu --dtype f32 tests/golden
//! ```

mod golden;

use std::path::PathBuf;
use std::process::ExitCode;
use std::str::FromStr;

use burn::tensor::DType;
use clap::Parser;
use dar_burn::device::{self, DeviceChoice};
use dar_burn::ops::Implementation;

use golden::{Case, Reason, Tester, case_files, computes};

/// Evaluates golden cases on one device in one element type: every output and every gradient of the public operations
/// and modules against a float64 reference.
///
/// Prints a line a case with the tensor whose relative RMS error is largest in proportion to its bound. Bounds: f32
/// 1e-5; f64 1e-10; f16 and bf16 twice the error of the composed operations on flex in the same type, and at least 2 units in
/// the last place; cases named `extreme` at least 1e-3, finite, and the right winner.
///
/// Exits with 1 if a case failed, an unreadable file or an unknown operation included, and with 2 on bad arguments.
#[derive(Parser)]
#[command(name = "conformance", verbatim_doc_comment)]
struct Args {
    /// auto, flex, wgpu, cuda, rocm, metal, vulkan or webgpu.
    #[arg(long, default_value_t = DeviceChoice::Flex)]
    device: DeviceChoice,
    /// f32, f16, bf16 or f64.
    #[arg(long, default_value = "f32")]
    dtype: ElementType,
    /// Composed operations instead of fused ones.
    #[arg(long)]
    composed: bool,
    /// Golden cases, or folders of them.
    #[arg(required = true, value_name = "FILE")]
    files: Vec<PathBuf>,
}

#[derive(Clone, Copy)]
struct ElementType(DType);

impl FromStr for ElementType {
    type Err = Reason;

    fn from_str(name: &str) -> Result<Self, Reason> {
        match name {
            "f32" => Ok(Self(DType::F32)),
            "f16" => Ok(Self(DType::F16)),
            "bf16" => Ok(Self(DType::BF16)),
            "f64" => Ok(Self(DType::F64)),
            _ => Err(format!("unknown element type `{name}`: expected one of f32, f16, bf16, f64")),
        }
    }
}

fn main() -> ExitCode {
    let Args { device, dtype: ElementType(dtype), composed, files } = Args::parse();
    let implementation = if composed { Implementation::Composed } else { Implementation::Fused };
    let opened = device::open(device).map_err(|error| error.to_string());
    let opened = match opened.and_then(|opened| computes(&opened, dtype).map(|()| opened)) {
        Ok(opened) => opened,
        Err(reason) => {
            eprintln!("error: {reason}");
            return ExitCode::from(2);
        }
    };
    println!("{}, {dtype:?}", opened.name);

    let reference = device::open(DeviceChoice::Flex).ok().map(|flex| flex.device);
    let tester = Tester::new(opened.device, dtype, implementation, reference);
    // A panic becomes the reason on the case's line.
    std::panic::set_hook(Box::new(|_| {}));
    let (mut passed, mut failed) = (0, 0);
    let mut count = |line: Result<String, String>| match line {
        Ok(line) => {
            passed += 1;
            println!("pass  {line}");
        }
        Err(line) => {
            failed += 1;
            println!("FAIL  {line}");
        }
    };
    for path in files {
        match case_files(&path) {
            Ok(files) => files.iter().for_each(|file| count(line(&tester, file))),
            Err(reason) => count(Err(format!("{}: {reason}", path.display()))),
        }
    }
    println!("{passed} passed, {failed} failed");
    if failed == 0 { ExitCode::SUCCESS } else { ExitCode::FAILURE }
}

/// The line of one file; an error if the case failed.
fn line(tester: &Tester, file: &std::path::Path) -> Result<String, String> {
    let case = Case::read(file).map_err(|reason| format!("{}: {reason}", file.display()))?;
    let report = tester.check(&case).map_err(|reason| format!("{}: {reason}", case.name))?;
    let line = format!("{}: {:.1e} in {} (bound {:.1e})", case.name, report.error, report.tensor, report.bound);
    match report.failure {
        None => Ok(line),
        Some(failure) => Err(format!("{line}: {failure}")),
    }
}
