//! Relative RMS error and its bounds.
//!
//! ```text
//! error = rms(got - truth) / max(rms(truth), 1e-3 rms(all cotangents) for a gradient, 1e-6)
//! ```
//!
//! | type | bound |
//! |---|---|
//! | f32 | 1e-5 |
//! | f64 | 1e-10 |
//! | f16, bf16 | twice the error of the composed graph on the reference device in the same type, at least 2 units in the last place |
//!
//! The error of a graph in a half type is the largest among the outputs of a case, or among its gradients. Rounding hits the
//! tensors of a deep graph at random: two graphs that are equally good differ by more than a factor of two in one tensor
//! or another.
//!
//! Extreme cases: at least 1e-3, and every vector of an output has to be its own winner: within ten times the bound of
//! the true vector, where another winner would be off by the order of 1.

use burn::tensor::DType;

use super::Reason;
use super::case::{Array, Case};
use super::graph::Results;

const F32_BOUND: f64 = 1e-5;
const F64_BOUND: f64 = 1e-10;
const EXTREME_BOUND: f64 = 1e-3;

/// The comparison of one case.
#[derive(Debug)]
pub struct Report {
    /// The tensor whose error is largest in proportion to its bound.
    pub tensor: String,
    /// Its relative RMS error.
    pub error: f64,
    /// Its bound.
    pub bound: f64,
    /// What fails, if anything does.
    pub failure: Option<Reason>,
}

/// The bound of every tensor of a case.
pub struct Bounds<'a> {
    case: &'a Case,
    least: f64,
    reference: Option<&'a Results>,
}

impl<'a> Bounds<'a> {
    pub fn new(case: &'a Case, dtype: DType, reference: Option<&'a Results>) -> Self {
        let least = match dtype {
            DType::F64 => F64_BOUND,
            DType::F16 => 2.0 * f64::from(half::f16::EPSILON),
            DType::BF16 => 2.0 * f64::from(half::bf16::EPSILON),
            _ => F32_BOUND,
        };
        let least = if case.is_extreme() && dtype != DType::F64 { least.max(EXTREME_BOUND) } else { least };
        Self { case, least, reference }
    }

    /// The bound of the outputs (`kind` is `out.`) or of the gradients (`grad.`).
    fn of(&self, kind: &str) -> Result<f64, Reason> {
        let Some(reference) = self.reference else {
            return Ok(self.least);
        };
        let mut bound = self.least;
        for (name, got) in reference.iter().filter(|(name, _)| name.starts_with(kind)) {
            let error = relative_error(self.case, name, got, self.case.tensor(name)?);
            // A reference that is not finite bounds nothing.
            if error.is_finite() {
                bound = bound.max(2.0 * error);
            }
        }
        Ok(bound)
    }
}

/// Compares `got` with the outputs and gradients of `case`; both have to name the same tensors.
pub fn compare(case: &Case, got: &Results, bounds: &Bounds) -> Result<Report, Reason> {
    let compared = |name: &&String| name.starts_with("out.") || name.starts_with("grad.");
    if let Some(name) = case.tensors.keys().filter(compared).find(|name| !got.contains_key(*name)) {
        return Err(format!("tensor `{name}` belongs to no input or output of the operation"));
    }
    let mut report = Report { tensor: String::new(), error: 0.0, bound: bounds.least, failure: None };
    let mut worst = -1.0;
    let [outputs, gradients] = [bounds.of("out.")?, bounds.of("grad.")?];
    for (name, got) in got {
        let truth = case.tensor(name)?;
        if truth.shape != got.shape {
            return Err(format!("tensor `{name}` has shape {:?}, the operation gives {:?}", truth.shape, got.shape));
        }
        let error = relative_error(case, name, got, truth);
        let bound = if name.starts_with("grad.") { gradients } else { outputs };
        let ratio = if error.is_nan() { f64::INFINITY } else { error / bound };
        let failure = report.failure.take().or_else(|| failure(case, name, got, truth, ratio, bound));
        if ratio > worst {
            worst = ratio;
            report = Report { tensor: name.clone(), error, bound, failure };
        } else {
            report.failure = failure;
        }
    }
    Ok(report)
}

fn failure(case: &Case, name: &str, got: &Array, truth: &Array, ratio: f64, bound: f64) -> Option<Reason> {
    if got.values.iter().any(|value| !value.is_finite()) {
        return Some(format!("`{name}` is not finite"));
    }
    if ratio > 1.0 {
        return Some(format!("`{name}` is past its bound"));
    }
    if case.is_extreme() && name.starts_with("out.") {
        let width = truth.shape.last().copied().unwrap_or(1).max(1);
        let mut rows = got.values.chunks(width).zip(truth.values.chunks(width));
        let other_winner = |(got, truth): (&[f64], &[f64])| distance(got, truth) > 10.0 * bound * rms(truth).max(1e-6);
        if let Some(row) = rows.position(other_winner) {
            return Some(format!("`{name}` has another winner in row {row}"));
        }
    }
    None
}

fn relative_error(case: &Case, name: &str, got: &Array, truth: &Array) -> f64 {
    let mut scale = rms(&truth.values).max(1e-6);
    if name.starts_with("grad.") {
        let cotangents = case.tensors.iter().filter(|(name, _)| name.starts_with("cot."));
        let cotangents: Vec<f64> = cotangents.flat_map(|(_, array)| array.values.iter().copied()).collect();
        scale = scale.max(1e-3 * rms(&cotangents));
    }
    distance(&got.values, &truth.values) / scale
}

/// RMS of the difference.
fn distance(got: &[f64], truth: &[f64]) -> f64 {
    rms(&got.iter().zip(truth).map(|(got, truth)| got - truth).collect::<Vec<f64>>())
}

/// Root mean square, zero of nothing.
fn rms(values: &[f64]) -> f64 {
    if values.is_empty() {
        return 0.0;
    }
    (values.iter().map(|value| value * value).sum::<f64>() / values.len() as f64).sqrt()
}
