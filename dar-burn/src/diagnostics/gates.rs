//! Write gates against rescue gains (DAR paper, Figure A.4).
//!
//! ```text
//! g_l = mean over tokens of beta^1 - beta^0        write-gate gap
//! d_l = R_{l,1} - R_{l,0}                          rescue gap
//! d ≈ slope * g + intercept                        least squares over layers; r is Pearson's correlation
//! ```
//!
//! A positive gap means that stream 1 is written more. The paper's figure takes the gates of the feed-forward branches at
//! the last 128 tokens of four sequences.

use dar_kernels::KernelError;
use ndarray::{ArrayView1, ArrayView2, Axis};

use super::check::{require_finite, require_shape};

/// Mean over tokens of `beta^1 - beta^0`.
///
/// # Shapes
/// - `beta`: `[tokens, 2]`
///
/// # Errors
/// If there are not two streams, no tokens, or a gate is not finite.
pub fn write_gate_gap(beta: ArrayView2<'_, f64>) -> Result<f64, KernelError> {
    require_shape(beta.ncols() == 2, "write_gate_gap", "beta", "[tokens, 2]", beta.shape())?;
    require_finite("write_gate_gap", "beta", beta)?;
    let mean = beta.mean_axis(Axis(0)).expect("at least one token");
    Ok(mean[1] - mean[0])
}

/// Figure A.4: one point a layer, their line, and the mean size of the write-gate gap.
#[derive(Debug, Clone, PartialEq)]
pub struct GateRescue {
    /// Write-gate gap and rescue gap of each layer.
    pub points: Vec<(f64, f64)>,
    /// Least-squares line of the rescue gap over the write-gate gap.
    pub line: Line,
    /// Mean over layers of the absolute write-gate gap.
    pub mean_absolute_gate_gap: f64,
}

impl GateRescue {
    /// From the write-gate gaps and the rescue gains of streams 0 and 1, layer by layer.
    ///
    /// # Errors
    /// If there are no layers, their numbers differ, or a value is not finite.
    pub fn measure(gate_gaps: &[f64], rescue_gains: &[[f64; 2]]) -> Result<Self, KernelError> {
        let gaps: Vec<f64> = rescue_gains.iter().map(|[first, second]| second - first).collect();
        let expected = || format!("one pair a layer, {} as of `gate_gaps`", gate_gaps.len());
        let fits = gaps.len() == gate_gaps.len();
        require_shape(fits, "GateRescue::measure", "rescue_gains", expected(), &[gaps.len(), 2])?;
        require_finite("GateRescue::measure", "gate_gaps", ArrayView1::from(gate_gaps))?;
        require_finite("GateRescue::measure", "rescue_gains", ArrayView1::from(&gaps))?;
        let mean_absolute_gate_gap = gate_gaps.iter().map(|gap| gap.abs()).sum::<f64>() / gate_gaps.len() as f64;
        let line = Line::fit(gate_gaps, &gaps)?;
        Ok(Self { points: gate_gaps.iter().copied().zip(gaps).collect(), line, mean_absolute_gate_gap })
    }
}

/// A line through points, and how well they lie on one.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct Line {
    /// Least-squares slope of y over x; `NaN` where all x are equal.
    pub slope: f64,
    /// Value of the line at x = 0; `NaN` where all x are equal.
    pub intercept: f64,
    /// Pearson's correlation; `NaN` where all x or all y are equal.
    pub correlation: f64,
}

impl Line {
    /// The least-squares line through the points `(x_i, y_i)`.
    ///
    /// # Errors
    /// If there are no points, the lengths differ, or a coordinate is not finite.
    pub fn fit(x: &[f64], y: &[f64]) -> Result<Self, KernelError> {
        require_finite("Line::fit", "x", ArrayView1::from(x))?;
        require_shape(x.len() == y.len(), "Line::fit", "y", format!("[{}] as of `x`", x.len()), &[y.len()])?;
        require_finite("Line::fit", "y", ArrayView1::from(y))?;
        let constant = |values: &[f64]| values.iter().all(|&value| value == values[0]);
        let centred = |values: &[f64]| {
            let values = ArrayView1::from(values);
            let mean = values.mean().expect("at least one point");
            (mean, values.mapv(|value| value - mean))
        };
        let ((x_mean, x_centred), (y_mean, y_centred)) = (centred(x), centred(y));
        let (xx, xy) = (x_centred.dot(&x_centred), x_centred.dot(&y_centred));
        let slope = if constant(x) { f64::NAN } else { xy / xx };
        let correlation = if constant(x) || constant(y) {
            f64::NAN
        } else {
            (xy / (xx.sqrt() * y_centred.dot(&y_centred).sqrt())).clamp(-1.0, 1.0)
        };
        Ok(Self { slope, intercept: y_mean - slope * x_mean, correlation })
    }
}
