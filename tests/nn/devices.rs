//! Long passes on every device against float64: a parameter's gradient is a sum over everything that used it, and fused
//! backends compute that sum in kernels of their own making.

use std::collections::BTreeMap;

use burn::module::{Module, Param};
use burn::tensor::{DType, Device, Tensor};
use dar_burn::nn::{AttnResConfig, DarConfig, Tying};
use dar_burn::{BranchLayout, ResidualConfig};

use super::params::param_gradients;
use super::toy::{Stir, Toy, tensor, vec};
use crate::support::devices::{devices, flex};
use crate::support::host::relative_error;

const BRANCHES: usize = 12;

/// The hidden state and the gradients of the residual parameters, those of one length together. On its own the gradient
/// of the first read's alpha would be rounding: both streams are the embedding there, and as the branch has a norm of its
/// own, their scale does not matter.
fn pass(config: &ResidualConfig, d_model: usize, dtype: DType, device: &Device) -> Vec<Vec<f64>> {
    let device = device.clone().autodiff();
    let toy = Toy::new(config, &BranchLayout::new(d_model, BRANCHES), &device);
    // Weak branches: rounding must not grow from branch to branch, or nothing would tell it from a fault.
    let weak = |weight: Param<Tensor<2>>| weight.map(|weight| (weight * 0.3).detach().require_grad());
    let weights = toy.weights.into_iter().map(weak).collect();
    let toy = Toy { residual: toy.residual.map(&mut Stir::new()), weights, ..toy };
    let hidden = toy.forward(tensor(1, [3, d_model], 1.0, &device).cast(dtype));
    let gradients = hidden.clone().square().sum().backward();
    let gradients = param_gradients(&toy.residual, &gradients);
    let mut of_length = BTreeMap::<usize, Vec<f64>>::new();
    for (_, values) in gradients.into_iter().flatten() {
        of_length.entry(values.len()).or_default().extend(values);
    }
    std::iter::once(vec(hidden)).chain(of_length.into_values()).collect()
}

/// Many entries (the full form), many uses of one site (one block of six layers), widths that vectorise and that do not.
#[test]
fn long_passes_agree_with_float64() {
    let tied = Tying::PerBlock;
    let configs = [
        ("AttnRes full", ResidualConfig::attnres_full()),
        ("AttnRes, one tied block", ResidualConfig::AttnRes(AttnResConfig::block(6).with_tying(tied))),
        ("DAR full", ResidualConfig::dar_full()),
        ("DAR, one tied block", ResidualConfig::Dar(DarConfig::block(6).with_tying(tied))),
        ("mHC", ResidualConfig::mhc(3)),
    ];
    for d_model in [7, 12] {
        for (name, config) in &configs {
            let truth = pass(config, d_model, DType::F64, &flex());
            // What f32 loses on the CPU, it may lose elsewhere; a wrong kernel is off by its whole result.
            let lost = errors(&pass(config, d_model, DType::F32, &flex()), &truth).into_iter().fold(0.0, f64::max);
            assert!(lost <= 1e-5, "{name}, d_model {d_model}: {lost:.1e} on the CPU");
            for opened in devices() {
                let got = errors(&pass(config, d_model, DType::F32, &opened.device), &truth);
                for (index, error) in got.into_iter().enumerate() {
                    let name = format!("{name}, d_model {d_model}, {}", opened.name);
                    assert!(error <= 10.0 * lost, "{name}: {error:.1e} > 10 * {lost:.1e} in {index}");
                }
            }
        }
    }
}

fn errors(got: &[Vec<f64>], truth: &[Vec<f64>]) -> Vec<f64> {
    assert_eq!(got.len(), truth.len());
    got.iter().zip(truth).map(|(got, truth)| relative_error(got, truth, 1e-3)).collect()
}
