use burn::module::{Module, Param};
use burn::tensor::{DType, Tensor};
use dar_burn::device::DeviceChoice;
use dar_burn::nn::{AttnResConfig, Dar, Scheme, SeparateValues};
use dar_burn::ops::BranchNorm;
use dar_burn::{BranchLayout, ResidualConfig, Routing};

use super::toy::{EPS, Stir, Toy, schemes, tensor, vec};
use crate::support::devices::{device, devices, flex, say};
use crate::support::host::relative_error;
use crate::support::panic_message;

const D_MODEL: usize = 6;
/// Ragged for blocks of two and three layers.
const BRANCHES: usize = 10;

fn layout() -> BranchLayout {
    BranchLayout::new(D_MODEL, BRANCHES)
}

fn stirred(config: &ResidualConfig) -> Toy {
    let device = flex().autodiff();
    let toy = Toy::new(config, &layout(), &device);
    Toy { residual: toy.residual.map(&mut Stir::new()), ..toy }
}

/// A state is a value: going on from it in two ways is two passes.
#[test]
fn two_continuations_of_one_state_are_two_passes() {
    let device = flex();
    let x = tensor(1, [5, D_MODEL], 1.0, &device);
    for (name, config) in schemes() {
        let toy = stirred(&config);
        let branch = |l: usize, h: Tensor<2>, sign: f64| toy.branch(l, h) * sign;
        // Forks within a block, at its end, and on a state that is read.
        for fork in [1, 4, 7] {
            let pass = |sign: f64| {
                let start = toy.residual.start(x.clone());
                let state = (0..BRANCHES).fold(start, |state, l| {
                    toy.residual.branch(state, |h| branch(l, h, if l < fork { 1.0 } else { sign }))
                });
                vec(toy.residual.finish(state))
            };
            let start = toy.residual.start(x.clone());
            let shared = (0..fork).fold(start, |state, l| toy.residual.branch(state, |h| branch(l, h, 1.0)));
            // Both continuations advance in turn, branch by branch.
            let (mut first, mut second) = (shared.clone(), shared);
            for l in fork..BRANCHES {
                first = toy.residual.branch(first, |h| branch(l, h, 1.0));
                let (input, pending) = toy.residual.read(second);
                second = toy.residual.write(pending.clone(), branch(l, input, -1.0));
                // A pending write may be tried and dropped.
                let _ = toy.residual.write(pending, x.clone());
            }
            assert_eq!(vec(toy.residual.finish(first)), pass(1.0), "{name}, fork at {fork}");
            assert_eq!(vec(toy.residual.finish(second)), pass(-1.0), "{name}, fork at {fork}");
        }
    }
}

#[test]
fn batches_and_tokens_are_the_same() {
    let device = flex();
    let x = tensor(2, [2, 3, D_MODEL], 1.0, &device);
    for (name, config) in schemes() {
        let toy = stirred(&config);
        let batched = toy.forward(x.clone());
        assert_eq!(batched.dims(), [2, 3, D_MODEL], "{name}");
        let flat = toy.forward(x.clone().reshape([6, D_MODEL]));
        assert_eq!(vec(batched), vec(flat), "{name}");
    }
}

/// A norm in front of a branch is the same within its read and behind it, whatever the scheme.
#[test]
fn folded_norms_are_norms() {
    let device = flex();
    let x = tensor(2, [2, 3, D_MODEL], 1.0, &device);
    let norm = BranchNorm { gain: tensor::<1>(7, [D_MODEL], 0.5, &device) + 1.0, eps: 1e-3 };
    for (name, config) in schemes() {
        let toy = stirred(&config);
        let pass = |folded: bool| {
            let state = (0..BRANCHES).fold(toy.residual.start(x.clone()), |state, l| match folded {
                true => toy.residual.branch_normed(state, norm.clone(), |h| toy.branch(l, h) * 0.5),
                false => toy.residual.branch(state, |h| toy.branch(l, norm.apply(h)) * 0.5),
            });
            vec(toy.residual.finish(state))
        };
        let error = relative_error(&pass(true), &pass(false), 1e-3);
        assert!(error <= 1e-6, "{name}: {error:.1e}");
    }
}

/// Also in a batch without any.
#[test]
fn no_tokens() {
    for opened in devices() {
        let device = opened.device.clone().autodiff();
        for (name, config) in schemes().into_iter().filter(|(name, _)| !opened.software || name.ends_with("PerBranch"))
        {
            let residual = config.init(&layout(), &device);
            let x = Tensor::<3>::zeros([2, 0, D_MODEL], &device).require_grad();
            let start = residual.start(x.clone());
            let hidden = residual.finish((0..BRANCHES).fold(start, |state, _| residual.branch(state, |h| h * 0.5)));
            assert_eq!(hidden.dims(), [2, 0, D_MODEL], "{name} on {}", opened.name);
            let gradients = hidden.sum().backward();
            if let Some(gradient) = x.grad(&gradients) {
                assert_eq!(gradient.dims(), [2, 0, D_MODEL], "{name} on {}", opened.name);
            }
        }
    }
}

/// Equation 4: a source is a branch output in the full form, which is therefore the block form of one branch.
#[test]
fn full_attn_res_is_one_branch_a_block() {
    let device = flex();
    let x = tensor(3, [4, D_MODEL], 1.0, &device);
    let one_a_block = ResidualConfig::AttnRes(AttnResConfig::new(1));
    let full = stirred(&ResidualConfig::attnres_full());
    assert_eq!(vec(full.forward(x.clone())), vec(stirred(&one_a_block).forward(x.clone())));
    // Identity maps change no value; two layers a block is another function.
    let maps = AttnResConfig::full().with_separate_values(SeparateValues::PerSource);
    let mut mapped = Toy::new(&ResidualConfig::AttnRes(maps), &layout(), &device);
    let plain = Toy::new(&ResidualConfig::attnres_full(), &layout(), &device);
    let error = relative_error(&vec(mapped.forward(x.clone())), &vec(plain.forward(x.clone())), 1e-3);
    assert!(error <= 1e-6, "{error:.1e}");
    mapped.residual = mapped.residual.map(&mut Stir::new());
    let error = relative_error(&vec(mapped.forward(x.clone())), &vec(full.forward(x.clone())), 1e-3);
    assert!(error >= 1e-2, "the maps do nothing");
    let blocks = stirred(&ResidualConfig::attnres_block(2));
    let error = relative_error(&vec(blocks.forward(x.clone())), &vec(full.forward(x)), 1e-3);
    assert!(error >= 1e-2, "blocks of four branches do nothing");
}

/// Equations 2–3 of the Bregman conditioning paper: both branches of a layer read the same state.
#[test]
fn cascade_runs_the_branches_of_a_layer_in_parallel() {
    let device = flex();
    let x = tensor(4, [3, D_MODEL], 1.0, &device);
    let toy = Toy::new(&ResidualConfig::Cascade, &layout(), &device);
    let sum = (0..BRANCHES / 2).fold(x.clone(), |state, layer| {
        state.clone() + toy.branch(2 * layer, state.clone()) + toy.branch(2 * layer + 1, state)
    });
    assert!(relative_error(&vec(toy.forward(x)), &vec(sum), 1e-3) <= 1e-6);
}

#[test]
fn misuse_is_refused() {
    let device = flex();
    let x = || Tensor::<2>::zeros([3, D_MODEL], &device);
    let refuses = |expected: &str, run: &dyn Fn()| assert_eq!(panic_message(run), expected);
    for (name, config) in schemes() {
        let residual = config.init(&layout(), &device);
        assert_eq!(residual.branches(), BRANCHES);
        let pass = |branches: usize| (0..branches).fold(residual.start(x()), |state, _| residual.branch(state, |h| h));
        refuses("Residual::start: `embedding` has shape [3, 5], expected [.., d_model] = [3, 6]", &|| {
            drop(residual.start(Tensor::<2>::zeros([3, 5], &device)))
        });
        refuses(
            "Residual::read: `state` is past branch 10, expected one of the 10 branches that the layout names",
            &|| {
                drop(residual.read(pass(BRANCHES)));
            },
        );
        refuses("Residual::finish: `state` is written by 9, expected written by all 10 branches", &|| {
            drop(residual.finish(pass(BRANCHES - 1)));
        });
        let write = |output: Tensor<2>| {
            let (_, pending) = residual.read(pass(1));
            drop(residual.write(pending, output));
        };
        refuses("Residual::write: `output` has shape [2, 6], expected the shape of the embedding = [3, 6]", &|| {
            write(Tensor::zeros([2, D_MODEL], &device))
        });
        refuses("Residual::write: `output` has element type F64, expected F32", &|| {
            write(Tensor::zeros([3, D_MODEL], (&device, DType::F64)));
        });

        let normed = |gain: Tensor<1>, eps: f64| drop(residual.read_normed(pass(1), BranchNorm { gain, eps }));
        refuses("Residual::read_normed: `norm.gain` has shape [5], expected [d_model] = [6]", &|| {
            normed(Tensor::ones([5], &device), EPS);
        });
        refuses("Residual::read_normed: `norm.eps` is -1, expected a finite number ≥ 0", &|| {
            normed(Tensor::ones([D_MODEL], &device), -1.0);
        });

        let other = if name == "standard" { ResidualConfig::Cascade } else { ResidualConfig::Standard };
        let other = other.init(&layout(), &device);
        refuses(
            "Residual::read: `state` is of a residual with another configuration or layout, expected one that this residual made",
            &|| {
                drop(other.read(pass(0)));
            },
        );
        refuses(
            "Residual::write: `pending` is of a residual with another configuration or layout, expected one that this residual made",
            &|| {
                drop(other.write(residual.read(pass(0)).1, x()));
            },
        );
        refuses(
            "Residual::finish: `state` is of a residual with another configuration or layout, expected one that this residual made",
            &|| {
                drop(other.finish(pass(BRANCHES)));
            },
        );
    }
}

/// Parameters that do not fit are refused at the call, not from inside a launch.
#[test]
fn parameters_of_another_shape_are_refused() {
    let device = flex();
    let x = || Tensor::<2>::zeros([3, D_MODEL], &device);
    let dar = |change: fn(&mut Dar)| {
        let mut residual = ResidualConfig::dar_block(2).init(&layout(), &device);
        let Scheme::Dar(scheme) = residual.scheme_mut() else { unreachable!("made as DAR") };
        change(scheme);
        residual
    };
    let residual = dar(|scheme| scheme.output_query = Param::from_tensor(Tensor::zeros([1, D_MODEL], &flex())));
    let refusal = panic_message(|| residual.start(x()));
    assert_eq!(refusal, "Residual::start: `query` has shape [1, 6], expected [streams, d_model] = [2, 6]");
    let residual = dar(|scheme| scheme.sites[1].rho.weight = Param::from_tensor(Tensor::zeros([5, 1], &flex())));
    let refusal = panic_message(|| residual.branch(residual.branch(residual.start(x()), |h| h), |h| h));
    assert_eq!(
        refusal,
        "Residual::read: `site.rho.weight` has shape [5, 1], expected [2 * d_model, outputs] = [12, 1]"
    );
}

/// Kernels exist for some element types only; which, is said at the start of a pass.
#[test]
fn an_element_type_without_kernels_is_refused() {
    for opened in devices().into_iter().filter(|opened| opened.device != flex()) {
        let residual = ResidualConfig::dar_block(2).init(&layout(), &opened.device);
        let x = Tensor::<2>::zeros([3, D_MODEL], (&opened.device, DType::F64));
        let message = panic_message(|| residual.start(x));
        let expected = "Residual::start: `embedding` has element type F64, expected one that kernels store";
        assert!(message.starts_with(expected), "{message}");
    }
}

/// Also of the same scheme with other blocks, routing or layout; but not of a clone or of a residual made alike.
#[test]
fn a_state_fits_residuals_of_one_configuration_and_layout() {
    let device = flex();
    let x = tensor(1, [3, D_MODEL], 1.0, &device);
    let config = ResidualConfig::dar_full();
    let residual = config.init(&layout(), &device);
    let state = || residual.branch(residual.start(x.clone()), |h| h);
    for (other, branches) in [
        (ResidualConfig::dar_block(2), BRANCHES),
        (ResidualConfig::dar_routed(1, Routing::CrossValue), BRANCHES),
        (config.clone(), BRANCHES - 1),
    ] {
        let other = other.init(&BranchLayout::new(D_MODEL, branches), &device);
        let message = panic_message(|| other.read(state()));
        assert!(message.contains("another configuration or layout"), "{message}");
    }
    for alike in [residual.clone(), config.init(&layout(), &device)] {
        drop(alike.read(state()));
    }
}

#[test]
fn a_branch_output_on_another_device_is_refused() {
    let Some(other) = device(DeviceChoice::Wgpu, DType::F32) else {
        return say("a branch output on another device: no second device here");
    };
    let (here, there) = (flex(), &other.device);
    let residual = ResidualConfig::Standard.init(&layout(), &here);
    let (_, pending) = residual.read(residual.start(Tensor::<2>::zeros([3, D_MODEL], &here)));
    let message = panic_message(|| residual.write(pending, Tensor::zeros([3, D_MODEL], there)));
    assert_eq!(message, format!("Residual::write: `output` is on device {there:?}, expected {here:?}"));

    for config in [ResidualConfig::Standard, ResidualConfig::dar_full()] {
        let residual = config.init(&layout(), &here);
        let norm = BranchNorm { gain: Tensor::ones([D_MODEL], there), eps: EPS };
        let message =
            panic_message(|| residual.read_normed(residual.start(Tensor::<2>::zeros([3, D_MODEL], &here)), norm));
        let expected = format!("Residual::read_normed: `norm.gain` is on device {there:?}, expected {here:?}");
        assert_eq!(message, expected);
    }
}
