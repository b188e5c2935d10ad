use thiserror::Error;

/// Why an operation refused its operands. Every message names the operation, the argument, what was expected and what
/// came.
#[derive(Debug, Clone, PartialEq, Eq, Error)]
pub enum KernelError {
    /// An operand has the wrong shape.
    #[error("{operation}: `{argument}` has shape {got:?}, expected {expected}")]
    Shape {
        /// The operation that was called.
        operation: &'static str,
        /// The operand that does not fit.
        argument: &'static str,
        /// The shape that fits, with the names of its axes.
        expected: String,
        /// The shape that came.
        got: Vec<usize>,
    },
    /// An operand has the wrong element type.
    #[error("{operation}: `{argument}` has element type {got}, expected {expected}")]
    ElementType {
        /// The operation that was called.
        operation: &'static str,
        /// The operand that does not fit.
        argument: &'static str,
        /// The element type that fits.
        expected: String,
        /// The element type that came.
        got: String,
    },
    /// An operand is on another device than the rest.
    #[error("{operation}: `{argument}` is on device {got}, expected {expected}")]
    Device {
        /// The operation that was called.
        operation: &'static str,
        /// The operand that does not fit.
        argument: &'static str,
        /// The device of the other operands.
        expected: String,
        /// The device of this operand.
        got: String,
    },
    /// A number is out of its range.
    #[error("{operation}: `{argument}` is {got}, expected {expected}")]
    Value {
        /// The operation that was called.
        operation: &'static str,
        /// The argument that does not fit.
        argument: &'static str,
        /// The range that fits.
        expected: String,
        /// The value that came.
        got: String,
    },
}

impl KernelError {
    /// A [`KernelError::Value`].
    pub fn value(
        operation: &'static str,
        argument: &'static str,
        expected: impl Into<String>,
        got: impl ToString,
    ) -> Self {
        Self::Value { operation, argument, expected: expected.into(), got: got.to_string() }
    }
}
