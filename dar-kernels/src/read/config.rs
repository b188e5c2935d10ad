use cubecl::prelude::*;

use crate::Routing;
use crate::launch::{Row, Tuning, lanes};
use crate::reduce::Reduction;

/// f32 registers of a unit for the merged state, with as many again in flight for each of the two inputs.
const MOST_REGISTERS: usize = 32;

/// Everything that changes the code of the kernel.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub(crate) struct ReadConfig {
    pub(crate) routing: Routing,
    pub(crate) row: Row,
    pub(crate) reduction: Reduction,
}

/// Lanes of a vector, and the kernel for them.
pub(crate) fn choose(
    client: &Client,
    d_model: usize,
    dtype: ElemType,
    routing: Routing,
    tuning: Tuning,
) -> (usize, ReadConfig) {
    let lanes = lanes(client, dtype, d_model);
    let reduction = tuning.reduction(client);
    let most_columns = (MOST_REGISTERS / (2 * lanes)).max(1);
    (lanes, ReadConfig { routing, row: Row::choose(client, d_model / lanes, most_columns, reduction), reduction })
}

/// f32 registers of a unit for the gradients of a site's parameters, 12 a column and lane, which stay over all of its
/// tokens; past them the state of a token spills.
const MOST_SITE_REGISTERS: usize = 96;

/// Lanes of a vector, and the kernel of the backward for them.
pub(crate) fn choose_backward(
    client: &Client,
    d_model: usize,
    dtype: ElemType,
    routing: Routing,
    tuning: Tuning,
) -> (usize, ReadConfig) {
    let lanes = lanes(client, dtype, d_model);
    let reduction = tuning.reduction(client);
    let most_columns = (MOST_SITE_REGISTERS / (12 * lanes)).max(1);
    (lanes, ReadConfig { routing, row: Row::choose(client, d_model / lanes, most_columns, reduction), reduction })
}
