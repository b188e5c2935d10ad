//! Retrieval-weight maps (DAR paper, Figures 3 and A.3).

use dar_kernels::KernelError;
use ndarray::{Array2, ArrayView3, Axis};

use super::check::{require_each, require_finite, require_shape, require_value};

/// Mean retrieval weights `pi` (11) by depth: one map a stream, rows are target layers, columns are entries.
///
/// Column 0 is the embedding and column b the state at the end of block b. The partial state of block b, which the block's
/// later branches may also retrieve, is drawn in column b, the entry that it becomes; the paper's figures name historical
/// blocks only and leave open where the partial state is shown. So the weights of a row sum to 1, and the cells right of
/// the last candidate are blank: `NaN`.
#[derive(Debug, Clone, PartialEq)]
pub struct RetrievalMaps {
    /// Before attention (Figure 3): one map a stream, `[layers, entries]`.
    pub attention: Vec<Array2<f64>>,
    /// Before the feed-forward branch (Figure A.3): one map a stream, `[layers, entries]`.
    pub feed_forward: Vec<Array2<f64>>,
}

/// How far from 1 the weights of a token may sum, which half precision needs.
const SUM_TOLERANCE: f64 = 1e-2;

/// Averages the weights of all branches over tokens.
///
/// # Shapes
/// - `branches`: attention and feed-forward alternating from the first layer on, each `[candidates, tokens, streams]`;
///   candidates are the completed entries in order and, where the branch may retrieve it, the partial state
/// - output: as many columns as the branch with most candidates has
///
/// # Errors
/// If branches do not pair up to layers, numbers of streams differ, or the weights of a token are no probabilities.
pub fn retrieval_maps(branches: &[ArrayView3<'_, f64>]) -> Result<RetrievalMaps, KernelError> {
    let operation = "retrieval_maps";
    let fits = !branches.is_empty() && branches.len().is_multiple_of(2);
    require_shape(fits, operation, "branches", "two branches a layer", &[branches.len()])?;
    let (_, _, streams) = branches[0].dim();
    for branch in branches {
        let expected = format!("[candidates, tokens, streams] with streams = {streams}, the same for all");
        require_shape(branch.dim().2 == streams, operation, "branches", expected, branch.shape())?;
        require_finite(operation, "branches", *branch)?;
        require_each(operation, "branches", "weights ≥ 0", *branch, |weight| weight >= 0.0)?;
        for sum in &branch.sum_axis(Axis(0)) {
            let fits = (sum - 1.0).abs() <= SUM_TOLERANCE;
            require_value(fits, operation, "branches", "weights that sum to 1 over candidates", sum)?;
        }
    }
    let entries = branches.iter().map(|branch| branch.dim().0).max().expect("at least two branches");
    let map = |first: usize, stream: usize| {
        let mut map = Array2::from_elem((branches.len() / 2, entries), f64::NAN);
        for (mut row, branch) in map.rows_mut().into_iter().zip(branches.iter().skip(first).step_by(2)) {
            let mean = branch.index_axis(Axis(2), stream).mean_axis(Axis(1)).expect("at least one token");
            row.iter_mut().zip(mean).for_each(|(cell, weight)| *cell = weight);
        }
        map
    };
    let maps = |first| (0..streams).map(|stream| map(first, stream)).collect();
    Ok(RetrievalMaps { attention: maps(0), feed_forward: maps(1) })
}
