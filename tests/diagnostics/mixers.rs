use dar_burn::diagnostics::ndarray::{Array2, Array3, array, s};
use dar_burn::diagnostics::{MixerMean, MixerPairs, identity_deviation, identity_mixers};

use super::{assert_all_close, assert_close, assert_refused, noise};

#[test]
fn the_identity_does_not_deviate() {
    assert_eq!(identity_deviation(identity_mixers(5, 4).view()).unwrap(), 0.0);
}

#[test]
fn of_doubly_stochastic_mixers_it_is_the_weight_of_other_streams() {
    for n in 2..6 {
        let uniform = Array3::from_elem((3, n, n), 1.0 / n as f64);
        assert_close(identity_deviation(uniform.view()).unwrap(), (n - 1) as f64 / n as f64, 1e-14);
    }
    // M(rho) of equation 16 with rho = 0.9 and 0.7, and an exchange.
    let mixers = array![[[0.9, 0.1], [0.1, 0.9]], [[0.7, 0.3], [0.3, 0.7]], [[0.0, 1.0], [1.0, 0.0]]];
    assert_close(identity_deviation(mixers.view()).unwrap(), (0.1 + 0.3 + 1.0) / 3.0, 1e-15);
}

#[test]
fn only_the_identity_does_not_deviate() {
    assert_eq!(identity_deviation((identity_mixers(1, 2) * 3.0).view()).unwrap(), 1.0);
    assert_eq!(identity_deviation((identity_mixers(1, 2) * -1.0).view()).unwrap(), 1.0);
}

#[test]
fn the_mean_is_over_all_tokens_of_all_batches() {
    let mixers = noise(1, (5, 3, 3));
    let mut mean = MixerMean::new(3);
    assert_eq!(mean.mean(), None);
    mean.push(mixers.slice(s![..4, .., ..])).unwrap();
    mean.push(mixers.slice(s![4.., .., ..])).unwrap();
    let truth = Array2::from_shape_fn((3, 3), |(i, j)| (0..5).map(|t| mixers[[t, i, j]]).sum::<f64>() / 5.0);
    assert_all_close(&mean.mean().unwrap(), &truth, 1e-15);
}

#[test]
fn pairs_leave_the_diagonal_out() {
    let (first, second) = (array![[0.5, 0.25, 0.25], [0.5, 0.0, 0.5], [0.0, 0.75, 0.25]], Array2::eye(3));
    let map = MixerPairs::measure(&[first.view(), second.view()]).unwrap();
    assert_eq!(map.pairs, [(0, 1), (0, 2), (1, 0), (1, 2), (2, 0), (2, 1)]);
    assert_eq!(map.weights, array![[0.25, 0.25, 0.5, 0.5, 0.0, 0.75], [0.0; 6]]);
}

#[test]
fn what_is_no_mixer_is_refused() {
    assert_refused(
        identity_deviation(Array3::zeros((2, 3, 4)).view()),
        "identity_deviation: `mixers` has shape [2, 3, 4], expected [tokens, n, n]",
    );
    assert_refused(
        identity_deviation(Array3::zeros((0, 2, 2)).view()),
        "identity_deviation: `mixers` has shape [0, 2, 2], expected at least one element an axis",
    );
    let mut broken = identity_mixers(2, 2);
    broken[[1, 0, 1]] = f64::NAN;
    assert_refused(
        identity_deviation(broken.view()),
        "identity_deviation: `mixers` is NaN at [1, 0, 1], expected finite numbers",
    );
    assert_refused(
        MixerMean::new(3).push(identity_mixers(1, 2).view()),
        "MixerMean::push: `mixers` has shape [1, 2, 2], expected [tokens, n, n] with n = 3",
    );
    let (two, three) = (Array2::eye(2), Array2::eye(3));
    assert_refused(
        MixerPairs::measure(&[two.view(), three.view()]),
        "MixerPairs::measure: `means` has shape [3, 3], expected [n, n] with n = 2, the same for all",
    );
    assert_refused(
        MixerPairs::measure(&[Array2::eye(1).view()]),
        "MixerPairs::measure: `means` has shape [1, 1], expected [n, n] with n = 2, the same for all",
    );
    assert_refused(MixerPairs::measure(&[]), "MixerPairs::measure: `means` has shape [0], expected at least one site");
}
