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

/// The norm in front of a branch: `gain * x / sqrt(mean(x²) + eps)`, for a read to fold in.
#[derive(Debug, Clone)]
pub struct BranchNorm {
    /// `[d_model]`
    pub gain: Tensor<1>,
    /// Added to the mean square.
    pub eps: f64,
}

impl BranchNorm {
    /// Normalises the last axis, in the accumulator type; the output has the element type of `x`.
    ///
    /// # Shapes
    /// - `x`, output: `[.., d_model]`
    pub fn apply<const D: usize>(&self, x: Tensor<D>) -> Tensor<D> {
        let dtype = x.dtype();
        let gain = self.gain.clone().cast(accumulator(dtype)).unsqueeze();
        (rms_norm(x, self.eps) * gain).cast(dtype)
    }
}

impl From<&burn::nn::RmsNorm> for BranchNorm {
    fn from(norm: &burn::nn::RmsNorm) -> Self {
        Self { gain: norm.gamma.val(), eps: norm.epsilon }
    }
}

/// Stacks on a new first axis, also without tokens, where [`Tensor::stack`] cannot: Burn's reshape reads a 0 as "the size
/// that was at this position", so an axis may be added behind an empty one only, and has to be moved.
pub(crate) fn stack_first<const D: usize, const E: usize>(parts: Vec<Tensor<D>>) -> Tensor<E> {
    Tensor::cat(parts.into_iter().map(|part| part.unsqueeze_dim::<E>(D).movedim(D, 0)).collect(), 0)
}

/// `x` with the two streams on `axis` exchanged. Flex panics on what its flip makes of a tensor without elements.
pub(crate) fn exchange<const D: usize>(x: Tensor<D>, axis: usize) -> Tensor<D> {
    if x.shape().num_elements() == 0 { x } else { x.flip([axis]) }
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
