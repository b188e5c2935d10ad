//! On which devices the tests run.
//!
//! `DAR_TEST_DEVICES=flex,cuda` names them, and one that does not start fails its tests. Without it the tests run on
//! every device of the build that starts here, and say loudly which they leave out. The tests of the kernels know one
//! more, which is no device of Burn's: see [`request`].

use std::io::Write;
use std::sync::OnceLock;

use burn::tensor::{DType, Device};
use dar_burn::device::{DeviceChoice, OpenDevice, open};

use super::golden::computes;

const VARIABLE: &str = "DAR_TEST_DEVICES";

/// The host running CUDA source: a device of CubeCL's only.
const KERNELS_ONLY: &str = "cuda-source";

struct Wanted {
    choice: DeviceChoice,
    required: bool,
    opened: Result<OpenDevice, String>,
}

/// Every device that the tests are to run on.
///
/// # Panics
/// If a device that `DAR_TEST_DEVICES` names does not start.
pub fn devices() -> Vec<&'static OpenDevice> {
    wanted().iter().filter_map(Wanted::opened).collect()
}

/// `choice`, where the tests are to run on it and it computes in `dtype`.
///
/// # Panics
/// If `DAR_TEST_DEVICES` names it and it does not start.
pub fn device(choice: DeviceChoice, dtype: DType) -> Option<&'static OpenDevice> {
    let Some(found) = wanted().iter().find(|wanted| wanted.choice == choice).and_then(Wanted::opened) else {
        say(&format!("{choice} in {dtype:?}: not among the devices of this test run"));
        return None;
    };
    match computes(found, dtype) {
        Ok(()) => Some(found),
        Err(reason) => {
            say(&format!("{choice} in {dtype:?}: {reason}"));
            None
        }
    }
}

/// The CPU, for what needs f64 or only one device.
pub fn flex() -> Device {
    open(DeviceChoice::Flex).expect("the tests need the feature `flex`").device
}

impl Wanted {
    fn opened(&self) -> Option<&OpenDevice> {
        match &self.opened {
            Ok(opened) => Some(opened),
            Err(reason) if self.required => panic!("{VARIABLE} requires `{}`: {reason}", self.choice),
            Err(_) => None,
        }
    }
}

fn wanted() -> &'static [Wanted] {
    static WANTED: OnceLock<Vec<Wanted>> = OnceLock::new();
    WANTED.get_or_init(|| {
        let start = |choice, required| {
            let opened = open(choice).map_err(|error| error.to_string());
            let choice = opened.as_ref().map_or(choice, |opened| opened.choice);
            Wanted { choice, required, opened }
        };
        match std::env::var(VARIABLE) {
            Ok(names) => {
                let names = split(&names).filter(|&name| name != KERNELS_ONLY);
                let choices = names.map(|name| name.parse().unwrap_or_else(|error| panic!("{VARIABLE}: {error}")));
                choices.map(|choice| start(choice, true)).collect()
            }
            Err(_) => {
                let built = DeviceChoice::ALL.into_iter();
                let built = built.filter(|choice| *choice != DeviceChoice::Auto && choice.is_built());
                let wanted: Vec<Wanted> = built.map(|choice| start(choice, false)).collect();
                for Wanted { choice, opened, .. } in &wanted {
                    match opened {
                        Ok(opened) => write_line(&format!("tests run on {}", opened.name)),
                        Err(reason) => say(&format!("{choice}: {reason}")),
                    }
                }
                wanted
            }
        }
    })
}

/// What this test run wants of the device of kernels alone.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Request {
    /// `DAR_TEST_DEVICES` names it.
    Required,
    /// Nothing is named.
    IfThere,
    /// Other devices are named.
    No,
}

/// Whether the kernels are to run on the host as CUDA source.
pub fn request() -> Request {
    match std::env::var(VARIABLE) {
        Ok(names) if split(&names).any(|name| name == KERNELS_ONLY) => Request::Required,
        Ok(_) => Request::No,
        Err(_) => Request::IfThere,
    }
}

fn split(names: &str) -> impl Iterator<Item = &str> {
    names.split(',').map(str::trim).filter(|name| !name.is_empty())
}

/// Reports what is left out, past the test harness's capture of standard error.
pub fn say(left_out: &str) {
    write_line(&format!("SKIPPED: {left_out}"));
}

/// Tells the user, past the test harness's capture of standard error.
pub fn write_line(line: &str) {
    // Nobody listening is no reason to fail.
    let _ = writeln!(std::io::stderr(), "{line}");
}
