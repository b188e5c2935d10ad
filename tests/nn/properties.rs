//! Random passes: whatever the sizes and the form, the fused pass and the graph of the equations agree.

use std::cell::Cell;

use dar_burn::nn::{AttnResConfig, DarConfig, SeparateValues, Tying};
use dar_burn::{ResidualConfig, Routing};
use proptest::prelude::*;
use proptest::test_runner::{Config, RngAlgorithm, TestRng, TestRunner};

use super::fused::{Sizes, agree_on, whole};
use crate::support::devices::devices;

/// Of all devices together.
const CASES: u32 = 500;
/// Of them on every device whose shaders compile in software.
const SOFTWARE_CASES: u32 = 25;

/// A form that has a history. `layers`: layers of a block.
fn config(layers: impl Strategy<Value = usize>) -> impl Strategy<Value = ResidualConfig> {
    let tying = prop_oneof![Just(Tying::PerBranch), Just(Tying::PerBlock)];
    let routing = prop::sample::select(Routing::ALL.to_vec());
    (layers, tying, routing, 0..4usize).prop_map(|(layers, tying, routing, form)| match form {
        0 => ResidualConfig::AttnRes(AttnResConfig::block(layers).with_tying(tying)),
        1 => ResidualConfig::AttnRes(AttnResConfig::full().with_separate_values(SeparateValues::Maps(layers))),
        _ => ResidualConfig::Dar(DarConfig::block(layers).with_tying(tying).with_routing(routing)),
    })
}

/// Anything small.
fn any() -> impl Strategy<Value = (ResidualConfig, Sizes)> {
    let sizes = (1..=4usize, 1..=9usize, 1..=5usize);
    (config(1..=3usize), sizes)
        .prop_map(|(config, (tokens, d_model, layers))| (config, Sizes { tokens, d_model, branches: 2 * layers }))
}

/// Only widths and blocks that the golden cases have, so that few shaders are compiled.
fn golden() -> impl Strategy<Value = (ResidualConfig, Sizes)> {
    let sizes = prop::sample::select(vec![(1, 10, 4), (2, 12, 8), (2, 8, 10)]);
    (sizes, 1..=5usize).prop_flat_map(|((layers, d_model, branches), tokens)| {
        config(Just(layers)).prop_map(move |config| (config, Sizes { tokens, d_model, branches }))
    })
}

fn check(
    cases: u32,
    seed: u64,
    strategy: impl Strategy<Value = (ResidualConfig, Sizes)>,
    check: impl Fn(&ResidualConfig, Sizes),
) {
    let mut bytes = [0; 32];
    bytes[..8].copy_from_slice(&seed.to_le_bytes());
    let config = Config { cases, failure_persistence: None, max_shrink_iters: 50, ..Config::default() };
    let mut runner = TestRunner::new_with_rng(config, TestRng::from_seed(RngAlgorithm::ChaCha, &bytes));
    let ran = Cell::new(0);
    let result = runner.run(&strategy, |(config, sizes)| {
        ran.set(ran.get() + 1);
        check(&config, sizes);
        Ok(())
    });
    if let Err(error) = result {
        panic!("seed {seed}: {error}");
    }
    assert_eq!(ran.get(), cases);
}

#[test]
fn random_passes_agree() {
    let devices = devices();
    let (software, fast): (Vec<_>, Vec<_>) = devices.into_iter().partition(|opened| opened.software);
    let seed = std::env::var("DAR_TEST_SEED").ok().and_then(|seed| seed.parse().ok()).unwrap_or(1);
    println!("random passes: seed {seed} (DAR_TEST_SEED sets another)");
    let on = |opened, config: &ResidualConfig, sizes| {
        let about = format!("{config:?}, {sizes:?}");
        agree_on(opened, &about, config, sizes, &|device| device.autodiff(), &whole);
    };
    for &opened in &software {
        check(SOFTWARE_CASES, seed, golden(), |config, sizes| on(opened, config, sizes));
    }
    let rest = CASES - SOFTWARE_CASES * software.len() as u32;
    for &opened in &fast {
        check(rest / fast.len() as u32, seed, any(), |config, sizes| on(opened, config, sizes));
    }
}
