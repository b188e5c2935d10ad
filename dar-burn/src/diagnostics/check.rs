//! Refusals that several measurements share.

use dar_kernels::KernelError;
use ndarray::{ArrayView, Dimension};

/// Refuses a shape that does not fit.
pub(super) fn require_shape(
    fits: bool,
    operation: &'static str,
    argument: &'static str,
    expected: impl Into<String>,
    got: &[usize],
) -> Result<(), KernelError> {
    if fits {
        return Ok(());
    }
    Err(KernelError::Shape { operation, argument, expected: expected.into(), got: got.to_vec() })
}

/// Refuses a number that is out of its range.
pub(super) fn require_value(
    fits: bool,
    operation: &'static str,
    argument: &'static str,
    expected: &str,
    got: impl ToString,
) -> Result<(), KernelError> {
    if fits { Ok(()) } else { Err(KernelError::value(operation, argument, expected, got)) }
}

/// Refuses arrays without elements, and the first element that is infinite or NaN.
pub(super) fn require_finite<D: Dimension>(
    operation: &'static str,
    argument: &'static str,
    values: ArrayView<'_, f64, D>,
) -> Result<(), KernelError> {
    require_shape(!values.is_empty(), operation, argument, "at least one element an axis", values.shape())?;
    require_each(operation, argument, "finite numbers", values, f64::is_finite)
}

/// Refuses the first element that `fits` rejects.
pub(super) fn require_each<D: Dimension>(
    operation: &'static str,
    argument: &'static str,
    expected: &str,
    values: ArrayView<'_, f64, D>,
    fits: impl Fn(f64) -> bool,
) -> Result<(), KernelError> {
    match values.iter().enumerate().find(|&(_, &value)| !fits(value)) {
        None => Ok(()),
        Some((flat, value)) => {
            let place = place(flat, values.shape());
            Err(KernelError::value(operation, argument, expected, format!("{value} at {place:?}")))
        }
    }
}

/// Index on every axis of the element at `flat` in row-major order.
fn place(mut flat: usize, shape: &[usize]) -> Vec<usize> {
    let mut place: Vec<usize> = shape
        .iter()
        .rev()
        .map(|&length| {
            let index = flat % length;
            flat /= length;
            index
        })
        .collect();
    place.reverse();
    place
}
