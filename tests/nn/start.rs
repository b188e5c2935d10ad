//! At their initial values all schemes compute the plain residual, up to a scale that a final norm removes.

use burn::tensor::{DType, Tensor};
use dar_burn::nn::{AttnResConfig, DarConfig, HyperConfig, MhcConfig, Tying};
use dar_burn::ops::rms_norm;
use dar_burn::{BranchLayout, ResidualConfig};

use super::toy::{Toy, schemes, tensor, vec};
use crate::support::devices::{devices, flex};
use crate::support::host::relative_error;

const D_MODEL: usize = 16;

fn with_eps(config: ResidualConfig, eps: f64) -> ResidualConfig {
    match config {
        ResidualConfig::AttnRes(config) => ResidualConfig::AttnRes(AttnResConfig { eps, ..config }),
        ResidualConfig::Dar(config) => ResidualConfig::Dar(DarConfig { eps, ..config }),
        ResidualConfig::Hyper(config) => ResidualConfig::Hyper(HyperConfig { eps, ..config }),
        ResidualConfig::Mhc(config) => ResidualConfig::Mhc(MhcConfig { eps, ..config }),
        config => config,
    }
}

/// Relative error of the normalised hidden state against the plain residual's. All norms, the branches' included, have
/// this `eps`: what they norm is the plain residual's state up to a scale.
fn off_standard(config: &ResidualConfig, eps: f64, branches: usize, x: &Tensor<2>) -> f64 {
    let layout = BranchLayout::new(D_MODEL, branches);
    let hidden = |config: &ResidualConfig| {
        let toy = Toy { eps, ..Toy::new(&with_eps(config.clone(), eps), &layout, &x.device()) };
        vec(rms_norm(toy.forward(x.clone()), eps))
    };
    relative_error(&hidden(config), &hidden(&ResidualConfig::Standard), 1e-3)
}

/// Blocks of one, two and three layers, whole and ragged, tied and not; parameters stay f32.
#[test]
fn every_scheme_starts_as_the_plain_residual() {
    let x = tensor(1, [5, D_MODEL], 1.0, &flex()).cast(DType::F64);
    for (name, config) in schemes().into_iter().filter(|(name, _)| name != "cascade") {
        // Whole blocks for K = 1, 2 and 3; a ragged end within the first layer of a block; one within a later layer.
        for branches in [12, 9, 7, 3] {
            let error = off_standard(&config, 1e-14, branches, &x);
            // The softmax-first order divides by sums plus 1e-6, once more for every branch.
            let bound = if name == "mHC 4" { 2e-5 } else { 2e-6 };
            assert!(error <= bound, "{name}, {branches} branches: {error:.1e}");
        }
    }
}

/// At eps > 0 the norms see the scale, and the error is of the order of eps · entries² / mean square.
#[test]
fn eps_moves_the_start_as_far_as_documented() {
    let branches = 12;
    for scale in [1.0, 0.03] {
        let x = tensor(2, [5, D_MODEL], scale, &flex()).cast(DType::F64);
        let mean_square = vec(x.clone()).iter().map(|x| x * x).sum::<f64>() / (5 * D_MODEL) as f64;
        for tying in [Tying::PerBranch, Tying::PerBlock] {
            let config = DarConfig::block(1).with_tying(tying);
            let entries = (branches / 2 + 1) as f64;
            let error = off_standard(&ResidualConfig::Dar(config), 1e-6, branches, &x);
            let order = 1e-6 * entries * entries / mean_square;
            assert!(error <= order.max(2e-6), "{tying:?}, scale {scale}: {error:.1e}, expected {order:.1e}");
        }
    }
}

/// The same in f32 on every device.
#[test]
fn dar_starts_as_the_plain_residual_on_every_device() {
    for opened in devices() {
        let x = tensor(3, [5, D_MODEL], 1.0, &opened.device);
        let error = off_standard(&ResidualConfig::dar_block(2), 1e-6, 6, &x);
        assert!(error <= 5e-5, "{}: {error:.1e}", opened.name);
    }
}
