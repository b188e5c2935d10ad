//! How strongly residual mixers exchange streams (mHC stream analysis, 3 and B).
//!
//! Row i of a mixer holds the weights of new stream i over the old streams, as in
//! [`StreamMaps::res`](crate::ops::StreamMaps::res).

use dar_kernels::KernelError;
use ndarray::{Array2, ArrayView2, ArrayView3, Axis};

use super::check::{require_finite, require_shape};

/// Mean over tokens of `1 / (2n) sum_ij |M_ij - I_ij|`: 0 for the identity, and for doubly stochastic mixers the weight
/// that a stream takes from other streams, at most 1.
///
/// The paper's summary says that the measure is zero for separate skip paths and grows with the off-diagonal weight. This
/// one equals the mean off-diagonal row sum where rows sum to 1, as in mHC, and is also zero for the identity alone where
/// they do not, as in plain hyper-connections.
///
/// # Shapes
/// - `mixers`: `[tokens, n, n]`
///
/// # Errors
/// If the mixers are not square, there are none, or a weight is not finite.
pub fn identity_deviation(mixers: ArrayView3<'_, f64>) -> Result<f64, KernelError> {
    check_mixers("identity_deviation", mixers)?;
    let (tokens, n, _) = mixers.dim();
    let from_identity = |((_, i, j), weight): ((usize, usize, usize), &f64)| (weight - f64::from(i == j)).abs();
    Ok(mixers.indexed_iter().map(from_identity).sum::<f64>() / (2 * n * tokens) as f64)
}

/// The mean mixer of one site over a calibration set that comes in batches.
#[derive(Debug, Clone, PartialEq)]
pub struct MixerMean {
    sum: Array2<f64>,
    tokens: usize,
}

impl MixerMean {
    /// An empty mean of mixers of `streams` streams.
    pub fn new(streams: usize) -> Self {
        Self { sum: Array2::zeros((streams, streams)), tokens: 0 }
    }

    /// Adds the mixers of a batch.
    ///
    /// # Shapes
    /// - `mixers`: `[tokens, n, n]`
    ///
    /// # Errors
    /// If the mixers have another number of streams, there are none, or a weight is not finite.
    pub fn push(&mut self, mixers: ArrayView3<'_, f64>) -> Result<(), KernelError> {
        let (tokens, rows, columns) = mixers.dim();
        let n = self.sum.nrows();
        let expected = format!("[tokens, n, n] with n = {n}");
        require_shape((rows, columns) == (n, n), "MixerMean::push", "mixers", expected, mixers.shape())?;
        check_mixers("MixerMean::push", mixers)?;
        self.sum += &mixers.sum_axis(Axis(0));
        self.tokens += tokens;
        Ok(())
    }

    /// The mean over all tokens so far, `[n, n]`; `None` before the first.
    pub fn mean(&self) -> Option<Array2<f64>> {
        (self.tokens > 0).then(|| &self.sum / self.tokens as f64)
    }
}

/// Which streams exchange at which site: mean mixer weights by pair of streams.
#[derive(Debug, Clone, PartialEq)]
pub struct MixerPairs {
    /// New and old stream of each column, `(to, from)`, without a stream and itself.
    pub pairs: Vec<(usize, usize)>,
    /// Rows are sites in order of depth. `[sites, n (n - 1)]`
    pub weights: Array2<f64>,
}

impl MixerPairs {
    /// From the mean mixer of each site, in order of depth.
    ///
    /// # Shapes
    /// - `means`: each `[n, n]`
    ///
    /// # Errors
    /// If there are no sites or fewer than two streams, the mixers differ in shape, or a weight is not finite.
    pub fn measure(means: &[ArrayView2<'_, f64>]) -> Result<Self, KernelError> {
        let operation = "MixerPairs::measure";
        require_shape(!means.is_empty(), operation, "means", "at least one site", &[0])?;
        let n = means[0].nrows();
        for mean in means {
            let expected = format!("[n, n] with n = {}, the same for all", n.max(2));
            require_shape(mean.dim() == (n, n) && n >= 2, operation, "means", expected, mean.shape())?;
            require_finite(operation, "means", *mean)?;
        }
        let pairs: Vec<(usize, usize)> =
            (0..n).flat_map(|to| (0..n).filter(move |&from| from != to).map(move |from| (to, from))).collect();
        let weights = Array2::from_shape_fn((means.len(), pairs.len()), |(site, pair)| means[site][pairs[pair]]);
        Ok(Self { pairs, weights })
    }
}

fn check_mixers(operation: &'static str, mixers: ArrayView3<'_, f64>) -> Result<(), KernelError> {
    let (_, rows, columns) = mixers.dim();
    require_shape(rows == columns, operation, "mixers", "[tokens, n, n]", mixers.shape())?;
    require_finite(operation, "mixers", mixers)
}
