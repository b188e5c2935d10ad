//! Streams part in direction under training, or the second one is of no use.

use burn::optim::{AdamConfig, GradientsParams};
use burn::tensor::Tensor;
use dar_burn::nn::{Dar, DarConfig, Gate, Scheme};
use dar_burn::ops::{
    GateWeights, History, MhcWeights, SinkhornOrder, SiteWeights, mhc_maps, output_read, prefix, residual_read,
    residual_read_first, streams_read, streams_write, write, write_first,
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
fn entries(toy: &Toy, dar: &Dar, routing: Routing, x: Tensor<2>) -> (History, Tensor<2>) {
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
        let mut retrieved = prefix(&history, queries, routing);
        let later = retrieved.pop().unwrap();
        let read = residual_read_first(retrieved.pop().unwrap().state, &site(first), EPS);
        let partial = write_first(toy.branch(first, read.input), read.beta);
        let (read, rho) = residual_read(later, partial.clone(), query(second), &site(second), routing, EPS);
        history = history.append(write(partial, toy.branch(second, read.input), read.beta, rho));
    }
    let hidden = output_read(&history, None, dar.output_query.val(), routing);
    (history, hidden)
}

/// Mean angle between two streams of states `[tokens, streams, d_model]`, in degrees.
fn angle(states: &[Tensor<3>], [first, second]: [usize; 2]) -> f64 {
    let angles = states.iter().flat_map(|state| {
        let streams = state.dims()[1];
        let of_token = |token: &[f64]| {
            let (a, b) = (&token[first * D_MODEL..][..D_MODEL], &token[second * D_MODEL..][..D_MODEL]);
            let dot = |a: &[f64], b: &[f64]| a.iter().zip(b).map(|(a, b)| a * b).sum::<f64>();
            let cosine = dot(a, b) / (dot(a, a) * dot(b, b)).sqrt();
            cosine.clamp(-1.0, 1.0).acos().to_degrees()
        };
        vec(state.clone()).chunks(streams * D_MODEL).map(of_token).collect::<Vec<_>>()
    });
    let angles: Vec<f64> = angles.collect();
    angles.iter().sum::<f64>() / angles.len() as f64
}

/// Mean angle between the streams of all entries but the embedding.
fn dar_angle(toy: &Toy, routing: Routing, x: Tensor<2>) -> f64 {
    let Scheme::Dar(dar) = toy.residual.scheme() else { unreachable!() };
    let (history, hidden) = entries(toy, dar, routing, x.clone());
    // The module is these operations.
    let error = relative_error(&vec(hidden), &vec(toy.forward(x)), 1e-3);
    assert!(error <= 1e-5, "{error:.1e}");
    let states: Vec<Tensor<3>> = (1..history.len()).map(|entry| history.value(entry)).collect();
    angle(&states, [0, 1])
}

/// Mean angle between streams 0 and 1 of mHC after every branch.
fn mhc_angle(toy: &Toy, x: Tensor<2>) -> f64 {
    let Scheme::Mhc(mhc) = toy.residual.scheme() else { unreachable!() };
    let mut streams = x.clone().unsqueeze_dim::<3>(1).repeat_dim(1, 2);
    let states: Vec<Tensor<3>> = (0..BRANCHES)
        .map(|branch| {
            let site = &mhc.sites[branch];
            let weights = MhcWeights { phi: site.phi.val(), bias: site.bias.val(), scale: site.scale.val() };
            let maps = mhc_maps(streams.clone(), &weights, 20, SinkhornOrder::ColumnsThenRows, EPS);
            let output = toy.branch(branch, streams_read(streams.clone(), maps.pre.clone()));
            streams = streams_write(streams.clone(), output, &maps);
            streams.clone()
        })
        .collect();
    let hidden = streams.sum_dim(1).squeeze_dim::<2>(1);
    let error = relative_error(&vec(hidden), &vec(toy.forward(x)), 1e-3);
    assert!(error <= 1e-5, "{error:.1e}");
    angle(&states, [0, 1])
}

/// What `measure` says before and after training on the output of another, fixed model, and the loss before and after.
fn train(config: &ResidualConfig, measure: impl Fn(&Toy, Tensor<2>) -> f64) -> ([f64; 2], [f64; 2]) {
    let device = flex().autodiff();
    let layout = BranchLayout::new(D_MODEL, BRANCHES);
    let mut toy = Toy::new(config, &layout, &device);
    let x = tensor(1, [96, D_MODEL], 1.0, &device);
    let target = tensor(2, [96, D_MODEL], 1.7, &device);
    let mut optimizer = AdamConfig::new().init();
    let mut losses = Vec::new();
    let before = measure(&toy, x.clone());
    for _ in 0..STEPS {
        let hidden = dar_burn::ops::rms_norm(toy.forward(x.clone()), EPS);
        let loss = (hidden - target.clone()).square().mean();
        losses.push(loss.clone().into_scalar::<f64>());
        let gradients = GradientsParams::from_grads(loss.backward(), &toy);
        toy = optimizer.step(3e-3, toy, gradients);
    }
    let (angles, losses) = ([before, measure(&toy, x)], [losses[0], losses[STEPS - 1]]);
    println!("{config:?}: angles {angles:?}, losses {losses:?}");
    assert!(losses[1] < 0.1 * losses[0], "{config:?}: {losses:?}");
    (angles, losses)
}

fn train_dar(config: DarConfig) -> [f64; 2] {
    let routing = config.routing;
    train(&ResidualConfig::Dar(config), |toy, x| dar_angle(toy, routing, x)).0
}

/// From a small gap, with every routing. FixedKV starts with equal streams, which its roles part.
#[test]
fn streams_part_under_training() {
    for routing in Routing::ALL {
        let [before, after] = train_dar(DarConfig::block(1).with_write_gap(0.1).with_routing(routing));
        assert!(before < 10.0 && after > 1.25 * before && after > 5.0, "{routing:?}: from {before} to {after}");
    }
}

/// The default start has them apart, and training keeps them so.
#[test]
fn streams_stay_apart() {
    for routing in [Routing::CrossKey, Routing::SelfKeyValue, Routing::CrossValue] {
        let [before, after] = train_dar(DarConfig::block(1).with_routing(routing));
        assert!(before > 20.0 && after > 20.0, "{routing:?}: from {before} to {after}");
    }
}

/// Equal writes give equal gradients: why the gap is there.
#[test]
fn streams_without_a_gap_stay_equal() {
    let [_, after] = train_dar(DarConfig::block(1).with_write_gap(0.0));
    assert!(after < 1.0, "{after}");
}

/// Reading one stream more than the other parts the streams of mHC, which start equal.
#[test]
fn streams_of_mhc_part_under_training() {
    let ([before, after], _) = train(&ResidualConfig::mhc(2), mhc_angle);
    assert!(before < 1e-3 && after > 2.0, "from {before} to {after}");
}
