use std::fmt::Debug;

use burn::tensor::Tensor;

use crate::ops::{Gates, StreamMaps};

/// Sees what a pass of a [`Residual`](super::Residual) computes, and may replace it. Given to
/// [`Residual::start_observed`](super::Residual::start_observed); a pass without an observer pays nothing for this.
///
/// Methods that return a tensor return what the pass goes on with, by default what came. Branches count from 0; the read
/// that ends the pass counts as one more. `tokens` are those of the embedding, batch and sequence flattened.
///
/// | scheme | retrieval | gates | maps | streams of a state |
/// |---|---|---|---|---|
/// | standard | | | | 1 |
/// | AttnRes | every read | | | 1: the open block's sum; 2 with separate values: source and projected value |
/// | DAR | every read | every branch | | 2: the partial state |
/// | HC, mHC | | | every branch | n |
/// | CASCADE | | | | 2: token and context, after every second branch |
///
/// Both branches of a layer of CASCADE read one state and are written together, when the second has been: after the
/// first there is no new state that a branch could read, and [`state`](Self::state) is not called.
pub trait Observer: Debug + Send + Sync {
    /// The retrieval weights of a read. They are computed when asked for, from the same operands as the read.
    ///
    /// # Shapes
    /// - `weights`: `[candidates, tokens, streams]`, in the accumulator type, summing to 1 over candidates; these are the
    ///   entries of the history in order and then, where there is one, the partial state
    fn retrieval(&self, branch: usize, weights: &dyn Fn() -> Tensor<3>) {
        let _ = (branch, weights);
    }

    /// The gates of a branch of DAR, before they are used.
    fn gates(&self, branch: usize, gates: Gates) -> Gates {
        let _ = branch;
        gates
    }

    /// The realised maps of a branch of hyper-connections, before they are used.
    fn maps(&self, branch: usize, maps: StreamMaps) -> StreamMaps {
        let _ = branch;
        maps
    }

    /// The current state after the write of a branch, before it becomes an entry of a history. Entries that are stored
    /// already stay as they are.
    ///
    /// # Shapes
    /// - `state`, output: `[tokens, streams, d_model]`
    fn state(&self, branch: usize, state: Tensor<3>) -> Tensor<3> {
        let _ = branch;
        state
    }
}

/// An observer that looks away.
#[derive(Debug, Clone, Copy, Default)]
pub struct Unobserved;

impl Observer for Unobserved {}
