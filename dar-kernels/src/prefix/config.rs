use cubecl::prelude::*;

use crate::launch::{Row, Tuning, lanes};
use crate::reduce::Reduction;
use crate::{Dims, Routing};

/// Queries × streams of one pass: with 8 lanes each takes 8 registers a column, so 16 fill half of what a unit has. More
/// queries read the history once more, mostly from the cache.
const MOST_HEADS: usize = 16;

/// f32 accumulators of a unit: past 128 registers for them alone, the rest spills.
const MOST_ACCUMULATORS: usize = 128;

/// Elements of the history that a unit has in flight. 4 entries × 2 streams × 8 lanes hide the latency of memory; more
/// registers for them leave too few units on a multiprocessor.
const MOST_IN_FLIGHT: usize = 64;

/// Entries a chunk at most: one barrier for all of their logits.
const MOST_ENTRIES: usize = 4;

/// Everything that changes the code of the kernel.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub(crate) struct PrefixConfig {
    pub(crate) streams: usize,
    pub(crate) routing: Routing,
    /// Queries a pass.
    pub(crate) group: usize,
    /// Entries a chunk.
    pub(crate) chunk: usize,
    pub(crate) row: Row,
    pub(crate) reduction: Reduction,
}

/// Lanes of a vector, how many groups of queries there are, and the kernel for one.
pub(crate) fn choose(
    client: &Client,
    dims: Dims,
    dtype: ElemType,
    branches: usize,
    routing: Routing,
    tuning: Tuning,
) -> (usize, usize, PrefixConfig) {
    let lanes = lanes(client, dtype, dims.d_model);
    let vectors = dims.d_model / lanes;
    let reduction = tuning.reduction(client);
    let groups = branches.div_ceil((MOST_HEADS / dims.streams).max(1));
    let group = branches.div_ceil(groups);
    let heads = group * dims.streams;

    let most_columns = (MOST_ACCUMULATORS / (heads * lanes)).max(1);
    let mut row = Row::choose(client, vectors, most_columns, reduction);
    let in_flight = dims.streams * row.columns * lanes;
    let mut chunk = MOST_ENTRIES;
    while chunk > 1 && chunk * in_flight > MOST_IN_FLIGHT {
        chunk /= 2;
    }
    // Without planes every unit has a place in shared memory for every sum.
    let shared = client.properties().hardware.max_shared_memory_size;
    while chunk > 1 && reduction.shared_bytes(chunk * heads, row.units) > shared {
        chunk /= 2;
    }
    while row.units > reduction.least_units() && reduction.shared_bytes(chunk * heads, row.units) > shared {
        row = row.halved();
    }
    (lanes, groups, PrefixConfig { streams: dims.streams, routing, group, chunk, row, reduction })
}

/// The backward by entry: what a unit keeps is three arrays of the entry's columns beside one pass of queries.
pub(crate) fn choose_history(
    client: &Client,
    dims: Dims,
    dtype: ElemType,
    branches: usize,
    routing: Routing,
    tuning: Tuning,
) -> (usize, PrefixConfig) {
    let lanes = lanes(client, dtype, dims.d_model);
    let group = branches.min(MOST_BACKWARD_HEADS.div_ceil(dims.streams));
    let heads = group * dims.streams + 3 * dims.streams;
    let reduction = tuning.reduction(client);
    let most_columns = (MOST_ACCUMULATORS / (heads * lanes)).max(1);
    let mut row = Row::choose(client, dims.d_model / lanes, most_columns, reduction);
    let shared = client.properties().hardware.max_shared_memory_size;
    while row.units > reduction.least_units() && reduction.shared_bytes(group * dims.streams, row.units) > shared {
        row = row.halved();
    }
    (lanes, PrefixConfig { streams: dims.streams, routing, group, chunk: 1, row, reduction })
}

/// Queries × streams of one step of the backward by entry, whose gradients are held at once.
const MOST_BACKWARD_HEADS: usize = 8;

/// The first stage of the queries' gradient: one accumulator a query, stream and column, and no sum over the cube.
pub(crate) fn choose_query(
    client: &Client,
    dims: Dims,
    dtype: ElemType,
    branches: usize,
    routing: Routing,
    tuning: Tuning,
) -> (usize, usize, PrefixConfig) {
    let (lanes, groups, config) = choose(client, dims, dtype, branches, routing, tuning);
    (lanes, groups, PrefixConfig { chunk: 1, reduction: Reduction::Shared, ..config })
}
