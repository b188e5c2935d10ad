//! Residual read: merge, gates and branch input (13–16, A.6–A.10).
//!
//! ```text
//! h        = merge(history, partial)                      (A.10; the retrieved state for a block's first branch)
//! alpha    = sigmoid(s_a * norm([h0; h1]) W_a + b_a)      (13, 14)
//! beta     = 2 sigmoid(s_b * norm([h0; h1]) W_b + b_b)    (13, 14)
//! input    = alpha0 h0 + alpha1 h1                        (15)
//! rho      = sigmoid(s_r * norm([P0; P1]) W_r + b_r)      (16)
//! ```

use burn::tensor::{DType, Tensor, activation::sigmoid};
use dar_kernels::{Dims, Routing};

use super::numeric::{accumulate, require_device, require_shape, rms_norm};
use super::retrieve::{Retrieved, check_merge, merge_accumulated};

/// Parameters of one gate: `sigmoid(scale * (norm(x) W) + bias)`.
#[derive(Debug, Clone)]
pub struct GateWeights {
    /// `[2 * d_model, outputs]`
    pub weight: Tensor<2>,
    /// `[outputs]`
    pub bias: Tensor<1>,
    /// `[1]`
    pub scale: Tensor<1>,
}

/// Parameters of one residual site.
#[derive(Debug, Clone)]
pub struct SiteWeights {
    /// Mixes the two retrieved streams into the branch input: two outputs.
    pub alpha: GateWeights,
    /// Scales the write into each stream: two outputs.
    pub beta: GateWeights,
    /// Keeps or exchanges the partial streams: one output.
    pub rho: GateWeights,
}

/// The gates of one branch, in the accumulator type.
#[derive(Debug, Clone)]
pub struct Gates {
    /// How much of each retrieved stream the branch reads (14), in (0, 1). `[tokens, 2]`
    pub alpha: Tensor<2>,
    /// How much each stream takes of the branch output (14), in (0, 2). `[tokens, 2]`
    pub beta: Tensor<2>,
    /// How much of itself a partial stream keeps (16); none for a block's first branch. `[tokens, 1]`
    pub rho: Option<Tensor<2>>,
}

/// What a residual read computes.
#[derive(Debug, Clone)]
pub struct ResidualRead {
    /// Branch input (15), in the storage type. `[tokens, d_model]`
    pub input: Tensor<2>,
    /// Write gate (14), in the accumulator type. `[tokens, 2]`
    pub beta: Tensor<2>,
}

/// Residual read of a block's later branches: returns the branch input, beta, and rho `[tokens, 1]` of the partial state
/// (16), gates in the accumulator type.
///
/// # Shapes
/// - `retrieved`: lse `[tokens, 2]`, state `[tokens, 2, d_model]`
/// - `partial`: `[tokens, 2, d_model]`
/// - `query`: `[2, d_model]`
///
/// # Panics
/// If an operand does not fit `partial`, or there are not two streams.
#[track_caller]
pub fn residual_read(
    retrieved: Retrieved,
    partial: Tensor<3>,
    query: Tensor<2>,
    site: &SiteWeights,
    routing: Routing,
    eps: f64,
) -> (ResidualRead, Tensor<2>) {
    let (input, gates) = residual_read_observed(retrieved, Some((partial, query)), site, routing, eps, |gates| gates);
    (ResidualRead { input, beta: gates.beta }, gates.rho.expect("there is a partial state"))
}

/// [`residual_read`], or without a partial state and its query [`residual_read_first`], whose gates pass through `change`
/// before they are used.
#[track_caller]
pub(crate) fn residual_read_observed(
    retrieved: Retrieved,
    partial: Option<(Tensor<3>, Tensor<2>)>,
    site: &SiteWeights,
    routing: Routing,
    eps: f64,
    change: impl FnOnce(Gates) -> Gates,
) -> (Tensor<2>, Gates) {
    let dtype = retrieved.state.dtype();
    let (merged, rho) = match partial {
        None => {
            check_streams("residual_read_first", &retrieved.state);
            check_site("residual_read_first", site, retrieved.state.dims()[2], &retrieved.state);
            (accumulate(retrieved.state), None)
        }
        Some((partial, query)) => {
            check_merge("residual_read", &retrieved, &partial, &query, routing);
            check_streams("residual_read", &partial);
            check_site("residual_read", site, partial.dims()[2], &partial);
            let rho = sigmoid(gate_logit(partial.clone(), &site.rho, eps)); // (16)
            (merge_accumulated(retrieved, partial, query, routing, eps), Some(rho))
        }
    };
    mix(merged, site, eps, dtype, rho, change)
}

/// Residual read of a block's first branch, which has no partial state yet.
///
/// # Shapes
/// - `retrieved`: `[tokens, 2, d_model]`
///
/// # Panics
/// If `site` does not fit `retrieved`, or there are not two streams.
#[track_caller]
pub fn residual_read_first(retrieved: Tensor<3>, site: &SiteWeights, eps: f64) -> ResidualRead {
    check_streams("residual_read_first", &retrieved);
    check_site("residual_read_first", site, retrieved.dims()[2], &retrieved);
    let dtype = retrieved.dtype();
    let (input, gates) = mix(accumulate(retrieved), site, eps, dtype, None, |gates| gates);
    ResidualRead { input, beta: gates.beta }
}

/// Branch input and gates of the merged state, which is in the accumulator type.
fn mix(
    merged: Tensor<3>,
    site: &SiteWeights,
    eps: f64,
    storage: DType,
    rho: Option<Tensor<2>>,
    change: impl FnOnce(Gates) -> Gates,
) -> (Tensor<2>, Gates) {
    let alpha = sigmoid(gate_logit(merged.clone(), &site.alpha, eps)); // (14)
    let beta = sigmoid(gate_logit(merged.clone(), &site.beta, eps)) * 2.0; // (14)
    let gates = change(Gates { alpha, beta, rho });
    let input = (merged * gates.alpha.clone().unsqueeze_dim::<3>(2)).sum_dim(1).squeeze_dim::<2>(1); // (15)
    (input.cast(storage), gates)
}

/// `scale * (norm([x0; x1]) W) + bias` (13, 14, 16), in the accumulator type. `[tokens, outputs]`
pub(crate) fn gate_logit(x: Tensor<3>, gate: &GateWeights, eps: f64) -> Tensor<2> {
    let normed = rms_norm(x.flatten::<2>(1, 2), eps);
    let dtype = normed.dtype();
    let scale = gate.scale.clone().cast(dtype).unsqueeze_dim::<2>(0);
    let bias = gate.bias.clone().cast(dtype).unsqueeze_dim::<2>(0);
    normed.matmul(gate.weight.clone().cast(dtype)) * scale + bias
}

/// Panics unless `state` has two streams.
#[track_caller]
fn check_streams(operation: &'static str, state: &Tensor<3>) {
    let Dims { tokens, d_model, .. } = Dims::of_state(state.dims());
    require_shape(operation, "state", "[tokens, 2, d_model]", [tokens, 2, d_model], state);
}

/// Panics unless `site` fits a model of width `d_model` and lies on the device of `reference`.
#[track_caller]
pub(crate) fn check_site<const D: usize>(
    operation: &'static str,
    site: &SiteWeights,
    d_model: usize,
    reference: &Tensor<D>,
) {
    for (gate, outputs, names) in [
        (&site.alpha, 2, ["site.alpha.weight", "site.alpha.bias", "site.alpha.scale"]),
        (&site.beta, 2, ["site.beta.weight", "site.beta.bias", "site.beta.scale"]),
        (&site.rho, 1, ["site.rho.weight", "site.rho.bias", "site.rho.scale"]),
    ] {
        require_shape(operation, names[0], "[2 * d_model, outputs]", [2 * d_model, outputs], &gate.weight);
        require_shape(operation, names[1], "[outputs]", [outputs], &gate.bias);
        require_shape(operation, names[2], "[1]", [1], &gate.scale);
        require_device(operation, names[0], reference, &gate.weight);
        require_device(operation, names[1], reference, &gate.bias);
        require_device(operation, names[2], reference, &gate.scale);
    }
}
