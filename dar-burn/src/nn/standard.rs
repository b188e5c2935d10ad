use burn::module::Module;

/// The plain pre-norm residual (equation 1): no parameters.
#[derive(Module, Debug, Default)]
pub struct Standard {}

impl Standard {
    /// The scheme.
    pub fn new() -> Self {
        Self {}
    }
}
