use dar_burn::diagnostics::Spectrum;
use dar_burn::diagnostics::ndarray::{Array2, array};

use super::{assert_close, assert_refused, noise, rotation};

#[test]
fn a_projector_has_its_rank() {
    let n = 12;
    let turn = rotation(1, n);
    for rank in 1..=n {
        let diagonal = Array2::from_shape_fn((n, n), |(i, j)| f64::from(i == j && i < rank));
        let projector = turn.dot(&diagonal).dot(&turn.t());
        let spectrum = Spectrum::of(projector.view()).unwrap();
        assert_close(spectrum.effective_rank(), rank as f64, 1e-9);
        assert_close(spectrum.trace(), rank as f64, 1e-12);
        if rank < n {
            assert_eq!(spectrum.condition_number(), f64::INFINITY);
        } else {
            assert_close(spectrum.condition_number(), 1.0, 1e-12);
        }
    }
}

#[test]
fn a_diagonal_by_hand() {
    let spectrum = Spectrum::of(array![[1.0, 0.0, 0.0], [0.0, 4.0, 0.0], [0.0, 0.0, 2.0]].view()).unwrap();
    for (got, truth) in spectrum.singular_values().iter().zip([4.0, 2.0, 1.0]) {
        assert_close(*got, truth, 1e-14);
    }
    assert_close(spectrum.condition_number(), 4.0, 1e-13);
    assert_close(spectrum.trace(), 7.0, 1e-14);
    // exp of the entropy of 4/7, 2/7, 1/7: 7 / (4^(4/7) 2^(2/7)) = 7 / 2^(10/7)
    assert_close(spectrum.effective_rank(), 7.0 / 2_f64.powf(10.0 / 7.0), 1e-13);
}

#[test]
fn singular_values_are_magnitudes() {
    let spectrum = Spectrum::of(array![[0.0, 2.0], [2.0, 0.0]].view()).unwrap(); // eigenvalues 2 and -2
    assert_close(spectrum.effective_rank(), 2.0, 1e-14);
    assert_close(spectrum.condition_number(), 1.0, 1e-14);
    assert_eq!(spectrum.trace(), 0.0);
}

#[test]
fn no_variance_has_no_rank() {
    let spectrum = Spectrum::of(Array2::zeros((3, 3)).view()).unwrap();
    assert_eq!((spectrum.effective_rank(), spectrum.trace()), (0.0, 0.0));
    assert_eq!(spectrum.condition_number(), f64::INFINITY);
    let one = Spectrum::of(array![[5.0]].view()).unwrap();
    assert_eq!((one.effective_rank(), one.condition_number(), one.trace()), (1.0, 1.0, 5.0));
}

#[test]
fn the_width_of_the_paper() {
    let samples = noise(1, (600, 516));
    let covariance = samples.t().dot(&samples) / 600.0;
    let spectrum = Spectrum::of(covariance.view()).unwrap();
    let values = spectrum.singular_values();
    assert_eq!(values.len(), 516);
    assert!(values.windows(2).all(|pair| pair[0] >= pair[1]));
    assert_close(values.iter().sum::<f64>() / spectrum.trace(), 1.0, 1e-12);
    let squares = |values: &mut dyn Iterator<Item = f64>| values.map(|value| value * value).sum::<f64>();
    let frobenius = squares(&mut covariance.iter().copied());
    assert_close(squares(&mut values.iter().copied()) / frobenius, 1.0, 1e-12);
}

#[test]
fn what_is_no_covariance_is_refused() {
    assert_refused(
        Spectrum::of(Array2::zeros((2, 3)).view()),
        "Spectrum::of: `covariance` has shape [2, 3], expected [d_model, d_model]",
    );
    assert_refused(
        Spectrum::of(Array2::zeros((0, 0)).view()),
        "Spectrum::of: `covariance` has shape [0, 0], expected at least one element an axis",
    );
    assert_refused(
        Spectrum::of(array![[1.0, 0.5], [0.25, 1.0]].view()),
        "Spectrum::of: `covariance` is a matrix whose halves differ by 2.5e-1, expected a symmetric one",
    );
    assert_refused(
        Spectrum::of(array![[1.0, 0.0], [0.0, f64::NAN]].view()),
        "Spectrum::of: `covariance` is NaN at [1, 1], expected finite numbers",
    );
}
