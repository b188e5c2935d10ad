use cubecl::prelude::*;
use dar_burn::Routing;
use dar_burn::ops::{Retrieved, prefix};
use dar_kernels::prefix::{PrefixFwd, prefix_fwd};
use dar_kernels::{KernelError, Reduction, Tuning, launches};

use super::support::{
    BF16, Buffer, EPS, F16, F32, STORAGE, assert_close, assert_only_token, bound, clients, golden_cases, gradient,
    history, host, inverse_rms, leaf, reductions, routing, stores, truth,
};
use crate::support::golden::Case;
use crate::support::host::{relative_error, values};

/// Rows of the arenas before the reads of a problem, and slots before their states. One row comes behind.
const FIRST: usize = 2;
const SLOT: usize = 1;

/// One history and the queries of a block.
#[derive(Debug, Clone)]
struct Problem {
    tokens: usize,
    streams: usize,
    d_model: usize,
    entries: usize,
    branches: usize,
    outputs: usize, // streams of a query
    routing: Routing,
    eps: f64,
    states: Vec<f64>,  // [entries, tokens, streams, d_model]
    queries: Vec<f64>, // [branches, outputs, d_model]
}

/// Outputs of a prefix.
#[derive(Debug, Clone, PartialEq)]
struct Found {
    lse: Vec<f64>,   // [branches, tokens, outputs]
    logit: Vec<f64>, // [entries, branches, tokens, outputs]
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
        let outputs = streams;
        Self { tokens, streams, d_model, entries, branches, outputs, routing, eps: EPS, states, queries }
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
            states: states.values,
            queries: queries.values.clone(),
            outputs: 2,
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

    /// The queries in an arena with rows of no concern around them.
    fn query(&self, client: &Client) -> Buffer {
        let Self { d_model, branches, outputs, .. } = *self;
        Buffer::arena(client, [FIRST + branches + 1, FIRST], &[outputs, d_model], F32, &self.queries)
    }

    fn run(&self, client: &Client, dtype: ElemType, tuning: Tuning) -> Found {
        let Self { tokens, d_model, entries, branches, outputs, .. } = *self;
        let reads = FIRST + branches + 1;
        let [value, inv_rms] = self.history(client, dtype);
        let query = self.query(client);
        let lse = Buffer::output(client, &[reads, tokens, outputs], F32);
        let logit = Buffer::output(client, &[entries + 1, reads, tokens, outputs], F32);
        let state = Buffer::output(client, &[SLOT + branches + 1, tokens, outputs, d_model], dtype);
        let operands = PrefixFwd {
            value: value.operand(),
            inv_rms: inv_rms.operand(),
            query: query.operand(),
            lse: lse.operand(),
            logit: logit.operand(),
            state: state.operand(),
            entries,
            first: FIRST,
            count: branches,
            slot: SLOT,
        };
        let before = launches();
        prefix_fwd(client, operands, self.routing, tuning).unwrap();
        assert!(tokens == 0 || launches() > before);
        let (length, start, end) = (tokens * outputs, FIRST * tokens * outputs, (FIRST + branches) * tokens * outputs);
        let logit = logit.rows(0, entries);
        let logit = logit.chunks((reads * length).max(1)).flat_map(|entry| {
            assert!(entry[..start].iter().chain(&entry[end..]).all(|x| x.is_nan()), "a logit of no concern changed");
            entry[start..end].to_vec()
        });
        Found { lse: lse.rows(FIRST, branches), logit: logit.collect(), state: state.rows(SLOT, branches) }
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
fn refusals_name_operation_argument_expected_and_got() {
    for (client, _) in clients() {
        let f64 = ElemType::Float(cubecl::ir::FloatKind::F64);
        let buffer = |shape: &[usize]| Buffer::new(&client, shape, F32, &vec![1.0; shape.iter().product()]);
        let (value, inv_rms, query) = (buffer(&[3, 5, 2, 8]), buffer(&[3, 5, 2]), buffer(&[4, 2, 8]));
        let (lse, logit, state) = (buffer(&[4, 5, 2]), buffer(&[3, 4, 5, 2]), buffer(&[4, 5, 2, 8]));
        let right = PrefixFwd {
            value: value.operand(),
            inv_rms: inv_rms.operand(),
            query: query.operand(),
            lse: lse.operand(),
            logit: logit.operand(),
            state: state.operand(),
            entries: 3,
            first: 0,
            count: 4,
            slot: 0,
        };
        let run = |operands, routing| prefix_fwd(&client, operands, routing, Tuning::default());
        assert_eq!(run(right, Routing::CrossKey), Ok(()));
        assert_eq!(run(PrefixFwd { count: 0, first: 4, slot: 4, ..right }, Routing::CrossKey), Ok(()));

        let short = buffer(&[4, 5, 2, 7]);
        let refused: Vec<(Result<(), KernelError>, &[&str])> = vec![
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
