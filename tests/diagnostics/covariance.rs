use dar_burn::diagnostics::ndarray::{Array1, Array2, ArrayView1, ArrayView2, array};
use dar_burn::diagnostics::{SoftmaxCovariance, Spectrum, TOP_TOKENS, softmax_covariance};

use super::{assert_all_close, assert_close, assert_refused, noise};

fn softmax(logits: ArrayView1<f64>) -> Array1<f64> {
    let exp = logits.mapv(f64::exp);
    &exp / exp.sum()
}

/// `sum_y p_y (gamma_y - mu)(gamma_y - mu)^T`, term by term.
fn direct(probabilities: ArrayView1<f64>, unembedding: ArrayView2<f64>) -> Array2<f64> {
    let mean = probabilities.dot(&unembedding);
    let d_model = unembedding.ncols();
    let mut covariance = Array2::zeros((d_model, d_model));
    for (row, probability) in unembedding.rows().into_iter().zip(probabilities) {
        let apart = &row - &mean;
        for ((i, j), cell) in covariance.indexed_iter_mut() {
            *cell += probability * apart[i] * apart[j];
        }
    }
    covariance
}

#[test]
fn three_tokens_by_hand() {
    let unembedding = array![[0.0, 0.0], [4.0, 0.0], [0.0, 4.0]];
    let logits = array![2_f64.ln(), 0.0, 0.0]; // 1/2, 1/4, 1/4; mean (1, 1)
    let covariance = |top| softmax_covariance(logits.view(), unembedding.view(), top).unwrap();
    for top in [3, TOP_TOKENS] {
        assert_all_close(&covariance(top), &array![[3.0, -1.0], [-1.0, 3.0]], 1e-14);
    }
    // 2/3 and 1/3 on the first two: the lower id wins the tie.
    assert_all_close(&covariance(2), &array![[32.0 / 9.0, 0.0], [0.0, 0.0]], 1e-14);
    assert_all_close(&covariance(1), &Array2::zeros((2, 2)), 1e-15);
}

#[test]
fn it_is_the_hessian_of_the_log_normaliser() {
    let (unembedding, state) = (noise(1, (30, 4)), noise(2, 4) * 3.0);
    let log_normaliser = |state: &Array1<f64>| unembedding.dot(state).mapv(f64::exp).sum().ln();
    let covariance = softmax_covariance(unembedding.dot(&state).view(), unembedding.view(), TOP_TOKENS).unwrap();
    let step = 1e-3;
    let hessian = Array2::from_shape_fn((4, 4), |(i, j)| {
        let shifted = |a: f64, b: f64| {
            let mut shifted = state.clone();
            shifted[i] += a * step;
            shifted[j] += b * step;
            log_normaliser(&shifted)
        };
        (shifted(1.0, 1.0) - shifted(1.0, -1.0) - shifted(-1.0, 1.0) + shifted(-1.0, -1.0)) / (4.0 * step * step)
    });
    assert_all_close(&covariance, &hessian, 1e-6);
}

#[test]
fn contexts_are_averaged() {
    // More tokens than are weighted at a time, and a mean far from zero.
    let unembedding = noise(1, (1500, 3)) + 7.0;
    let mut collected = SoftmaxCovariance::new(unembedding.view(), TOP_TOKENS).unwrap();
    let mut truth = Array2::zeros((3, 3));
    for seed in 2..7 {
        let logits = noise(seed, 1500) * 6.0;
        collected.push(logits.view()).unwrap();
        truth += &(direct(softmax(logits.view()).view(), unembedding.view()) / 5.0);
    }
    assert_eq!(collected.contexts(), 5);
    assert_all_close(&collected.finish().unwrap(), &truth, 1e-13);
}

#[test]
fn the_top_tokens_of_each_context_are_renormalised() {
    let unembedding = noise(1, (40, 5));
    let mut collected = SoftmaxCovariance::new(unembedding.view(), 9).unwrap();
    let mut truth = Array2::zeros((5, 5));
    for seed in 2..6 {
        let logits = noise(seed, 40) * 4.0 + Array1::range(0.0, 40.0, 1.0) * 1e-6; // no ties
        collected.push((&logits + 100.0).view()).unwrap();
        let mut order: Vec<usize> = (0..40).collect();
        order.sort_by(|&a, &b| logits[b].total_cmp(&logits[a]));
        let mut probabilities = logits.mapv(f64::exp);
        order[9..].iter().for_each(|&token| probabilities[token] = 0.0);
        probabilities /= probabilities.sum();
        truth += &(direct(probabilities.view(), unembedding.view()) / 4.0);
    }
    assert_all_close(&collected.finish().unwrap(), &truth, 1e-14);
}

#[test]
fn confident_contexts_keep_their_small_variance() {
    // Each context is sure of another token: the spread between contexts is 1e9 times the one within them.
    let unembedding = noise(1, (6, 3));
    let mut collected = SoftmaxCovariance::new(unembedding.view(), TOP_TOKENS).unwrap();
    let mut truth = Array2::zeros((3, 3));
    for token in 0..6 {
        let logits = Array1::from_shape_fn(6, |y| if y == token { 22.0 } else { 0.0 });
        collected.push(logits.view()).unwrap();
        truth += &(direct(softmax(logits.view()).view(), unembedding.view()) / 6.0);
    }
    let (got, truth) = (collected.finish().unwrap(), Spectrum::of(truth.view()).unwrap());
    assert!(truth.trace() < 1e-8);
    assert_close(Spectrum::of(got.view()).unwrap().trace() / truth.trace(), 1.0, 1e-6);
}

#[test]
fn what_has_no_covariance_is_refused() {
    let unembedding = noise(1, (4, 2));
    assert_refused(
        SoftmaxCovariance::new(unembedding.view(), 0),
        "SoftmaxCovariance::new: `top` is 0, expected at least 1",
    );
    assert_refused(
        SoftmaxCovariance::new(Array2::zeros((0, 2)).view(), 1),
        "SoftmaxCovariance::new: `unembedding` has shape [0, 2], expected at least one element an axis",
    );
    let mut covariance = SoftmaxCovariance::new(unembedding.view(), 3).unwrap();
    assert_refused(covariance.finish(), "SoftmaxCovariance::finish: `contexts` is 0, expected at least 1");
    assert_refused(
        covariance.push(array![1.0, 2.0].view()),
        "SoftmaxCovariance::push: `logits` has shape [2], expected [vocab] = [4]",
    );
    assert_refused(
        covariance.push(array![1.0, 2.0, f64::NAN, 0.0].view()),
        "SoftmaxCovariance::push: `logits` is NaN at [2], expected finite numbers",
    );
    assert_eq!(covariance.contexts(), 0);
}
