//! Seeded values, and a float64 oracle in plain loops that shares no code with the crate.

use dar_burn::Routing;
use rand::rngs::SmallRng;
use rand::{Rng, SeedableRng};

/// Values in [-scale, scale] that bf16 represents, so that every element type sees the same.
pub fn values(seed: u64, count: usize, scale: f64) -> Vec<f64> {
    let mut random = SmallRng::seed_from_u64(seed);
    (0..count).map(|_| half::bf16::from_f64(random.random_range(-scale..=scale)).to_f64()).collect()
}

/// Softmax over all candidates at once (equations 10–12 and 22): the state, and the log-sum-exp of the logits.
///
/// - `candidates`: each `[tokens][2][d_model]`
/// - `query`: `[2][d_model]`
/// - output: `[tokens][2][d_model]` and `[tokens][2]`
pub fn retrieve(
    candidates: &[Vec<f64>],
    query: &[f64],
    d_model: usize,
    routing: Routing,
    eps: f64,
) -> (Vec<f64>, Vec<f64>) {
    let tokens = candidates[0].len() / (2 * d_model);
    let (mut states, mut lse) = (Vec::new(), Vec::new());
    for token in 0..tokens {
        for stream in 0..2 {
            // (22): which stream of a candidate is the key and which the value.
            let (key, value) = match routing {
                Routing::CrossKey => (1 - stream, stream),
                Routing::SelfKeyValue => (stream, stream),
                Routing::CrossValue => (stream, 1 - stream),
                Routing::FixedKeyValue => (0, 1),
            };
            let row =
                |candidate: usize, stream: usize| &candidates[candidate][(token * 2 + stream) * d_model..][..d_model];
            let query = &query[stream * d_model..][..d_model];
            let logits: Vec<f64> = (0..candidates.len())
                .map(|candidate| {
                    let key = row(candidate, key);
                    let mean_square = key.iter().map(|x| x * x).sum::<f64>() / d_model as f64;
                    let dot = key.iter().zip(query).map(|(k, q)| k * q).sum::<f64>();
                    dot / (mean_square + eps).sqrt()
                })
                .collect();
            let max = logits.iter().copied().fold(f64::NEG_INFINITY, f64::max);
            let partition: f64 = logits.iter().map(|logit| (logit - max).exp()).sum();
            lse.push(max + partition.ln());
            states.extend((0..d_model).map(|feature| {
                let terms = logits.iter().enumerate();
                terms.map(|(r, logit)| (logit - max).exp() / partition * row(r, value)[feature]).sum::<f64>()
            }));
        }
    }
    (states, lse)
}

/// `rms(got - truth) / max(rms(truth), floor)`, infinite for what is not finite.
pub fn relative_error(got: &[f64], truth: &[f64], floor: f64) -> f64 {
    assert_eq!(got.len(), truth.len());
    if got.is_empty() {
        return 0.0;
    }
    if got.iter().any(|value| !value.is_finite()) {
        return f64::INFINITY;
    }
    let rms = |values: &mut dyn Iterator<Item = f64>| {
        (values.map(|value| value * value).sum::<f64>() / got.len() as f64).sqrt()
    };
    rms(&mut got.iter().zip(truth).map(|(got, truth)| got - truth)) / rms(&mut truth.iter().copied()).max(floor)
}
