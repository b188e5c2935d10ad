//! How far apart the streams point (mHC stream analysis, 3).

use dar_kernels::KernelError;
use ndarray::{Array2, ArrayView1, ArrayView2, ArrayView3, Axis};

use super::check::{require_finite, require_shape};

/// Mean over tokens of the cosine of every pair of streams, symmetric with ones on the diagonal; `NaN` for a pair of which
/// one is zero at some token.
///
/// # Shapes
/// - `states`: `[tokens, streams, d_model]`
/// - output: `[streams, streams]`
///
/// # Errors
/// If there are no states, or one is not finite.
pub fn stream_cosines(states: ArrayView3<'_, f64>) -> Result<Array2<f64>, KernelError> {
    require_finite("stream_cosines", "states", states)?;
    let (tokens, streams, _) = states.dim();
    let mut sum = Array2::zeros((streams, streams));
    for token in states.outer_iter() {
        let mut unit = token.to_owned();
        unit.axis_iter_mut(Axis(0)).for_each(|mut stream| {
            let norm = norm(stream.view());
            // Zero over zero marks a state without direction.
            stream.mapv_inplace(|x| x / norm);
        });
        sum += &unit.dot(&unit.t());
    }
    Ok(sum / tokens as f64)
}

/// Mean of a cosine matrix over its pairs of different streams.
///
/// # Shapes
/// - `cosines`: `[streams, streams]`
///
/// # Errors
/// If the matrix is not square, or there are fewer than two streams.
pub fn mean_pair_cosine(cosines: ArrayView2<'_, f64>) -> Result<f64, KernelError> {
    let (streams, columns) = cosines.dim();
    let fits = streams == columns && streams >= 2;
    require_shape(fits, "mean_pair_cosine", "cosines", "[streams, streams] with streams ≥ 2", cosines.shape())?;
    let pairs = cosines.indexed_iter().filter(|((i, j), _)| i < j).map(|(_, cosine)| cosine);
    Ok(pairs.sum::<f64>() * 2.0 / (streams * (streams - 1)) as f64)
}

/// Euclidean norm, also where squares would overflow or vanish.
pub(super) fn norm(x: ArrayView1<'_, f64>) -> f64 {
    let largest = x.iter().fold(0.0, |largest: f64, x| largest.max(x.abs()));
    if largest == 0.0 { 0.0 } else { largest * x.iter().map(|x| (x / largest).powi(2)).sum::<f64>().sqrt() }
}
