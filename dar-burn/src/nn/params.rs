//! Parameters with given initial values, created lazily: counting a model's parameters allocates none of them.

use burn::module::{Param, ParamId};
use burn::tensor::{Device, Tensor, TensorData};

/// A trainable parameter whose initial value is `value(device)`, which must have `shape`.
fn lazy<const D: usize>(
    shape: [usize; D],
    device: &Device,
    value: impl Fn(&Device) -> Tensor<D> + Send + Sync + 'static,
) -> Param<Tensor<D>> {
    let init = move |device: &Device, require_grad: bool| value(device).set_require_grad(require_grad);
    Param::uninitialized(ParamId::new(), init, device.clone(), true, shape.into())
}

/// All zeros.
pub(super) fn zeros<const D: usize>(shape: [usize; D], device: &Device) -> Param<Tensor<D>> {
    lazy(shape, device, move |device| Tensor::zeros(shape, device))
}

/// The given values, row-major.
pub(super) fn values<const D: usize>(shape: [usize; D], values: Vec<f64>, device: &Device) -> Param<Tensor<D>> {
    lazy(shape, device, move |device| Tensor::from_data(TensorData::new(values.clone(), shape), device))
}

/// `count` identity matrices. `[count, size, size]`
pub(super) fn identities(count: usize, size: usize, device: &Device) -> Param<Tensor<3>> {
    lazy([count, size, size], device, move |device| {
        Tensor::<2>::eye(size, device).unsqueeze_dim::<3>(0).repeat_dim(0, count)
    })
}

/// `ln(p / (1 - p))`: the logit that a sigmoid maps to `p`.
pub(super) fn logit(p: f64) -> f64 {
    (p / (1.0 - p)).ln()
}
