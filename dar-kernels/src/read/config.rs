use cubecl::prelude::*;

use crate::launch::{Held, Row, Tuning};
use crate::{Dims, Routing};

/// f32 registers of a unit for the merged state, with as many again in flight for each of the two inputs.
const MOST_REGISTERS: usize = 32;

/// f32 registers of a unit for the gradients of parameters, which stay over all of its tokens, and for the states of a
/// token: one column of 8 lanes where everything is trained.
const MOST_BACKWARD_REGISTERS: usize = 168;

/// States of a token that the backward keeps between two sums: retrieved, merged, open, and a gradient.
const STATES: usize = 4;

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

/// `loads`: operands with a state's columns.
pub(crate) fn choose(
    client: &Client,
    dims: Dims,
    dtype: ElemType,
    loads: usize,
    routing: Routing,
    normed: bool,
    tuning: Tuning,
) -> ReadConfig {
    let Dims { streams, d_model, .. } = dims;
    let held = Held { loads, arrays: streams, registers: MOST_REGISTERS };
    let row = Row::choose(client, dtype, d_model, held, tuning);
    ReadConfig { streams, routing, normed, written: false, trained: false, gain_trained: false, row }
}

/// `rows`: of gradients of parameters.
pub(crate) fn choose_backward(
    client: &Client,
    dims: Dims,
    dtype: ElemType,
    rows: usize,
    [opened, written, trained, normed, gain_trained]: [bool; 5],
    routing: Routing,
    tuning: Tuning,
) -> ReadConfig {
    let Dims { streams, d_model, .. } = dims;
    let loads = 1 + if opened { 2 * streams } else { streams };
    let held = Held { loads, arrays: rows + STATES * streams, registers: MOST_BACKWARD_REGISTERS };
    let row = Row::choose(client, dtype, d_model, held, tuning);
    ReadConfig { streams, routing, normed, written, trained, gain_trained, row }
}
