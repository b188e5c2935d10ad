//! Smoothing of training curves (DAR paper, Figures 2, 4 and A.2).
//!
//! Figure A.2 draws the auxiliary loss of the expert router over training steps. The loss itself, which is 1 when all
//! experts are used evenly, is computed with the model:
//! [`DecoderOutput::balance_loss`](crate::model::DecoderOutput::balance_loss).

use dar_kernels::KernelError;
use ndarray::ArrayView1;

use super::check::{require_finite, require_value};

/// Steps over which the figures average.
pub const MOVING_AVERAGE_STEPS: usize = 300;

/// The mean of every full window of `window` successive values; value i of the output belongs to step `i + window - 1`.
///
/// # Errors
/// If the window is empty or longer than the curve, or a value is not finite.
pub fn moving_average(values: &[f64], window: usize) -> Result<Vec<f64>, KernelError> {
    require_finite("moving_average", "values", ArrayView1::from(values))?;
    let expected = format!("1 to the number of values, {}", values.len());
    require_value((1..=values.len()).contains(&window), "moving_average", "window", &expected, window)?;
    Ok(values.windows(window).map(|window| window.iter().sum::<f64>() / window.len() as f64).collect())
}
