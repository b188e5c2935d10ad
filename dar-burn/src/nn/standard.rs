use burn::module::Module;
use burn::tensor::Tensor;

use super::observer::Observer;

/// The plain pre-norm residual (equation 1): no parameters.
#[derive(Module, Debug, Default)]
pub struct Standard {}

impl Standard {
    /// The scheme.
    pub fn new() -> Self {
        Self {}
    }

    pub(super) fn write(
        &self,
        branch: usize,
        x: Tensor<2>,
        output: Tensor<2>,
        observer: Option<&dyn Observer>,
    ) -> Tensor<2> {
        let x = x + output;
        match observer {
            Some(observer) => observer.state(branch, x.unsqueeze_dim(1)).squeeze_dim(1),
            None => x,
        }
    }
}
