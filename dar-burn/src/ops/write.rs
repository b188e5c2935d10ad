//! Write: constrained transport of the partial state and the gated write of the branch output (16, 17).
//!
//! ```text
//! P'^j = rho P^j + (1 - rho) P^(1-j) + beta^j y      (17, i > 1)
//! P'^j = beta^j y                                    (17, i = 1)
//! ```

use burn::tensor::Tensor;
use dar_kernels::Dims;

use super::numeric::{accumulate, exchange, require_device, require_dtype, require_shape};

/// The state after a later branch of a block.
///
/// # Shapes
/// - `partial`: `[tokens, 2, d_model]`
/// - `output`: `[tokens, d_model]`
/// - `beta`: `[tokens, 2]`, `rho`: `[tokens, 1]`
/// - output: `[tokens, 2, d_model]`, in the storage type
///
/// # Panics
/// If an operand does not fit `partial`.
#[track_caller]
pub fn write(partial: Tensor<3>, output: Tensor<2>, beta: Tensor<2>, rho: Tensor<2>) -> Tensor<3> {
    let Dims { tokens, d_model, .. } = Dims::of_state(partial.dims());
    require_shape("write", "partial", "[tokens, 2, d_model]", [tokens, 2, d_model], &partial);
    require_shape("write", "output", "[tokens, d_model]", [tokens, d_model], &output);
    require_shape("write", "rho", "[tokens, 1]", [tokens, 1], &rho);
    require_dtype("write", "output", &partial, &output);
    require_device("write", "output", &partial, &output);
    let dtype = partial.dtype();
    let partial = accumulate(partial);
    let rho = rho.cast(partial.dtype()).unsqueeze_dim::<3>(2);
    let carried = partial.clone() * rho.clone() + exchange(partial, 1) * (rho.neg() + 1.0); // M(rho) P
    (carried + gated("write", output, beta)).cast(dtype)
}

/// The state after the first branch of a block.
///
/// # Shapes
/// - `output`: `[tokens, d_model]`
/// - `beta`: `[tokens, 2]`
/// - output: `[tokens, 2, d_model]`, in the storage type
///
/// # Panics
/// If `beta` does not fit `output`.
#[track_caller]
pub fn write_first(output: Tensor<2>, beta: Tensor<2>) -> Tensor<3> {
    let dtype = output.dtype();
    gated("write_first", output, beta).cast(dtype)
}

/// `beta ⊗ y` (7), in the accumulator type. `[tokens, 2, d_model]`
#[track_caller]
fn gated(operation: &'static str, output: Tensor<2>, beta: Tensor<2>) -> Tensor<3> {
    let [tokens, _] = output.dims();
    require_shape(operation, "beta", "[tokens, 2]", [tokens, 2], &beta);
    require_device(operation, "beta", &output, &beta);
    let output = accumulate(output);
    let beta = beta.cast(output.dtype()).unsqueeze_dim::<3>(2);
    output.unsqueeze_dim::<3>(1) * beta
}
