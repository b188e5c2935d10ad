//! Concept directions, and whether a straight line is the way to follow them (Stream separation, 5).
//!
//! ```text
//! primal = mean over pairs of target - base, scaled to length 1
//! dual   = (H + damping I)^-1 primal, scaled to length 1              natural gradient
//! cosine = <primal, dual>
//! ```
//!
//! The paper builds the direction from word pairs and prompts without a formula. Taken here is the mean difference of the
//! pairs. With the unembedding rows of the two words, a step along the dual direction moves the expected unembedding along
//! the primal one, which is the case that Park et al. prove optimal; with hidden states of two groups of prompts it is the
//! difference of the group means.
//!
//! H is close to singular at many layers, so its inverse needs damping. The default is that of the published code of Park
//! et al., whose protocol the paper follows. It is absolute: a metric of trace far below it leaves the direction as it is.

use dar_kernels::KernelError;
use linfa_linalg::cholesky::SolveCInplace;
use ndarray::{Array1, ArrayView1, ArrayView2, Axis};

use super::check::{require_finite, require_shape, require_value};
use super::spectrum::{Spectrum, check_symmetric};
use super::streams::norm;

/// Added to the diagonal of the metric before it is inverted.
pub const DAMPING: f64 = 1e-3;

/// Below this cosine of primal and dual direction, Euclidean steering is unreliable.
pub const UNRELIABLE_COSINE: f64 = 0.3;

/// Above this cosine of primal and dual direction, Euclidean steering works.
pub const RELIABLE_COSINE: f64 = 0.4;

/// Unit direction from the base words of pairs to their target words.
///
/// # Shapes
/// - `base`, `target`: `[pairs, d_model]`
/// - output: `[d_model]`
///
/// # Errors
/// If shapes differ or are empty, a value is not finite, or the mean difference is zero.
pub fn concept_direction(base: ArrayView2<'_, f64>, target: ArrayView2<'_, f64>) -> Result<Array1<f64>, KernelError> {
    require_finite("concept_direction", "base", base)?;
    let expected = format!("[pairs, d_model] = {:?} as of `base`", base.shape());
    require_shape(target.shape() == base.shape(), "concept_direction", "target", expected, target.shape())?;
    require_finite("concept_direction", "target", target)?;
    let mean = (&target - &base).mean_axis(Axis(0)).expect("at least one pair");
    unit("concept_direction", "target", mean)
}

/// Unit natural-gradient direction of a primal direction under a metric. A metric that is singular, if only up to
/// rounding, needs damping.
///
/// # Shapes
/// - `covariance`: `[d_model, d_model]`
/// - `primal`, output: `[d_model]`
///
/// # Errors
/// If shapes do not fit, a value is not finite, the direction is zero, the damping is negative, or the damped metric is
/// not positive definite.
pub fn dual_direction(
    covariance: ArrayView2<'_, f64>,
    primal: ArrayView1<'_, f64>,
    damping: f64,
) -> Result<Array1<f64>, KernelError> {
    let operation = "dual_direction";
    check_symmetric(operation, covariance)?;
    let d_model = covariance.nrows();
    let expected = format!("[d_model] = [{d_model}] as of `covariance`");
    require_shape(primal.len() == d_model, operation, "primal", expected, primal.shape())?;
    require_finite(operation, "primal", primal)?;
    let fits = damping.is_finite() && damping >= 0.0;
    require_value(fits, operation, "damping", "a finite number ≥ 0", damping)?;
    let primal = unit(operation, "primal", primal.to_owned())?;

    let mut metric = covariance.to_owned();
    metric.diag_mut().mapv_inplace(|variance| variance + damping);
    let dual = metric.solvec_into(primal.insert_axis(Axis(1))).map_err(|_| {
        KernelError::value(operation, "damping", "large enough to make the covariance positive definite", damping)
    })?;
    unit(operation, "damping", dual.remove_axis(Axis(1)))
}

/// What the cosine of primal and dual direction says about Euclidean steering at a layer.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum LinearSteering {
    /// The cosine is below [`UNRELIABLE_COSINE`]: steering along a straight line leaks probability to other tokens.
    Unreliable,
    /// The cosine is between the two thresholds, for which the paper says nothing.
    Undecided,
    /// The cosine is above [`RELIABLE_COSINE`].
    Reliable,
}

impl LinearSteering {
    /// The rule applied to one cosine.
    ///
    /// # Errors
    /// If the number is no cosine.
    pub fn of(cosine: f64) -> Result<Self, KernelError> {
        // Rounding may carry a cosine past 1.
        let fits = cosine.abs() <= 1.0 + 1e-9;
        require_value(fits, "LinearSteering::of", "cosine", "a number in [-1, 1]", cosine)?;
        Ok(match cosine {
            cosine if cosine < UNRELIABLE_COSINE => Self::Unreliable,
            cosine if cosine > RELIABLE_COSINE => Self::Reliable,
            _ => Self::Undecided,
        })
    }
}

/// The geometry of one layer: a row of Tables 1, 2 and 4 and a point of Figure 2.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct LayerGeometry {
    /// Directions that carry variance.
    pub effective_rank: f64,
    /// Largest over smallest singular value.
    pub condition_number: f64,
    /// Total variance.
    pub trace: f64,
    /// Cosine of the primal and the dual concept direction.
    pub cosine: f64,
    /// What the cosine says about Euclidean steering.
    pub steering: LinearSteering,
}

impl LayerGeometry {
    /// From the layer's covariance and a concept direction.
    ///
    /// # Shapes
    /// - `covariance`: `[d_model, d_model]`
    /// - `primal`: `[d_model]`, of any length but zero
    ///
    /// # Errors
    /// As of [`Spectrum::of`] and [`dual_direction`].
    pub fn measure(
        covariance: ArrayView2<'_, f64>,
        primal: ArrayView1<'_, f64>,
        damping: f64,
    ) -> Result<Self, KernelError> {
        let spectrum = Spectrum::of(covariance)?;
        let dual = dual_direction(covariance, primal, damping)?;
        let cosine = unit("LayerGeometry::measure", "primal", primal.to_owned())?.dot(&dual);
        Ok(Self {
            effective_rank: spectrum.effective_rank(),
            condition_number: spectrum.condition_number(),
            trace: spectrum.trace(),
            cosine,
            steering: LinearSteering::of(cosine)?,
        })
    }
}

/// The direction scaled to length 1.
pub(super) fn unit(
    operation: &'static str,
    argument: &'static str,
    direction: Array1<f64>,
) -> Result<Array1<f64>, KernelError> {
    let norm = norm(direction.view());
    let fits = norm.is_finite() && norm > 0.0;
    require_value(fits, operation, argument, "one of finite length > 0", format!("a direction of length {norm}"))?;
    Ok(direction / norm)
}
