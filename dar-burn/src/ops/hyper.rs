//! Hyper-connections: realised maps per token, the read and write that apply them, and the Sinkhorn projection.
//!
//! ```text
//! input = sum_i pre_i X_i;      X'_i = sum_j res[i][j] X_j + post_i y
//! mHC:  z = norm(flatten X) phi
//!       pre = sigmoid(a0 z + b);  post = 2 sigmoid(a1 z + b);  res = Sinkhorn(a2 z + b)
//! HC:   pre_i = static_pre_i + s0 tanh(norm(X_i)·w_pre);  post likewise with s1
//!       res[j][i] = static_res[i][j] + s2 tanh(norm(X_i) W_res)[j]      (from stream i to stream j)
//! ```
//!
//! Everything is computed in the accumulator type whatever the type of the states.

use burn::tensor::{
    Tensor,
    activation::{log_softmax, sigmoid, softmax},
};
use dar_kernels::{Dims, KernelError};
use serde::{Deserialize, Serialize};

use super::numeric::{accumulate, accumulator, require, require_device, require_dtype, require_shape, rms_norm};

/// The published orders of the Sinkhorn–Knopp iteration.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default, Serialize, Deserialize)]
pub enum SinkhornOrder {
    /// `exp` of the logits, then alternately columns and rows; rows last (mHC paper).
    #[default]
    ColumnsThenRows,
    /// Softmax over the last axis, then columns, then alternately rows and columns, each division with 1e-6; used with
    /// `X'_n = sum_m M[m][n] X_m`, so that the last step normalises over the inputs here too.
    SoftmaxFirst,
}

/// Added to every divisor of [`SinkhornOrder::SoftmaxFirst`].
const SOFTMAX_FIRST_EPS: f64 = 1e-6;

/// Doubly stochastic matrices from logits by `iterations` Sinkhorn–Knopp iterations.
///
/// # Shapes
/// - `logits`: `[tokens, n, n]`
/// - output: `[tokens, n, n]`, in the accumulator type
///
/// # Panics
/// If the matrices are not square, or `iterations` is zero.
#[track_caller]
pub fn sinkhorn(logits: Tensor<3>, iterations: usize, order: SinkhornOrder) -> Tensor<3> {
    let [tokens, n, _] = logits.dims();
    require_shape("sinkhorn", "logits", "[tokens, n, n]", [tokens, n, n], &logits);
    if iterations == 0 {
        require::<()>(Err(KernelError::value("sinkhorn", "iterations", "at least 1", iterations)));
    }
    let logits = accumulate(logits);
    let divide = |m: Tensor<3>, axis: usize, eps: f64| {
        let sum = m.clone().sum_dim(axis);
        m / if eps > 0.0 { sum + eps } else { sum }
    };
    match order {
        SinkhornOrder::ColumnsThenRows => {
            // The first iteration on logits: a row far below the others would underflow to zeros and divide by zero. From
            // here on every column sums to at least 1 / n².
            let start = softmax(log_softmax(logits, 1), 2);
            (1..iterations).fold(start, |m, _| divide(divide(m, 1, 0.0), 2, 0.0))
        }
        SinkhornOrder::SoftmaxFirst => {
            let start = divide(softmax(logits, 2) + SOFTMAX_FIRST_EPS, 1, SOFTMAX_FIRST_EPS);
            (1..iterations).fold(start, |m, _| divide(divide(m, 2, SOFTMAX_FIRST_EPS), 1, SOFTMAX_FIRST_EPS))
        }
    }
}

/// The realised maps of one branch, in the accumulator type.
#[derive(Debug, Clone)]
pub struct StreamMaps {
    /// How much of each stream the branch reads. `[tokens, n]`
    pub pre: Tensor<2>,
    /// How much each stream takes of the branch output. `[tokens, n]`
    pub post: Tensor<2>,
    /// Residual mixer: row `i` holds the weights of new stream `i` over the old streams. `[tokens, n, n]`
    pub res: Tensor<3>,
}

/// Parameters of one mHC branch.
#[derive(Debug, Clone)]
pub struct MhcWeights {
    /// Rows stream-major, columns pre, post, res (row-major). `[n * d_model, 2n + n²]`
    pub phi: Tensor<2>,
    /// Static logits, in the order of `phi`'s columns. `[2n + n²]`
    pub bias: Tensor<1>,
    /// Gains of pre, post and res. `[3]`
    pub scale: Tensor<1>,
}

/// Realised maps of manifold-constrained hyper-connections.
///
/// # Shapes
/// - `streams`: `[tokens, n, d_model]`
///
/// # Panics
/// If `weights` does not fit `streams`.
#[track_caller]
pub fn mhc_maps(
    streams: Tensor<3>,
    weights: &MhcWeights,
    iterations: usize,
    order: SinkhornOrder,
    eps: f64,
) -> StreamMaps {
    let Dims { tokens, streams: n, d_model } = Dims::of_state(streams.dims());
    let columns = 2 * n + n * n;
    require_shape("mhc_maps", "weights.phi", "[n * d_model, 2n + n²]", [n * d_model, columns], &weights.phi);
    require_shape("mhc_maps", "weights.bias", "[2n + n²]", [columns], &weights.bias);
    require_shape("mhc_maps", "weights.scale", "[3]", [3], &weights.scale);
    require_device("mhc_maps", "weights.phi", &streams, &weights.phi);

    let z = rms_norm(streams.flatten::<2>(1, 2), eps);
    let dtype = z.dtype();
    let z = z.matmul(weights.phi.clone().cast(dtype));
    let bias = weights.bias.clone().cast(dtype).unsqueeze_dim::<2>(0);
    let scale = weights.scale.clone().cast(dtype).unsqueeze_dim::<2>(0);
    let logits = |part: usize, from: usize, length: usize| {
        z.clone().narrow(1, from, length) * scale.clone().narrow(1, part, 1) + bias.clone().narrow(1, from, length)
    };
    let mixer = sinkhorn(logits(2, 2 * n, n * n).reshape([tokens, n, n]), iterations, order);
    StreamMaps {
        pre: sigmoid(logits(0, 0, n)),
        post: sigmoid(logits(1, n, n)) * 2.0,
        res: match order {
            SinkhornOrder::ColumnsThenRows => mixer,
            SinkhornOrder::SoftmaxFirst => mixer.swap_dims(1, 2),
        },
    }
}

/// Parameters of one branch of dynamic hyper-connections.
#[derive(Debug, Clone)]
pub struct HyperWeights {
    /// `[n]`
    pub static_pre: Tensor<1>,
    /// `[n]`
    pub static_post: Tensor<1>,
    /// `[i][j]`: from stream i to stream j. `[n, n]`
    pub static_res: Tensor<2>,
    /// `[d_model]`
    pub w_pre: Tensor<1>,
    /// `[d_model]`
    pub w_post: Tensor<1>,
    /// `[d_model, n]`
    pub w_res: Tensor<2>,
    /// Scales of the dynamic parts of pre, post and res. `[3]`
    pub scale: Tensor<1>,
}

/// Realised maps of dynamic hyper-connections.
///
/// # Shapes
/// - `streams`: `[tokens, n, d_model]`
///
/// # Panics
/// If `weights` does not fit `streams`.
#[track_caller]
pub fn hyper_maps(streams: Tensor<3>, weights: &HyperWeights, eps: f64) -> StreamMaps {
    let Dims { tokens, streams: n, d_model } = Dims::of_state(streams.dims());
    require_shape("hyper_maps", "weights.static_pre", "[n]", [n], &weights.static_pre);
    require_shape("hyper_maps", "weights.static_post", "[n]", [n], &weights.static_post);
    require_shape("hyper_maps", "weights.static_res", "[n, n]", [n, n], &weights.static_res);
    require_shape("hyper_maps", "weights.w_pre", "[d_model]", [d_model], &weights.w_pre);
    require_shape("hyper_maps", "weights.w_post", "[d_model]", [d_model], &weights.w_post);
    require_shape("hyper_maps", "weights.w_res", "[d_model, n]", [d_model, n], &weights.w_res);
    require_shape("hyper_maps", "weights.scale", "[3]", [3], &weights.scale);
    require_device("hyper_maps", "weights.w_pre", &streams, &weights.w_pre);

    let normed = rms_norm(streams, eps); // each stream on its own
    let dtype = normed.dtype();
    let scale = weights.scale.clone().cast(dtype);
    let dynamic = Tensor::cat(
        vec![
            weights.w_pre.clone().cast(dtype).unsqueeze_dim(1),
            weights.w_post.clone().cast(dtype).unsqueeze_dim(1),
            weights.w_res.clone().cast(dtype),
        ],
        1,
    ); // [d_model, 2 + n]
    let dynamic = normed.reshape([tokens * n, d_model]).matmul(dynamic).tanh().reshape([tokens, n, 2 + n]);
    let part = |which: usize, from: usize, length: usize| {
        dynamic.clone().narrow(2, from, length) * scale.clone().narrow(0, which, 1).reshape([1, 1, 1])
    };
    let from_to = weights.static_res.clone().cast(dtype).unsqueeze_dim::<3>(0) + part(2, 2, n);
    StreamMaps {
        pre: weights.static_pre.clone().cast(dtype).unsqueeze_dim::<2>(0) + part(0, 0, 1).squeeze_dim::<2>(2),
        post: weights.static_post.clone().cast(dtype).unsqueeze_dim::<2>(0) + part(1, 1, 1).squeeze_dim::<2>(2),
        res: from_to.swap_dims(1, 2),
    }
}

/// Branch input: `sum_i pre_i X_i`.
///
/// # Shapes
/// - `streams`: `[tokens, n, d_model]`
/// - `pre`: `[tokens, n]`
/// - output: `[tokens, d_model]`, in the storage type
///
/// # Panics
/// If `pre` does not fit `streams`.
#[track_caller]
pub fn streams_read(streams: Tensor<3>, pre: Tensor<2>) -> Tensor<2> {
    let Dims { tokens, streams: n, .. } = Dims::of_state(streams.dims());
    require_shape("streams_read", "pre", "[tokens, n]", [tokens, n], &pre);
    let dtype = streams.dtype();
    let pre = pre.cast(accumulator(dtype)).unsqueeze_dim::<3>(2);
    (accumulate(streams) * pre).sum_dim(1).squeeze_dim::<2>(1).cast(dtype)
}

/// New streams: `X'_i = sum_j res[i][j] X_j + post_i y`.
///
/// # Shapes
/// - `streams`: `[tokens, n, d_model]`
/// - `output`: `[tokens, d_model]`
/// - output: `[tokens, n, d_model]`, in the storage type
///
/// # Panics
/// If an operand does not fit `streams`.
#[track_caller]
pub fn streams_write(streams: Tensor<3>, output: Tensor<2>, maps: &StreamMaps) -> Tensor<3> {
    let Dims { tokens, streams: n, d_model } = Dims::of_state(streams.dims());
    require_shape("streams_write", "output", "[tokens, d_model]", [tokens, d_model], &output);
    require_shape("streams_write", "maps.post", "[tokens, n]", [tokens, n], &maps.post);
    require_shape("streams_write", "maps.res", "[tokens, n, n]", [tokens, n, n], &maps.res);
    require_dtype("streams_write", "output", &streams, &output);
    require_device("streams_write", "output", &streams, &output);
    let dtype = streams.dtype();
    let acc = accumulator(dtype);
    let streams = accumulate(streams);
    let write = accumulate(output).unsqueeze_dim::<3>(1) * maps.post.clone().cast(acc).unsqueeze_dim::<3>(2);
    let res = maps.res.clone().cast(acc);
    // n is small: n multiply-adds over whole states beat `tokens` tiny matrix products.
    let carried = (0..n)
        .map(|j| streams.clone().narrow(1, j, 1) * res.clone().narrow(2, j, 1))
        .reduce(|sum, term| sum + term)
        .expect("streams_write: at least one stream");
    (carried + write).cast(dtype)
}
