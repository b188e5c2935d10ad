use dar_burn::ResidualConfig;

use super::{config, decoder, dense, host, mixture, residuals, tokens};
use crate::support::devices::flex;
use crate::support::host::relative_error;
use crate::support::panic_message;

/// One token at a time, three at a time with a rest, a prompt and single tokens, unequal.
const SPLITS: [&[usize]; 4] = [&[1; 8], &[3, 3, 2], &[6, 1, 1], &[2, 1, 4, 1]];

#[test]
fn steps_equal_the_whole_pass() {
    let device = flex();
    for (name, residual) in residuals() {
        for feed_forward in [dense(), mixture()] {
            let decoder = decoder(&config(feed_forward.clone(), residual.clone()), &device);
            let tokens = tokens(5, [2, 8], &device);
            let whole = host(decoder.forward(tokens.clone()).logits);
            for split in SPLITS {
                let mut cache = decoder.cache();
                assert!(cache.is_empty() && cache.batch().is_none());
                let mut logits = Vec::new();
                for &new in split {
                    logits.push(decoder.step(tokens.clone().narrow(1, cache.len(), new), &mut cache));
                }
                assert_eq!((cache.len(), cache.batch()), (8, Some(2)));
                let error = relative_error(&host(burn::tensor::Tensor::cat(logits, 1)), &whole, 0.0);
                assert!(error <= 1e-5, "{name}, {feed_forward:?}, {split:?}: {error}");
            }
        }
    }
}

#[test]
fn a_cloned_cache_continues_on_its_own() {
    let device = flex();
    let decoder = decoder(&config(dense(), ResidualConfig::dar_block(2)), &device);
    let [prompt, left, right] = [1, 2, 3].map(|seed| tokens(seed, [1, 4], &device));
    let mut cache = decoder.cache();
    decoder.step(prompt.clone(), &mut cache);
    let mut other = cache.clone();
    decoder.step(left, &mut other);
    let continued = host(decoder.step(right.clone(), &mut cache));
    let whole = decoder.forward(burn::tensor::Tensor::cat(vec![prompt, right], 1)).logits.narrow(1, 4, 4);
    assert!(relative_error(&continued, &host(whole), 0.0) <= 1e-5);
}

#[test]
fn a_foreign_cache_is_refused() {
    let device = flex();
    let small = decoder(&config(dense(), ResidualConfig::Standard), &device);
    let mut cache = small.cache();
    small.step(tokens(1, [2, 3], &device), &mut cache);

    let message = panic_message(|| small.step(tokens(1, [3, 1], &device), &mut cache));
    assert_eq!(message, "Decoder::step: `tokens` is a batch of 3, expected 2 sequences, as in the cache");

    let mut deeper = config(dense(), ResidualConfig::Standard);
    deeper.layers = 5;
    let message = panic_message(|| decoder(&deeper, &device).step(tokens(1, [2, 1], &device), &mut cache));
    assert_eq!(message, "Decoder::step: `cache` is of 4, expected a cache of this decoder's 5 layers");

    let message = panic_message(|| small.step(tokens(1, [2, 0], &device), &mut cache));
    assert_eq!(message, "Decoder::step: `tokens` is [2, 0], expected [batch, sequence] of at least [1, 1]");
}
