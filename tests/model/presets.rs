use burn::module::Module;
use dar_burn::ResidualConfig;
use dar_burn::model::{Decoder, FeedForwardConfig, Method, Preset, stream_separation};

use crate::support::devices::flex;

/// `size,method,layers,heads,kv_heads,d_model,d_ff,K,printed_excl_M,printed_incl_M,exact_excl`
const TABLE: &str = include_str!("../data/parameter_counts.csv");

fn count(preset: Preset, method: Method) -> Decoder {
    preset.model(method).init(&flex())
}

#[test]
fn every_printed_count_is_reproduced_without_allocating() {
    let rows = TABLE.lines().filter(|line| !line.starts_with('#')).skip(1);
    let mut seen = 0;
    for row in rows {
        let fields: Vec<&str> = row.split(',').collect();
        let (preset, method): (Preset, Method) = (fields[0].parse().unwrap(), fields[1].parse().unwrap());
        let config = preset.model(method);
        let (layers, heads, kv_heads, d_model) = (config.layers, config.heads, config.kv_heads, config.d_model);
        assert_eq!([layers, heads, kv_heads, d_model].map(|number| number.to_string()), fields[2..6]);

        let decoder = config.init(&flex());
        let excluding = decoder.num_params() - decoder.embedding.num_params();
        assert_eq!(excluding.to_string(), fields[10], "{row}");
        assert_eq!(decoder.num_params() - excluding, 131_072 * d_model);
        assert!(!decoder.embedding.is_initialized());
        seen += 1;
    }
    assert_eq!(seen, 24);
}

#[test]
fn active_parameters_are_those_of_table_a5() {
    for (method, excluding, including) in
        [(Method::Residual, 1136, 1404), (Method::AttnResBlock, 1136, 1404), (Method::DarBlock, 1136, 1405)]
    {
        let decoder = count(Preset::Moe7B, method);
        let millions = |count: usize| (count + 500_000) / 1_000_000;
        assert_eq!(millions(decoder.active_params()), including, "{method}");
        assert_eq!(millions(decoder.active_params() - decoder.embedding.num_params()), excluding, "{method}");
    }
    let dense = count(Preset::Dense01B, Method::DarBlock);
    assert_eq!(dense.active_params(), dense.num_params());
}

#[test]
fn separate_values_match_the_parameters_of_plain_attention_residuals() {
    let config = Preset::Dense05B.model(Method::AttnResSepV);
    assert_eq!(config.feed_forward, FeedForwardConfig::Dense { d_ff: 4992 });
    let separate = config.init(&flex()).num_params();
    assert_eq!(separate, count(Preset::Dense05B, Method::AttnResFull).num_params());
    for preset in Preset::ALL {
        let (separate, plain) = (count(preset, Method::AttnResSepV), count(preset, Method::AttnResFull));
        let ratio = separate.num_params() as f64 / plain.num_params() as f64;
        assert!((ratio - 1.0).abs() < 2e-3, "{preset}: {ratio}");
    }
}

#[test]
fn residual_parameters_are_counted_apart() {
    let residual = |method| count(Preset::Dense05B, method).residual.num_params();
    assert_eq!(residual(Method::Residual), 0);
    assert_eq!(residual(Method::Cascade), 0);
    // 20 sites a stream form of 12 d + 8, two output queries
    assert_eq!(residual(Method::DarBlock), 20 * (12 * 1280 + 8) + 2 * 1280);
    assert_eq!(residual(Method::DarFull), 40 * (12 * 1280 + 8));
    for variant in [Method::DarSelfKv, Method::DarCrossV, Method::DarFixedKv] {
        assert_eq!(residual(variant), residual(Method::DarFull));
    }
    assert_eq!(residual(Method::Mhc), 40 * (24 * 4 * 1280 + 24 + 3));
    assert_eq!(residual(Method::Mhc2), 40 * (8 * 2 * 1280 + 8 + 3));
}

#[test]
fn the_model_of_stream_separation_has_45_4_million_parameters() {
    for residual in [ResidualConfig::Standard, ResidualConfig::Cascade] {
        let decoder = stream_separation(residual).init(&flex());
        // Per layer 4 d² + 6 d + 3 d 1408 + 2 d, once the final gain and the embedding.
        let d = 516;
        let count = 6 * (4 * d * d + 6 * d + 3 * d * 1408 + 2 * d) + d + 50_257 * d;
        assert_eq!((decoder.num_params(), count), (count, 45_425_544));
    }
}

#[test]
fn names_are_read_back() {
    for preset in Preset::ALL {
        assert_eq!(preset.name().to_lowercase().parse(), Ok(preset));
    }
    for method in Method::ALL {
        assert_eq!(method.name().to_uppercase().parse(), Ok(method));
    }
    assert_eq!(
        "2B".parse::<Preset>().unwrap_err().to_string(),
        r#"preset is "2B", expected one of 0.1B, 0.3B, 0.5B, 1B, 7B-MoE"#
    );
}

#[test]
fn recipes_take_the_steps_of_the_tables() {
    assert_eq!(Preset::Moe7B.recipe().steps(), 60_000);
    assert_eq!(Preset::Moe7B.recipe().balance_coefficient, Some(0.01));
    assert_eq!(Preset::Dense1B.recipe().steps(), 47_684);
    assert_eq!((Preset::Dense01B.recipe().steps(), Preset::Dense01B.recipe().warmup_steps), (1_908, 300));
}
