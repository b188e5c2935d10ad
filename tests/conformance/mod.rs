//! Every golden case on every device, in every element type that it computes in.

use std::path::Path;

use burn::tensor::DType;
use dar_burn::device::{DeviceChoice, open};
use dar_burn::ops::Implementation;

use crate::support::devices::device;
use crate::support::golden::{Case, Tester, case_files};
use crate::support::golden_folder;

macro_rules! golden_cases {
    ($($device:ident: $choice:ident;)*) => {$(
        mod $device {
            use super::*;

            #[test]
            fn f32() {
                golden_cases_pass(DeviceChoice::$choice, DType::F32);
            }

            #[test]
            fn f64() {
                golden_cases_pass(DeviceChoice::$choice, DType::F64);
            }

            #[test]
            fn f16() {
                golden_cases_pass(DeviceChoice::$choice, DType::F16);
            }

            #[test]
            fn bf16() {
                golden_cases_pass(DeviceChoice::$choice, DType::BF16);
            }
        }
    )*};
}

golden_cases! {
    flex: Flex;
    wgpu: Wgpu;
    cuda: Cuda;
    rocm: Rocm;
    metal: Metal;
    vulkan: Vulkan;
}

fn golden_cases_pass(choice: DeviceChoice, dtype: DType) {
    let Some(opened) = device(choice, dtype) else {
        return;
    };
    let reference = open(DeviceChoice::Flex).ok().map(|flex| flex.device);
    let mut files = case_files(&golden_folder()).unwrap();
    if opened.software {
        // Shaders compile slowly in software: one size of every operation and scheme. The example runs them all.
        files.retain(|file| {
            let name = file.to_string_lossy();
            ["r3s4n7d24", "l4k1n3d10", "extreme"].iter().any(|size| name.contains(size))
        });
    }
    for implementation in [Implementation::Fused, Implementation::Composed] {
        let tester = Tester::new(opened.device.clone(), dtype, implementation, reference.clone());
        let failures: Vec<String> = files.iter().filter_map(|file| failure(&tester, file)).collect();
        let (failed, all) = (failures.len(), files.len());
        let about = format!("{implementation:?} on {}", opened.name);
        assert!(failures.is_empty(), "{failed} of {all} cases fail, {about}:\n{}", failures.join("\n"));
        // Operations know one implementation only.
        files.retain(|file| file.to_string_lossy().contains("_stack"));
    }
}

/// What is wrong with a case, if anything is.
fn failure(tester: &Tester, file: &Path) -> Option<String> {
    let report = Case::read(file).and_then(|case| tester.check(&case));
    let failure = match report {
        Ok(report) => {
            let (error, bound) = (report.error, report.bound);
            report.failure.map(|failure| format!("{failure} (worst {error:.1e}, bound {bound:.1e})"))
        }
        Err(reason) => Some(reason),
    };
    failure.map(|failure| format!("{}: {failure}", file.display()))
}

/// The evaluator has to see what is wrong, or passing means nothing.
#[test]
fn a_wrong_gradient_a_lost_tensor_and_an_unknown_operation_fail() {
    let Some(opened) = device(DeviceChoice::Flex, DType::F32) else {
        return;
    };
    let tester = Tester::new(opened.device.clone(), DType::F32, Implementation::Fused, None);
    let file = golden_folder().join("merge_r3s4n7d24_cross_key.safetensors");
    let read = || Case::read(&file).unwrap();
    let report = tester.check(&read()).unwrap();
    assert!(report.failure.is_none(), "{report:?}");

    let mut case = read();
    case.tensors.get_mut("grad.P").unwrap().values[3] *= 1.01;
    let report = tester.check(&case).unwrap();
    assert_eq!((report.tensor.as_str(), report.failure.is_some()), ("grad.P", true), "{report:?}");

    for (lost, reason) in [
        ("zeta", "tensor `zeta` is missing"),
        ("cot.h", "tensor `cot.h` is missing"),
        ("grad.q", "tensor `grad.q` is missing"),
    ] {
        let mut case = read();
        case.tensors.remove(lost);
        assert_eq!(tester.check(&case).unwrap_err(), reason);
    }

    let mut case = read();
    let array = case.tensors["grad.q"].clone();
    case.tensors.insert("grad.other".into(), array);
    assert_eq!(tester.check(&case).unwrap_err(), "tensor `grad.other` belongs to no input or output of the operation");

    let mut case = read();
    case.metadata.insert("op".into(), "splice".into());
    assert_eq!(tester.check(&case).unwrap_err(), "op `splice` is unknown");
}
