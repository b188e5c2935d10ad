use burn::config::Config;
use dar_burn::nn::{AttnResConfig, DarConfig, HyperConfig, MhcConfig, SeparateValues, Tying};
use dar_burn::{BranchLayout, ResidualConfig};

use super::toy::schemes;
use crate::support::devices::flex;
use crate::support::panic_message;

fn layout() -> BranchLayout {
    BranchLayout::new(8, 12)
}

#[track_caller]
fn refuses(config: ResidualConfig, layout: BranchLayout, expected: &str) {
    let error = config.validate(&layout).expect_err("expected a refusal").to_string();
    assert_eq!(error, expected);
    // What `validate` refuses, `init` refuses in the same words.
    assert_eq!(panic_message(|| config.init(&layout, &flex())), error);
}

fn dar(config: DarConfig) -> ResidualConfig {
    ResidualConfig::Dar(config)
}

fn attn_res(config: AttnResConfig) -> ResidualConfig {
    ResidualConfig::AttnRes(config)
}

#[test]
fn every_form_is_accepted() {
    for (name, config) in schemes() {
        config.validate(&layout()).unwrap_or_else(|error| panic!("{name}: {error}"));
    }
}

#[test]
fn layouts_are_refused() {
    refuses(ResidualConfig::Standard, BranchLayout::new(0, 12), "BranchLayout: `d_model` is 0, expected at least 1");
    refuses(ResidualConfig::Standard, BranchLayout::new(8, 0), "BranchLayout: `branches` is 0, expected at least 1");
    refuses(
        ResidualConfig::Cascade,
        BranchLayout::new(8, 11),
        "Cascade: `layout.branches` is 11, expected an even number of alternating branches: attention and feed-forward \
         of a layer read the same state",
    );
}

#[test]
fn schemes_that_return_a_scaled_state_need_a_final_norm() {
    let layout = layout().with_final_norm(false);
    for (name, config) in schemes() {
        if !config.needs_final_norm() {
            config.validate(&layout).unwrap_or_else(|error| panic!("{name}: {error}"));
            continue;
        }
        let expected = format!(
            "{}: `layout.final_norm` is false, expected true: this scheme returns the residual state up to a scale, \
             which a norm after the last branch removes",
            config.name()
        );
        refuses(config, layout.clone(), &expected);
    }
}

/// With one branch a block both streams of an entry would be the same vector, scaled (equations 19–20).
#[test]
fn one_branch_a_block_is_refused_for_dar() {
    for branches in [0, 1] {
        refuses(
            dar(DarConfig::new(branches)),
            layout(),
            &format!(
                "Dar: `branches_per_block` is {branches}, expected at least 2: the entry of a one-branch block would be \
                 one branch output, scaled for each stream, so its two streams would be collinear and could not address \
                 each other (equations 19–20)"
            ),
        );
    }
    refuses(attn_res(AttnResConfig::new(0)), layout(), "AttnRes: `branches_per_block` is 0, expected at least 1");
}

#[test]
fn tying_per_block_needs_alternating_branches_and_whole_layers() {
    let tied = |branches| dar(DarConfig::new(branches).with_tying(Tying::PerBlock));
    refuses(
        tied(4),
        layout().with_alternating(false),
        "Dar: `layout.alternating` is false, expected true with tying per block: a block has one attention site and \
         one feed-forward site",
    );
    refuses(
        tied(3),
        layout(),
        "Dar: `branches_per_block` is 3, expected an even number with tying per block: whole layers",
    );
    refuses(
        attn_res(AttnResConfig::block(2).with_tying(Tying::PerBlock)),
        layout().with_alternating(false),
        "AttnRes: `layout.alternating` is false, expected true with tying per block: a block has one attention site \
         and one feed-forward site",
    );
    // Without tying neither matters.
    dar(DarConfig::new(3)).validate(&layout().with_alternating(false)).unwrap();
}

#[test]
fn separate_values_are_refused_where_a_block_is_open() {
    let maps = |config: AttnResConfig, maps| attn_res(config.with_separate_values(maps));
    refuses(
        maps(AttnResConfig::block(1), SeparateValues::PerSource),
        layout(),
        "AttnRes: `branches_per_block` is 2, expected 1 with separate values: equation 21 gives every source a map, and \
         an open block is not a source yet",
    );
    for count in [0, 14] {
        refuses(
            maps(AttnResConfig::full(), SeparateValues::Maps(count)),
            layout(),
            &format!("AttnRes: `separate_values` is {count}, expected from 1 to 13 maps, the number of sources"),
        );
    }
}

/// Numbers that f64 holds and f32 does not, and block sizes whose number of branches does not fit.
#[test]
fn huge_numbers_are_refused() {
    for config in [
        ResidualConfig::Hyper(HyperConfig::new().with_dynamic_scale(1e300)),
        ResidualConfig::Mhc(MhcConfig::new().with_own_logit(-1e300)),
        dar(DarConfig::block(1).with_eps(1e300)),
    ] {
        let error = config.validate(&layout()).unwrap_err().to_string();
        assert!(error.contains("that f32 holds"), "{error}");
    }
    // One block for the whole model, not a small one by wrapping around.
    let ResidualConfig::Dar(config) = ResidualConfig::dar_block((1 << 63) + 1) else { unreachable!() };
    assert_eq!(config.branches_per_block, usize::MAX);
}

#[test]
fn numbers_out_of_range_are_refused() {
    refuses(
        dar(DarConfig::block(1).with_write_gap(1.0)),
        layout(),
        "Dar: `write_gap` is 1, expected a number in [0, 1)",
    );
    for (config, scheme) in [
        (dar(DarConfig::block(1).with_eps(-1.0)), "Dar"),
        (attn_res(AttnResConfig::full().with_eps(-1.0)), "AttnRes"),
        (ResidualConfig::Hyper(HyperConfig::new().with_eps(-1.0)), "Hyper"),
        (ResidualConfig::Mhc(MhcConfig::new().with_eps(-1.0)), "Mhc"),
    ] {
        refuses(config, layout(), &format!("{scheme}: `eps` is -1, expected a finite number ≥ 0 that f32 holds"));
    }
    for keep in [0.0, 1.0, f64::NAN] {
        let error = dar(DarConfig::block(1).with_keep(keep)).validate(&layout()).unwrap_err().to_string();
        assert!(error.starts_with(&format!("Dar: `keep` is {keep}, expected a number in (0, 1)")), "{error}");
    }
    refuses(ResidualConfig::hyper_connections(0), layout(), "Hyper: `streams` is 0, expected at least 1");
    refuses(
        ResidualConfig::Hyper(HyperConfig::new().with_dynamic_scale(f64::INFINITY)),
        layout(),
        "Hyper: `dynamic_scale` is inf, expected a finite number that f32 holds",
    );
    refuses(
        ResidualConfig::mhc(1),
        layout(),
        "Mhc: `streams` is 1, expected at least 2: a doubly stochastic mixer of one stream is the number 1",
    );
    refuses(
        ResidualConfig::Mhc(MhcConfig::new().with_iterations(0)),
        layout(),
        "Mhc: `iterations` is 0, expected at least 1",
    );
    refuses(
        ResidualConfig::Mhc(MhcConfig::new().with_favour(1.0)),
        layout(),
        "Mhc: `favour` is 1, expected a number in (0, 1)",
    );
    refuses(
        ResidualConfig::Mhc(MhcConfig::new().with_own_logit(f64::NAN)),
        layout(),
        "Mhc: `own_logit` is NaN, expected a finite number that f32 holds",
    );
}

#[test]
fn configurations_survive_json() {
    let folder = tempfile::tempdir().unwrap();
    for (name, config) in schemes() {
        let file = folder.path().join("residual.json");
        config.save(&file).unwrap();
        assert_eq!(ResidualConfig::load(&file).unwrap(), config, "{name}");
        let text = serde_json::to_string(&config).unwrap();
        assert_eq!(serde_json::from_str::<ResidualConfig>(&text).unwrap(), config, "{name}: {text}");
    }
    let layout = layout().with_final_norm(false).with_alternating(false);
    let text = serde_json::to_string(&layout).unwrap();
    assert_eq!(serde_json::from_str::<BranchLayout>(&text).unwrap(), layout, "{text}");
}
