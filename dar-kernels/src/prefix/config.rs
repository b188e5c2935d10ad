use cubecl::prelude::*;

use crate::launch::{Row, Tuning};
use crate::reduce::Reduction;
use crate::{Dims, Routing};

/// Queries × outputs of one pass: with 8 lanes each takes 8 registers a column, so 16 fill half of what a unit has.
/// More queries read the history once more, mostly from the cache.
const MOST_HEADS: usize = 16;

/// Queries × outputs of one step of the backward by entry, whose gradients are held at once.
const MOST_BACKWARD_HEADS: usize = 8;

/// f32 accumulators of a unit: past 128 registers for them alone, the rest spills.
const MOST_ACCUMULATORS: usize = 128;

/// Elements of the history that a unit has in flight. 4 entries × 2 streams × 8 lanes hide the latency of memory; more
/// registers for them leave too few units on a multiprocessor.
const MOST_IN_FLIGHT: usize = 64;

/// Entries a chunk at most: one barrier for all of their logits.
const MOST_ENTRIES: usize = 4;

/// Logits of a chunk, queries × outputs × entries, which wait in registers beside the accumulators: 48 of them spill.
const MOST_LOGITS: usize = 32;

/// Everything that changes the code of a kernel.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub(crate) struct PrefixConfig {
    /// Streams of an entry.
    pub(crate) streams: usize,
    /// Streams of a query and of what it retrieves.
    pub(crate) outputs: usize,
    pub(crate) routing: Routing,
    /// Queries a pass.
    pub(crate) group: usize,
    /// Entries a chunk.
    pub(crate) chunk: usize,
    pub(crate) row: Row,
}

/// What a prefix works on: sizes of an entry, its type, streams of a query, and queries.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Work {
    pub(crate) dims: Dims,
    pub(crate) dtype: ElemType,
    pub(crate) outputs: usize,
    pub(crate) queries: usize,
    pub(crate) routing: Routing,
    /// Whether keys are read beside values.
    pub(crate) keyed: bool,
}

impl Work {
    /// How many groups of queries there are, and the kernel for one, which makes up to `more` sums at a time beside
    /// those of the logits.
    pub(crate) fn choose(self, client: &Client, tuning: Tuning, more: usize) -> (usize, PrefixConfig) {
        let Self { dims: Dims { streams, d_model, .. }, dtype, outputs, queries, routing, keyed } = self;
        let groups = queries.div_ceil((MOST_HEADS / outputs).max(1));
        let group = queries.div_ceil(groups);
        let heads = group * outputs;

        let row = Row::held(client, dtype, d_model, tuning, heads, MOST_ACCUMULATORS);
        let in_flight = (streams + if keyed { outputs } else { 0 }) * row.columns * row.lanes;
        let mut chunk = MOST_ENTRIES;
        // Without planes every unit has a place in shared memory for every sum.
        let held = |chunk| chunk * in_flight <= MOST_IN_FLIGHT && chunk * heads <= MOST_LOGITS;
        while chunk > 1 && !(held(chunk) && row.fits(client, more.max(chunk * heads))) {
            chunk /= 2;
        }
        let row = row.fit(client, more.max(chunk * heads));
        (groups, PrefixConfig { streams, outputs, routing, group, chunk, row })
    }

    /// The backward by entry: what a unit keeps is three arrays of the entry's columns beside one pass of queries.
    pub(crate) fn choose_history(self, client: &Client, tuning: Tuning) -> PrefixConfig {
        let Self { dims: Dims { streams, d_model, .. }, dtype, outputs, queries, routing, .. } = self;
        let group = queries.clamp(1, MOST_BACKWARD_HEADS.div_ceil(outputs));
        let arrays = group * outputs + 3 * streams;
        let row = Row::held(client, dtype, d_model, tuning, arrays, MOST_ACCUMULATORS).fit(client, group * outputs);
        PrefixConfig { streams, outputs, routing, group, chunk: 1, row }
    }

    /// The first stage of the queries' gradient: one accumulator a query, output and column, and no sum over the cube.
    pub(crate) fn choose_query(self, client: &Client) -> (usize, PrefixConfig) {
        let (groups, config) = self.choose(client, Tuning { reduction: Some(Reduction::Shared) }, 0);
        (groups, PrefixConfig { chunk: 1, ..config })
    }
}
