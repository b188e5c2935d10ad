//! What every composed operation shares: the accumulator type, the norm, operand checks.

use burn::tensor::{DType, Tensor};
use dar_kernels::{Dims, KernelError};

/// The type in which an operation computes on states of type `storage`: f64 for f64, else f32.
pub fn accumulator(storage: DType) -> DType {
    match storage {
        DType::F64 => DType::F64,
        _ => DType::F32,
    }
}

/// `x` in the accumulator type of its own type.
pub(crate) fn accumulate<const D: usize>(x: Tensor<D>) -> Tensor<D> {
    let dtype = accumulator(x.dtype());
    x.cast(dtype)
}

/// `1 / sqrt(mean(x²) + eps)` over the last axis, which stays with size 1, in the accumulator type.
pub(crate) fn inverse_rms<const D: usize>(x: Tensor<D>, eps: f64) -> Tensor<D> {
    (accumulate(x).square().mean_dim(D - 1) + eps).sqrt().recip()
}

/// RMSNorm over the last axis without a learnable gain (`Norm_h` in the papers), in the accumulator type.
pub fn rms_norm<const D: usize>(x: Tensor<D>, eps: f64) -> Tensor<D> {
    let x = accumulate(x);
    let inverse = inverse_rms(x.clone(), eps);
    x * inverse
}

/// Panics with the message of a refused operand.
#[track_caller]
pub(crate) fn require<T>(result: Result<T, KernelError>) -> T {
    match result {
        Ok(value) => value,
        Err(error) => panic!("{error}"),
    }
}

/// Panics unless `tensor` has the shape `expected`.
#[track_caller]
pub(crate) fn require_shape<const D: usize>(
    operation: &'static str,
    argument: &'static str,
    axes: &str,
    expected: [usize; D],
    tensor: &Tensor<D>,
) {
    require(Dims::expect(operation, argument, axes, &expected, &tensor.dims()));
}

/// Panics unless `tensor` is on the device of `reference`.
#[track_caller]
pub(crate) fn require_device<const D: usize, const E: usize>(
    operation: &'static str,
    argument: &'static str,
    reference: &Tensor<D>,
    tensor: &Tensor<E>,
) {
    let (expected, got) = (reference.device(), tensor.device());
    if expected != got {
        require::<()>(Err(KernelError::Device {
            operation,
            argument,
            expected: format!("{expected:?}"),
            got: format!("{got:?}"),
        }));
    }
}

/// Panics unless `tensor` has the element type of `reference`.
#[track_caller]
pub(crate) fn require_dtype<const D: usize, const E: usize>(
    operation: &'static str,
    argument: &'static str,
    reference: &Tensor<D>,
    tensor: &Tensor<E>,
) {
    let (expected, got) = (reference.dtype(), tensor.dtype());
    if expected != got {
        require::<()>(Err(KernelError::ElementType {
            operation,
            argument,
            expected: format!("{expected:?}"),
            got: format!("{got:?}"),
        }));
    }
}
