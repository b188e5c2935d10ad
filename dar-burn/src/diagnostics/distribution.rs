//! Softmax distributions and how far apart they are.

use dar_kernels::KernelError;
use ndarray::{Array1, ArrayView1, ArrayView2};

use super::check::{require_finite, require_shape};

/// Natural logarithm of the softmax of finite logits.
pub(super) fn log_softmax(logits: ArrayView1<'_, f64>) -> Array1<f64> {
    let max = logits.iter().copied().fold(f64::NEG_INFINITY, f64::max);
    let partition = logits.iter().map(|logit| (logit - max).exp()).sum::<f64>().ln();
    logits.mapv(|logit| logit - max - partition)
}

/// `sum_y p_y (ln p_y - ln q_y)` in nats, from logarithms. Rounding below zero is zero.
pub(super) fn kl_of_logs(log_p: ArrayView1<'_, f64>, log_q: ArrayView1<'_, f64>) -> f64 {
    let kl: f64 = log_p.iter().zip(log_q).map(|(p, q)| p.exp() * (p - q)).sum();
    if kl < 0.0 { 0.0 } else { kl }
}

/// `KL(clean || changed)` in nats of the softmax over the vocabulary, mean over tokens.
///
/// # Shapes
/// - `clean`, `changed`: logits, `[tokens, vocab]`
///
/// # Errors
/// If the shapes differ or are empty, or a logit is not finite.
pub fn mean_kl(clean: ArrayView2<'_, f64>, changed: ArrayView2<'_, f64>) -> Result<f64, KernelError> {
    require_finite("mean_kl", "clean", clean)?;
    let expected = || format!("[tokens, vocab] = {:?} as of `clean`", clean.shape());
    require_shape(clean.shape() == changed.shape(), "mean_kl", "changed", expected(), changed.shape())?;
    require_finite("mean_kl", "changed", changed)?;
    let tokens = clean.rows().into_iter().zip(changed.rows());
    let sum: f64 = tokens.map(|(p, q)| kl_of_logs(log_softmax(p).view(), log_softmax(q).view())).sum();
    Ok(sum / clean.nrows() as f64)
}

/// `-sum_i s_i ln s_i` of shares that sum to 1, where empty shares count nothing.
pub(super) fn entropy(shares: impl IntoIterator<Item = f64>) -> f64 {
    shares.into_iter().filter(|&share| share > 0.0).map(|share| -share * share.ln()).sum()
}
