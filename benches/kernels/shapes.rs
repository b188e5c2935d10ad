//! What is measured: the papers' shapes and those that others publish.

use cubecl::ir::FloatKind;
use cubecl::prelude::*;

use crate::buffer::PERIOD;

/// An operation of the residual pathway.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub enum Operation {
    /// A state becomes an entry of the history.
    Pack,
    /// What the queries of a block find in the history.
    Prefix,
    /// The write of the branch before, then merge, gates and branch input.
    Read,
    /// Gated write with transport; its backward is that of a block's last write.
    Write,
    /// The retrieval of the output queries, summed over two streams.
    OutputRead,
    /// One query of one stream over the history.
    AttnResRead,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Direction {
    Forward,
    Backward,
}

/// One operation at one size.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct Problem {
    pub operation: Operation,
    /// Of the history; 0 where there is none.
    pub entries: usize,
    /// That share a pass over the history; 0 where there is none.
    pub queries: usize,
    pub tokens: usize,
    pub streams: usize,
    pub d_model: usize,
    pub dtype: ElemType,
    /// Before scaling down.
    pub full_tokens: usize,
}

pub const F32: ElemType = ElemType::Float(FloatKind::F32);
pub const F16: ElemType = ElemType::Float(FloatKind::F16);
pub const BF16: ElemType = ElemType::Float(FloatKind::BF16);

/// Tokens of the DAR paper's sequences.
const SEQUENCE: usize = 4096;
/// Width and layers of its models, the dense ones and the mixture of experts.
const MODELS: [(usize, usize); 5] = [(640, 16), (1024, 20), (1280, 20), (2048, 20), (2048, 24)];
/// Layers a block.
const BLOCKS: [usize; 3] = [1, 2, 3];
/// Single reads of others' benchmarks: entries, tokens, d_model.
const SINGLE_READS: [(usize, usize, usize); 9] = [
    (8, 8192, 2048),
    (8, 32768, 2048),
    (10, 8192, 4096),
    (10, 32768, 4096),
    (9, 4096, 1024),
    (9, 2048, 2048),
    (33, 1024, 4096),
    (9, 512, 7168),
    (9, 512, 8192),
];

impl Operation {
    pub fn name(self) -> &'static str {
        match self {
            Self::Pack => "pack",
            Self::Prefix => "prefix",
            Self::Read => "read",
            Self::Write => "write",
            Self::OutputRead => "output_read",
            Self::AttnResRead => "attnres_read",
        }
    }
}

impl Direction {
    pub fn name(self) -> &'static str {
        match self {
            Self::Forward => "forward",
            Self::Backward => "backward",
        }
    }
}

impl Problem {
    fn new(operation: Operation, [entries, queries, tokens, streams, d_model]: [usize; 5]) -> Self {
        Self { operation, entries, queries, tokens, streams, d_model, dtype: F32, full_tokens: tokens }
    }

    /// Packing has no backward of its own: the norm of a key belongs to the backward of the prefix.
    pub fn directions(&self) -> &'static [Direction] {
        match self.operation {
            Operation::Pack => &[Direction::Forward],
            _ => &[Direction::Forward, Direction::Backward],
        }
    }

    /// Bytes that must move: every state that is an operand, once. Logits, gates and other scalars of a token do not
    /// count.
    pub fn bytes(&self, direction: Direction) -> u64 {
        let Self { entries, queries, tokens, streams, d_model, .. } = *self;
        let (history, block) = (entries * streams, queries * streams);
        let units = match (self.operation, direction) {
            (Operation::Pack, _) => 2 * streams,
            (Operation::Prefix, Direction::Forward) => history + block,
            // History and gradients of what was retrieved; the gradient of the history.
            (Operation::Prefix, Direction::Backward) => history + block + history,
            // Partial state, branch output, retrieved state; partial state, branch input.
            (Operation::Read, Direction::Forward) => 2 + 1 + 2 + 2 + 1,
            // Retrieved state, partial state and its gradient, branch output, gradient of the input; gradients of the
            // retrieved state, partial state, branch output.
            (Operation::Read, Direction::Backward) => 2 + 2 + 2 + 1 + 1 + 2 + 2 + 1,
            (Operation::Write, Direction::Forward) => 2 + 1 + 2,
            (Operation::Write, Direction::Backward) => 2 + 1 + 1,
            (Operation::OutputRead | Operation::AttnResRead, Direction::Forward) => history + 1,
            (Operation::OutputRead | Operation::AttnResRead, Direction::Backward) => history + 1 + history,
        };
        (units * tokens * d_model * self.dtype.size()) as u64
    }

    /// Bytes of the largest buffer.
    pub fn largest_buffer(&self) -> u64 {
        let states = self.entries.max(self.queries).max(1) * self.streams;
        (states * self.tokens * self.d_model * self.dtype.size()) as u64
    }

    /// With so few tokens, a multiple of the period, that `fits`; tokens are halved.
    pub fn scaled(mut self, fits: impl Fn(&Self) -> bool) -> Self {
        while self.tokens > PERIOD && !fits(&self) {
            self.tokens = (self.tokens / 2).next_multiple_of(PERIOD);
        }
        self
    }
}

/// Everything, in the element types that the device stores.
pub fn all(dtypes: &[ElemType]) -> Vec<Problem> {
    let mut problems = Vec::new();
    for (d_model, layers) in MODELS {
        for operation in [Operation::Pack, Operation::Read, Operation::Write] {
            problems.push(Problem::new(operation, [0, 0, SEQUENCE, 2, d_model]));
        }
        for layers_per_block in BLOCKS {
            // What the last block of the model sees.
            let entries = layers.div_ceil(layers_per_block);
            problems.push(Problem::new(Operation::Prefix, [entries, 2 * layers_per_block, SEQUENCE, 2, d_model]));
            problems.push(Problem::new(Operation::OutputRead, [entries, 1, SEQUENCE, 2, d_model]));
            problems.push(Problem::new(Operation::AttnResRead, [entries, 1, SEQUENCE, 1, d_model]));
        }
    }
    for (entries, tokens, d_model) in SINGLE_READS {
        problems.push(Problem::new(Operation::AttnResRead, [entries, 1, tokens, 1, d_model]));
    }
    // Growth with depth and with tokens.
    for entries in [2, 4, 8, 16, 32] {
        problems.push(Problem::new(Operation::Prefix, [entries, 4, SEQUENCE / 4, 2, 1024]));
    }
    for tokens in [256, 512, 1024, 2048, 4096, 8192] {
        problems.push(Problem::new(Operation::Prefix, [10, 4, tokens, 2, 1024]));
        problems.push(Problem::new(Operation::Read, [0, 0, tokens, 2, 1024]));
    }
    let mut typed: Vec<Problem> =
        dtypes.iter().flat_map(|&dtype| problems.iter().map(move |&problem| Problem { dtype, ..problem })).collect();
    // AttnRes block, 32 branches, 8 a block, published in bf16: what its last block sees.
    let dtype = [BF16, F16].into_iter().find(|dtype| dtypes.contains(dtype)).unwrap_or(F32);
    typed.push(Problem { dtype, ..Problem::new(Operation::Prefix, [4, 8, 4 * 16384, 1, 2048]) });
    typed
}

/// One of each operation, and one that grows.
pub fn few() -> Vec<Problem> {
    let (d_model, entries, tokens) = (640, 4, 64);
    vec![
        Problem::new(Operation::Pack, [0, 0, tokens, 2, d_model]),
        Problem::new(Operation::Prefix, [entries, 4, tokens, 2, d_model]),
        Problem::new(Operation::Prefix, [entries / 2, 4, tokens, 2, d_model]),
        Problem::new(Operation::Prefix, [entries, 4, tokens / 2, 2, d_model]),
        Problem::new(Operation::Read, [0, 0, tokens, 2, d_model]),
        Problem::new(Operation::Write, [0, 0, tokens, 2, d_model]),
        Problem::new(Operation::OutputRead, [entries, 1, tokens, 2, d_model]),
        Problem::new(Operation::AttnResRead, [entries, 1, tokens, 1, d_model]),
    ]
}
