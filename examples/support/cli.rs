use std::fmt::Display;
use std::path::Path;
use std::process::ExitCode;

use clap::Args;
use dar_burn::device::{self, DeviceChoice, OpenDevice};

/// Why an example stops: one line for the user, and an exit code.
#[derive(Debug)]
pub enum Failure {
    /// The arguments cannot be meant: exit code 2, like clap's own refusals.
    Usage(String),
    /// It did not work: exit code 1.
    Run(String),
}

impl Failure {
    pub fn usage(message: impl Into<String>) -> Self {
        Self::Usage(message.into())
    }

    pub fn run(message: impl Into<String>) -> Self {
        Self::Run(message.into())
    }
}

/// `what: error`, for `map_err`.
pub fn failed<E: Display>(what: impl Display) -> impl FnOnce(E) -> Failure {
    move |error| Failure::Run(format!("{what}: {error}"))
}

/// `cannot verb path: error`, for `map_err`.
pub fn failed_to<E: Display>(verb: &str, path: impl AsRef<Path>) -> impl FnOnce(E) -> Failure {
    failed(format!("cannot {verb} {}", path.as_ref().display()))
}

/// The exit code of `main`, after showing what went wrong.
pub fn exit(result: Result<ExitCode, Failure>) -> ExitCode {
    let (message, code) = match result {
        Ok(code) => return code,
        Err(Failure::Usage(message)) => (message, 2),
        Err(Failure::Run(message)) => (message, 1),
    };
    eprintln!("error: {message}");
    ExitCode::from(code)
}

/// The `--device` argument.
#[derive(Args, Debug, Clone)]
pub struct DeviceArgument {
    /// Where to compute: auto, flex (CPU), wgpu, cuda, rocm, metal, vulkan, webgpu
    #[arg(long, value_name = "NAME", default_value = "auto")]
    device: DeviceChoice,
}

impl DeviceArgument {
    pub fn open(&self) -> Result<OpenDevice, Failure> {
        open(self.device)
    }
}

pub fn open(choice: DeviceChoice) -> Result<OpenDevice, Failure> {
    device::open(choice).map_err(|error| Failure::run(error.to_string()))
}
