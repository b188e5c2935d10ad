use dar_burn::diagnostics::ndarray::{Array2, Array3, array};
use dar_burn::diagnostics::{mean_pair_cosine, stream_cosines};

use super::{assert_all_close, assert_close, assert_refused};

#[test]
fn two_tokens_by_hand() {
    // Streams 0 and 1: right angle, then 45 degrees; stream 2 is stream 0 scaled, then turned round.
    let states = array![[[1.0, 0.0], [0.0, 2.0], [3.0, 0.0]], [[1.0, 1.0], [0.0, 5.0], [-2.0, -2.0]]];
    let half = 0.5_f64.sqrt() / 2.0;
    let truth = array![[1.0, half, 0.0], [half, 1.0, -half], [0.0, -half, 1.0]];
    let cosines = stream_cosines(states.view()).unwrap();
    assert_all_close(&cosines, &truth, 1e-15);
    assert_close(mean_pair_cosine(cosines.view()).unwrap(), 0.0, 1e-15);
}

#[test]
fn equal_streams_have_cosine_one() {
    let states = Array3::from_shape_fn((4, 3, 5), |(t, _, d)| (t + 2 * d) as f64 - 3.5);
    let cosines = stream_cosines(states.view()).unwrap();
    assert_all_close(&cosines, &Array2::ones((3, 3)), 1e-14);
    assert_close(mean_pair_cosine(cosines.view()).unwrap(), 1.0, 1e-14);
}

#[test]
fn size_does_not_matter() {
    let states = array![[[3e-200, 0.0], [4e200, 3e200]]];
    assert_close(stream_cosines(states.view()).unwrap()[[0, 1]], 0.8, 1e-15);
}

#[test]
fn a_zero_stream_has_no_cosine() {
    let cosines = stream_cosines(array![[[1.0, 2.0], [0.0, 0.0]]].view()).unwrap();
    assert_close(cosines[[0, 0]], 1.0, 1e-15);
    assert!(cosines[[0, 1]].is_nan() && cosines[[1, 1]].is_nan());
}

#[test]
fn what_has_no_pairs_is_refused() {
    assert_refused(
        mean_pair_cosine(Array2::eye(1).view()),
        "mean_pair_cosine: `cosines` has shape [1, 1], expected [streams, streams] with streams ≥ 2",
    );
    assert_refused(
        stream_cosines(array![[[f64::NEG_INFINITY]]].view()),
        "stream_cosines: `states` is -inf at [0, 0, 0], expected finite numbers",
    );
}
