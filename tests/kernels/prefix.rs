use cubecl::prelude::*;
use dar_burn::Routing;
use dar_burn::ops::prefix;
use dar_kernels::prefix::{
    PrefixBwdHistory, PrefixBwdQuery, PrefixBwdShift, PrefixFwd, prefix_bwd_history, prefix_bwd_query,
    prefix_bwd_shift, prefix_fwd,
};
use dar_kernels::{KernelError, Reduction, Tuning};

use super::support::{
    BF16, Buffer, EPS, F16, F32, STORAGE, assert_close, assert_only_token, bound, clients, golden_cases, gradient,
    history, host, inverse_rms, leaf, reductions, routing, stores, truth,
};
use crate::support::golden::Case;
use crate::support::host::{relative_error, values};

/// One history and the queries of a block.
#[derive(Debug, Clone)]
struct Problem {
    tokens: usize,
    streams: usize,
    d_model: usize,
    entries: usize,
    branches: usize,
    routing: Routing,
    eps: f64,
    states: Vec<f64>,              // [entries, tokens, streams, d_model]
    queries: Vec<f64>,             // [branches, streams, d_model]
    query_dtype: Option<ElemType>, // that of the states otherwise
}

/// Outputs of a prefix.
#[derive(Debug, Clone, PartialEq)]
struct Found {
    lse: Vec<f64>,   // [branches, tokens, streams]
    logit: Vec<f64>, // [entries, branches, tokens, streams]
    state: Vec<f64>, // [branches, tokens, streams, d_model]
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
        Self { tokens, streams, d_model, entries, branches, routing, eps: EPS, states, queries, query_dtype: None }
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
            query_dtype: None,
        }
    }

    /// The kernel on a buffer with room for one entry more, which is NaN.
    fn run(&self, client: &Client, dtype: ElemType, tuning: Tuning) -> Found {
        let Self { tokens, streams, d_model, entries, branches, .. } = *self;
        let room = |values: &[f64], row: usize| {
            values.iter().copied().chain(std::iter::repeat_n(f64::NAN, tokens * streams * row)).collect::<Vec<_>>()
        };
        let inv_rms = inverse_rms(&self.states, d_model, self.eps);
        let value = Buffer::new(client, &[entries + 1, tokens, streams, d_model], dtype, &room(&self.states, d_model));
        let inv_rms = Buffer::new(client, &[entries + 1, tokens, streams], F32, &room(&inv_rms, 1));
        let query =
            Buffer::new(client, &[branches, streams, d_model], self.query_dtype.unwrap_or(dtype), &self.queries);
        let lse = Buffer::output(client, &[branches, tokens, streams], F32);
        let logit = Buffer::output(client, &[entries, branches, tokens, streams], F32);
        let state = Buffer::output(client, &[branches, tokens, streams, d_model], dtype);
        let operands = PrefixFwd {
            value: value.operand(),
            inv_rms: inv_rms.operand(),
            query: query.operand(),
            lse: lse.operand(),
            logit: logit.operand(),
            state: state.operand(),
            entries,
        };
        prefix_fwd(client, operands, self.routing, tuning).unwrap();
        Found { lse: lse.read(), logit: logit.read(), state: state.read() }
    }

    /// The composed operation in f64.
    fn truth(&self) -> Found {
        let Self { tokens, streams, d_model, entries, branches, .. } = *self;
        let found = |entries: std::ops::Range<usize>| {
            let length = tokens * streams * d_model;
            let states = &self.states[entries.start * length..entries.end * length];
            let (history, _) = history(states, [entries.len(), tokens, streams, d_model], self.eps, truth);
            prefix(&history, truth(&self.queries, [branches, streams, d_model]), self.routing)
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
    lse: Vec<f64>,   // [branches, tokens, streams]
    state: Vec<f64>, // [branches, tokens, streams, d_model]
}

/// Gradients of a prefix.
#[derive(Debug, PartialEq)]
struct Gradients {
    states: Vec<f64>,  // [entries, tokens, streams, d_model]
    queries: Vec<f64>, // [branches, streams, d_model]
}

impl Gradients {
    #[track_caller]
    fn assert_close(&self, truth: &Self, bound: f64, about: &str) {
        assert_close(
            about,
            &[("d_value", &self.states, &truth.states, bound), ("d_query", &self.queries, &truth.queries, bound)],
        );
    }
}

impl Problem {
    fn cotangents(&self) -> Cotangents {
        let heads = self.branches * self.tokens * self.streams;
        Cotangents { lse: values(3, heads, 1.0), state: values(4, heads * self.d_model, 1.0) }
    }

    /// Forward, then backward, the entries in two parts: the last alone, as where a block closes, then the others.
    fn run_bwd(&self, client: &Client, dtype: ElemType, tuning: Tuning, cotangents: &Cotangents) -> Gradients {
        let Self { tokens, streams, d_model, entries, branches, routing, .. } = *self;
        let found = self.run(client, dtype, tuning);
        let heads = [branches, tokens, streams];
        let states = [branches, tokens, streams, d_model];
        let value = Buffer::new(client, &[entries, tokens, streams, d_model], dtype, &self.states);
        let inv_rms = inverse_rms(&self.states, d_model, self.eps);
        let inv_rms = Buffer::new(client, &[entries, tokens, streams], F32, &inv_rms);
        let query = Buffer::new(client, &[branches, streams, d_model], dtype, &self.queries);
        let lse = Buffer::new(client, &heads, F32, &found.lse);
        let logit = Buffer::new(client, &[entries, branches, tokens, streams], F32, &found.logit);
        let state = Buffer::new(client, &states, dtype, &found.state);
        let d_state = Buffer::new(client, &states, dtype, &cotangents.state);
        let d_lse = Buffer::new(client, &heads, F32, &cotangents.lse);
        let shift = Buffer::output(client, &heads, F32);
        let d_logit = Buffer::output(client, &[entries, branches, tokens, streams], F32);
        let d_query = Buffer::output(client, &[branches, streams, d_model], F32);

        let operands = PrefixBwdShift {
            state: state.operand(),
            d_state: d_state.operand(),
            d_lse: d_lse.operand(),
            shift: shift.operand(),
        };
        prefix_bwd_shift(client, operands, tuning).unwrap();
        let entries_from = |first: usize, count: usize| {
            let d_value = Buffer::output(client, &[count, tokens, streams, d_model], dtype);
            let operands = PrefixBwdHistory {
                value: value.operand(),
                inv_rms: inv_rms.operand(),
                query: query.operand(),
                lse: lse.operand(),
                logit: logit.operand(),
                d_state: d_state.operand(),
                shift: shift.operand(),
                d_logit: d_logit.operand(),
                d_value: d_value.operand(),
                first,
            };
            prefix_bwd_history(client, operands, routing, tuning).unwrap();
            d_value.read()
        };
        let last = entries_from(entries - 1, 1);
        let mut states = entries_from(0, entries - 1);
        states.extend(last);
        let operands = PrefixBwdQuery {
            value: value.operand(),
            inv_rms: inv_rms.operand(),
            d_logit: d_logit.operand(),
            d_query: d_query.operand(),
        };
        prefix_bwd_query(client, operands, routing, tuning).unwrap();
        Gradients { states, queries: d_query.read() }
    }

    /// Automatic differentiation of the composed operation in f64.
    fn truth_bwd(&self, cotangents: &Cotangents) -> Gradients {
        let Self { tokens, streams, d_model, entries, branches, .. } = *self;
        let queries = leaf(&self.queries, [branches, streams, d_model]);
        let (history, states) = history(&self.states, [entries, tokens, streams, d_model], self.eps, leaf);
        let found = prefix(&history, queries.clone(), self.routing).into_iter().enumerate();
        let length = tokens * streams;
        let loss = found.map(|(s, retrieved)| {
            let d_lse = leaf(&cotangents.lse[s * length..][..length], [tokens, streams]);
            let d_state = &cotangents.state[s * length * d_model..][..length * d_model];
            (retrieved.lse * d_lse).sum() + (retrieved.state * leaf(d_state, [tokens, streams, d_model])).sum()
        });
        let gradients = loss.reduce(|sum, term| sum + term).unwrap().backward();
        Gradients {
            states: states.iter().flat_map(|state| gradient(state, &gradients)).collect(),
            queries: gradient(&queries, &gradients),
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
            for dtype in STORAGE.into_iter().filter(|&dtype| stores(&client, dtype)) {
                let found = problem.run_bwd(&client, dtype, Tuning::default(), &cotangents);
                let least = if case.is_extreme() { 1e-3 } else { 1e-5 };
                found.assert_close(&truth, bound(dtype).max(least), &format!("{} in {dtype} on {device}", case.name));
            }
        }
    }
}

/// The widths and groups of the forward; more queries than one step takes, all routings by the golden cases.
#[test]
fn backward_of_any_size() {
    for (client, device) in clients() {
        for (dims, entries, branches, routing) in [
            ([5, 2, 1], 3, 2, Routing::CrossKey),
            ([5, 2, 3], 1, 2, Routing::CrossKey),
            ([1, 2, 37], 3, 2, Routing::CrossKey),
            ([5, 2, 130], 3, 2, Routing::CrossKey),
            ([5, 2, 257], 3, 2, Routing::CrossKey),
            ([3, 2, 24], 64, 11, Routing::CrossKey),
            ([3, 1, 24], 5, 3, Routing::SelfKeyValue),
            ([700, 2, 3], 3, 2, Routing::CrossKey),
        ] {
            let problem = Problem::new(dims, entries, branches, routing, 3.0);
            let cotangents = problem.cotangents();
            let truth = problem.truth_bwd(&cotangents);
            for tuning in reductions(&client) {
                let about = format!("{dims:?}, {entries} entries, {branches} queries on {device}, {tuning:?}");
                let found = problem.run_bwd(&client, F32, tuning, &cotangents);
                found.assert_close(&truth, 1e-5, &about);
                assert_eq!(found, problem.run_bwd(&client, F32, tuning, &cotangents), "{about}: other bits");
            }
        }
        let empty = Problem::new([0, 2, 24], 3, 4, Routing::CrossKey, 3.0);
        let found = empty.run_bwd(&client, F32, Tuning::default(), &empty.cotangents());
        assert_eq!(found, Gradients { states: Vec::new(), queries: vec![0.0; 4 * 2 * 24] }, "{device}");
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

/// Parameters may stay in f32 beside half states.
#[test]
fn half_states_with_full_queries() {
    for (client, device) in clients() {
        for dtype in [F16, BF16].into_iter().filter(|&dtype| stores(&client, dtype)) {
            let mut problem = Problem::new([5, 2, 24], 3, 4, Routing::CrossKey, 3.0);
            problem.query_dtype = Some(F32);
            problem.queries.iter_mut().for_each(|x| *x *= 1.001); // not a value of a half type
            let found = problem.run(&client, dtype, Tuning::default());
            found.assert_close(&problem.truth(), dtype, device);
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
        let clean = problem.run_bwd(&client, F32, Tuning::default(), &cotangents);
        cotangents.lse[2 * 2] = f64::NAN; // query 0, token 2
        let found = problem.run_bwd(&client, F32, Tuning::default(), &cotangents);
        assert_only_token(device, &found.states, &clean.states, [5, 2, 2 * 24]);
    }
}

#[test]
fn refused_backward() {
    for (client, _) in clients() {
        let buffer = |shape: &[usize]| Buffer::new(&client, shape, F32, &vec![1.0; shape.iter().product()]);
        let (value, inv_rms, query) = (buffer(&[3, 5, 2, 8]), buffer(&[3, 5, 2]), buffer(&[4, 2, 8]));
        let (heads, logit, state) = (buffer(&[4, 5, 2]), buffer(&[3, 4, 5, 2]), buffer(&[4, 5, 2, 8]));
        let (shift, d_logit, d_value) = (buffer(&[4, 5, 2]), buffer(&[3, 4, 5, 2]), buffer(&[2, 5, 2, 8]));
        let right = PrefixBwdHistory {
            value: value.operand(),
            inv_rms: inv_rms.operand(),
            query: query.operand(),
            lse: heads.operand(),
            logit: logit.operand(),
            d_state: state.operand(),
            shift: shift.operand(),
            d_logit: d_logit.operand(),
            d_value: d_value.operand(),
            first: 1,
        };
        let run = |operands| prefix_bwd_history(&client, operands, Routing::CrossKey, Tuning::default());
        assert_eq!(run(right), Ok(()));
        let message = run(PrefixBwdHistory { first: 2, ..right }).unwrap_err().to_string();
        assert!(message.starts_with("prefix_bwd_history: `first` is 2, expected at most 1"), "{message}");
        let message = run(PrefixBwdHistory { shift: inv_rms.operand(), ..right }).unwrap_err().to_string();
        assert_eq!(
            message,
            "prefix_bwd_history: `shift` has shape [3, 5, 2], expected [branches, tokens, streams] = [4, 5, 2]"
        );

        let right = PrefixBwdQuery {
            value: value.operand(),
            inv_rms: inv_rms.operand(),
            d_logit: logit.operand(),
            d_query: query.operand(),
        };
        let message = prefix_bwd_query(
            &client,
            PrefixBwdQuery { d_query: state.operand(), ..right },
            Routing::CrossKey,
            Tuning::default(),
        );
        assert_eq!(
            message.unwrap_err().to_string(),
            "prefix_bwd_query: `d_query` has shape [4, 5, 2, 8], expected [branches, streams, d_model] = [4, 2, 8]"
        );

        let operands = PrefixBwdShift {
            state: state.operand(),
            d_state: state.operand(),
            d_lse: heads.operand(),
            shift: inv_rms.operand(),
        };
        assert_eq!(
            prefix_bwd_shift(&client, operands, Tuning::default()).unwrap_err().to_string(),
            "prefix_bwd_shift: `shift` has shape [3, 5, 2], expected [branches, tokens, streams] = [4, 5, 2]"
        );
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
        };
        let run = |operands, routing| prefix_fwd(&client, operands, routing, Tuning::default());
        assert_eq!(run(right, Routing::CrossKey), Ok(()));

        let short = buffer(&[4, 5, 2, 7]);
        let refused: Vec<(Result<(), KernelError>, &[&str])> = vec![
            (run(PrefixFwd { entries: 0, ..right }, Routing::CrossKey), &["`entries` is 0", "at least 1"]),
            (run(PrefixFwd { entries: 4, ..right }, Routing::CrossKey), &["`value`", "[3, 5, 2, 8]", "capacity ≥ 4"]),
            (
                run(PrefixFwd { query: lse.operand(), ..right }, Routing::CrossKey),
                &["`query`", "[4, 5, 2]", "[4, 2, 8]"],
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
