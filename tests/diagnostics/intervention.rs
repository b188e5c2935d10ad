use dar_burn::diagnostics::ndarray::{Array2, array};
use dar_burn::diagnostics::{fixed_mixers, identity_mixers, keep_largest, perplexity_change};

use super::{assert_all_close, assert_close, assert_refused, noise};

#[test]
fn mixers_of_all_tokens_are_replaced() {
    let identity = array![[[1.0, 0.0], [0.0, 1.0]], [[1.0, 0.0], [0.0, 1.0]]];
    assert_eq!(identity_mixers(2, 2), identity);
    let mean = array![[0.75, 0.25], [0.5, 0.5]];
    assert_eq!(fixed_mixers(mean.view(), 2).unwrap(), array![[[0.75, 0.25], [0.5, 0.5]], [[0.75, 0.25], [0.5, 0.5]]]);
    assert_refused(
        fixed_mixers(Array2::zeros((2, 3)).view(), 1),
        "fixed_mixers: `mixer` has shape [2, 3], expected [n, n]",
    );
}

#[test]
fn the_largest_weights_keep_the_sum() {
    let weights = array![[1.0, 4.0, 2.0, 1.0], [0.5, 0.5, 0.5, 0.5], [0.0, 0.0, 0.0, 0.0]];
    let truth = array![[0.0, 16.0 / 3.0, 8.0 / 3.0, 0.0], [1.0, 1.0, 0.0, 0.0], [0.0, 0.0, 0.0, 0.0]];
    assert_all_close(&keep_largest(weights.view(), 2).unwrap(), &truth, 1e-14);
    assert_eq!(keep_largest(weights.view(), 4).unwrap(), weights);

    let random = noise(1, (20, 5)).mapv(f64::abs);
    for kept in 1..=5 {
        let sparse = keep_largest(random.view(), kept).unwrap();
        for (before, after) in random.rows().into_iter().zip(sparse.rows()) {
            assert_close(after.sum(), before.sum(), 1e-14);
            assert_eq!(after.iter().filter(|weight| **weight > 0.0).count(), kept);
        }
    }
}

#[test]
fn perplexity_rises_with_the_loss() {
    assert_close(perplexity_change(2.0, 2.0 + 1.019_f64.ln()).unwrap(), 0.019, 1e-14);
    assert_eq!(perplexity_change(3.0, 3.0).unwrap(), 0.0);
    assert_refused(
        perplexity_change(1.0, f64::NAN),
        "perplexity_change: `changed_loss` is NaN, expected a finite number",
    );
}

#[test]
fn what_cannot_be_kept_is_refused() {
    let weights = array![[1.0, 2.0]];
    for kept in [0, 3] {
        let message = format!("keep_largest: `kept` is {kept}, expected 1 to streams = 2");
        assert_refused(keep_largest(weights.view(), kept), &message);
    }
    assert_refused(
        keep_largest(array![[1.0, -2.0]].view(), 1),
        "keep_largest: `weights` is -2 at [0, 1], expected weights ≥ 0",
    );
    assert_refused(
        keep_largest(array![[f64::NAN, 1.0]].view(), 1),
        "keep_largest: `weights` is NaN at [0, 0], expected finite numbers",
    );
}
