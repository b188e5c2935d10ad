//! Observers against composed passes, closed forms and the definition of each change.

use std::sync::Arc;

use burn::module::Module;
use burn::tensor::Tensor;
use dar_burn::diagnostics::ndarray::{Array2, Array3, Axis};
use dar_burn::diagnostics::{Intervention, Record, Recorder};
use dar_burn::nn::{AttnResConfig, Observer, SeparateValues, Unobserved};
use dar_burn::ops::Implementation;
use dar_burn::{BranchLayout, ResidualConfig, Routing};

use super::{assert_all_close, assert_close};
use crate::nn::toy::{EPS, Stir, Toy, schemes, tensor, vec};
use crate::support::devices::flex;
use crate::support::host::{relative_error, retrieve};
use crate::support::panic_message;

const TOKENS: usize = 5;
const D_MODEL: usize = 8;
const BRANCHES: usize = 8;

/// A model whose residual parameters all matter.
fn toy(config: &ResidualConfig) -> Toy {
    let mut toy = Toy::new(config, &BranchLayout::new(D_MODEL, BRANCHES), &flex());
    toy.residual = toy.residual.map(&mut Stir::new());
    toy
}

fn embedding() -> Tensor<2> {
    tensor(7, [TOKENS, D_MODEL], 1.0, &flex())
}

fn observed(toy: &Toy, observer: Arc<dyn Observer>) -> Vec<f64> {
    let start = toy.residual.start_observed(embedding(), observer);
    let state = (0..BRANCHES).fold(start, |state, l| toy.residual.branch(state, |h| toy.branch(l, h)));
    vec(toy.residual.finish(state))
}

fn records(toy: &Toy) -> Vec<Record> {
    let recorder = Arc::new(Recorder::new());
    observed(toy, recorder.clone());
    let records = recorder.records();
    (0..=BRANCHES).map(|branch| records.get(&branch).cloned().unwrap_or_default()).collect()
}

fn composed(config: &ResidualConfig) -> ResidualConfig {
    config.clone().with_implementation(Implementation::Composed)
}

#[test]
fn a_recorder_changes_no_bit() {
    for (name, config) in schemes() {
        let truth = vec(toy(&composed(&config)).forward(embedding()));
        let toy = toy(&config);
        assert_eq!(observed(&toy, Arc::new(Recorder::new())), truth, "{name}");
        assert_eq!(observed(&toy, Arc::new(Unobserved)), truth, "{name}");
        assert!(relative_error(&vec(toy.forward(embedding())), &truth, 0.0) < 1e-5, "{name}: fused");
    }
}

#[test]
fn every_scheme_records_what_it_has() {
    for (name, config) in schemes() {
        for (branch, record) in records(&toy(&config)).iter().enumerate() {
            let in_pass = branch < BRANCHES;
            let retrieves = matches!(config, ResidualConfig::AttnRes(_) | ResidualConfig::Dar(_));
            assert_eq!(record.retrieval.is_some(), retrieves, "{name}, {branch}");
            assert_eq!(record.gates.is_some(), in_pass && matches!(config, ResidualConfig::Dar(_)), "{name}, {branch}");
            let has_maps = matches!(config, ResidualConfig::Hyper(_) | ResidualConfig::Mhc(_));
            assert_eq!(record.maps.is_some(), in_pass && has_maps, "{name}, {branch}");
            let changes = in_pass && (config != ResidualConfig::Cascade || branch % 2 == 1);
            assert_eq!(record.state.is_some(), changes, "{name}, {branch}");
        }
    }
}

#[test]
fn retrieval_weights_give_what_the_oracle_retrieves() {
    for routing in [Routing::CrossKey, Routing::SelfKeyValue, Routing::CrossValue, Routing::FixedKeyValue] {
        let toy = toy(&ResidualConfig::dar_routed(2, routing));
        let records = records(&toy);
        let embedding: Vec<f64> = vec(embedding());
        let first: Vec<f64> = embedding.chunks(D_MODEL).flat_map(|row| [row, row].concat()).collect();
        let state = |branch: usize| records[branch].state.as_ref().unwrap().iter().copied().collect::<Vec<f64>>();
        // Branch 6: the embedding, the state that ended block 0, and the partial state of block 1.
        let candidates = [first, state(3), state(5)];
        let dar_burn::nn::Scheme::Dar(dar) = toy.residual.scheme() else { panic!("a DAR model") };
        let query = vec(dar.sites[6].query.as_ref().unwrap().val());
        let (truth, _) = retrieve(&candidates, &query, D_MODEL, routing, EPS);
        let weights = records[6].retrieval.as_ref().unwrap();
        assert_eq!(weights.dim(), (3, TOKENS, 2));
        let value = |stream: usize| match routing {
            Routing::CrossKey | Routing::SelfKeyValue => stream,
            Routing::CrossValue => 1 - stream,
            Routing::FixedKeyValue => 1,
        };
        for (index, truth) in truth.iter().enumerate() {
            let (token, stream, feature) = (index / (2 * D_MODEL), index / D_MODEL % 2, index % D_MODEL);
            let place = (2 * token + value(stream)) * D_MODEL + feature;
            let got = (0..3).map(|r| weights[[r, token, stream]] * candidates[r][place]).sum::<f64>();
            assert_close(got, *truth, 1e-5);
        }
    }
}

#[test]
fn gates_explain_the_state() {
    let toy = toy(&ResidualConfig::dar_block(2));
    let records = records(&toy);
    // (17) with the branch output that is left over: P' - M(rho) P = beta y, so both streams give the same y.
    for branch in [1, 2, 3, 5] {
        let gates = records[branch].gates.as_ref().unwrap();
        let mixers = records[branch].mixers().unwrap();
        let (before, after) = (records[branch - 1].state.as_ref().unwrap(), records[branch].state.as_ref().unwrap());
        for token in 0..TOKENS {
            let carried = mixers.index_axis(Axis(0), token).dot(&before.index_axis(Axis(0), token));
            let wrote = &after.index_axis(Axis(0), token) - &carried;
            let output = |stream: usize| wrote.row(stream).mapv(|x| x / gates.beta[[token, stream]]);
            assert_all_close(&output(0), &output(1), 1e-4);
        }
    }
    assert!(records[4].gates.as_ref().unwrap().rho.is_none(), "a block's first branch has no partial state");
    assert!(records[4].mixers().is_none());
}

#[test]
fn chosen_branches_and_tokens_are_those_of_the_whole_record() {
    for config in [ResidualConfig::dar_block(2), ResidualConfig::mhc(3)] {
        let toy = toy(&config);
        let whole = records(&toy);
        let recorder = Arc::new(Recorder::new().branches([2, 5]).tokens([4, 1]));
        observed(&toy, recorder.clone());
        let chosen = recorder.records();
        assert_eq!(chosen.keys().copied().collect::<Vec<_>>(), [2, 5]);
        for (branch, record) in chosen.iter() {
            let state = whole[*branch].state.as_ref().unwrap().select(Axis(0), &[4, 1]);
            assert_eq!(record.state.as_ref(), Some(&state));
            assert_eq!(record.writes(), Some(&whole[*branch].writes().unwrap().select(Axis(0), &[4, 1])));
            let retrieval = whole[*branch].retrieval.as_ref().map(|weights| weights.select(Axis(1), &[4, 1]));
            assert_eq!(record.retrieval, retrieval);
        }
    }
}

/// The records of a pass that a change was made in: the change, then the recorder.
#[derive(Debug)]
struct Both(Intervention, Recorder);

impl Observer for Both {
    fn gates(&self, branch: usize, gates: dar_burn::ops::Gates) -> dar_burn::ops::Gates {
        self.1.gates(branch, self.0.gates(branch, gates))
    }
    fn maps(&self, branch: usize, maps: dar_burn::ops::StreamMaps) -> dar_burn::ops::StreamMaps {
        self.1.maps(branch, self.0.maps(branch, maps))
    }
    fn state(&self, branch: usize, state: Tensor<3>) -> Tensor<3> {
        self.1.state(branch, self.0.state(branch, state))
    }
}

fn changed(toy: &Toy, change: Intervention) -> (Vec<f64>, Vec<Record>) {
    let both = Arc::new(Both(change, Recorder::new()));
    let hidden = observed(toy, both.clone());
    let records = both.1.records();
    (hidden, (0..BRANCHES).map(|branch| records[&branch].clone()).collect())
}

#[test]
fn mixers_are_replaced_where_they_were_to_be() {
    for config in [ResidualConfig::mhc(3), ResidualConfig::hyper_connections(3), ResidualConfig::dar_block(4)] {
        let toy = toy(&config);
        let (clean, whole) = (observed(&toy, Arc::new(Unobserved)), records(&toy));
        let streams = whole[1].mixers().unwrap().dim().1;
        let (hidden, changed_records) = changed(&toy, Intervention::IdentityMixers(4..8));
        assert!(relative_error(&hidden, &clean, 0.0) > 1e-3, "{config:?}");
        for branch in 1..BRANCHES {
            let got = changed_records[branch].mixers().unwrap();
            for (token, mixer) in got.outer_iter().enumerate() {
                let own = whole[branch].mixers().unwrap().index_axis(Axis(0), token).to_owned();
                let truth = if branch < 4 { own } else { Array2::eye(streams) };
                assert_all_close(&mixer.to_owned(), &truth, 1e-6);
            }
        }
        // The mean of equal mixers is the mixer: fixing to it what the identity made equal changes nothing more.
        let mixers = vec![Some(Array2::eye(streams)); BRANCHES];
        let (fixed, _) = changed(&toy, Intervention::FixedMixers { branches: 4..8, mixers });
        assert_eq!(fixed, hidden, "{config:?}");
    }
}

#[test]
fn the_largest_weights_are_kept_at_the_same_sum() {
    for config in [ResidualConfig::mhc(3), ResidualConfig::dar_block(2)] {
        let toy = toy(&config);
        let whole = records(&toy);
        let reads = changed(&toy, Intervention::KeepReads(1)).1;
        let writes = changed(&toy, Intervention::KeepWrites(1)).1;
        // At the first branch nothing has changed yet, so the weights are those of the clean pass.
        for (got, clean) in [(reads[0].reads(), whole[0].reads()), (writes[0].writes(), whole[0].writes())] {
            let (got, clean) = (got.unwrap(), clean.unwrap());
            assert_all_close(&got.sum_axis(Axis(1)), &clean.sum_axis(Axis(1)), 1e-5);
            assert!(got.rows().into_iter().all(|row| row.iter().filter(|&&weight| weight > 0.0).count() == 1));
        }
        assert_eq!(reads[0].writes(), whole[0].writes());
        assert_eq!(writes[0].reads(), whole[0].reads());
        // All kept is nothing changed.
        let streams = whole[0].reads().unwrap().ncols();
        let (all, clean) = (changed(&toy, Intervention::KeepReads(streams)).0, observed(&toy, Arc::new(Unobserved)));
        assert!(relative_error(&all, &clean, 0.0) < 1e-5, "{config:?}");
    }
}

#[test]
fn one_stream_is_kept_behind_the_same_clean_prefix() {
    for config in [ResidualConfig::dar_block(1), ResidualConfig::mhc(2), ResidualConfig::Cascade] {
        let toy = toy(&config);
        let whole = records(&toy);
        for kept in [None, Some(0), Some(1)] {
            let recorder = Arc::new(Both(Intervention::KeepStream { branch: 3, kept }, Recorder::new()));
            observed(&toy, recorder.clone());
            let records = recorder.1.records();
            // Nothing before it changes, and right after it the other streams are zero.
            assert_eq!(records[&1].state, whole[1].state, "{config:?}");
            let (got, clean) = (records[&3].state.as_ref().unwrap(), whole[3].state.as_ref().unwrap());
            for stream in 0..2 {
                let got = got.index_axis(Axis(1), stream).to_owned();
                let truth = clean.index_axis(Axis(1), stream).to_owned();
                assert_all_close(&got, &if kept == Some(stream) { truth } else { truth * 0.0 }, 0.0);
            }
        }
    }
}

#[test]
fn chosen_tokens_and_streams_are_steered() {
    let separate = AttnResConfig::full().with_separate_values(SeparateValues::PerSource);
    for (config, streams) in [
        (ResidualConfig::Standard, 1),
        (ResidualConfig::Cascade, 2),
        (ResidualConfig::mhc(3), 3),
        (ResidualConfig::dar_block(2), 2),
        (ResidualConfig::AttnRes(separate), 2),
    ] {
        let toy = toy(&config);
        let whole = records(&toy);
        // The last token stays.
        let offsets = Array2::from_shape_fn((TOKENS, D_MODEL), |(token, feature)| match token {
            4 => 0.0,
            _ => token as f64 + 0.25 * feature as f64,
        });
        for stream in [None, Some(0), Some(streams - 1)] {
            let steer = Intervention::Steer { branch: 3, stream, offsets: offsets.clone() };
            let both = Arc::new(Both(steer, Recorder::new()));
            let hidden = observed(&toy, both.clone());
            let steered = both.1.records();
            assert_eq!(steered[&1].state, whole[1].state, "{config:?}");
            let (got, clean) = (steered[&3].state.as_ref().unwrap(), whole[3].state.as_ref().unwrap());
            for j in 0..streams {
                let moved =
                    if stream.is_none_or(|stream| stream == j) { offsets.clone() } else { offsets.clone() * 0.0 };
                let truth = clean.index_axis(Axis(1), j).to_owned() + moved;
                assert_all_close(&got.index_axis(Axis(1), j).to_owned(), &truth, 1e-5);
            }
            let clean = observed(&toy, Arc::new(Unobserved));
            let of = |hidden: &[f64], token: usize| hidden[token * D_MODEL..(token + 1) * D_MODEL].to_vec();
            assert_eq!(of(&hidden, 4), of(&clean, 4), "{config:?}");
            // Of separate values, stream 0 alone changes keys: what is retrieved changes with them.
            assert!(relative_error(&of(&hidden, 2), &of(&clean, 2), 0.0) > 1e-3, "{config:?}, {stream:?}");
        }
    }
}

#[test]
fn steering_that_does_not_fit_is_refused() {
    let toy = toy(&ResidualConfig::Standard);
    let steer = |stream, offsets| {
        panic_message(|| observed(&toy, Arc::new(Intervention::Steer { branch: 3, stream, offsets })))
    };
    assert_eq!(
        steer(None, Array2::zeros((TOKENS, 3))),
        "Intervention::Steer: `offsets` has shape [5, 3], expected [tokens, d_model] = [5, 8] as of the state"
    );
    assert_eq!(
        steer(Some(1), Array2::zeros((TOKENS, D_MODEL))),
        "Intervention::Steer: `stream` is 1, expected a stream below 1"
    );
}

#[test]
fn separate_values_are_recorded_beside_their_sources() {
    let separate = AttnResConfig::full().with_separate_values(SeparateValues::PerSource);
    let toy = toy(&ResidualConfig::AttnRes(separate));
    let records = records(&toy);
    let dar_burn::nn::Scheme::AttnRes(scheme) = toy.residual.scheme() else { panic!("an AttnRes model") };
    let maps = vec(scheme.value_maps.as_ref().unwrap().val());
    let maps = Array3::from_shape_vec((BRANCHES + 1, D_MODEL, D_MODEL), maps).unwrap();
    // (21): the value of a source is its map times the source; the embedding has the first map.
    for (branch, record) in records.iter().enumerate().take(BRANCHES) {
        let entry = record.state.as_ref().unwrap();
        assert_eq!(entry.dim(), (TOKENS, 2, D_MODEL));
        let source = entry.index_axis(Axis(1), 0);
        let truth = source.dot(&maps.index_axis(Axis(0), branch + 1).t());
        assert_all_close(&entry.index_axis(Axis(1), 1).to_owned(), &truth, 1e-5);
    }
    // The values that are recorded are those that the output read mixes.
    let embedding = Array2::from_shape_vec((TOKENS, D_MODEL), vec(embedding())).unwrap();
    let mut mixed = Array2::<f64>::zeros((TOKENS, D_MODEL));
    let weights = records[BRANCHES].retrieval.as_ref().unwrap();
    for entry in 0..=BRANCHES {
        let value = match entry {
            0 => embedding.dot(&maps.index_axis(Axis(0), 0).t()),
            _ => records[entry - 1].state.as_ref().unwrap().index_axis(Axis(1), 1).to_owned(),
        };
        for token in 0..TOKENS {
            mixed.row_mut(token).scaled_add(weights[[entry, token, 0]], &value.row(token));
        }
    }
    let hidden = observed(&toy, Arc::new(Unobserved));
    assert!(relative_error(&mixed.into_iter().collect::<Vec<_>>(), &hidden, 0.0) < 1e-5);
}

#[test]
fn an_exit_is_what_a_shorter_model_returns() {
    for (name, config) in schemes() {
        let toy = toy(&composed(&config));
        let mut state = toy.residual.start(embedding());
        for l in 0..BRANCHES {
            state = toy.residual.branch(state, |h| toy.branch(l, h));
        }
        let exit = vec(toy.residual.exit(&state));
        assert_eq!(exit, vec(toy.residual.finish(state)), "{name}");
    }
    // The plain residual after two branches, written out.
    let toy = toy(&ResidualConfig::Standard);
    let mut state = toy.residual.start(embedding());
    let mut x = embedding();
    for l in 0..2 {
        state = toy.residual.branch(state, |h| toy.branch(l, h));
        x = x.clone() + toy.branch(l, x);
    }
    assert_eq!(vec(toy.residual.exit(&state)), vec(x));
}

#[test]
fn a_fused_pass_has_no_exit_and_says_what_to_do() {
    let toy = toy(&ResidualConfig::dar_block(2));
    let state = toy.residual.start(embedding());
    assert_eq!(
        panic_message(|| toy.residual.exit(&state)),
        "Residual::exit: `state` is one of a fused pass, expected one of an observed or composed pass"
    );
}
