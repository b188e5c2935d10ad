//! Every diagnostic against values worked out by hand, closed forms or a second formula in plain loops.

mod cka;
mod concept;
mod covariance;
mod curve;
mod depth;
mod distribution;
mod gates;
mod intervention;
mod mixers;
mod observer;
mod rescue;
mod retrieval;
mod routes;
mod spectrum;
mod steering;
mod streams;
mod supervision;
mod sweep;

use std::fmt::Debug;

use dar_burn::KernelError;
use dar_burn::diagnostics::ndarray::{Array, Array2, Dimension, ShapeBuilder};

use crate::support::host::values;

/// Seeded values in [-1, 1].
fn noise<D: Dimension, S: ShapeBuilder<Dim = D>>(seed: u64, shape: S) -> Array<f64, D> {
    let shape = shape.into_shape_with_order();
    Array::from_shape_vec(shape.clone(), values(seed, shape.size(), 1.0)).unwrap()
}

/// An orthogonal matrix: two reflections, so a rotation.
fn rotation(seed: u64, n: usize) -> Array2<f64> {
    let reflection = |seed| {
        let v = noise(seed, (n, 1));
        let norm = v.iter().map(|x| x * x).sum::<f64>();
        Array2::eye(n) - v.dot(&v.t()) * (2.0 / norm)
    };
    reflection(seed).dot(&reflection(seed + 1))
}

#[track_caller]
fn assert_close(got: f64, truth: f64, tolerance: f64) {
    assert!((got - truth).abs() <= tolerance, "{got}, expected {truth}");
}

#[track_caller]
fn assert_all_close<D: Dimension>(got: &Array<f64, D>, truth: &Array<f64, D>, tolerance: f64) {
    assert_eq!(got.shape(), truth.shape());
    for (got, truth) in got.iter().zip(truth) {
        assert_close(*got, *truth, tolerance);
    }
}

#[track_caller]
fn assert_refused<T: Debug>(result: Result<T, KernelError>, message: &str) {
    assert_eq!(result.unwrap_err().to_string(), message);
}
