//! Conditioning of a covariance (Stream separation, 2).

use dar_kernels::KernelError;
use linfa_linalg::eigh::EigValsh;
use ndarray::ArrayView2;

use super::check::{require_finite, require_shape, require_value};
use super::distribution::entropy;

/// Singular values of a covariance, largest first.
#[derive(Debug, Clone, PartialEq)]
pub struct Spectrum {
    singular_values: Vec<f64>,
    trace: f64,
}

impl Spectrum {
    /// Of a symmetric matrix, whose singular values are the magnitudes of its eigenvalues.
    ///
    /// # Shapes
    /// - `covariance`: `[d_model, d_model]`
    ///
    /// # Errors
    /// If the matrix is not square, symmetric and finite.
    pub fn of(covariance: ArrayView2<'_, f64>) -> Result<Self, KernelError> {
        check_symmetric("Spectrum::of", covariance)?;
        let eigenvalues = covariance
            .eigvalsh()
            .map_err(|error| KernelError::value("Spectrum::of", "covariance", "a matrix with eigenvalues", error))?;
        let mut singular_values: Vec<f64> = eigenvalues.iter().map(|value| value.abs()).collect();
        singular_values.sort_unstable_by(|a, b| b.total_cmp(a));
        Ok(Self { singular_values, trace: covariance.diag().sum() })
    }

    /// Largest first. `[d_model]`
    pub fn singular_values(&self) -> &[f64] {
        &self.singular_values
    }

    /// `exp(-sum_i s_i ln s_i)` with `s_i = sigma_i / sum_j sigma_j`: how many directions carry the variance. Zero where
    /// there is no variance.
    pub fn effective_rank(&self) -> f64 {
        let sum: f64 = self.singular_values.iter().sum();
        if sum > 0.0 { entropy(self.singular_values.iter().map(|value| value / sum)).exp() } else { 0.0 }
    }

    /// `sigma_max / sigma_min`; infinite where the smallest is zero up to rounding, that is at most
    /// `d_model * f64::EPSILON` of the largest.
    pub fn condition_number(&self) -> f64 {
        let (largest, smallest) = (self.singular_values[0], self.singular_values[self.singular_values.len() - 1]);
        let rounding = self.singular_values.len() as f64 * f64::EPSILON;
        if smallest <= rounding * largest { f64::INFINITY } else { largest / smallest }
    }

    /// Total variance.
    pub fn trace(&self) -> f64 {
        self.trace
    }
}

/// Refuses what is no covariance: matrices that are not square, finite and symmetric up to rounding.
pub(super) fn check_symmetric(operation: &'static str, covariance: ArrayView2<'_, f64>) -> Result<(), KernelError> {
    let (rows, columns) = covariance.dim();
    require_shape(rows == columns, operation, "covariance", "[d_model, d_model]", covariance.shape())?;
    require_finite(operation, "covariance", covariance)?;
    let largest = covariance.iter().fold(0.0, |largest: f64, x| largest.max(x.abs()));
    let asymmetry = covariance.iter().zip(covariance.t()).fold(0.0, |most: f64, (x, y)| most.max((x - y).abs()));
    require_value(
        asymmetry <= 1e-9 * largest,
        operation,
        "covariance",
        "a symmetric one",
        format!("a matrix whose halves differ by {asymmetry:e}"),
    )
}
