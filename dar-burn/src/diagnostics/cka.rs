//! Linear centred kernel alignment between stream states at different depths (DAR paper, Figure 5; Kornblith et al. 2019).
//!
//! ```text
//! K = X_c X_c^T, L = Y_c Y_c^T      X_c, Y_c: columns minus their means over tokens
//! CKA(X, Y) = <K, L> / (|K| |L|)    Frobenius product and norms
//! ```
//!
//! The paper samples the last [`LAST_TOKENS`] tokens of [`SEQUENCES`] sequences, after the feed-forward branch of each
//! layer. It names linear CKA only; the biased estimator above is the one of the paper it cites, and what is meant where
//! nothing else is said. Its value for independent states of width d is of order d / tokens, not zero.

use dar_kernels::KernelError;
use ndarray::{Array2, ArrayView2, ArrayView4, Axis, s};

use super::check::{require_finite, require_shape, require_value};

/// Sequences that Figures 5, 6 and A.4 sample.
pub const SEQUENCES: usize = 4;

/// Tokens at the end of every sequence that Figures 5, 6 and A.4 sample.
pub const LAST_TOKENS: usize = 128;

/// The states of one stream at the last tokens of every sequence, sequence by sequence.
///
/// # Shapes
/// - `states`: `[sequences, tokens, streams, d_model]`
/// - output: `[sequences * last, d_model]`
///
/// # Errors
/// If sequences are shorter than `last`, `last` is zero, or there is no such stream.
pub fn last_tokens(states: ArrayView4<'_, f64>, stream: usize, last: usize) -> Result<Array2<f64>, KernelError> {
    require_finite("last_tokens", "states", states)?;
    let (sequences, tokens, streams, d_model) = states.dim();
    require_value(stream < streams, "last_tokens", "stream", &format!("below streams = {streams}"), stream)?;
    require_value((1..=tokens).contains(&last), "last_tokens", "last", &format!("1 to tokens = {tokens}"), last)?;
    let sampled = states.slice(s![.., tokens - last.., stream, ..]);
    Ok(sampled.to_shape((sequences * last, d_model)).expect("the axes are merged").into_owned())
}

/// Linear CKA of two sets of states of the same tokens: 1 for states equal up to rotation, translation and scale; `NaN`
/// where either is the same at all tokens. The widths may differ.
///
/// # Shapes
/// - `x`: `[tokens, d_model]`
/// - `y`: `[tokens, d_model of y]`
///
/// # Errors
/// If there are fewer than two tokens, the numbers of tokens differ, or a state is not finite.
pub fn linear_cka(x: ArrayView2<'_, f64>, y: ArrayView2<'_, f64>) -> Result<f64, KernelError> {
    check_states("linear_cka", "x", x, x.nrows())?;
    check_states("linear_cka", "y", y, x.nrows())?;
    Ok(alignment(&unit_gram(x), &unit_gram(y)))
}

/// Linear CKA of every pair of states; in Figure 5 rows are the layers of stream 0, columns those of stream 1.
///
/// Memory: one `[tokens, tokens]` matrix for each of `rows` and `columns`.
///
/// # Shapes
/// - `rows`, `columns`: each `[tokens, d_model]`
/// - output: `[rows, columns]`, `NaN` where a state is the same at all tokens
///
/// # Errors
/// If there is no state or fewer than two tokens, numbers of tokens differ, or a state is not finite.
pub fn cka_matrix(rows: &[Array2<f64>], columns: &[Array2<f64>]) -> Result<Array2<f64>, KernelError> {
    let grams = |argument, states: &[Array2<f64>]| {
        require_shape(!states.is_empty(), "cka_matrix", argument, "at least one state", &[0])?;
        let gram = |state: &Array2<f64>| {
            check_states("cka_matrix", argument, state.view(), rows[0].nrows())?;
            Ok(unit_gram(state.view()))
        };
        states.iter().map(gram).collect::<Result<Vec<_>, KernelError>>()
    };
    let (row, column) = (grams("rows", rows)?, grams("columns", columns)?);
    Ok(Array2::from_shape_fn((row.len(), column.len()), |(i, j)| alignment(&row[i], &column[j])))
}

fn check_states(
    operation: &'static str,
    argument: &'static str,
    states: ArrayView2<'_, f64>,
    tokens: usize,
) -> Result<(), KernelError> {
    let expected = format!("[tokens, d_model] with tokens = {}, the same for all", tokens.max(2));
    require_shape(states.nrows() == tokens && tokens >= 2, operation, argument, expected, states.shape())?;
    require_finite(operation, argument, states)
}

/// The centred Gram matrix scaled to Frobenius norm 1; `None` for states that are the same at all tokens.
fn unit_gram(states: ArrayView2<'_, f64>) -> Option<Array2<f64>> {
    // Scaled first, so that squares of squares neither overflow nor vanish.
    let largest = states.iter().fold(0.0, |largest: f64, x| largest.max(x.abs()));
    if largest == 0.0 {
        return None;
    }
    let scaled = states.mapv(|x| x / largest);
    let centred = &scaled - &scaled.mean_axis(Axis(0)).expect("at least two tokens");
    // The mean of equal numbers is off by rounding, so what is left of a constant is not zero.
    let rounding = states.nrows() as f64 * f64::EPSILON;
    if centred.iter().all(|x| x.abs() <= rounding) {
        return None;
    }
    let gram = centred.dot(&centred.t());
    let norm = gram.iter().map(|x| x * x).sum::<f64>().sqrt();
    Some(gram / norm)
}

fn alignment(x: &Option<Array2<f64>>, y: &Option<Array2<f64>>) -> f64 {
    match (x, y) {
        (Some(x), Some(y)) => x.iter().zip(y).map(|(x, y)| x * y).sum(),
        _ => f64::NAN,
    }
}
