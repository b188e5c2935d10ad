use burn::module::{Module, ModuleVisitor, Param};
use burn::tensor::{DType, Gradients, Tensor};
use dar_burn::nn::{AttnResConfig, DarConfig, Scheme, SeparateValues, Tying};
use dar_burn::{BranchLayout, Residual, ResidualConfig};

use super::toy::{Stir, Toy, schemes, tensor, vec};
use crate::support::devices::{devices, flex, say};
use crate::support::golden::computes;
use crate::support::host::relative_error;

fn count(config: ResidualConfig, d_model: usize, branches: usize) -> usize {
    config.init(&BranchLayout::new(d_model, branches), &flex()).num_params()
}

/// 12 d + 8 a site, 2 d output queries, and no query where a site only ever sees the embedding.
#[test]
fn dar_counts() {
    let d = 10;
    for (layers, branches, tying, sites, queries) in [
        (1, 12, Tying::PerBranch, 12, 11),
        (2, 12, Tying::PerBranch, 12, 11),
        (3, 10, Tying::PerBranch, 10, 9), // ragged
        (1, 12, Tying::PerBlock, 12, 11), // one layer a block shares nothing
        (2, 12, Tying::PerBlock, 6, 6),   // the first site serves branch 2 as well
        (2, 10, Tying::PerBlock, 6, 6),   // ragged after a whole layer
        (2, 9, Tying::PerBlock, 5, 5),    // ragged within a layer
        (6, 12, Tying::PerBlock, 2, 2),
    ] {
        let config = ResidualConfig::Dar(DarConfig::block(layers).with_tying(tying));
        let expected = sites * (10 * d + 8) + queries * 2 * d + 2 * d;
        assert_eq!(count(config, d, branches), expected, "K = {layers}, {branches} branches, {tying:?}");
    }
}

#[test]
fn attn_res_counts() {
    let (d, branches) = (10, 12);
    let full = AttnResConfig::full();
    assert_eq!(count(ResidualConfig::AttnRes(full.clone()), d, branches), 11 * d + d);
    assert_eq!(count(ResidualConfig::attnres_block(2), d, branches), 11 * d + d);
    let tied = AttnResConfig::block(2).with_tying(Tying::PerBlock);
    assert_eq!(count(ResidualConfig::AttnRes(tied), d, branches), 6 * d + d);
    for (values, maps) in [(SeparateValues::PerSource, 13), (SeparateValues::Maps(6), 6)] {
        let config = full.clone().with_separate_values(values);
        assert_eq!(count(ResidualConfig::AttnRes(config), d, branches), 12 * d + maps * d * d);
    }
}

#[test]
fn other_counts() {
    let (d, branches) = (10, 12);
    assert_eq!(count(ResidualConfig::Standard, d, branches), 0);
    assert_eq!(count(ResidualConfig::Cascade, d, branches), 0);
    for n in [1, 2, 4] {
        let hyper = branches * ((2 + n) * d + 2 * n + n * n + 3);
        assert_eq!(count(ResidualConfig::hyper_connections(n), d, branches), hyper);
    }
    for n in [2, 4] {
        let mhc = branches * ((2 * n + n * n) * (n * d + 1) + 3);
        assert_eq!(count(ResidualConfig::mhc(n), d, branches), mhc);
    }
}

/// Counting allocates nothing: this model would not fit.
#[test]
fn counting_does_not_allocate() {
    assert_eq!(count(ResidualConfig::mhc(4), 1 << 20, 1 << 10), (1 << 10) * (24 * ((4 << 20) + 1) + 3));
}

/// The gradients of a module's parameters in the order of the visit; none where there is none.
struct ParamGradients<'a> {
    gradients: &'a Gradients,
    found: Vec<Option<(DType, Vec<f64>)>>,
}

impl ModuleVisitor for ParamGradients<'_> {
    fn visit_float<const D: usize>(&mut self, param: &Param<Tensor<D>>) {
        let gradient = param.val().grad(self.gradients);
        self.found.push(gradient.map(|gradient| (gradient.dtype(), vec(gradient))));
    }
}

pub(super) fn param_gradients(residual: &Residual, gradients: &Gradients) -> Vec<Option<(DType, Vec<f64>)>> {
    let mut visitor = ParamGradients { gradients, found: Vec::new() };
    residual.visit(&mut visitor);
    visitor.found
}

/// Parameters in f32 serve states of any type: the output has the type of the states, gradients that of the parameters.
#[test]
fn half_states_keep_their_type_and_parameters_theirs() {
    let layout = BranchLayout::new(8, 6);
    for opened in devices() {
        for dtype in [DType::F16, DType::BF16] {
            if let Err(reason) = computes(opened, dtype) {
                say(&reason);
                continue;
            }
            let device = opened.device.clone().autodiff();
            for (name, config) in schemes() {
                if opened.software && name.ends_with("PerBlock") {
                    continue; // the same kernels as PerBranch
                }
                let toy = Toy::new(&config, &layout, &device);
                let toy = Toy { residual: toy.residual.map(&mut Stir::new()), ..toy };
                let x = tensor(1, [4, 8], 1.0, &device);
                let truth = vec(toy.forward(x.clone()));
                let hidden = toy.forward(x.cast(dtype));
                let name = format!("{name} on {}", opened.name);
                assert_eq!(hidden.dtype(), dtype, "{name}");
                let error = relative_error(&vec(hidden.clone()), &truth, 1e-3);
                assert!(error <= 0.05, "{name} in {dtype:?}: {error:.1e}");
                let gradients = hidden.cast(DType::F32).square().mean().backward();
                for (dtype, gradient) in param_gradients(&toy.residual, &gradients).into_iter().flatten() {
                    assert_eq!(dtype, DType::F32, "{name}");
                    assert!(gradient.iter().all(|value| value.is_finite()), "{name}");
                }
            }
        }
    }
}

/// Every parameter that can matter has a gradient. What cannot is the transport of a block's first branch.
#[test]
fn every_parameter_is_used() {
    let layout = BranchLayout::new(8, 10);
    let device = flex().autodiff();
    for (name, config) in schemes() {
        let toy = Toy::new(&config, &layout, &device);
        let residual = toy.residual.map(&mut Stir::new());
        let toy = Toy { residual, ..toy };
        let gradients = toy.forward(tensor(1, [4, 8], 1.0, &device)).square().sum().backward();
        let found = param_gradients(&toy.residual, &gradients);
        let unused = found.iter().filter(|gradient| match gradient {
            Some((_, gradient)) => gradient.iter().all(|value| *value == 0.0),
            None => true,
        });
        // Weight, bias and scale of rho in every site that only ever opens a block.
        let openers = match (&config, toy.residual.scheme()) {
            (ResidualConfig::Dar(config), Scheme::Dar(_)) => match (config.tying, config.branches_per_block) {
                (Tying::PerBlock, block) if block > 2 => 0, // shared with the block's later layers, see below
                (_, block) => 10usize.div_ceil(block),
            },
            _ => 0,
        };
        // The last block of ten branches in blocks of four holds one layer: its shared site only opens.
        let openers = match &config {
            ResidualConfig::Dar(config) if config.tying == Tying::PerBlock && config.branches_per_block == 4 => 1,
            _ => openers,
        };
        assert_eq!(unused.count(), 3 * openers, "{name}");
    }
}

/// Freezing some parameters changes no other gradient.
#[test]
fn frozen_parameters_have_no_gradient_and_leave_the_others() {
    let layout = BranchLayout::new(8, 8);
    let device = flex().autodiff();
    let free = Toy::new(&ResidualConfig::dar_block(2), &layout, &device);
    let free = Toy { residual: free.residual.map(&mut Stir::new()), ..free };
    let mut frozen = free.clone();
    let Scheme::Dar(dar) = frozen.residual.scheme_mut() else { unreachable!() };
    dar.sites[2].alpha = dar.sites[2].alpha.clone().no_grad();
    dar.sites[5] = dar.sites[5].clone().no_grad();
    dar.output_query = dar.output_query.clone().no_grad();

    let x = tensor(1, [4, 8], 1.0, &device);
    let gradients = |toy: &Toy| {
        let gradients = toy.forward(x.clone()).square().sum().backward();
        param_gradients(&toy.residual, &gradients)
    };
    let (all, some) = (gradients(&free), gradients(&frozen));
    // Alpha; query and three gates; the output query.
    assert_eq!(some.iter().filter(|gradient| gradient.is_none()).count(), 3 + 10 + 1 + none(&all));
    for (all, some) in all.iter().zip(&some) {
        if let (Some((_, all)), Some((_, some))) = (all, some) {
            assert!(relative_error(some, all, 1e-6) <= 1e-6);
        }
    }
}

fn none(gradients: &[Option<(DType, Vec<f64>)>]) -> usize {
    gradients.iter().filter(|gradient| gradient.is_none()).count()
}
