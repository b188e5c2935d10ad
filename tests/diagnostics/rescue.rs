use dar_burn::diagnostics::ndarray::{Array2, Array3, Axis, array};
use dar_burn::diagnostics::{KL_FLOOR, keep_stream, rescue_gain, rescue_gains};

use super::{assert_close, assert_refused, noise};

#[test]
fn the_formula_by_hand() {
    assert_eq!(rescue_gain(0.0, 2.0).unwrap(), 1.0);
    assert_eq!(rescue_gain(2.0, 2.0).unwrap(), 0.0);
    assert_eq!(rescue_gain(3.0, 2.0).unwrap(), -0.5);
    // The floor: a layer that moves nothing has nothing to recover.
    assert_eq!(KL_FLOOR, 1e-12);
    assert_eq!(rescue_gain(0.0, 0.0).unwrap(), 1.0);
    assert_close(rescue_gain(2e-12, 1e-20).unwrap(), -1.0, 1e-15);
}

#[test]
fn a_stream_that_is_everything_recovers_all_and_one_that_is_nothing_nothing() {
    // The model reads stream 1 only: logits = state of stream 1 times the head.
    let (states, head) = (noise(1, (5, 2, 4)), noise(2, (4, 11)));
    let logits = |states: &Array3<f64>| -> Array2<f64> { states.index_axis(Axis(1), 1).dot(&head) };
    let run = |kept| logits(&keep_stream(states.view(), kept).unwrap());
    let clean = logits(&states);
    let (first, second, zero) = (run(Some(0)), run(Some(1)), run(None));
    assert_eq!(rescue_gains(clean.view(), &[first.view(), second.view()], zero.view()).unwrap(), [0.0, 1.0]);
}

#[test]
fn tokens_are_averaged_before_the_quotient() {
    // Binary distributions (1/2, 1/2) against odds 3 : 1; the second token's output depends on the layer in no run.
    let (even, odd) = ([0.0, 0.0], [3_f64.ln(), 0.0]);
    let clean = array![even, even];
    let (keep, zero) = (array![even, odd], array![odd, even]);
    assert_close(rescue_gains(clean.view(), &[keep.view()], zero.view()).unwrap()[0], 0.0, 1e-15);
}

#[test]
fn keeping_a_stream_zeroes_the_others() {
    let states = array![[[1.0, 2.0], [3.0, 4.0], [5.0, 6.0]]];
    assert_eq!(keep_stream(states.view(), Some(1)).unwrap(), array![[[0.0, 0.0], [3.0, 4.0], [0.0, 0.0]]]);
    assert_eq!(keep_stream(states.view(), None).unwrap(), &states * 0.0);
    assert_refused(keep_stream(states.view(), Some(3)), "keep_stream: `kept` is 3, expected below streams = 3");
}

#[test]
fn what_is_no_divergence_is_refused() {
    assert_refused(rescue_gain(-1.0, 2.0), "rescue_gain: `kl_keep` is -1, expected a finite number ≥ 0");
    assert_refused(rescue_gain(1.0, f64::NAN), "rescue_gain: `kl_zero` is NaN, expected a finite number ≥ 0");
    let clean = noise(1, (2, 3));
    assert_refused(
        rescue_gains(clean.view(), &[], clean.view()),
        "rescue_gains: `keep` has shape [0], expected one run a stream",
    );
}
