use crate::KernelError;

/// The sizes that every operand of one call agrees on.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Dims {
    /// Positions of all sequences together; zero is allowed.
    pub tokens: usize,
    /// Parallel residual lanes: 2 in Dual Attention Residuals, n in hyper-connections, 1 otherwise.
    pub streams: usize,
    /// Width of the model.
    pub d_model: usize,
}

impl Dims {
    /// Sizes of a state `[tokens, streams, d_model]`.
    pub const fn of_state(shape: [usize; 3]) -> Self {
        Self { tokens: shape[0], streams: shape[1], d_model: shape[2] }
    }

    /// `[tokens, streams, d_model]`
    pub const fn state(self) -> [usize; 3] {
        [self.tokens, self.streams, self.d_model]
    }

    /// `[tokens, d_model]`
    pub const fn branch(self) -> [usize; 2] {
        [self.tokens, self.d_model]
    }

    /// Refuses an operand whose shape is not `expected`. `axes` names the axes for the message.
    pub fn expect(
        operation: &'static str,
        argument: &'static str,
        axes: &str,
        expected: &[usize],
        got: &[usize],
    ) -> Result<(), KernelError> {
        if expected == got {
            return Ok(());
        }
        Err(KernelError::Shape { operation, argument, expected: format!("{axes} = {expected:?}"), got: got.to_vec() })
    }
}

/// Gradients of a token that kernels of the backward hand on: d_beta of both streams, then of every output the shift
/// `d_lse - <d_state, state>`, then of every output d_lse.
pub(crate) const fn token_gradients(outputs: usize) -> usize {
    2 + 2 * outputs
}
