use std::ops::Range;

use cubecl::prelude::*;
use dar_burn::Routing;
use dar_burn::ops::{History, Retrieved, prefix};
use dar_kernels::prefix::{
    Mix, PrefixBwdHistory, PrefixBwdQuery, PrefixFwd, prefix_bwd_history, prefix_bwd_query, prefix_fwd,
};
use dar_kernels::read::{ReadFwd, read_fwd};
use dar_kernels::site::{packed_length, site_length};
use dar_kernels::{KernelError, Reduction, Tuning, launches};

use super::support::{
    BF16, Buffer, EPS, F16, F32, STORAGE, assert_close, assert_only_token, bound, clients, few, golden_cases, gradient,
    history, host, inverse_rms, keys, leaf, reductions, routing, stores, truth,
};
use crate::support::golden::Case;
use crate::support::host::{relative_error, values};

/// Slots before the retrieved states of a problem; one comes behind.
const SLOT: usize = 1;

/// A history and queries. Their rows in arenas are those from `first` on, and one comes behind.
#[derive(Debug, Clone)]
struct Problem {
    tokens: usize,
    streams: usize,
    d_model: usize,
    entries: usize,
    branches: usize,
    outputs: usize, // streams of a query
    first: usize,
    keyed: bool,               // keys in a buffer of their own
    branches_per_block: usize, // row i sees the entries up to i / branches_per_block
    routing: Routing,
    eps: f64,
    states: Vec<f64>,  // [entries, tokens, streams, d_model]
    queries: Vec<f64>, // [branches, outputs, d_model]
}

/// The operands of a prefix.
struct Arenas {
    value: Buffer,
    inv_rms: Buffer,
    key: Option<Buffer>,
    query: Buffer,
    lse: Buffer,
    logit: Buffer,
    state: Buffer,
}

/// Outputs of a prefix.
#[derive(Debug, Clone, PartialEq)]
struct Found {
    lse: Vec<f64>,   // [branches, tokens, outputs]
    logit: Vec<f64>, // [entries, branches, tokens, outputs], without entries that a query does not see
    state: Vec<f64>, // [branches, tokens, outputs, d_model]
}

impl Problem {
    /// Logits of about ±`logits`; the scales of states differ by entry, so that a logit depends on the inverse RMS.
    fn new(
        [tokens, streams, d_model]: [usize; 3],
        entries: usize,
        branches: usize,
        routing: Routing,
        logits: f64,
    ) -> Self {
        let mut states = values(1, entries * tokens * streams * d_model, 1.0);
        let length = tokens * streams * d_model;
        for (k, x) in states.iter_mut().enumerate() {
            *x *= [1.0, 4.0, 0.25][k / length % 3];
        }
        let queries = values(2, branches * streams * d_model, logits * 2.0 / (d_model as f64).sqrt());
        Self {
            tokens,
            streams,
            d_model,
            entries,
            branches,
            outputs: streams,
            first: entries + 1,
            keyed: false,
            branches_per_block: 1,
            routing,
            eps: EPS,
            states,
            queries,
        }
    }

    fn golden(case: &Case) -> Self {
        let states = case.tensor("H").unwrap().swap_axes(1); // [R, N, 2, D]
        let queries = case.tensor("q").unwrap();
        Self {
            tokens: states.shape[1],
            streams: 2,
            d_model: states.shape[3],
            entries: states.shape[0],
            branches: queries.shape[0],
            routing: routing(case),
            eps: case.eps().unwrap(),
            outputs: 2,
            first: states.shape[0],
            keyed: false,
            branches_per_block: 1,
            states: states.values,
            queries: queries.values.clone(),
        }
    }

    /// Attention Residuals with projected values: stream 0 gives the key of one output and stream 1 its value.
    fn projected(tokens: usize, d_model: usize, entries: usize, branches: usize) -> Self {
        let problem = Self::new([tokens, 2, d_model], entries, branches, Routing::FixedKeyValue, 3.0);
        Self { outputs: 1, queries: problem.queries[..branches * d_model].to_vec(), ..problem }
    }

    /// Queries of as many streams as states: zeros where there are no outputs.
    fn all_queries(&self) -> Vec<f64> {
        let queries = self.queries.chunks(self.outputs * self.d_model);
        let rest = vec![0.0; (self.streams - self.outputs) * self.d_model];
        queries.flat_map(|query| [query, &rest].concat()).collect()
    }

    /// The history in a buffer with room for one entry more, which is NaN, and its inverse RMS.
    fn history(&self, client: &Client, dtype: ElemType) -> [Buffer; 2] {
        let Self { tokens, streams, d_model, entries, .. } = *self;
        let inv_rms = inverse_rms(&self.states, d_model, self.eps);
        let rows = [entries + 1, 0];
        [
            Buffer::arena(client, rows, &[tokens, streams, d_model], dtype, &self.states),
            Buffer::arena(client, rows, &[tokens, streams], F32, &inv_rms),
        ]
    }

    /// Rows of the arenas.
    fn reads(&self) -> usize {
        self.first + self.branches + 1
    }

    /// How many entries the query sees.
    fn visible(&self, branch: usize) -> usize {
        ((self.first + branch) / self.branches_per_block + 1).min(self.entries)
    }

    /// The queries that see equally many entries, and how many.
    fn blocks(&self) -> Vec<(Range<usize>, usize)> {
        let mut blocks: Vec<(Range<usize>, usize)> = Vec::new();
        for branch in 0..self.branches {
            let visible = self.visible(branch);
            match blocks.last_mut() {
                Some((branches, entries)) if *entries == visible => branches.end += 1,
                _ => blocks.push((branch..branch + 1, visible)),
            }
        }
        blocks
    }

    /// Whether entry and row of a logit `[entries, reads, tokens, outputs]` belong to a query that sees the entry.
    fn sees(&self, logit: usize) -> bool {
        let row = logit / (self.tokens * self.outputs);
        let (entry, read) = (row / self.reads(), row % self.reads());
        read >= self.first && read < self.first + self.branches && entry < self.visible(read - self.first)
    }

    fn forward(&self, client: &Client, dtype: ElemType, tuning: Tuning) -> Arenas {
        self.forward_with(client, dtype, tuning, None)
    }

    /// `mix`: of the first query.
    fn forward_with(&self, client: &Client, dtype: ElemType, tuning: Tuning, mix: Option<Mix>) -> Arenas {
        let Self { tokens, streams, d_model, entries, branches, outputs, first, .. } = *self;
        let reads = self.reads();
        let [value, inv_rms] = self.history(client, dtype);
        let key = self.keyed.then(|| {
            let keys = keys(&self.states, [streams, outputs, d_model], self.routing, self.eps);
            Buffer::arena(client, [entries + 1, 0], &[tokens, outputs, d_model], dtype, &keys)
        });
        // With keys nothing reads it.
        let no_inv_rms = Buffer::output(client, &[entries + 1, tokens, streams], F32);
        let arenas = Arenas {
            value,
            inv_rms,
            key,
            query: Buffer::arena(client, [reads, first], &[outputs, d_model], F32, &self.queries),
            lse: Buffer::output(client, &[reads, tokens, outputs], F32),
            logit: Buffer::output(client, &[entries + 1, reads, tokens, outputs], F32),
            state: Buffer::output(client, &[SLOT + branches + 1, tokens, outputs, d_model], dtype),
        };
        for (block, entries) in self.blocks() {
            let operands = PrefixFwd {
                value: arenas.value.operand(),
                inv_rms: if self.keyed { no_inv_rms.operand() } else { arenas.inv_rms.operand() },
                key: arenas.key.as_ref().map(Buffer::operand),
                query: arenas.query.operand(),
                lse: arenas.lse.operand(),
                logit: arenas.logit.operand(),
                state: arenas.state.operand(),
                mix: mix.filter(|_| block.start == 0),
                entries,
                first: first + block.start,
                count: block.len(),
                slot: SLOT + block.start,
            };
            let before = launches();
            prefix_fwd(client, operands, self.routing, tuning).unwrap();
            assert!(tokens == 0 || launches() > before);
        }
        arenas
    }

    fn run(&self, client: &Client, dtype: ElemType, tuning: Tuning) -> Found {
        self.found(&self.forward(client, dtype, tuning), 0)
    }

    /// What is in the arenas, without the states of the first `unkept` queries, which are NaN still.
    fn found(&self, arenas: &Arenas, unkept: usize) -> Found {
        let Arenas { lse, logit, state, .. } = arenas;
        let logit = logit.rows(0, self.entries);
        let logit = logit.into_iter().enumerate().filter_map(|(k, x)| {
            assert!(self.sees(k) || x.is_nan(), "a logit of no concern changed");
            self.sees(k).then_some(x)
        });
        Found {
            lse: lse.rows(self.first, self.branches),
            logit: logit.collect(),
            state: state.rows(SLOT + unkept, self.branches - unkept),
        }
    }

    /// The composed operation in f64.
    fn truth(&self) -> Found {
        let Self { tokens, streams, d_model, entries, branches, outputs, .. } = *self;
        let found = |entries: std::ops::Range<usize>| {
            let length = tokens * streams * d_model;
            let states = &self.states[entries.start * length..entries.end * length];
            let (history, _) = history(states, [entries.len(), tokens, streams, d_model], self.eps, truth);
            let all = prefix(&history, truth(&self.all_queries(), [branches, streams, d_model]), self.routing);
            let outputs = all.into_iter().map(|Retrieved { lse, state }| Retrieved {
                lse: lse.narrow(1, 0, outputs),
                state: state.narrow(1, 0, outputs),
            });
            outputs.collect::<Vec<_>>()
        };
        let all = found(0..entries);
        Found {
            lse: all.iter().flat_map(|retrieved| host(retrieved.lse.clone())).collect(),
            // The lse of one entry is its logit.
            logit: (0..entries).flat_map(|r| found(r..r + 1)).flat_map(|retrieved| host(retrieved.lse)).collect(),
            state: all.into_iter().flat_map(|retrieved| host(retrieved.state)).collect(),
        }
    }
}

impl Found {
    #[track_caller]
    fn assert_close(&self, truth: &Self, dtype: ElemType, about: &str) {
        // Half types round the states and queries, not what is computed from them.
        assert_close(
            about,
            &[
                ("lse", &self.lse, &truth.lse, 1e-5),
                ("logit", &self.logit, &truth.logit, 1e-5),
                ("state", &self.state, &truth.state, bound(dtype)),
            ],
        );
    }
}

/// What reaches the outputs of a prefix.
struct Cotangents {
    lse: Vec<f64>,   // [branches, tokens, outputs]
    state: Vec<f64>, // [branches, tokens, outputs, d_model]
}

/// Gradients of a prefix.
#[derive(Debug, PartialEq)]
struct Gradients {
    states: Vec<f64>,  // [entries, tokens, streams, d_model]
    queries: Vec<f64>, // [branches, outputs, d_model]
}

impl Gradients {
    #[track_caller]
    fn assert_close(&self, truth: &Self, [states, queries]: [f64; 2], about: &str) {
        assert_close(
            about,
            &[("d_value", &self.states, &truth.states, states), ("d_query", &self.queries, &truth.queries, queries)],
        );
    }
}

impl Problem {
    fn cotangents(&self) -> Cotangents {
        let heads = self.branches * self.tokens * self.outputs;
        Cotangents { lse: values(3, heads, 1.0), state: values(4, heads * self.d_model, 1.0) }
    }

    /// Forward, then backward by entry, the last first, then of the queries, which adds to `queries`.
    fn run_bwd(
        &self,
        client: &Client,
        dtype: ElemType,
        tuning: Tuning,
        cotangents: &Cotangents,
        queries: &[f64],
    ) -> Gradients {
        let Self { tokens, streams, d_model, entries, branches, outputs, first, routing, .. } = *self;
        let Arenas { value, inv_rms, query, lse, logit, state, .. } = self.forward(client, dtype, tuning);
        let reads = self.reads();
        let row = [tokens, outputs, d_model];
        let d_state = Buffer::arena(client, [reads, first], &row, dtype, &cotangents.state);
        // As the read's backward leaves it: shift and d_lse behind the gradient of beta.
        let state = state.rows(SLOT, branches);
        let dots = cotangents.state.chunks(d_model).zip(state.chunks(d_model));
        let dots = dots.map(|(d, state)| d.iter().zip(state).map(|(d, x)| d * x).sum::<f64>());
        let shift: Vec<f64> = cotangents.lse.iter().zip(dots).map(|(d_lse, dot)| d_lse - dot).collect();
        let token = shift.chunks(outputs).zip(cotangents.lse.chunks(outputs));
        let token = token.flat_map(|(shift, d_lse)| [&[f64::NAN; 2], shift, d_lse].concat()).collect::<Vec<_>>();
        let d_token = Buffer::arena(client, [reads, first], &[tokens, 2 + 2 * outputs], F32, &token);
        let d_logit = Buffer::output(client, &[entries + 1, reads, tokens, outputs], F32);
        let d_query = Buffer::arena(client, [reads, first], &[outputs, d_model], F32, queries);

        let mut states = Vec::new();
        for entry in (0..entries).rev() {
            let unseen = (0..branches).filter(|&branch| self.visible(branch) <= entry).count();
            let d_value = Buffer::output(client, &[tokens, streams, d_model], dtype);
            let operands = PrefixBwdHistory {
                value: value.operand(),
                inv_rms: inv_rms.operand(),
                query: query.operand(),
                lse: lse.operand(),
                logit: logit.operand(),
                d_logit: d_logit.operand(),
                d_state: d_state.operand(),
                d_token: d_token.operand(),
                d_value: d_value.operand(),
                entry,
                first: first + unseen,
                last: first + branches,
            };
            if entry == 0 {
                self.assert_sum_over_streams(client, dtype, tuning, operands);
            }
            prefix_bwd_history(client, operands, routing, tuning).unwrap();
            states.splice(0..0, d_value.read());
        }
        let operands = PrefixBwdQuery {
            value: value.operand(),
            inv_rms: inv_rms.operand(),
            lse: lse.operand(),
            logit: logit.operand(),
            d_logit: d_logit.operand(),
            d_token: d_token.operand(),
            d_query: d_query.operand(),
            entries,
            first,
            reads: first + branches,
            branches_per_block: self.branches_per_block,
        };
        prefix_bwd_query(client, operands, routing).unwrap();
        self.assert_logits_add_up(&d_logit.rows(0, entries), cotangents);
        Gradients { states, queries: d_query.rows(first, branches) }
    }

    /// The gradients of the logits of a query add up to that of its log-sum-exp, and those of queries that do not see
    /// an entry are left alone. `d_logit`: `[entries, reads, tokens, outputs]`
    fn assert_logits_add_up(&self, d_logit: &[f64], cotangents: &Cotangents) {
        let Self { tokens, entries, outputs, first, .. } = *self;
        assert!(d_logit.iter().enumerate().all(|(k, x)| self.sees(k) || x.is_nan()), "a logit of no concern changed");
        for (head, d_lse) in cotangents.lse.iter().enumerate() {
            let own = first * tokens * outputs + head;
            let of_entries = (0..entries).map(|entry| entry * self.reads() * tokens * outputs + own);
            let gradients: Vec<f64> = of_entries.filter(|&k| self.sees(k)).map(|k| d_logit[k]).collect();
            if gradients.iter().all(|x| x.is_finite()) {
                let size = gradients.iter().map(|x| x.abs()).sum::<f64>().max(d_lse.abs());
                let sum = gradients.iter().sum::<f64>();
                assert!((sum - d_lse).abs() <= 1e-5 * size, "gradients of logits give {sum}, not {d_lse}");
            }
        }
    }

    /// The gradient of an embedding is the sum over the streams of what `operands` give.
    fn assert_sum_over_streams(&self, client: &Client, dtype: ElemType, tuning: Tuning, operands: PrefixBwdHistory) {
        let Self { tokens, streams, d_model, .. } = *self;
        let [apart, summed] = [true, false].map(|apart| {
            let shape: &[usize] = if apart { &[tokens, streams, d_model] } else { &[tokens, d_model] };
            let d_value = Buffer::output(client, shape, dtype);
            let operands = PrefixBwdHistory { d_value: d_value.operand(), ..operands };
            prefix_bwd_history(client, operands, self.routing, tuning).unwrap();
            d_value.read()
        });
        if apart.iter().any(|x| !x.is_finite()) {
            return; // a test that puts such a value in
        }
        let sums: Vec<f64> = (0..tokens * d_model)
            .map(|k| (0..streams).map(|j| apart[(k / d_model * streams + j) * d_model + k % d_model]).sum())
            .collect();
        // Streams may cancel where they are rounded one by one.
        let least = (apart.iter().map(|x| x * x).sum::<f64>() / apart.len().max(1) as f64).sqrt();
        assert!(relative_error(&summed, &sums, least) <= bound(dtype), "an embedding's gradient is the streams' sum");
    }

    /// Automatic differentiation of the composed operation in f64.
    fn truth_bwd(&self, cotangents: &Cotangents) -> Gradients {
        let Self { tokens, streams, d_model, entries, branches, outputs, .. } = *self;
        let queries = leaf(&self.all_queries(), [branches, streams, d_model]);
        let (_, states) = history(&self.states, [entries, tokens, streams, d_model], self.eps, leaf);
        let heads = tokens * outputs;
        let mut loss = leaf(&[0.0], [1]);
        for (block, entries) in self.blocks() {
            let first = History::new(states[0].clone(), self.eps);
            let history = states[1..entries].iter().cloned().fold(first, History::append);
            let found = prefix(&history, queries.clone().slice([block.clone()]), self.routing);
            for (branch, Retrieved { lse, state }) in block.zip(found) {
                let d_lse = leaf(&cotangents.lse[branch * heads..][..heads], [tokens, outputs]);
                let d_state = &cotangents.state[branch * heads * d_model..][..heads * d_model];
                let d_state = leaf(d_state, [tokens, outputs, d_model]);
                let narrowed = (lse.narrow(1, 0, outputs), state.narrow(1, 0, outputs));
                loss = loss + (narrowed.0 * d_lse).sum() + (narrowed.1 * d_state).sum();
            }
        }
        let gradients = loss.backward();
        let queries = gradient(&queries, &gradients);
        Gradients {
            states: states.iter().flat_map(|state| gradient(state, &gradients)).collect(),
            queries: queries.chunks(streams * d_model).flat_map(|query| query[..outputs * d_model].to_vec()).collect(),
        }
    }
}

/// Both ways to add in f32; half types differ in how they load only.
fn tunings(client: &Client, dtype: ElemType) -> Vec<Tuning> {
    if dtype == F32 { reductions(client) } else { vec![Tuning::default()] }
}

/// Keys in a buffer of their own, rounded to the type of the states, give what values and inverse RMS give. Golden cases;
/// widths, a chunk that is not full, more queries than one pass takes, one stream, one output of two streams.
#[test]
fn packed_keys() {
    for (client, device) in clients() {
        let golden = golden_cases("prefix_").into_iter().filter(|case| !case.is_extreme());
        let golden: Vec<Problem> = golden.map(|case| Problem::golden(&case)).collect();
        let sized = [[257, 2, 1], [1, 2, 37], [37, 2, 130], [3, 2, 257], [0, 2, 8]];
        let sized = sized.map(|[tokens, streams, d_model]| {
            Problem::new([few(&client, tokens), streams, d_model], 3, 2, Routing::CrossKey, 3.0)
        });
        let others = [
            Problem::new([3, 2, 24], 7, 11, Routing::CrossKey, 3.0),
            Problem::new([3, 1, 24], 5, 3, Routing::SelfKeyValue, 3.0),
            Problem::projected(5, 24, 3, 2),
        ];
        for problem in golden.into_iter().chain(sized).chain(others) {
            let problem = Problem { keyed: true, ..problem };
            let truth = problem.truth();
            // A rounded key moves its logit by as much of it, which the exponential passes on.
            let largest = truth.logit.iter().fold(1.0f64, |largest, x| largest.max(x.abs()));
            for dtype in STORAGE.into_iter().filter(|&dtype| stores(&client, dtype)) {
                for tuning in tunings(&client, dtype) {
                    let Problem { tokens, d_model, branches, routing, .. } = problem;
                    let about = format!(
                        "{tokens} × {d_model}, {branches} queries, {routing:?}, {dtype} on {device}, {tuning:?}"
                    );
                    let found = problem.run(&client, dtype, tuning);
                    let bound = bound(dtype);
                    assert_close(
                        &about,
                        &[
                            ("lse", &found.lse, &truth.lse, bound),
                            ("logit", &found.logit, &truth.logit, bound),
                            ("state", &found.state, &truth.state, bound * largest),
                        ],
                    );
                }
            }
        }
    }
}

/// What one launch gives for the first branch of a block, or for an output, is what a read of its own gives of the
/// stored state. Widths; more queries than one group has, of which one mixes; without a site any number of outputs.
#[test]
fn mixed_with_the_first_branch() {
    for (client, device) in clients() {
        let routed = Routing::ALL.map(|routing| Problem::new([5, 2, 24], 5, 4, routing, 3.0));
        let sized = [[257, 2, 1], [1, 2, 37], [37, 2, 130], [3, 2, 257], [0, 2, 8]];
        let sized = sized.map(|[tokens, streams, d_model]| {
            Problem::new([few(&client, tokens), streams, d_model], 3, 2, Routing::CrossKey, 3.0)
        });
        let many = Problem::new([3, 2, 24], 3, 19, Routing::CrossKey, 3.0);
        let sited = routed.into_iter().chain(sized).chain([many]).map(|problem| (problem, true));
        let keyed = Problem { keyed: true, ..Problem::new([5, 2, 24], 5, 4, Routing::CrossKey, 3.0) };
        let sited = sited.chain([(keyed, true)]);
        let plain = [
            Problem::new([5, 2, 24], 3, 1, Routing::CrossKey, 3.0),
            Problem::new([5, 1, 37], 3, 3, Routing::SelfKeyValue, 3.0),
            Problem::new([5, 4, 24], 3, 2, Routing::SelfKeyValue, 3.0),
            Problem::projected(5, 24, 3, 2),
        ];
        for (problem, sited) in sited.chain(plain.map(|problem| (problem, false))) {
            let Problem { tokens, d_model, entries, branches, outputs, first, routing, .. } = problem;
            // With the norm of the branch folded in, but where two streams without gates leave no room for its gain; of
            // the widths with and without vectors one each is enough.
            let may_be_normed = (sited || outputs != 2) && matches!(d_model, 24 | 257);
            for normed in [false, true].into_iter().filter(|&normed| !normed || may_be_normed) {
                let norm = normed.then_some(1e-3);
                let length = packed_length(d_model, sited, normed);
                let site = values(6, length, 2.0 / (d_model as f64).sqrt());
                let site = (sited || normed).then(|| Buffer::new(&client, &[length], F32, &site));
                let site = site.as_ref().map(Buffer::operand);
                for dtype in STORAGE.into_iter().filter(|&dtype| stores(&client, dtype)) {
                    for tuning in tunings(&client, dtype) {
                        let about = format!(
                            "{tokens} × {outputs} × {d_model}, {entries} entries, {branches} queries, {routing:?}, site \
                         {sited}, normed {normed}, {dtype} on {device}, {tuning:?}"
                        );
                        let outputs_of_read = || {
                            let gate = Buffer::output(&client, &[problem.reads(), tokens, 5], F32);
                            (gate, Buffer::output(&client, &[tokens, d_model], dtype))
                        };
                        let apart = problem.forward(&client, dtype, tuning);
                        let (gate_apart, input_apart) = outputs_of_read();
                        let operands = ReadFwd {
                            state: apart.state.operand(),
                            slot: SLOT,
                            open: None,
                            query: apart.query.operand(),
                            lse: apart.lse.operand(),
                            site,
                            gate: sited.then(|| gate_apart.operand()),
                            input: input_apart.operand(),
                            read: first,
                            eps: EPS,
                            norm,
                        };
                        read_fwd(&client, operands, routing, tuning).unwrap();

                        for keep_first in [true, false] {
                            let (gate, input) = outputs_of_read();
                            let mix = Mix {
                                site,
                                gate: sited.then(|| gate.operand()),
                                input: input.operand(),
                                keep_first,
                                eps: EPS,
                                norm,
                            };
                            let found = problem.forward_with(&client, dtype, tuning, Some(mix));
                            let unkept = usize::from(!keep_first);
                            let mut expected = problem.found(&apart, 0);
                            expected.state.drain(..unkept * tokens * outputs * d_model);
                            assert_eq!(problem.found(&found, unkept), expected, "{about}");
                            let gates = [&gate, &gate_apart].map(|gate| gate.rows(first, usize::from(sited)));
                            assert_close(
                                &about,
                                &[
                                    ("gate", &gates[0], &gates[1], bound(dtype)),
                                    ("input", &input.read(), &input_apart.read(), bound(dtype)),
                                ],
                            );
                        }
                    }
                }
            }
        }
    }
}

#[test]
fn golden_backward() {
    for (client, device) in clients() {
        for case in golden_cases("prefix_") {
            let problem = Problem::golden(&case);
            let token_major = |name| case.tensor(name).unwrap().swap_axes(1).values;
            let cotangents = Cotangents { lse: token_major("cot.zeta"), state: token_major("cot.hist") };
            let truth =
                Gradients { states: token_major("grad.H"), queries: case.tensor("grad.q").unwrap().values.clone() };
            let nothing = vec![0.0; problem.queries.len()];
            for dtype in STORAGE.into_iter().filter(|&dtype| stores(&client, dtype)) {
                let found = problem.run_bwd(&client, dtype, Tuning::default(), &cotangents, &nothing);
                let least = if case.is_extreme() { 1e-3 } else { 1e-5 };
                found.assert_close(
                    &truth,
                    [bound(dtype).max(least); 2],
                    &format!("{} in {dtype} on {device}", case.name),
                );
            }
        }
    }
}

/// The widths and groups of the forward; more queries than one step takes, all routings by the golden cases.
#[test]
fn backward_of_any_size() {
    for (client, device) in clients() {
        let sized = [
            Problem::new([few(&client, 257), 2, 1], 3, 2, Routing::CrossKey, 3.0),
            Problem::new([few(&client, 130), 2, 3], 1, 2, Routing::CrossKey, 3.0),
            Problem::new([1, 2, 37], 3, 2, Routing::CrossKey, 3.0),
            Problem::new([few(&client, 37), 2, 130], 3, 2, Routing::CrossKey, 3.0),
            Problem::new([3, 2, 257], 3, 2, Routing::CrossKey, 3.0),
            Problem::new([3, 2, 24], 64, 11, Routing::CrossKey, 3.0),
            Problem::new([3, 1, 24], 5, 3, Routing::SelfKeyValue, 3.0),
            Problem::new([few(&client, 700), 2, 3], 3, 2, Routing::CrossKey, 3.0),
            Problem::projected(5, 24, 3, 2),
            Problem::projected(3, 130, 9, 11),
        ];
        for problem in sized {
            let Problem { tokens, streams, d_model, entries, branches, .. } = problem;
            let cotangents = problem.cotangents();
            let truth = problem.truth_bwd(&cotangents);
            let nothing = vec![0.0; problem.queries.len()];
            for tuning in reductions(&client) {
                let about = format!(
                    "{tokens} × {streams} × {d_model}, {entries} entries, {branches} queries on {device}, {tuning:?}"
                );
                let found = problem.run_bwd(&client, F32, tuning, &cotangents, &nothing);
                found.assert_close(&truth, [1e-5; 2], &about);
                let again = problem.run_bwd(&client, F32, tuning, &cotangents, &nothing);
                assert_eq!(found, again, "{about}: other bits");
            }
        }
        let empty = Problem::new([0, 2, 24], 3, 4, Routing::CrossKey, 3.0);
        let queries = values(5, 4 * 2 * 24, 1.0);
        let found = empty.run_bwd(&client, F32, Tuning::default(), &empty.cotangents(), &queries);
        assert_eq!(found, Gradients { states: Vec::new(), queries }, "{device}");
    }
}

/// A pass of blocks: every read sees the entries before its block only, gradients are added to what is there, and rows
/// before the first read stay.
#[test]
fn backward_of_a_pass() {
    for (client, device) in clients() {
        for (first, branches, branches_per_block, entries) in [(0, 13, 4, 4), (3, 21, 2, 9), (1, 4, 8, 1)] {
            for routing in Routing::ALL {
                let problem = Problem::new([5, 2, 24], entries, branches, routing, 3.0);
                let problem = Problem { first, branches_per_block, ..problem };
                let cotangents = problem.cotangents();
                let mut truth = problem.truth_bwd(&cotangents);
                let queries = values(5, problem.queries.len(), 1.0);
                truth.queries.iter_mut().zip(&queries).for_each(|(sum, x)| *sum += x);
                for dtype in [F32, F16].into_iter().filter(|&dtype| stores(&client, dtype)) {
                    let found = problem.run_bwd(&client, dtype, Tuning::default(), &cotangents, &queries);
                    let about = format!("{branches} reads from {first}, {routing:?}, {dtype} on {device}");
                    // Stored states are rounded, and the shifts with them: the correction takes that out of the
                    // queries' gradients again.
                    found.assert_close(&truth, [bound(dtype), 1e-5], &about);
                }
            }
        }
    }
}

#[test]
fn golden() {
    for (client, device) in clients() {
        for case in golden_cases("prefix_") {
            let problem = Problem::golden(&case);
            // [S, 2, N] and [S, 2, N, D] as [S, N, 2] and [S, N, 2, D]
            let lse = case.tensor("out.zeta").unwrap().swap_axes(1).values;
            let state = case.tensor("out.hist").unwrap().swap_axes(1).values;
            for dtype in STORAGE {
                if !stores(&client, dtype) {
                    continue;
                }
                for tuning in reductions(&client) {
                    let found = problem.run(&client, dtype, tuning);
                    let about = format!("{} on {device}, {tuning:?}", case.name);
                    // Every type represents the inputs, so that only the state is rounded.
                    let least = if case.is_extreme() { 1e-3 } else { 1e-5 };
                    assert_close(
                        &about,
                        &[("lse", &found.lse, &lse, least), ("state", &found.state, &state, bound(dtype).max(least))],
                    );
                }
            }
        }
    }
}

/// One column, an odd width in one unit each, two lanes, and 257: no vectors and more columns than units.
#[test]
fn any_width() {
    for (client, device) in clients() {
        for d_model in [1, 3, 37, 130, 257] {
            let problem = Problem::new([5, 2, d_model], 3, 2, Routing::CrossKey, 3.0);
            let truth = problem.truth();
            for tuning in reductions(&client) {
                let about = format!("d_model {d_model} on {device}, {tuning:?}");
                problem.run(&client, F32, tuning).assert_close(&truth, F32, &about);
            }
        }
    }
}

/// No token, one; no full chunk, one entry past a chunk, many; logits whose exponentials overflow.
#[test]
fn any_tokens_entries_and_logits() {
    for (client, device) in clients() {
        for tokens in [0, 1, 5] {
            for entries in [1, 5, 64] {
                for logits in [1.0, 1e4] {
                    let problem = Problem::new([tokens, 2, 24], entries, 4, Routing::CrossKey, logits);
                    let about = format!("{tokens} tokens, {entries} entries, logits {logits} on {device}");
                    let found = problem.run(&client, F32, Tuning::default());
                    let truth = problem.truth();
                    // An f32 logit of 1e4 is uncertain by 1e-3, which its exponential passes on.
                    let bound = if logits > 1.0 { 2e-2 } else { 1e-5 };
                    assert_close(
                        &about,
                        &[
                            ("lse", &found.lse, &truth.lse, 1e-5),
                            ("logit", &found.logit, &truth.logit, 1e-5),
                            ("state", &found.state, &truth.state, bound),
                        ],
                    );
                }
            }
        }
    }
}

/// One stream (AttnRes), and more queries than one pass takes.
#[test]
fn one_stream_and_many_queries() {
    for (client, device) in clients() {
        for (streams, branches, routing) in [(1, 3, Routing::SelfKeyValue), (2, 11, Routing::CrossKey)] {
            let problem = Problem::new([3, streams, 24], 3, branches, routing, 3.0);
            let about = format!("{streams} stream(s), {branches} queries on {device}");
            problem.run(&client, F32, Tuning::default()).assert_close(&problem.truth(), F32, &about);
        }
    }
}

/// Queries keep their f32 beside half states.
#[test]
fn half_states_with_full_queries() {
    for (client, device) in clients() {
        for dtype in [F16, BF16].into_iter().filter(|&dtype| stores(&client, dtype)) {
            let mut problem = Problem::new([5, 2, 24], 3, 4, Routing::CrossKey, 3.0);
            problem.queries.iter_mut().for_each(|x| *x *= 1.001); // not a value of a half type
            let found = problem.run(&client, dtype, Tuning::default());
            found.assert_close(&problem.truth(), dtype, device);
        }
    }
}

#[test]
fn projected_values() {
    for (client, device) in clients() {
        for (tokens, d_model, entries, branches) in [(5, 24, 3, 2), (1, 37, 1, 1), (3, 130, 9, 11)] {
            let problem = Problem::projected(tokens, d_model, entries, branches);
            let truth = problem.truth();
            for tuning in reductions(&client) {
                for dtype in STORAGE.into_iter().filter(|&dtype| stores(&client, dtype)) {
                    let about = format!("{tokens} × {d_model}, {branches} queries in {dtype} on {device}, {tuning:?}");
                    problem.run(&client, dtype, tuning).assert_close(&truth, dtype, &about);
                }
            }
        }
    }
}

#[test]
fn more_cubes_than_one_axis_allows() {
    for (client, device) in clients() {
        let most = client.properties().hardware.max_cube_count.0 as usize;
        if most > 1 << 20 {
            continue; // the limit of other axes only
        }
        let problem = Problem::new([most + 3, 1, 1], 1, 1, Routing::SelfKeyValue, 3.0);
        let found = problem.run(&client, F32, Tuning::default());
        // One entry is retrieved as it is.
        assert!(relative_error(&found.state, &problem.states, 1e-6) <= 1e-6, "{device}");
    }
}

#[test]
fn reruns_are_bit_identical() {
    for (client, device) in clients() {
        let problem = Problem::new([5, 2, 130], 5, 2, Routing::CrossKey, 3.0);
        for tuning in reductions(&client) {
            let first = problem.run(&client, F32, tuning);
            for _ in 0..3 {
                assert_eq!(problem.run(&client, F32, tuning), first, "{device}, {tuning:?}");
            }
        }
    }
}

#[test]
fn one_token_never_leaks_into_another() {
    for (client, device) in clients() {
        let problem = Problem::new([5, 2, 24], 5, 4, Routing::CrossKey, 3.0);
        let clean = problem.run(&client, F32, Tuning::default());
        for poison in [f64::NAN, f64::INFINITY] {
            let mut problem = problem.clone();
            problem.states[(5 + 2) * 2 * 24] = poison; // entry 1, token 2
            let found = problem.run(&client, F32, Tuning::default());
            let about = format!("{poison} on {device}");
            assert_only_token(&about, &found.lse, &clean.lse, [5, 2, 2]);
            assert_only_token(&about, &found.logit, &clean.logit, [5, 2, 2]);
            assert_only_token(&about, &found.state, &clean.state, [5, 2, 2 * 24]);
        }
    }
}

#[test]
fn no_gradient_of_one_token_leaks_into_another() {
    for (client, device) in clients() {
        let problem = Problem::new([5, 2, 24], 5, 4, Routing::CrossKey, 3.0);
        let mut cotangents = problem.cotangents();
        let nothing = vec![0.0; problem.queries.len()];
        let run = |cotangents: &Cotangents| problem.run_bwd(&client, F32, Tuning::default(), cotangents, &nothing);
        let clean = run(&cotangents);
        for poison in [f64::NAN, f64::INFINITY] {
            cotangents.lse[2 * 2] = poison; // query 0, token 2
            let found = run(&cotangents);
            assert_only_token(&format!("{poison} on {device}"), &found.states, &clean.states, [5, 2, 2 * 24]);
        }
    }
}

#[test]
fn refused_backward() {
    for (client, _) in clients() {
        let buffer = |shape: &[usize]| Buffer::new(&client, shape, F32, &vec![1.0; shape.iter().product()]);
        let (value, inv_rms, query) = (buffer(&[3, 5, 2, 8]), buffer(&[3, 5, 2]), buffer(&[4, 2, 8]));
        let (lse, logit, state) = (buffer(&[4, 5, 2]), buffer(&[3, 4, 5, 2]), buffer(&[4, 5, 2, 8]));
        let (d_token, d_value, d_query) = (buffer(&[4, 5, 6]), buffer(&[5, 2, 8]), buffer(&[4, 2, 8]));
        let d_logit = buffer(&[3, 4, 5, 2]);
        let right = PrefixBwdHistory {
            value: value.operand(),
            inv_rms: inv_rms.operand(),
            query: query.operand(),
            lse: lse.operand(),
            logit: logit.operand(),
            d_logit: d_logit.operand(),
            d_state: state.operand(),
            d_token: d_token.operand(),
            d_value: d_value.operand(),
            entry: 2,
            first: 1,
            last: 4,
        };
        let run = |operands| {
            let run = prefix_bwd_history(&client, operands, Routing::CrossKey, Tuning::default());
            run.map_err(|error| error.to_string())
        };
        assert_eq!(run(right), Ok(()));
        for (operands, message) in [
            (
                PrefixBwdHistory { last: 5, ..right },
                "prefix_bwd_history: `first and last` is 1 to 5, expected a range of the 4 reads",
            ),
            (
                PrefixBwdHistory { first: 3, last: 2, ..right },
                "prefix_bwd_history: `first and last` is 3 to 2, expected a range of the 4 reads",
            ),
            (
                PrefixBwdHistory { entry: 3, ..right },
                "prefix_bwd_history: `value` has shape [3, 5, 2, 8], expected [capacity, tokens, streams, d_model] with \
                 capacity ≥ 4",
            ),
            (
                PrefixBwdHistory { d_token: lse.operand(), ..right },
                "prefix_bwd_history: `d_token` has shape [4, 5, 2], expected [reads, tokens, 2 + 2 * outputs] = [4, 5, 6]",
            ),
            (
                PrefixBwdHistory { d_value: inv_rms.operand(), ..right },
                "prefix_bwd_history: `d_value` has shape [3, 5, 2], expected [tokens, streams, d_model] = [5, 2, 8]",
            ),
        ] {
            assert_eq!(run(operands).unwrap_err(), message);
        }

        let right = PrefixBwdQuery {
            value: value.operand(),
            inv_rms: inv_rms.operand(),
            lse: lse.operand(),
            logit: logit.operand(),
            d_logit: d_logit.operand(),
            d_token: d_token.operand(),
            d_query: d_query.operand(),
            entries: 3,
            first: 1,
            reads: 4,
            branches_per_block: 1,
        };
        let run = |operands| prefix_bwd_query(&client, operands, Routing::CrossKey).map_err(|error| error.to_string());
        assert_eq!(run(right), Ok(()));
        for (operands, message) in [
            (
                PrefixBwdQuery { d_query: state.operand(), ..right },
                "prefix_bwd_query: `d_query` has shape [4, 5, 2, 8], expected [reads, outputs, d_model] with reads ≥ 1 \
                 and outputs ≥ 1",
            ),
            (
                PrefixBwdQuery { reads: 5, ..right },
                "prefix_bwd_query: `first and reads` is 1 to 5, expected a range of the 4 rows of `d_query`",
            ),
            (
                PrefixBwdQuery { branches_per_block: 0, ..right },
                "prefix_bwd_query: `branches_per_block` is 0, expected at least 1",
            ),
            (PrefixBwdQuery { entries: 0, ..right }, "prefix_bwd_query: `entries` is 0, expected at least 1"),
        ] {
            assert_eq!(run(operands).unwrap_err(), message);
        }
    }
}

#[test]
fn refusals_name_operation_argument_expected_and_got() {
    for (client, _) in clients() {
        let f64 = ElemType::Float(cubecl::ir::FloatKind::F64);
        let buffer = |shape: &[usize]| Buffer::new(&client, shape, F32, &vec![1.0; shape.iter().product()]);
        let (value, inv_rms, query) = (buffer(&[3, 5, 2, 8]), buffer(&[3, 5, 2]), buffer(&[4, 2, 8]));
        let (lse, logit, state) = (buffer(&[4, 5, 2]), buffer(&[3, 4, 5, 2]), buffer(&[4, 5, 2, 8]));
        let right = PrefixFwd {
            value: value.operand(),
            inv_rms: inv_rms.operand(),
            key: None,
            query: query.operand(),
            lse: lse.operand(),
            logit: logit.operand(),
            state: state.operand(),
            mix: None,
            entries: 3,
            first: 0,
            count: 4,
            slot: 0,
        };
        let run = |operands, routing| prefix_fwd(&client, operands, routing, Tuning::default());
        assert_eq!(run(right, Routing::CrossKey), Ok(()));
        assert_eq!(run(PrefixFwd { count: 0, first: 4, slot: 4, ..right }, Routing::CrossKey), Ok(()));

        let short = buffer(&[4, 5, 2, 7]);
        let (site, gate, input) = (buffer(&[site_length(8)]), buffer(&[4, 5, 5]), buffer(&[5, 8]));
        let mix = Mix {
            site: Some(site.operand()),
            gate: Some(gate.operand()),
            input: input.operand(),
            keep_first: true,
            eps: EPS,
            norm: None,
        };
        let mixed = |mix| PrefixFwd { mix: Some(mix), ..right };
        assert_eq!(run(mixed(mix), Routing::CrossKey), Ok(()));
        let refused: Vec<(Result<(), KernelError>, &[&str])> = vec![
            (run(mixed(Mix { gate: None, ..mix }), Routing::CrossKey), &["`mix.gate` is none", "`mix.site` is there"]),
            (run(mixed(Mix { input: gate.operand(), ..mix }), Routing::CrossKey), &["`mix.input`", "[5, 8]"]),
            (run(mixed(Mix { eps: f64::NAN, ..mix }), Routing::CrossKey), &["`eps` is NaN"]),
            (run(PrefixFwd { count: 0, ..mixed(mix) }, Routing::CrossKey), &["`count` is 0", "at least 1 with `mix`"]),
            (
                run(PrefixFwd { key: Some(query.operand()), ..right }, Routing::CrossKey),
                &["`key`", "[4, 2, 8]", "[capacity, tokens, outputs, d_model] = [3, 5, 2, 8]"],
            ),
            (run(PrefixFwd { entries: 0, ..right }, Routing::CrossKey), &["`entries` is 0", "at least 1"]),
            (run(PrefixFwd { entries: 4, ..right }, Routing::CrossKey), &["`value`", "[3, 5, 2, 8]", "capacity ≥ 4"]),
            (
                run(PrefixFwd { query: lse.operand(), ..right }, Routing::CrossKey),
                &["`outputs of the query` is 5", "2 as in `value`, or 1 with FixedKeyValue"],
            ),
            (run(PrefixFwd { first: 1, ..right }, Routing::CrossKey), &["`first` is 1", "at most 0, as 4 of 4 reads"]),
            (run(PrefixFwd { slot: 1, ..right }, Routing::CrossKey), &["`slot` is 1", "at most 0, as 4 of 4 slots"]),
            (
                run(
                    PrefixFwd { query: dar_kernels::Operand { dtype: F16, ..right.query }, ..right },
                    Routing::CrossKey,
                ),
                &["`query`", "f16", "f32"],
            ),
            (
                run(PrefixFwd { value: inv_rms.operand(), ..right }, Routing::CrossKey),
                &["`value`", "[3, 5, 2]", "[capacity, tokens, streams, d_model]"],
            ),
            (
                run(
                    PrefixFwd { value: dar_kernels::Operand { dtype: f64, ..right.value }, ..right },
                    Routing::CrossKey,
                ),
                &["`value`", "f64", "f32, f16 or bf16"],
            ),
            (
                run(PrefixFwd { lse: dar_kernels::Operand { dtype: F16, ..right.lse }, ..right }, Routing::CrossKey),
                &["`lse`", "f16", "f32"],
            ),
            (
                run(
                    PrefixFwd { state: dar_kernels::Operand { shape: right.state.shape, ..short.operand() }, ..right },
                    Routing::CrossKey,
                ),
                &["`state`", "1280 bytes", "1120 bytes"],
            ),
        ];
        for (result, parts) in refused {
            let message = result.unwrap_err().to_string();
            assert!(message.starts_with("prefix_fwd: "), "{message}");
            for part in parts {
                assert!(message.contains(part), "{message} does not name {part}");
            }
        }
        if !client.properties().supports_type(BF16) {
            let bf16 = dar_kernels::Operand { dtype: BF16, ..right.value };
            let message = run(PrefixFwd { value: bf16, ..right }, Routing::CrossKey).unwrap_err().to_string();
            assert!(message.contains("bf16") && message.contains("f32 or f16"), "{message}");
        }
        let (value, inv_rms, query) = (buffer(&[1, 5, 3, 8]), buffer(&[1, 5, 3]), buffer(&[1, 3, 8]));
        let three = PrefixFwd {
            value: value.operand(),
            inv_rms: inv_rms.operand(),
            query: query.operand(),
            entries: 1,
            count: 1,
            ..right
        };
        let message = run(three, Routing::CrossKey).unwrap_err().to_string();
        assert!(message.contains("`routing` is CrossKey") && message.contains("3 stream(s)"), "{message}");
    }
}

/// The plane path is what a device with planes takes by itself.
#[test]
fn planes_where_the_device_has_them() {
    for (client, _) in clients() {
        let has = client.features().plane.contains(cubecl::features::Plane::Ops);
        if !has {
            assert_eq!(Reduction::of_device(&client), Reduction::Shared);
        } else if let Ok(planes) = Reduction::forced_planes(&client) {
            assert_eq!(Reduction::of_device(&client), planes);
        }
    }
}
