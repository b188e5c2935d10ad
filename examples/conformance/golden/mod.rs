//! Golden cases: the truth of an independent float64 reference, held against the public operations and modules.
//!
//! ```text
//! file  ──Case::read──▶  inputs (leaf tensors, token-major, in the type under test)
//!       ──ops / stacks──▶  outputs;  loss = sum over outputs of sum(cot * out);  loss.backward()
//!       ──measure──▶  relative RMS error of every output and every gradient against its bound
//! ```

mod case;
mod graph;
mod measure;
mod ops;
mod stacks;

use std::panic::{AssertUnwindSafe, catch_unwind};

use burn::tensor::{DType, Device};
use dar_burn::device::{DeviceChoice, OpenDevice};
use dar_burn::ops::Implementation;

pub use case::{Case, case_files};
pub use measure::Report;

use graph::{Graph, Results};
use measure::Bounds;

/// Why a case could not be compared.
pub type Reason = String;

/// Evaluates cases on one device in one element type.
pub struct Tester {
    device: Device,
    dtype: DType,
    implementation: Implementation,
    reference: Option<Device>,
}

impl Tester {
    /// Half types are also evaluated on `reference` in the same type by the composed graph, which gives their bound (see
    /// [`measure`]).
    pub fn new(device: Device, dtype: DType, implementation: Implementation, reference: Option<Device>) -> Self {
        Self { device, dtype, implementation, reference }
    }

    /// Compares all outputs and gradients of `case`. An error, a panic included, is the reason why there is no report.
    pub fn check(&self, case: &Case) -> Result<Report, Reason> {
        let got = evaluate(case, &self.device, self.dtype, self.implementation)?;
        let half = matches!(self.dtype, DType::F16 | DType::BF16);
        let reference = match &self.reference {
            Some(reference) if half => Some(evaluate(case, reference, self.dtype, Implementation::Composed)?),
            _ => None,
        };
        measure::compare(case, &got, &Bounds::new(case, self.dtype, reference.as_ref()))
    }
}

/// Whether `device` computes in `dtype`, or the reason in one line.
pub fn computes(device: &OpenDevice, dtype: DType) -> Result<(), Reason> {
    let shaders = [DeviceChoice::Wgpu, DeviceChoice::Vulkan, DeviceChoice::Metal, DeviceChoice::WebGpu];
    if dtype == DType::F64 && shaders.contains(&device.choice) {
        return Err(format!(
            "device `{}` does not compute in F64: shader languages have no exp, log and tanh in it, and what they give \
             instead is silently wrong",
            device.choice
        ));
    }
    if !device.device.supports_dtype(dtype) {
        return Err(format!("device `{}` does not compute in {dtype:?}: {}", device.choice, device.name));
    }
    Ok(())
}

/// Outputs `out.NAME` and gradients `grad.NAME` in the layout of the file.
fn evaluate(case: &Case, device: &Device, dtype: DType, implementation: Implementation) -> Result<Results, Reason> {
    let run = || {
        let mut graph = Graph::new(case, device, dtype, implementation);
        match case.op()? {
            op if op.ends_with("_stack") => stacks::run(op, &mut graph)?,
            op => ops::run(op, &mut graph)?,
        }
        graph.backward()
    };
    catch_unwind(AssertUnwindSafe(run)).unwrap_or_else(|panic| {
        let message = panic.downcast_ref::<String>().map(String::as_str);
        let message = message.or_else(|| panic.downcast_ref::<&str>().copied()).unwrap_or("no message");
        Err(format!("panicked: {}", message.lines().next().unwrap_or_default()))
    })
}
