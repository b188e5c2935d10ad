//! The operations as kernels of `dar-kernels` on buffers.

use std::collections::BTreeMap;

use cubecl::prelude::*;
use dar_kernels::pack::{Key, PackFwd, pack_fwd};
use dar_kernels::prefix::{
    PrefixBwdHistory, PrefixBwdQuery, PrefixFwd, prefix_bwd_history, prefix_bwd_query, prefix_fwd,
};
use dar_kernels::read::{Open, OpenBwd, ReadBwd, ReadFwd, read_bwd, read_fwd};
use dar_kernels::site::{GateOperands, PackSite, SiteOperands, pack_site, site_length};
use dar_kernels::write::{WriteBwd, WriteFwd, write_bwd, write_fwd};
use dar_kernels::{KernelError, Operand, Tuning};

use crate::buffer::{Buffer, PERIOD, Pattern};
use crate::composed::{EPS, GATE_OUTPUTS, Output, OutputKind, STREAM_WEIGHTS, inverse_rms, patterns, routing};
use crate::shapes::{Direction, F32, Operation, Problem};

/// What a history holds beside its values.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Packing {
    /// An inverse RMS for each key.
    InverseRms,
    /// The normalised keys, as the paper has them.
    Keys,
}

/// One problem on one device. What a launch works on in place holds something else after it; the work is the same.
pub struct Fused {
    client: Client,
    problem: Problem,
    direction: Direction,
    packing: Packing,
    buffers: BTreeMap<&'static str, Buffer>,
    /// Gradients of the entries.
    d_value: Vec<Buffer>,
}

const WEIGHTS: [&str; 3] = ["alpha_weight", "beta_weight", "rho_weight"];
const BIASES: [&str; 3] = ["alpha_bias", "beta_bias", "rho_bias"];
const SCALES: [&str; 3] = ["alpha_scale", "beta_scale", "rho_scale"];
const D_WEIGHTS: [&str; 3] = ["d_alpha_weight", "d_beta_weight", "d_rho_weight"];
const D_BIASES: [&str; 3] = ["d_alpha_bias", "d_beta_bias", "d_rho_bias"];
const D_SCALES: [&str; 3] = ["d_alpha_scale", "d_beta_scale", "d_rho_scale"];

/// The read that a read works on; the one before it wrote.
const READ: usize = 1;

impl Fused {
    /// Makes the operands, and for a backward what the forward saves.
    ///
    /// # Errors
    /// If the kernels refuse the problem.
    pub fn new(client: &Client, problem: Problem, direction: Direction, packing: Packing) -> Result<Self, KernelError> {
        let (client, buffers) = (client.clone(), BTreeMap::new());
        let mut fused = Self { client, problem, direction, packing, buffers, d_value: Vec::new() };
        match problem.operation {
            Operation::Pack => fused.make_pack(),
            Operation::Write => fused.make_write(),
            Operation::Read => fused.make_read()?,
            Operation::Prefix | Operation::OutputRead | Operation::AttnResRead => fused.make_prefix()?,
        }
        Ok(fused)
    }

    /// The operation; nothing waits.
    ///
    /// # Errors
    /// If a kernel refuses its operands.
    pub fn launch(&self) -> Result<(), KernelError> {
        match (self.problem.operation, self.direction) {
            (Operation::Pack, _) => self.pack(),
            (Operation::Prefix | Operation::AttnResRead, Direction::Forward) => self.prefix(),
            (Operation::OutputRead, Direction::Forward) => self.prefix().and_then(|()| self.sum_streams()),
            (Operation::Read, Direction::Forward) => self.read(),
            (Operation::Write, Direction::Forward) => self.write(),
            (Operation::Prefix | Operation::AttnResRead, Direction::Backward) => self.prefix_backward(),
            (Operation::OutputRead, Direction::Backward) => {
                self.sum_streams_backward().and_then(|()| self.prefix_backward())
            }
            (Operation::Read, Direction::Backward) => self.read_backward(),
            (Operation::Write, Direction::Backward) => self.write_backward(),
        }
    }

    /// What the first launch computed.
    pub fn outputs(&self) -> Vec<Output> {
        let Problem { entries, queries, streams, d_model, .. } = self.problem;
        let state = streams * d_model;
        match (self.problem.operation, self.direction) {
            (Operation::Pack, _) => {
                let mut outputs =
                    vec![self.tokens("value", "value", 0, state), self.tokens("inv_rms", "inv_rms", 0, streams)];
                if self.packing == Packing::Keys {
                    outputs.push(self.tokens("key", "key", 0, state));
                }
                outputs
            }
            (Operation::Prefix, Direction::Forward) => (0..queries)
                .flat_map(|query| {
                    [self.tokens("state", "state", query, state), self.tokens("lse", "lse", query, streams)]
                })
                .collect(),
            (Operation::AttnResRead, Direction::Forward) => vec![self.tokens("input", "state", 0, state)],
            (Operation::OutputRead, Direction::Forward) => vec![self.tokens("input", "input", 0, d_model)],
            (Operation::Prefix | Operation::AttnResRead | Operation::OutputRead, Direction::Backward) => {
                let gradients = self.d_value.iter().take(entries).map(|buffer| self.ends("d_value", buffer, 0, state));
                gradients.chain([self.sum("d_query", "d_query", (entries - 1) * state, queries * state)]).collect()
            }
            (Operation::Read, Direction::Forward) => {
                vec![self.tokens("partial", "partial", 0, state), self.tokens("input", "input", 0, d_model)]
            }
            (Operation::Read, Direction::Backward) => vec![
                self.tokens("d_state", "state", 0, state),
                self.tokens("d_output", "d_output", 0, d_model),
                self.tokens("d_partial", "d_partial", 0, state),
                self.sum("d_query", "d_query", READ * state, state),
                self.sum("d_alpha", D_WEIGHTS[0], 0, 2 * state),
                self.sum("d_rho", D_WEIGHTS[2], 0, state),
            ],
            (Operation::Write, Direction::Forward) => vec![self.tokens("state", "state", 0, state)],
            (Operation::Write, Direction::Backward) => vec![self.tokens("d_output", "d_output", 0, d_model)],
        }
    }

    // ---- operands

    fn make_pack(&mut self) {
        let Problem { tokens, streams, d_model, dtype, .. } = self.problem;
        self.pattern("source", &[tokens, streams, d_model], dtype, patterns::HISTORY, 0);
        self.empty("value", &[1, tokens, streams, d_model], dtype);
        self.empty("inv_rms", &[1, tokens, streams], F32);
        if self.packing == Packing::Keys {
            self.empty("key", &[1, tokens, streams, d_model], dtype);
        }
    }

    fn make_write(&mut self) {
        let Problem { tokens, d_model, dtype, .. } = self.problem;
        self.pattern("before", &[tokens, 2, d_model], dtype, patterns::BEFORE, 0);
        self.pattern("output", &[tokens, d_model], dtype, patterns::OUTPUT, 0);
        self.pattern("gate", &[1, tokens, 5], F32, patterns::GATE, 1);
        self.empty("state", &[tokens, 2, d_model], dtype);
        if self.direction == Direction::Backward {
            self.ones("d_state", &[tokens, 2, d_model], dtype);
            self.empty("d_output", &[tokens, d_model], dtype);
            self.empty("d_token", &[1, tokens, 6], F32);
        }
    }

    fn make_read(&mut self) -> Result<(), KernelError> {
        let Problem { tokens, d_model, dtype, .. } = self.problem;
        self.pattern("state", &[1, tokens, 2, d_model], dtype, patterns::RETRIEVED, 1);
        self.pattern("before", &[tokens, 2, d_model], dtype, patterns::BEFORE, 0);
        self.pattern("output", &[tokens, d_model], dtype, patterns::OUTPUT, 0);
        self.empty("partial", &[tokens, 2, d_model], dtype);
        self.empty("input", &[tokens, d_model], dtype);
        self.pattern("gate", &[2, tokens, 5], F32, patterns::GATE, 1);
        // Row 1 is what is read; row 0 has to exist only.
        let lse = patterns::LSE.values(1, 2, PERIOD);
        self.tiled("lse", &[2, tokens, 2], &[lse.clone(), lse].concat());
        let query = patterns::QUERY.values(1, 2 * d_model, 1);
        self.values("query", &[2, 2, d_model], &[query.clone(), query].concat());
        for gate in 0..3 {
            let outputs = GATE_OUTPUTS[gate];
            self.parameter(WEIGHTS[gate], &[2 * d_model, outputs], patterns::WEIGHTS[gate]);
            self.parameter(BIASES[gate], &[outputs], patterns::BIASES[gate]);
            self.values(SCALES[gate], &[1], &[1.0]);
        }
        self.empty("site", &[site_length(d_model)], F32);
        let parameters = self.site_operands([WEIGHTS, BIASES, SCALES]);
        pack_site(&self.client, PackSite { parameters, gain: None, site: self.operand("site") })?;
        if self.direction == Direction::Forward {
            return Ok(());
        }

        self.read()?; // gates and partial state
        self.ones("d_input", &[tokens, d_model], dtype);
        // What the loss weighs the streams with, written as a branch output of one.
        let [stream_0, stream_1] = STREAM_WEIGHTS;
        self.empty("d_partial", &[tokens, 2, d_model], dtype);
        self.tiled("stream_weights", &[1, tokens, 5], &[0.0, 0.0, stream_0, stream_1, 0.0].repeat(PERIOD));
        let weights = WriteFwd {
            before: None,
            output: self.operand("d_input"),
            gate: Some(self.operand("stream_weights")),
            read: 0,
            state: self.operand("d_partial"),
        };
        write_fwd(&self.client, weights)?;
        self.empty("d_output", &[tokens, d_model], dtype);
        self.empty("d_query", &[2, 2, d_model], F32);
        for gate in 0..3 {
            let outputs = GATE_OUTPUTS[gate];
            self.empty(D_WEIGHTS[gate], &[2 * d_model, outputs], F32);
            self.empty(D_BIASES[gate], &[outputs], F32);
            self.empty(D_SCALES[gate], &[1], F32);
        }
        // The gradient of beta of the branch that follows: that of the state after it, times its output.
        let next = patterns::NEXT_OUTPUT.values(1, d_model, PERIOD);
        let d_beta = next.chunks(d_model).map(|row| row.iter().sum::<f64>());
        let row: Vec<f64> =
            d_beta.flat_map(|d_beta| [stream_0 * d_beta, stream_1 * d_beta, 0.0, 0.0, 0.0, 0.0]).collect();
        self.tiled("d_token", &[2, tokens, 6], &[row.clone(), row].concat());
        Ok(())
    }

    fn make_prefix(&mut self) -> Result<(), KernelError> {
        let Problem { operation, entries, queries, tokens, streams, d_model, dtype, .. } = self.problem;
        self.pattern("value", &[entries, tokens, streams, d_model], dtype, patterns::HISTORY, 1);
        self.tiled("inv_rms", &[entries, tokens, streams], &inverse_rms(entries, streams, d_model));
        self.parameter("query", &[queries, streams, d_model], patterns::QUERY);
        self.empty("lse", &[queries, tokens, streams], F32);
        self.empty("logit", &[entries, queries, tokens, streams], F32);
        self.empty("state", &[queries, tokens, streams, d_model], dtype);
        if operation == Operation::OutputRead {
            self.empty("input", &[tokens, d_model], dtype);
        }
        if self.packing == Packing::Keys {
            self.pack_entries()?;
        }
        if self.direction == Direction::Forward {
            return Ok(());
        }

        self.prefix()?;
        self.empty("d_logit", &[entries, queries, tokens, streams], F32);
        let entry = |_| Buffer::empty(&self.client, &[tokens, streams, d_model], dtype);
        self.d_value = (0..entries).map(entry).collect();
        if operation == Operation::OutputRead {
            // A read without an open block has a gradient of its query in name only.
            self.empty("d_read_query", &[queries, streams, d_model], F32);
            self.ones("d_input", &[tokens, d_model], dtype);
            self.empty("d_token", &[queries, tokens, 2 + 2 * streams], F32);
            self.sum_streams_backward()?;
            self.make_query_operands()?;
            self.prefix()?; // the backward of the read took the retrieved states
            return self.sum_streams();
        }
        // A gradient of one for what was retrieved, none for lse: the shift is minus the sum of the state.
        let states = |query: usize| {
            let rows = self.buffers["state"].read(query * tokens * streams * d_model, PERIOD * streams * d_model);
            rows.chunks(streams * d_model)
                .flat_map(|row| {
                    let shifts = row.chunks(d_model).map(|row| -row.iter().sum::<f64>());
                    [0.0, 0.0].into_iter().chain(shifts).chain(vec![0.0; streams]).collect::<Vec<_>>()
                })
                .collect::<Vec<f64>>()
        };
        let shift: Vec<f64> = (0..queries).flat_map(states).collect();
        self.tiled("d_token", &[queries, tokens, 2 + 2 * streams], &shift);
        self.ones("d_state", &[queries, tokens, streams, d_model], dtype);
        self.make_query_operands()
    }

    /// The history again, entry by entry, with its keys.
    fn pack_entries(&mut self) -> Result<(), KernelError> {
        let Problem { entries, tokens, streams, d_model, dtype, .. } = self.problem;
        let shape = [entries, tokens, streams, d_model];
        let (value, key) = (Buffer::empty(&self.client, &shape, dtype), Buffer::empty(&self.client, &shape, dtype));
        for entry in 0..entries {
            let state = self.buffers["value"].row(entry);
            let operands = PackFwd {
                state: state.operand(),
                value: value.operand(),
                inv_rms: self.operand("inv_rms"),
                key: Some(Key { key: key.operand(), routing: routing(streams) }),
                entry,
                eps: EPS,
            };
            pack_fwd(&self.client, operands, Tuning::default())?;
        }
        self.add("value", value);
        self.add("key", key);
        Ok(())
    }

    /// What the gradient of the queries reads, in rows of a pass in which every query comes after all entries.
    fn make_query_operands(&mut self) -> Result<(), KernelError> {
        let Problem { entries, queries, tokens, streams, d_model, .. } = self.problem;
        self.history_backward()?;
        let reads = entries - 1 + queries;
        self.add_late("late_lse", "lse", 1, streams);
        self.add_late("late_d_token", "d_token", 1, 2 + 2 * streams);
        self.add_late("late_logit", "logit", entries, streams);
        self.add_late("late_d_logit", "d_logit", entries, streams);
        for name in ["late_logit", "late_d_logit"] {
            let buffer = self.buffers.get_mut(name).expect("just made");
            buffer.reshape(&[entries, reads, tokens, streams]);
        }
        self.values("d_query", &[reads, streams, d_model], &vec![0.0; reads * streams * d_model]);
        Ok(())
    }

    /// `source` `[outer, queries, tokens, inner]` behind the rows of `entries - 1` reads that nobody looks at.
    fn add_late(&mut self, name: &'static str, source: &str, outer: usize, inner: usize) {
        let Problem { entries, queries, tokens, .. } = self.problem;
        let period = PERIOD * inner;
        let mut rows = Vec::new();
        for index in 0..outer {
            rows.extend(vec![0.0; (entries - 1) * period]);
            for query in 0..queries {
                rows.extend(self.buffers[source].read((index * queries + query) * tokens * inner, period));
            }
        }
        self.tiled(name, &[outer * (entries - 1 + queries), tokens, inner], &rows);
    }

    fn add(&mut self, name: &'static str, buffer: Buffer) {
        self.buffers.insert(name, buffer);
    }

    fn empty(&mut self, name: &'static str, shape: &[usize], dtype: ElemType) {
        self.add(name, Buffer::empty(&self.client, shape, dtype));
    }

    fn pattern(&mut self, name: &'static str, shape: &[usize], dtype: ElemType, pattern: Pattern, token_axis: usize) {
        self.add(name, Buffer::filled(&self.client, shape, dtype, pattern, Some(token_axis)));
    }

    fn ones(&mut self, name: &'static str, shape: &[usize], dtype: ElemType) {
        let one = Pattern { seed: 0, middle: 1.0, width: 0.0 };
        self.add(name, Buffer::filled(&self.client, shape, dtype, one, None));
    }

    fn parameter(&mut self, name: &'static str, shape: &[usize], pattern: Pattern) {
        self.add(name, Buffer::filled(&self.client, shape, F32, pattern, None));
    }

    fn values(&mut self, name: &'static str, shape: &[usize], values: &[f64]) {
        let values: Vec<f32> = values.iter().map(|&x| x as f32).collect();
        self.add(name, Buffer::of(&self.client, shape, &values));
    }

    /// Values of a period of tokens, `[outer, period, inner]`, for all tokens. `shape`: `[outer, tokens, inner]`
    fn tiled(&mut self, name: &'static str, shape: &[usize; 3], values: &[f64]) {
        let [_, tokens, inner] = *shape;
        let all = values.chunks(PERIOD * inner).flat_map(|rows| rows.repeat(tokens / PERIOD)).collect::<Vec<f64>>();
        self.values(name, shape, &all);
    }

    fn operand(&self, name: &str) -> Operand<'_> {
        self.buffers[name].operand()
    }

    fn site_operands(&self, [weights, biases, scales]: [[&str; 3]; 3]) -> SiteOperands<'_> {
        let gate = |gate: usize| GateOperands {
            weight: self.operand(weights[gate]),
            bias: self.operand(biases[gate]),
            scale: self.operand(scales[gate]),
        };
        SiteOperands { alpha: gate(0), beta: gate(1), rho: gate(2) }
    }

    // ---- launches

    fn key(&self) -> Option<Operand<'_>> {
        (self.packing == Packing::Keys).then(|| self.operand("key"))
    }

    fn pack(&self) -> Result<(), KernelError> {
        let operands = PackFwd {
            state: self.operand("source"),
            value: self.operand("value"),
            inv_rms: self.operand("inv_rms"),
            key: self.key().map(|key| Key { key, routing: routing(self.problem.streams) }),
            entry: 0,
            eps: EPS,
        };
        pack_fwd(&self.client, operands, Tuning::default())
    }

    fn prefix(&self) -> Result<(), KernelError> {
        let Problem { entries, queries, streams, .. } = self.problem;
        let operands = PrefixFwd {
            value: self.operand("value"),
            inv_rms: self.operand("inv_rms"),
            key: self.key(),
            query: self.operand("query"),
            lse: self.operand("lse"),
            logit: self.operand("logit"),
            state: self.operand("state"),
            mix: None,
            entries,
            first: 0,
            count: queries,
            slot: 0,
        };
        prefix_fwd(&self.client, operands, routing(streams), Tuning::default())
    }

    fn prefix_backward(&self) -> Result<(), KernelError> {
        let Problem { entries, queries, streams, .. } = self.problem;
        self.history_backward()?;
        let operands = PrefixBwdQuery {
            value: self.operand("value"),
            inv_rms: self.operand("inv_rms"),
            lse: self.operand("late_lse"),
            logit: self.operand("late_logit"),
            d_logit: self.operand("late_d_logit"),
            d_token: self.operand("late_d_token"),
            d_query: self.operand("d_query"),
            entries,
            first: entries - 1,
            reads: entries - 1 + queries,
            branches_per_block: 1,
        };
        prefix_bwd_query(&self.client, operands, routing(streams))
    }

    fn history_backward(&self) -> Result<(), KernelError> {
        let Problem { operation, queries, streams, .. } = self.problem;
        // The backward of the read leaves the gradient in the memory of the state.
        let d_state = if operation == Operation::OutputRead { "state" } else { "d_state" };
        for (entry, d_value) in self.d_value.iter().enumerate() {
            let operands = PrefixBwdHistory {
                value: self.operand("value"),
                inv_rms: self.operand("inv_rms"),
                query: self.operand("query"),
                lse: self.operand("lse"),
                logit: self.operand("logit"),
                d_state: self.operand(d_state),
                d_token: self.operand("d_token"),
                d_logit: self.operand("d_logit"),
                d_value: d_value.operand(),
                entry,
                first: 0,
                last: queries,
            };
            prefix_bwd_history(&self.client, operands, routing(streams), Tuning::default())?;
        }
        Ok(())
    }

    /// The read without gates: the sum of the streams.
    fn sum_streams(&self) -> Result<(), KernelError> {
        let operands = ReadFwd {
            state: self.operand("state"),
            slot: 0,
            open: None,
            query: self.operand("query"),
            lse: self.operand("lse"),
            site: None,
            gate: None,
            input: self.operand("input"),
            read: 0,
            eps: EPS,
            norm: None,
        };
        read_fwd(&self.client, operands, routing(self.problem.streams), Tuning::default())
    }

    fn sum_streams_backward(&self) -> Result<(), KernelError> {
        let operands = ReadBwd {
            state: self.operand("state"),
            slot: 0,
            lse: self.operand("lse"),
            query: self.operand("query"),
            site: None,
            gate: None,
            d_input: self.operand("d_input"),
            written: false,
            open: None,
            d_token: self.operand("d_token"),
            d_site: None,
            d_gain: None,
            d_query: self.operand("d_read_query"),
            read: 0,
            eps: EPS,
            norm: None,
        };
        read_bwd(&self.client, operands, routing(self.problem.streams), Tuning::default())
    }

    fn read(&self) -> Result<(), KernelError> {
        let open = Open {
            before: Some(self.operand("before")),
            output: self.operand("output"),
            partial: self.operand("partial"),
        };
        let operands = ReadFwd {
            state: self.operand("state"),
            slot: 0,
            open: Some(open),
            query: self.operand("query"),
            lse: self.operand("lse"),
            site: Some(self.operand("site")),
            gate: Some(self.operand("gate")),
            input: self.operand("input"),
            read: READ,
            eps: EPS,
            norm: None,
        };
        read_fwd(&self.client, operands, routing(2), Tuning::default())
    }

    fn read_backward(&self) -> Result<(), KernelError> {
        let open = OpenBwd {
            partial: self.operand("partial"),
            d_partial: self.operand("d_partial"),
            output: Some(self.operand("output")),
            d_output: Some(self.operand("d_output")),
        };
        let operands = ReadBwd {
            state: self.operand("state"),
            slot: 0,
            lse: self.operand("lse"),
            query: self.operand("query"),
            site: Some(self.operand("site")),
            gate: Some(self.operand("gate")),
            d_input: self.operand("d_input"),
            written: true,
            open: Some(open),
            d_token: self.operand("d_token"),
            d_site: Some(self.site_operands([D_WEIGHTS, D_BIASES, D_SCALES])),
            d_gain: None,
            d_query: self.operand("d_query"),
            read: READ,
            eps: EPS,
            norm: None,
        };
        read_bwd(&self.client, operands, routing(2), Tuning::default())
    }

    fn write(&self) -> Result<(), KernelError> {
        let operands = WriteFwd {
            before: Some(self.operand("before")),
            output: self.operand("output"),
            gate: Some(self.operand("gate")),
            read: 0,
            state: self.operand("state"),
        };
        write_fwd(&self.client, operands)
    }

    fn write_backward(&self) -> Result<(), KernelError> {
        let operands = WriteBwd {
            d_state: self.operand("d_state"),
            output: self.operand("output"),
            gate: self.operand("gate"),
            read: 0,
            d_output: self.operand("d_output"),
            d_token: self.operand("d_token"),
        };
        write_bwd(&self.client, operands, Tuning::default())
    }

    // ---- outputs

    /// Row `row` of a buffer `[_, tokens, width]`.
    fn tokens(&self, name: &'static str, buffer: &str, row: usize, width: usize) -> Output {
        self.ends(name, &self.buffers[buffer], row, width)
    }

    fn ends(&self, name: &'static str, buffer: &Buffer, row: usize, width: usize) -> Output {
        let tokens = self.problem.tokens;
        let ends = [row * tokens, (row + 1) * tokens - PERIOD];
        Output { name, kind: OutputKind::Tokens(ends.map(|first| buffer.read(first * width, PERIOD * width))) }
    }

    fn sum(&self, name: &'static str, buffer: &str, start: usize, length: usize) -> Output {
        Output { name, kind: OutputKind::Sum(self.buffers[buffer].read(start, length)) }
    }
}
