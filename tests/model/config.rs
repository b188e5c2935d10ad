use std::fs;

use burn::config::Config;
use dar_burn::model::{DecoderConfig, FeedForwardConfig, Method, MoeConfig, Preset};
use dar_burn::ops::{Implementation, Memory};
use dar_burn::{BranchLayout, ResidualConfig};

use super::{config, dense, mixture, residuals};
use crate::support::devices::flex;
use crate::support::panic_message;

#[test]
fn a_configuration_survives_its_file() {
    let folder = tempfile::TempDir::new().unwrap();
    let path = folder.path().join("decoder.json");
    let small = residuals().into_iter().flat_map(|(_, residual)| {
        [dense(), mixture()].map(|feed_forward| config(feed_forward, residual.clone()).with_rope_base(123.5))
    });
    let presets = Preset::ALL.into_iter().flat_map(|preset| Method::ALL.map(|method| preset.model(method)));
    for config in small.chain(presets) {
        config.save(&path).unwrap();
        assert_eq!(DecoderConfig::load(&path).unwrap(), config);
    }
}

#[test]
fn a_configuration_of_before_a_field_loads_with_its_default() {
    let folder = tempfile::TempDir::new().unwrap();
    let path = folder.path().join("decoder.json");
    let load = |json: &serde_json::Value| {
        fs::write(&path, json.to_string()).unwrap();
        DecoderConfig::load(&path)
    };
    for residual in [ResidualConfig::Standard, ResidualConfig::dar_block(2), ResidualConfig::attnres_block(2)] {
        let config = config(dense(), residual);
        let mut json = serde_json::to_value(&config).unwrap();
        for field in ["rope_base", "gated_attention", "norm_eps"] {
            assert!(json.as_object_mut().unwrap().remove(field).is_some(), "{field}");
        }
        for scheme in ["Dar", "AttnRes"] {
            if let Some(scheme) = json["residual"].get_mut(scheme).and_then(|scheme| scheme.as_object_mut()) {
                assert!(scheme.remove("memory").is_some() && scheme.remove("implementation").is_some());
            }
        }
        assert_eq!(load(&json).unwrap(), config);
        json.as_object_mut().unwrap().remove("layers");
        assert!(load(&json).unwrap_err().to_string().contains("layers"));
    }
    let residual = ResidualConfig::dar_block(2).with_memory(Memory::Leanest);
    let lean = config(dense(), residual.with_implementation(Implementation::Composed)).with_gated_attention(true);
    assert_eq!(load(&serde_json::to_value(&lean).unwrap()).unwrap(), lean);
}

#[test]
fn the_layout_names_two_alternating_branches_a_layer() {
    assert_eq!(config(dense(), ResidualConfig::Standard).layout(), BranchLayout::new(16, 8));
}

#[test]
fn what_no_decoder_can_have_is_refused() {
    type Change = fn(&mut DecoderConfig);
    let moe = |experts, chosen, width| FeedForwardConfig::MixtureOfExperts(MoeConfig::new(experts, chosen, width));
    let cases: [(Change, &str); 10] = [
        (|c| c.vocab_size = 0, "DecoderConfig: `vocab_size` is 0, expected at least 1"),
        (|c| c.layers = 0, "DecoderConfig: `layers` is 0, expected at least 1"),
        (
            |c| c.heads = 3,
            "DecoderConfig: `heads` is 3, expected heads of equal and even width (rotary encoding) in d_model = 16",
        ),
        (
            |c| (c.heads, c.kv_heads) = (16, 16),
            "DecoderConfig: `heads` is 16, expected heads of equal and even width (rotary encoding) in d_model = 16",
        ),
        (|c| c.kv_heads = 3, "DecoderConfig: `kv_heads` is 3, expected a divisor of heads = 4"),
        (
            |c| c.feed_forward = FeedForwardConfig::Dense { d_ff: 0 },
            "DecoderConfig: `feed_forward.d_ff` is 0, expected at least 1",
        ),
        (|c| c.rope_base = 0.0, "DecoderConfig: `rope_base` is 0, expected a finite number > 0"),
        (|c| c.norm_eps = f64::NAN, "DecoderConfig: `norm_eps` is NaN, expected a finite number ≥ 0"),
        (|c| c.residual = ResidualConfig::attnres_block(0), "AttnRes: `branches_per_block` is 0, expected at least 1"),
        (|c| c.residual = ResidualConfig::mhc(1), "Mhc: `streams` is 1, expected at least 2"),
    ];
    for (change, expected) in cases {
        let mut config = config(dense(), ResidualConfig::Standard);
        change(&mut config);
        let message = config.validate().unwrap_err().to_string();
        assert!(message.starts_with(expected), "{message}");
        assert_eq!(panic_message(|| config.init(&flex())), message);
    }
    for (feed_forward, expected) in [
        (moe(0, 1, 8), "`feed_forward.experts` is 0, expected at least 1"),
        (moe(4, 5, 8), "`feed_forward.experts_per_token` is 5, expected from 1 to experts = 4"),
        (moe(4, 0, 8), "`feed_forward.experts_per_token` is 0, expected from 1 to experts = 4"),
        (moe(4, 2, 0), "`feed_forward.d_expert` is 0, expected at least 1"),
    ] {
        let message = config(feed_forward, ResidualConfig::Standard).validate().unwrap_err().to_string();
        assert_eq!(message, format!("DecoderConfig: {expected}"));
    }
}
