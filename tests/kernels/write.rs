use burn::tensor::Tensor;
use cubecl::prelude::*;
use dar_burn::ops::{write, write_first};
use dar_kernels::pack::Key;
use dar_kernels::write::{CloseFwd, WriteBwd, WriteFwd, close_fwd, write_bwd, write_fwd};
use dar_kernels::{Routing, Tuning};

use super::support::{
    Buffer, EPS, F32, STORAGE, assert_close, assert_only_token, bound, clients, few, golden_cases, gradient, host,
    inverse_rms, keys, leaf, reductions, stores, truth,
};
use crate::support::host::values;

/// Rows of the arenas, and that of the write.
const READS: usize = 4;
const READ: usize = 2;

/// One write; without a state before it is a block's first.
#[derive(Debug, Clone)]
struct Problem {
    tokens: usize,
    d_model: usize,
    before: Option<Vec<f64>>, // [tokens, streams, d_model]
    output: Vec<f64>,         // [tokens, d_model]
    gates: Option<Gates>,     // none for a plain sum of one stream
}

#[derive(Debug, Clone)]
struct Gates {
    beta: Vec<f64>, // [tokens, 2]
    rho: Vec<f64>,  // [tokens, 1]
}

impl Gates {
    /// As the read leaves them. `[tokens, 5]`
    fn row(&self) -> Vec<f64> {
        let tokens = self.beta.chunks(2).zip(&self.rho);
        tokens.flat_map(|(beta, &rho)| [f64::NAN, f64::NAN, beta[0], beta[1], rho]).collect()
    }
}

impl Problem {
    fn new(tokens: usize, d_model: usize, first: bool) -> Self {
        let gates = Gates {
            beta: values(3, tokens * 2, 1.0).iter().map(|x| 1.0 + x).collect(),
            rho: values(4, tokens, 0.5).iter().map(|x| 0.5 + x).collect(),
        };
        Self {
            tokens,
            d_model,
            before: (!first).then(|| values(1, tokens * 2 * d_model, 1.5)),
            output: values(2, tokens * d_model, 1.5),
            gates: Some(gates),
        }
    }

    /// One stream without gates.
    fn plain(tokens: usize, d_model: usize, first: bool) -> Self {
        let before = (!first).then(|| values(1, tokens * d_model, 1.5));
        Self { before, gates: None, ..Self::new(tokens, d_model, first) }
    }

    fn streams(&self) -> usize {
        if self.gates.is_some() { 2 } else { 1 }
    }

    fn inputs(&self, client: &Client, dtype: ElemType) -> (Option<Buffer>, Buffer, Option<Buffer>) {
        let Self { tokens, d_model, .. } = *self;
        let state = [tokens, self.streams(), d_model];
        (
            self.before.as_ref().map(|before| Buffer::new(client, &state, dtype, before)),
            Buffer::new(client, &[tokens, d_model], dtype, &self.output),
            self.gates.as_ref().map(|gates| Buffer::arena(client, [READS, READ], &[tokens, 5], F32, &gates.row())),
        )
    }

    fn run(&self, client: &Client, dtype: ElemType) -> Vec<f64> {
        let (before, output, gate) = self.inputs(client, dtype);
        let state = Buffer::output(client, &[self.tokens, self.streams(), self.d_model], dtype);
        let operands = WriteFwd {
            before: before.as_ref().map(Buffer::operand),
            output: output.operand(),
            gate: gate.as_ref().map(Buffer::operand),
            read: READ,
            state: state.operand(),
        };
        write_fwd(client, operands).unwrap();
        state.read()
    }

    /// Value and inverse RMS of the middle one of three entries, the others are NaN still.
    fn close(&self, client: &Client, dtype: ElemType, tuning: Tuning) -> [Vec<f64>; 2] {
        self.close_with(client, dtype, tuning, None)
    }

    fn close_with(&self, client: &Client, dtype: ElemType, tuning: Tuning, key: Option<Key>) -> [Vec<f64>; 2] {
        let Self { tokens, d_model, .. } = *self;
        let (before, output, gate) = self.inputs(client, dtype);
        let value = Buffer::output(client, &[3, tokens, self.streams(), d_model], dtype);
        let inv_rms = Buffer::output(client, &[3, tokens, self.streams()], F32);
        let operands = CloseFwd {
            before: before.as_ref().map(Buffer::operand),
            output: output.operand(),
            gate: gate.as_ref().map(Buffer::operand),
            read: READ,
            value: value.operand(),
            inv_rms: inv_rms.operand(),
            key,
            entry: 1,
            eps: EPS,
        };
        close_fwd(client, operands, tuning).unwrap();
        [value.rows(1, 1), inv_rms.rows(1, 1)]
    }

    /// The composed operation in f64.
    fn truth(&self) -> Vec<f64> {
        let Self { tokens, d_model, .. } = *self;
        let output = truth(&self.output, [tokens, d_model]);
        let Some(Gates { beta, rho }) = &self.gates else {
            let before = self.before.as_ref().map(|before| truth(before, [tokens, d_model]));
            return host(before.map_or(output.clone(), |before: Tensor<2>| before + output));
        };
        let beta = truth(beta, [tokens, 2]);
        host(match &self.before {
            Some(before) => write(truth(before, [tokens, 2, d_model]), output, beta, truth(rho, [tokens, 1])),
            None => write_first(output, beta),
        })
    }

    /// Gradients of the output `[tokens, d_model]` and beta `[tokens, 2]`.
    fn run_bwd(&self, client: &Client, dtype: ElemType, tuning: Tuning, d_state: &[f64]) -> [Vec<f64>; 2] {
        let Self { tokens, d_model, .. } = *self;
        let (_, output, gate) = self.inputs(client, dtype);
        let gate = gate.expect("the backward of a gated write");
        let d_state = Buffer::new(client, &[tokens, 2, d_model], dtype, d_state);
        let d_output = Buffer::output(client, &[tokens, d_model], dtype);
        let d_token = Buffer::output(client, &[READS, tokens, 6], F32);
        let operands = WriteBwd {
            d_state: d_state.operand(),
            output: output.operand(),
            gate: gate.operand(),
            read: READ,
            d_output: d_output.operand(),
            d_token: d_token.operand(),
        };
        write_bwd(client, operands, tuning).unwrap();
        let d_beta = d_token.rows(READ, 1);
        let d_beta = d_beta.chunks(6).flat_map(|token| {
            assert!(token[2..].iter().all(|x| x.is_nan()), "the shift or d_lse changed");
            token[..2].to_vec()
        });
        [d_output.read(), d_beta.collect()]
    }

    /// The same by automatic differentiation of the composed operation in f64.
    fn truth_bwd(&self, d_state: &[f64]) -> [Vec<f64>; 2] {
        let Self { tokens, d_model, .. } = *self;
        let Gates { beta, .. } = self.gates.as_ref().unwrap();
        let (output, beta) = (leaf(&self.output, [tokens, d_model]), leaf(beta, [tokens, 2]));
        let state = write_first(output.clone(), beta.clone());
        let gradients = (state * leaf(d_state, [tokens, 2, d_model])).sum().backward();
        [gradient(&output, &gradients), gradient(&beta, &gradients)]
    }
}

#[test]
fn golden() {
    for (client, device) in clients() {
        for case in golden_cases("write_") {
            let y = case.tensor("y").unwrap();
            // `carried` is the transported state, which rho = 1 leaves as it is.
            let rho = vec![1.0; y.shape[0]];
            let problem = Problem {
                tokens: y.shape[0],
                d_model: y.shape[1],
                before: case.tensor("carried").ok().map(|carried| carried.swap_axes(0).values),
                output: y.values.clone(),
                gates: Some(Gates { beta: case.tensor("beta").unwrap().values.clone(), rho }),
            };
            let state = case.tensor("out.P").unwrap().swap_axes(0).values;
            for dtype in STORAGE.into_iter().filter(|&dtype| stores(&client, dtype)) {
                let about = format!("{} in {dtype} on {device}", case.name);
                assert_close(&about, &[("state", &problem.run(&client, dtype), &state, bound(dtype))]);

                let d_state = case.tensor("cot.P").unwrap().swap_axes(0).values;
                let [d_output, d_beta] = problem.run_bwd(&client, dtype, Tuning::default(), &d_state);
                let [d_y, d_beta_truth] = ["grad.y", "grad.beta"].map(|name| &case.tensor(name).unwrap().values[..]);
                assert_close(
                    &about,
                    &[("d_output", &d_output, d_y, bound(dtype)), ("d_beta", &d_beta, d_beta_truth, 1e-5)],
                );
            }
        }
    }
}

/// Any width, no token, one; closing stores what writing does, and its inverse RMS.
#[test]
fn any_size() {
    for (client, device) in clients() {
        for dtype in STORAGE.into_iter().filter(|&dtype| stores(&client, dtype)) {
            for (tokens, d_model) in [(257, 1), (130, 3), (1, 37), (37, 130), (3, 257), (0, 8)] {
                let tokens = few(&client, tokens);
                for (first, new) in [false, true]
                    .into_iter()
                    .flat_map(|first| [(first, Problem::new as fn(_, _, _) -> _), (first, Problem::plain)])
                {
                    let problem: Problem = new(tokens, d_model, first);
                    let streams = problem.streams();
                    let about = format!("{tokens} × {streams} × {d_model}, first {first}, in {dtype} on {device}");
                    let state = problem.run(&client, dtype);
                    assert_close(&about, &[("state", &state, &problem.truth(), bound(dtype))]);
                    for tuning in reductions(&client) {
                        let about = format!("{about}, {tuning:?}");
                        let [value, inv_rms] = problem.close(&client, dtype, tuning);
                        assert_eq!(value, state, "{about}");
                        assert_close(&about, &[("inv_rms", &inv_rms, &inverse_rms(&value, d_model, EPS), 1e-5)]);

                        let mut routings: Vec<_> =
                            Routing::ALL.into_iter().filter(|routing| routing.fits(streams)).collect();
                        routings.truncate(if d_model == 3 { routings.len() } else { 1 });
                        for routing in routings {
                            let about = format!("{about}, {routing:?}");
                            let key = Buffer::output(&client, &[3, tokens, streams, d_model], dtype);
                            let packed = Key { key: key.operand(), routing };
                            let keyed = problem.close_with(&client, dtype, tuning, Some(packed));
                            assert_eq!(keyed, [value.clone(), inv_rms.clone()], "{about}");
                            let truth = keys(&value, [streams, streams, d_model], routing, EPS);
                            assert_close(&about, &[("key", &key.rows(1, 1), &truth, bound(dtype))]);
                        }
                    }
                }
            }
        }
    }
}

#[test]
fn backward_of_any_size() {
    for (client, device) in clients() {
        for dtype in STORAGE.into_iter().filter(|&dtype| stores(&client, dtype)) {
            for (tokens, d_model) in [(257, 1), (130, 3), (1, 37), (37, 130), (3, 257), (0, 8)] {
                let tokens = few(&client, tokens);
                let problem = Problem::new(tokens, d_model, true);
                let d_state = values(5, tokens * 2 * d_model, 1.0);
                for tuning in reductions(&client) {
                    let about = format!("{tokens} × {d_model} in {dtype} on {device}, {tuning:?}");
                    let found = problem.run_bwd(&client, dtype, tuning, &d_state);
                    if tokens == 0 {
                        assert!(found.iter().all(Vec::is_empty), "{about}");
                        continue;
                    }
                    let [d_output, d_beta] = problem.truth_bwd(&d_state);
                    assert_close(
                        &about,
                        &[("d_output", &found[0], &d_output, bound(dtype)), ("d_beta", &found[1], &d_beta, 1e-5)],
                    );
                    let again = problem.run_bwd(&client, dtype, tuning, &d_state);
                    assert_eq!(found, again, "{about}: another run, other bits");
                }
            }
        }
    }
}

#[test]
fn one_token_never_leaks_into_another() {
    for (client, device) in clients() {
        let mut problem = Problem::new(5, 130, false);
        let (clean, [clean_value, clean_rms]) =
            (problem.run(&client, F32), problem.close(&client, F32, Tuning::default()));
        problem.output[2 * 130 + 7] = f64::NAN;
        let (state, [value, inv_rms]) = (problem.run(&client, F32), problem.close(&client, F32, Tuning::default()));
        assert_only_token(device, &state, &clean, [5, 2, 260]);
        assert_only_token(device, &value, &clean_value, [5, 2, 260]);
        assert_only_token(device, &inv_rms, &clean_rms, [5, 2, 2]);
    }
}

#[test]
fn refusals_name_operation_argument_expected_and_got() {
    for (client, _) in clients() {
        let buffer = |shape: &[usize]| Buffer::new(&client, shape, F32, &vec![1.0; shape.iter().product()]);
        let (before, output, gate) = (buffer(&[5, 2, 8]), buffer(&[5, 8]), buffer(&[4, 5, 5]));
        let (state, value, inv_rms) = (buffer(&[5, 2, 8]), buffer(&[3, 5, 2, 8]), buffer(&[3, 5, 2]));
        let d_token = buffer(&[4, 5, 4]);
        let right = WriteFwd {
            before: Some(before.operand()),
            output: output.operand(),
            gate: Some(gate.operand()),
            read: 3,
            state: state.operand(),
        };
        let run = |operands| write_fwd(&client, operands).map_err(|error| error.to_string());
        assert_eq!(run(right), Ok(()));
        for (operands, message) in [
            (
                WriteFwd { gate: Some(d_token.operand()), ..right },
                "write_fwd: `gate` has shape [4, 5, 4], expected [reads, tokens, 5] = [4, 5, 5]",
            ),
            (
                WriteFwd { before: Some(output.operand()), ..right },
                "write_fwd: `before` has shape [5, 8], expected [tokens, streams, d_model] = [5, 2, 8]",
            ),
            (
                WriteFwd { gate: None, ..right },
                "write_fwd: `before` has shape [5, 2, 8], expected [tokens, streams, d_model] = [5, 1, 8]",
            ),
            (WriteFwd { read: 4, ..right }, "write_fwd: `read` is 4, expected less than the 4 rows of `gate`"),
        ] {
            assert_eq!(run(operands).unwrap_err(), message);
        }

        let operands = WriteBwd {
            d_state: state.operand(),
            output: output.operand(),
            gate: gate.operand(),
            read: 0,
            d_output: output.operand(),
            d_token: gate.operand(),
        };
        assert_eq!(
            write_bwd(&client, operands, Tuning::default()).unwrap_err().to_string(),
            "write_bwd: `d_token` has shape [4, 5, 5], expected [reads, tokens, 6] = [4, 5, 6]"
        );

        let right = CloseFwd {
            before: None,
            output: output.operand(),
            gate: Some(gate.operand()),
            read: 0,
            value: value.operand(),
            inv_rms: inv_rms.operand(),
            key: None,
            entry: 0,
            eps: EPS,
        };
        let run = |operands| close_fwd(&client, operands, Tuning::default());
        assert_eq!(run(right), Ok(()));
        let message = run(CloseFwd { entry: 3, ..right }).unwrap_err().to_string();
        assert!(message.starts_with("close_fwd: `value` has shape [3, 5, 2, 8]"), "{message}");
    }
}
