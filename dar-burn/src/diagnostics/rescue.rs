//! Rescue gain: how much of the output one stream recovers (DAR paper, Figure 6).
//!
//! ```text
//! R_j = 1 - KL(p_clean || p_keep-j) / max(KL(p_clean || p_zero-both), 1e-12)
//! ```
//!
//! The streams are replaced right after a layer's feed-forward write: one is kept and the others are zero, or all are
//! zero; the remaining layers run as they are. In DAR the state that is replaced is the current one; history entries
//! stored before stay, since the interventions start from the same clean prefix.
//!
//! The paper does not say how tokens enter. Both divergences are means over the sampled tokens here and the gain is the
//! quotient of the means: a token whose output does not depend on the layer would otherwise count as an arbitrarily large
//! negative gain.

use dar_kernels::KernelError;
use ndarray::{Array3, ArrayView2, ArrayView3, s};

use super::check::{require_finite, require_shape, require_value};
use super::distribution::mean_kl;

/// Smallest divisor of the rescue gain, in nats.
pub const KL_FLOOR: f64 = 1e-12;

/// Rescue gain from the divergence after keeping one stream and after keeping none: 1 for complete recovery, 0 for none,
/// below 0 where keeping the stream is worse than keeping nothing.
///
/// # Errors
/// If a divergence is negative or not finite.
pub fn rescue_gain(kl_keep: f64, kl_zero: f64) -> Result<f64, KernelError> {
    for (argument, kl) in [("kl_keep", kl_keep), ("kl_zero", kl_zero)] {
        require_value(kl.is_finite() && kl >= 0.0, "rescue_gain", argument, "a finite number ≥ 0", kl)?;
    }
    Ok(1.0 - kl_keep / kl_zero.max(KL_FLOOR))
}

/// Rescue gain of every stream at one layer, from the logits of the runs.
///
/// # Shapes
/// - `clean`, `zero`, each of `keep`: logits of the unmodified run, with all streams zero, and with only stream j kept,
///   `[tokens, vocab]`
/// - output: one gain a stream
///
/// # Errors
/// If shapes differ or are empty, or a logit is not finite.
pub fn rescue_gains(
    clean: ArrayView2<'_, f64>,
    keep: &[ArrayView2<'_, f64>],
    zero: ArrayView2<'_, f64>,
) -> Result<Vec<f64>, KernelError> {
    require_shape(!keep.is_empty(), "rescue_gains", "keep", "one run a stream", &[0])?;
    let kl_zero = mean_kl(clean, zero)?;
    keep.iter().map(|&keep| rescue_gain(mean_kl(clean, keep)?, kl_zero)).collect()
}

/// The states with only one stream kept and the others zero; with none kept, all are zero.
///
/// # Shapes
/// - `states`, output: `[tokens, streams, d_model]`
///
/// # Errors
/// If a state is not finite, or there is no such stream.
pub fn keep_stream(states: ArrayView3<'_, f64>, kept: Option<usize>) -> Result<Array3<f64>, KernelError> {
    require_finite("keep_stream", "states", states)?;
    let mut output = Array3::zeros(states.raw_dim());
    if let Some(stream) = kept {
        let (_, streams, _) = states.dim();
        require_value(stream < streams, "keep_stream", "kept", &format!("below streams = {streams}"), stream)?;
        output.slice_mut(s![.., stream, ..]).assign(&states.slice(s![.., stream, ..]));
    }
    Ok(output)
}
