//! The two streams of DAR part in direction under training, or the second one is of no use.

use burn::optim::{AdamConfig, GradientsParams};
use burn::tensor::Tensor;
use dar_burn::nn::{Dar, DarConfig, Gate, Scheme};
use dar_burn::ops::{
    GateWeights, History, SiteWeights, output_read, prefix, residual_read, residual_read_first, write, write_first,
};
use dar_burn::{BranchLayout, ResidualConfig, Routing};

use super::toy::{EPS, Toy, tensor, vec};
use crate::support::devices::flex;
use crate::support::host::relative_error;

const D_MODEL: usize = 32;
/// Six layers.
const BRANCHES: usize = 12;
const STEPS: usize = 120;

/// The entries of a pass with one layer a block and the hidden state, spelt out with operations.
fn entries(toy: &Toy, dar: &Dar, x: Tensor<2>) -> (History, Tensor<2>) {
    let gate = |gate: &Gate| GateWeights { weight: gate.weight.val(), bias: gate.bias.val(), scale: gate.scale.val() };
    let site = |branch: usize| {
        let site = &dar.sites[branch];
        SiteWeights { alpha: gate(&site.alpha), beta: gate(&site.beta), rho: gate(&site.rho) }
    };
    let query = |branch: usize| match &dar.sites[branch].query {
        Some(query) => query.val(),
        None => Tensor::zeros([2, D_MODEL], &x.device()),
    };
    let mut history = History::new(x.clone().unsqueeze_dim::<3>(1).repeat_dim(1, 2), EPS);
    for first in (0..BRANCHES).step_by(2) {
        let second = first + 1;
        let queries = Tensor::stack::<3>(vec![query(first), query(second)], 0);
        let mut retrieved = prefix(&history, queries, Routing::CrossKey);
        let later = retrieved.pop().unwrap();
        let read = residual_read_first(retrieved.pop().unwrap().state, &site(first), EPS);
        let partial = write_first(toy.branch(first, read.input), read.beta);
        let (read, rho) = residual_read(later, partial.clone(), query(second), &site(second), Routing::CrossKey, EPS);
        history = history.append(write(partial, toy.branch(second, read.input), read.beta, rho));
    }
    let hidden = output_read(&history, None, dar.output_query.val(), Routing::CrossKey);
    (history, hidden)
}

/// Mean angle between the streams of all entries but the embedding, in degrees.
fn angle(toy: &Toy, x: Tensor<2>) -> f64 {
    let Scheme::Dar(dar) = toy.residual.scheme() else { unreachable!() };
    let (history, hidden) = entries(toy, dar, x.clone());
    // The module is these operations.
    let error = relative_error(&vec(hidden), &vec(toy.forward(x)), 1e-3);
    assert!(error <= 1e-5, "{error:.1e}");
    let angles: Vec<f64> = (1..history.len())
        .flat_map(|entry| {
            let streams = vec(history.value(entry));
            let of_token = streams.chunks(2 * D_MODEL).map(|token| {
                let (a, b) = token.split_at(D_MODEL);
                let dot = |a: &[f64], b: &[f64]| a.iter().zip(b).map(|(a, b)| a * b).sum::<f64>();
                let cosine = dot(a, b) / (dot(a, a) * dot(b, b)).sqrt();
                cosine.clamp(-1.0, 1.0).acos().to_degrees()
            });
            of_token.collect::<Vec<_>>()
        })
        .collect();
    angles.iter().sum::<f64>() / angles.len() as f64
}

/// Angles before and after training on the output of another, fixed model, and the loss before and after.
fn train(config: DarConfig) -> ([f64; 2], [f64; 2]) {
    let device = flex().autodiff();
    let layout = BranchLayout::new(D_MODEL, BRANCHES);
    let mut toy = Toy::new(&ResidualConfig::Dar(config), &layout, &device);
    let x = tensor(1, [96, D_MODEL], 1.0, &device);
    let target = tensor(2, [96, D_MODEL], 1.7, &device);
    let mut optimizer = AdamConfig::new().init();
    let mut losses = Vec::new();
    let before = angle(&toy, x.clone());
    for _ in 0..STEPS {
        let hidden = dar_burn::ops::rms_norm(toy.forward(x.clone()), EPS);
        let loss = (hidden - target.clone()).square().mean();
        losses.push(loss.clone().into_scalar::<f64>());
        let gradients = GradientsParams::from_grads(loss.backward(), &toy);
        toy = optimizer.step(3e-3, toy, gradients);
    }
    ([before, angle(&toy, x)], [losses[0], losses[STEPS - 1]])
}

/// A gap of one sign starts the streams close together, and so does a small one.
#[test]
fn streams_part_under_training() {
    for config in [DarConfig::block(1).with_alternate_gap(false), DarConfig::block(1).with_write_gap(0.1)] {
        let (angles, losses) = train(config.clone());
        assert!(losses[1] < 0.1 * losses[0], "{config:?}: {losses:?}");
        assert!(angles[0] > 2.0 && angles[1] > 1.25 * angles[0], "{config:?}: {angles:?}");
    }
}

/// The default start has them apart, and training keeps them so.
#[test]
fn streams_stay_apart() {
    let (angles, losses) = train(DarConfig::block(1));
    assert!(losses[1] < 0.1 * losses[0], "{losses:?}");
    assert!(angles[0] > 30.0 && angles[1] > 30.0, "{angles:?}");
}

/// Equal writes give equal gradients: why the gap is there.
#[test]
fn streams_without_a_gap_stay_equal() {
    let (angles, losses) = train(DarConfig::block(1).with_write_gap(0.0));
    assert!(losses[1] < 0.1 * losses[0], "{losses:?}");
    assert!(angles[1] < 1.0, "{angles:?}");
}
