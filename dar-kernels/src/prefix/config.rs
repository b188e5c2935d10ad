use cubecl::prelude::*;

use crate::launch::{Held, Row, Tuning};
use crate::reduce::Reduction;
use crate::{Dims, Routing};

/// Queries × outputs of one pass: with 8 lanes each takes 8 registers a column, so 16 fill half of what a unit has.
/// More queries read the history once more, mostly from the cache.
const MOST_HEADS: usize = 16;

/// Queries × outputs of one step of the backward by entry, whose gradients are held at once.
const MOST_BACKWARD_HEADS: usize = 8;

/// f32 accumulators of a unit: past 128 registers for them alone, the rest spills.
const MOST_ACCUMULATORS: usize = 128;

/// Elements of the history, and of packed keys, that a unit has in flight. 4 entries × 2 streams × 8 lanes hide the latency of memory; more
/// registers for them leave too few units on a multiprocessor.
const MOST_IN_FLIGHT: usize = 64;

/// Entries a chunk at most: one barrier for all of their logits.
const MOST_ENTRIES: usize = 4;

/// Logits of a chunk, queries × outputs × entries, which wait in registers beside the accumulators: 48 of them spill.
const MOST_LOGITS: usize = 32;

/// Registers that the forward of more than one entry a chunk may take by its own account: the accumulators and half as many
/// for the queries on their way to them, the logits and the elements in flight. From 192 on it spills.
const MOST_REGISTERS: usize = 184;

/// Accumulators up to which the forward spares registers: a quarter of what a unit has where two cubes of 256 share a
/// multiprocessor.
const MOST_SPARING: usize = 32;

/// Values of a head that one unit tells the others, forward: the factor of what was accumulated, and the weights of a chunk.
pub(super) const fn told(chunk: usize) -> usize {
    1 + chunk
}

/// The same, backward: the probability, the gradient of the logit, and their share in `<d_key, key>`.
pub(super) const TOLD_BACKWARD: usize = 3;

/// What a row costs: loads are in flight by chunks of entries, and by groups of queries in the backward by entry, so
/// that one column is enough.
const fn held(arrays: usize) -> Held {
    Held { loads: usize::MAX, arrays, registers: MOST_ACCUMULATORS }
}

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
    /// Groups of queries, whose cubes lie side by side, so that they can share what they read in the cache.
    pub(crate) groups: usize,
    /// Entries a chunk.
    pub(crate) chunk: usize,
    pub(crate) row: Row,
}

impl PrefixConfig {
    /// Whether the forward widens values a second time, past the barrier, rather than keep them in f32: only where a second
    /// cube then fits on a multiprocessor. With more accumulators it does not, and the instructions count.
    pub(crate) const fn spares_registers(self) -> bool {
        self.group * self.outputs * self.row.columns * self.row.lanes <= MOST_SPARING
    }
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
    /// The forward, which makes up to `more` sums at a time beside those of the logits.
    pub(crate) fn choose(self, client: &Client, tuning: Tuning, more: usize) -> PrefixConfig {
        let Self { dims: Dims { streams, d_model, .. }, dtype, outputs, routing, .. } = self;
        let (groups, group) = self.groups();
        let row = Row::choose(client, dtype, d_model, held(group * outputs), tuning);
        let heads = group * outputs;
        let sums = |chunk| more.max(chunk * heads);
        let published = |chunk| more.max(told(chunk) * heads);
        let columns = row.columns * row.lanes;
        let in_flight = |chunk| chunk * self.states() * columns * dtype.size() / size_of::<f32>();
        let registers = |chunk| heads * columns * 3 / 2 + heads * chunk + in_flight(chunk);
        let chunk = self.chunk(row, group, |chunk| {
            registers(chunk) <= MOST_REGISTERS && row.fits(client, sums(chunk), published(chunk))
        });
        let row = row.fit(client, d_model, sums(chunk), published(chunk));
        PrefixConfig { streams, outputs, routing, group, groups, chunk, row }
    }

    /// The backward by entry: what a unit keeps is three arrays of the entry's columns beside one pass of queries.
    pub(crate) fn choose_history(self, client: &Client, tuning: Tuning) -> PrefixConfig {
        let Self { dims: Dims { streams, d_model, .. }, dtype, outputs, queries, routing, .. } = self;
        let group = queries.clamp(1, MOST_BACKWARD_HEADS.div_ceil(outputs));
        let heads = group * outputs;
        let arrays = heads + 3 * streams;
        let row = Row::choose(client, dtype, d_model, held(arrays), tuning).fit(
            client,
            d_model,
            heads,
            heads * TOLD_BACKWARD,
        );
        PrefixConfig { streams, outputs, routing, group, groups: 1, chunk: 1, row }
    }

    /// The first stage of the queries' gradient: one accumulator a query, output and column, and no sum over the cube.
    pub(crate) fn choose_query(self, client: &Client) -> PrefixConfig {
        let Self { dims: Dims { streams, d_model, .. }, dtype, outputs, routing, .. } = self;
        let (groups, group) = self.groups();
        let tuning = Tuning { reduction: Some(Reduction::Shared) }; // none, which takes no units at least
        let row = Row::choose(client, dtype, d_model, held(group * outputs), tuning);
        let chunk = self.chunk(row, group, |_| true);
        PrefixConfig { streams, outputs, routing, group, groups, chunk, row }
    }

    /// How many groups of queries there are, and queries of a group.
    fn groups(self) -> (usize, usize) {
        let groups = self.queries.div_ceil((MOST_HEADS / self.outputs).max(1));
        (groups, self.queries.div_ceil(groups))
    }

    /// Rows of an entry that are read.
    fn states(self) -> usize {
        self.dims.streams + if self.keyed { self.outputs } else { 0 }
    }

    /// Entries of a chunk: as many as registers and `fits` allow.
    fn chunk(self, row: Row, group: usize, fits: impl Fn(usize) -> bool) -> usize {
        let in_flight = self.states() * row.columns * row.lanes;
        let mut chunk = MOST_ENTRIES;
        while chunk > 1
            && (chunk * in_flight > MOST_IN_FLIGHT || chunk * group * self.outputs > MOST_LOGITS || !fits(chunk))
        {
            chunk /= 2;
        }
        chunk
    }
}
