use cubecl::prelude::*;

use crate::launch::{Row, Tuning};
use crate::{Dims, Routing};

/// f32 registers of a unit for the merged state, with as many again in flight for each of the two inputs.
const MOST_REGISTERS: usize = 32;

/// f32 registers of a unit for the gradients of parameters, which stay over all of its tokens: six a stream (rows of
/// five gates and a query), column and lane. Past them the state of a token spills.
const MOST_GRADIENT_REGISTERS: usize = 96;

/// Everything that changes the code of a kernel beside the operands that are there.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub(crate) struct ReadConfig {
    pub(crate) streams: usize,
    pub(crate) routing: Routing,
    /// Whether the branch's own norm is folded in.
    pub(crate) normed: bool,
    /// Backward: whether a gradient of the state after the branch comes in.
    pub(crate) written: bool,
    /// Backward: whether the site's parameters get gradients.
    pub(crate) trained: bool,
    /// Backward: whether the gain of the branch's norm gets a gradient.
    pub(crate) gain_trained: bool,
    pub(crate) row: Row,
}

pub(crate) fn choose(
    client: &Client,
    dims: Dims,
    dtype: ElemType,
    routing: Routing,
    normed: bool,
    tuning: Tuning,
) -> ReadConfig {
    let Dims { streams, d_model, .. } = dims;
    let row = Row::held(client, dtype, d_model, tuning, streams, MOST_REGISTERS);
    ReadConfig { streams, routing, normed, written: false, trained: false, gain_trained: false, row }
}

pub(crate) fn choose_backward(
    client: &Client,
    dims: Dims,
    dtype: ElemType,
    [written, trained, normed, gain_trained]: [bool; 4],
    routing: Routing,
    tuning: Tuning,
) -> ReadConfig {
    let Dims { streams, d_model, .. } = dims;
    let arrays = 6 * streams + usize::from(gain_trained);
    let row = Row::held(client, dtype, d_model, tuning, arrays, MOST_GRADIENT_REGISTERS);
    ReadConfig { streams, routing, normed, written, trained, gain_trained, row }
}
