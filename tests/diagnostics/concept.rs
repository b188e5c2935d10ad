use dar_burn::diagnostics::ndarray::{Array1, Array2, array};
use dar_burn::diagnostics::{
    DAMPING, LayerGeometry, LinearSteering, concept_direction, dual_direction, softmax_covariance,
};

use super::{assert_all_close, assert_close, assert_refused, noise};

#[test]
fn the_direction_is_the_mean_difference_of_length_one() {
    let base = array![[1.0, 0.0], [0.0, 5.0]];
    let target = array![[3.0, 1.0], [4.0, 12.0]]; // differences (2, 1) and (4, 7): mean (3, 4)
    assert_all_close(&concept_direction(base.view(), target.view()).unwrap(), &array![0.6, 0.8], 1e-15);
}

#[test]
fn a_diagonal_metric_divides_by_its_variances() {
    let metric = array![[0.5, 0.0], [0.0, 2.0]];
    let dual = dual_direction(metric.view(), array![10.0, 10.0].view(), 0.0).unwrap();
    let norm = (4.0_f64 + 0.25).sqrt();
    assert_all_close(&dual, &array![2.0 / norm, 0.5 / norm], 1e-15);
    let damped = dual_direction(metric.view(), array![1.0, 1.0].view(), 1.5).unwrap();
    let norm = (0.25 + 1.0_f64 / 12.25).sqrt();
    assert_all_close(&damped, &array![0.5 / norm, 1.0 / (3.5 * norm)], 1e-15);
}

#[test]
fn the_inverse_metric_is_applied() {
    let samples = noise(1, (30, 6));
    let metric = samples.t().dot(&samples);
    let primal = noise(2, 6);
    let dual = dual_direction(metric.view(), primal.view(), 0.25).unwrap();
    assert_close(dual.dot(&dual), 1.0, 1e-14);
    let back = metric.dot(&dual) + &dual * 0.25;
    let length = |x: &Array1<f64>| x.dot(x).sqrt();
    assert_close(back.dot(&primal) / (length(&back) * length(&primal)), 1.0, 1e-13);
}

#[test]
fn a_round_metric_and_no_metric_leave_the_direction() {
    for metric in [Array2::eye(4) * 3.0, Array2::zeros((4, 4))] {
        let geometry = LayerGeometry::measure(metric.view(), noise(1, 4).view(), DAMPING).unwrap();
        assert_close(geometry.cosine, 1.0, 1e-14);
        assert_eq!(geometry.steering, LinearSteering::Reliable);
    }
}

#[test]
fn one_layer_by_hand() {
    // Primal (1, 1) / sqrt 2; dual ∝ (1/100, 1): cosine 1.01 / sqrt(2 · 1.0001).
    let metric = array![[100.0, 0.0], [0.0, 1.0]];
    let geometry = LayerGeometry::measure(metric.view(), array![2.0, 2.0].view(), 0.0).unwrap();
    assert_close(geometry.cosine, 1.01 / (2.0 * 1.0001_f64).sqrt(), 1e-14);
    assert_close(geometry.condition_number, 100.0, 1e-12);
    assert_close(geometry.trace, 101.0, 1e-12);
    assert_close(geometry.effective_rank, 101.0 / 100_f64.powf(100.0 / 101.0), 1e-12);

    // A direction along which the metric is a thousand times the rest turns away from itself.
    let steep = array![[1000.0, 0.0], [0.0, 1.0]];
    let primal = array![1.0, 0.1];
    let geometry = LayerGeometry::measure(steep.view(), primal.view(), 0.0).unwrap();
    assert_close(geometry.cosine, 0.011 / (1.01_f64 * (1e-6 + 1e-2)).sqrt(), 1e-14);
    assert_eq!(geometry.steering, LinearSteering::Unreliable);
}

#[test]
fn the_rule_has_two_thresholds() {
    use LinearSteering::{Reliable, Undecided, Unreliable};
    let cases = [
        (-1.0, Unreliable),
        (0.09, Unreliable),
        (0.3, Undecided),
        (0.35, Undecided),
        (0.4, Undecided),
        (0.41, Reliable),
        (1.0, Reliable),
    ];
    for (cosine, verdict) in cases {
        assert_eq!(LinearSteering::of(cosine).unwrap(), verdict, "{cosine}");
    }
    for cosine in ["NaN", "1.5", "inf"] {
        let message = format!("LinearSteering::of: `cosine` is {cosine}, expected a number in [-1, 1]");
        assert_refused(LinearSteering::of(cosine.parse().unwrap()), &message);
    }
}

#[test]
fn a_confident_prediction_needs_damping() {
    let unembedding = noise(1, (3, 5)); // three tokens span two of five directions
    let metric = softmax_covariance(noise(2, 3).view(), unembedding.view(), 3).unwrap();
    let primal = concept_direction(unembedding.select_row(0).view(), unembedding.select_row(1).view()).unwrap();
    let dual = dual_direction(metric.view(), primal.view(), DAMPING).unwrap();
    assert!(primal.dot(&dual) > 0.0);
    assert_refused(
        dual_direction((Array2::eye(2) * -1.0).view(), array![1.0, 0.0].view(), 0.5),
        "dual_direction: `damping` is 0.5, expected large enough to make the covariance positive definite",
    );
    assert_refused(
        dual_direction(Array2::zeros((2, 2)).view(), array![1.0, 0.0].view(), 0.0),
        "dual_direction: `damping` is 0, expected large enough to make the covariance positive definite",
    );
}

#[test]
fn what_has_no_direction_is_refused() {
    let base = noise(1, (3, 2));
    assert_refused(
        concept_direction(base.view(), base.view()),
        "concept_direction: `target` is a direction of length 0, expected one of finite length > 0",
    );
    assert_refused(
        concept_direction(base.view(), noise(2, (2, 2)).view()),
        "concept_direction: `target` has shape [2, 2], expected [pairs, d_model] = [3, 2] as of `base`",
    );
    let metric = Array2::eye(2);
    let dual = |primal: Array1<f64>, damping| dual_direction(metric.view(), primal.view(), damping);
    assert_refused(
        dual(array![1.0], 0.0),
        "dual_direction: `primal` has shape [1], expected [d_model] = [2] as of `covariance`",
    );
    assert_refused(
        dual(array![0.0, 0.0], 0.0),
        "dual_direction: `primal` is a direction of length 0, expected one of finite length > 0",
    );
    assert_refused(dual(array![f64::NAN, 0.0], 0.0), "dual_direction: `primal` is NaN at [0], expected finite numbers");
    assert_refused(dual(array![1.0, 0.0], -1.0), "dual_direction: `damping` is -1, expected a finite number ≥ 0");
}

/// One row as a matrix.
trait SelectRow {
    fn select_row(&self, row: usize) -> Array2<f64>;
}

impl SelectRow for Array2<f64> {
    fn select_row(&self, row: usize) -> Array2<f64> {
        self.select(dar_burn::diagnostics::ndarray::Axis(0), &[row])
    }
}
