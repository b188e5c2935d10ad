//! Interventions on realised maps: what a run uses instead of what the model computed (mHC stream analysis, Figure 3).

use dar_kernels::KernelError;
use ndarray::{Array2, Array3, ArrayView2};

use super::check::{require_each, require_finite, require_shape, require_value};

/// Mixers that carry every stream forward on its own.
///
/// # Shapes
/// - output: `[tokens, streams, streams]`
pub fn identity_mixers(tokens: usize, streams: usize) -> Array3<f64> {
    Array3::from_shape_fn((tokens, streams, streams), |(_, i, j)| f64::from(i == j))
}

/// One mixer for all tokens, such as the [mean](super::MixerMean) of a calibration set.
///
/// # Shapes
/// - `mixer`: `[n, n]`
/// - output: `[tokens, n, n]`
///
/// # Errors
/// If the mixer is not square, or not finite.
pub fn fixed_mixers(mixer: ArrayView2<'_, f64>, tokens: usize) -> Result<Array3<f64>, KernelError> {
    let (n, columns) = mixer.dim();
    require_shape(n == columns, "fixed_mixers", "mixer", "[n, n]", mixer.shape())?;
    require_finite("fixed_mixers", "mixer", mixer)?;
    Ok(mixer.broadcast((tokens, n, n)).expect("tokens is a new axis").to_owned())
}

/// Each token's `kept` largest weights, scaled so that they sum to what all its weights summed to; the others are zero.
/// The lower stream wins a tie.
///
/// Weights must not be negative, as those of mHC are not: signed weights may sum to zero, and then no scale keeps the sum.
///
/// # Shapes
/// - `weights`, output: `[tokens, streams]`
///
/// # Errors
/// If a weight is negative or not finite, or `kept` is not 1 to `streams`.
pub fn keep_largest(weights: ArrayView2<'_, f64>, kept: usize) -> Result<Array2<f64>, KernelError> {
    let operation = "keep_largest";
    require_finite(operation, "weights", weights)?;
    require_each(operation, "weights", "weights ≥ 0", weights, |weight| weight >= 0.0)?;
    let streams = weights.ncols();
    require_value((1..=streams).contains(&kept), operation, "kept", &format!("1 to streams = {streams}"), kept)?;

    let mut output = Array2::zeros(weights.raw_dim());
    for (token, mut row) in weights.rows().into_iter().zip(output.rows_mut()) {
        let mut order: Vec<usize> = (0..streams).collect();
        order.sort_by(|&a, &b| token[b].total_cmp(&token[a])); // stable: equal weights stay in order
        let kept = &order[..kept];
        let kept_sum: f64 = kept.iter().map(|&stream| token[stream]).sum();
        if kept_sum > 0.0 {
            let scale = token.sum() / kept_sum;
            kept.iter().for_each(|&stream| row[stream] = token[stream] * scale);
        }
    }
    Ok(output)
}

/// Relative change of perplexity, `exp(changed_loss - clean_loss) - 1`, from mean cross entropies in nats: 0.019 where it
/// rises by 1.9 %.
///
/// # Errors
/// If a loss is not finite.
pub fn perplexity_change(clean_loss: f64, changed_loss: f64) -> Result<f64, KernelError> {
    for (argument, loss) in [("clean_loss", clean_loss), ("changed_loss", changed_loss)] {
        require_value(loss.is_finite(), "perplexity_change", argument, "a finite number", loss)?;
    }
    Ok((changed_loss - clean_loss).exp_m1())
}
