use cubecl::prelude::*;
use dar_burn::ops::{write, write_first};
use dar_kernels::Tuning;
use dar_kernels::write::{CloseFwd, WriteBwd, WriteFwd, close_fwd, write_bwd, write_fwd};

use super::support::{
    Buffer, EPS, F32, STORAGE, assert_close, assert_only_token, bound, clients, golden_cases, gradient, host,
    inverse_rms, leaf, reductions, stores, truth,
};
use crate::support::host::values;

/// One write; without a partial state it is a block's first.
#[derive(Debug, Clone)]
struct Problem {
    tokens: usize,
    d_model: usize,
    partial: Option<Vec<f64>>, // [tokens, 2, d_model]
    output: Vec<f64>,          // [tokens, d_model]
    beta: Vec<f64>,            // [tokens, 2]
    rho: Vec<f64>,             // [tokens, 1]
}

impl Problem {
    fn new(tokens: usize, d_model: usize, first: bool) -> Self {
        Self {
            tokens,
            d_model,
            partial: (!first).then(|| values(1, tokens * 2 * d_model, 1.5)),
            output: values(2, tokens * d_model, 1.5),
            beta: values(3, tokens * 2, 1.0).iter().map(|x| 1.0 + x).collect(),
            rho: values(4, tokens, 0.5).iter().map(|x| 0.5 + x).collect(),
        }
    }

    fn gate(&self) -> Vec<f64> {
        let tokens = self.beta.chunks(2).zip(&self.rho);
        tokens.flat_map(|(beta, &rho)| [f64::NAN, f64::NAN, beta[0], beta[1], rho]).collect()
    }

    fn inputs(&self, client: &Client, dtype: ElemType) -> (Option<Buffer>, Buffer, Buffer) {
        let Self { tokens, d_model, .. } = *self;
        (
            self.partial.as_ref().map(|partial| Buffer::new(client, &[tokens, 2, d_model], dtype, partial)),
            Buffer::new(client, &[tokens, d_model], dtype, &self.output),
            Buffer::new(client, &[tokens, 5], F32, &self.gate()),
        )
    }

    fn run(&self, client: &Client, dtype: ElemType) -> Vec<f64> {
        let (partial, output, gate) = self.inputs(client, dtype);
        let state = Buffer::output(client, &[self.tokens, 2, self.d_model], dtype);
        let operands = WriteFwd {
            partial: partial.as_ref().map(Buffer::operand),
            output: output.operand(),
            gate: gate.operand(),
            state: state.operand(),
        };
        write_fwd(client, operands).unwrap();
        state.read()
    }

    /// Value and inverse RMS of the middle one of three entries, the others are NaN still.
    fn close(&self, client: &Client, dtype: ElemType, tuning: Tuning) -> [Vec<f64>; 2] {
        let Self { tokens, d_model, .. } = *self;
        let (partial, output, gate) = self.inputs(client, dtype);
        let value = Buffer::output(client, &[3, tokens, 2, d_model], dtype);
        let inv_rms = Buffer::output(client, &[3, tokens, 2], F32);
        let operands = CloseFwd {
            partial: partial.as_ref().map(Buffer::operand),
            output: output.operand(),
            gate: gate.operand(),
            value: value.operand(),
            inv_rms: inv_rms.operand(),
            entry: 1,
            eps: EPS,
        };
        close_fwd(client, operands, tuning).unwrap();
        [value.read(), inv_rms.read()].map(|all| {
            let third = all.len() / 3;
            assert!(all[..third].iter().chain(&all[2 * third..]).all(|x| x.is_nan()), "another entry changed");
            all[third..2 * third].to_vec()
        })
    }

    /// The composed operation in f64.
    fn truth(&self) -> Vec<f64> {
        let Self { tokens, d_model, .. } = *self;
        let output = truth(&self.output, [tokens, d_model]);
        let beta = truth(&self.beta, [tokens, 2]);
        host(match &self.partial {
            Some(partial) => write(truth(partial, [tokens, 2, d_model]), output, beta, truth(&self.rho, [tokens, 1])),
            None => write_first(output, beta),
        })
    }
}

/// Gradients of a write.
#[derive(Debug, PartialEq)]
struct Gradients {
    partial: Vec<f64>, // [tokens, 2, d_model]
    output: Vec<f64>,  // [tokens, d_model]
    gate: Vec<f64>,    // [tokens, 5]
}

impl Gradients {
    #[track_caller]
    fn assert_close(&self, truth: &Self, bound: f64, about: &str) {
        assert_close(
            about,
            &[
                ("d_partial", &self.partial, &truth.partial, bound),
                ("d_output", &self.output, &truth.output, bound),
                ("d_gate", &self.gate, &truth.gate, 1e-5),
            ],
        );
    }
}

impl Problem {
    fn run_bwd(&self, client: &Client, dtype: ElemType, tuning: Tuning, d_state: &[f64]) -> Gradients {
        let Self { tokens, d_model, .. } = *self;
        let (partial, output, gate) = self.inputs(client, dtype);
        let d_state = Buffer::new(client, &[tokens, 2, d_model], dtype, d_state);
        let d_partial = Buffer::output(client, &[tokens, 2, d_model], dtype);
        let d_output = Buffer::output(client, &[tokens, d_model], dtype);
        let d_gate = Buffer::output(client, &[tokens, 5], F32);
        let operands = WriteBwd {
            d_state: d_state.operand(),
            partial: partial.as_ref().map(|partial| (partial.operand(), d_partial.operand())),
            output: output.operand(),
            gate: gate.operand(),
            d_output: d_output.operand(),
            d_gate: d_gate.operand(),
        };
        write_bwd(client, operands, tuning).unwrap();
        let partial = if partial.is_some() { d_partial.read() } else { Vec::new() };
        Gradients { partial, output: d_output.read(), gate: d_gate.read() }
    }

    /// Automatic differentiation of the composed operation in f64.
    fn truth_bwd(&self, d_state: &[f64]) -> Gradients {
        let Self { tokens, d_model, .. } = *self;
        let output = leaf(&self.output, [tokens, d_model]);
        let (beta, rho) = (leaf(&self.beta, [tokens, 2]), leaf(&self.rho, [tokens, 1]));
        let partial = self.partial.as_ref().map(|partial| leaf(partial, [tokens, 2, d_model]));
        let state = match &partial {
            Some(partial) => write(partial.clone(), output.clone(), beta.clone(), rho.clone()),
            None => write_first(output.clone(), beta.clone()),
        };
        let gradients = (state * leaf(d_state, [tokens, 2, d_model])).sum().backward();
        let (beta, rho) = (gradient(&beta, &gradients), gradient(&rho, &gradients));
        Gradients {
            partial: partial.map_or_else(Vec::new, |partial| gradient(&partial, &gradients)),
            output: gradient(&output, &gradients),
            gate: beta.chunks(2).zip(rho).flat_map(|(beta, rho)| [0.0, 0.0, beta[0], beta[1], rho]).collect(),
        }
    }
}

#[test]
fn golden() {
    for (client, device) in clients() {
        for case in golden_cases("write_") {
            let y = case.tensor("y").unwrap();
            let problem = Problem {
                tokens: y.shape[0],
                d_model: y.shape[1],
                // `carried` is the transported state, which rho = 1 leaves as it is.
                partial: case.tensor("carried").ok().map(|carried| carried.swap_axes(0).values),
                output: y.values.clone(),
                beta: case.tensor("beta").unwrap().values.clone(),
                rho: vec![1.0; y.shape[0]],
            };
            let state = case.tensor("out.P").unwrap().swap_axes(0).values;
            for dtype in STORAGE.into_iter().filter(|&dtype| stores(&client, dtype)) {
                let about = format!("{} in {dtype} on {device}", case.name);
                assert_close(&about, &[("state", &problem.run(&client, dtype), &state, bound(dtype))]);

                let d_state = case.tensor("cot.P").unwrap().swap_axes(0).values;
                let found = problem.run_bwd(&client, dtype, Tuning::default(), &d_state);
                let d_beta: Vec<f64> = found.gate.chunks(5).flat_map(|gates| [gates[2], gates[3]]).collect();
                let [d_y, d_beta_truth] = ["grad.y", "grad.beta"].map(|name| &case.tensor(name).unwrap().values[..]);
                // The gradient of M(1) P is the gradient of P.
                let d_partial = case.tensor("grad.carried").map_or_else(|_| Vec::new(), |x| x.swap_axes(0).values);
                assert_close(
                    &about,
                    &[
                        ("d_partial", &found.partial, &d_partial, bound(dtype)),
                        ("d_output", &found.output, d_y, bound(dtype)),
                        ("d_beta", &d_beta, d_beta_truth, 1e-5),
                    ],
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
            for (tokens, d_model) in [(5, 1), (5, 3), (1, 37), (5, 130), (3, 257), (0, 8)] {
                for first in [false, true] {
                    let problem = Problem::new(tokens, d_model, first);
                    let about = format!("{tokens} × {d_model}, first {first}, in {dtype} on {device}");
                    let state = problem.run(&client, dtype);
                    assert_close(&about, &[("state", &state, &problem.truth(), bound(dtype))]);
                    for tuning in reductions(&client) {
                        let about = format!("{about}, {tuning:?}");
                        let d_state = values(5, tokens * 2 * d_model, 1.0);
                        if tokens > 0 {
                            let found = problem.run_bwd(&client, dtype, tuning, &d_state);
                            found.assert_close(&problem.truth_bwd(&d_state), bound(dtype), &about);
                            let again = problem.run_bwd(&client, dtype, tuning, &d_state);
                            assert_eq!(found, again, "{about}: another run, other bits");
                        } else {
                            assert!(problem.run_bwd(&client, dtype, tuning, &d_state).output.is_empty());
                        }
                        let [value, inv_rms] = problem.close(&client, dtype, tuning);
                        assert_close(
                            &about,
                            &[
                                ("value", &value, &state, bound(dtype)),
                                ("inv_rms", &inv_rms, &inverse_rms(&value, d_model, EPS), 1e-5),
                            ],
                        );
                    }
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
        let (partial, output, gate) = (buffer(&[5, 2, 8]), buffer(&[5, 8]), buffer(&[5, 5]));
        let (state, value, inv_rms) = (buffer(&[5, 2, 8]), buffer(&[3, 5, 2, 8]), buffer(&[3, 5, 2]));
        let right = WriteFwd {
            partial: Some(partial.operand()),
            output: output.operand(),
            gate: gate.operand(),
            state: state.operand(),
        };
        assert_eq!(write_fwd(&client, right), Ok(()));
        let message = write_fwd(&client, WriteFwd { gate: output.operand(), ..right }).unwrap_err().to_string();
        assert_eq!(message, "write_fwd: `gate` has shape [5, 8], expected [tokens, 5] = [5, 5]");
        let message = write_fwd(&client, WriteFwd { partial: Some(gate.operand()), ..right }).unwrap_err().to_string();
        assert_eq!(message, "write_fwd: `partial` has shape [5, 5], expected [tokens, 2, d_model] = [5, 2, 8]");

        let operands = WriteBwd {
            d_state: state.operand(),
            partial: Some((partial.operand(), gate.operand())),
            output: output.operand(),
            gate: gate.operand(),
            d_output: output.operand(),
            d_gate: gate.operand(),
        };
        assert_eq!(
            write_bwd(&client, operands, Tuning::default()).unwrap_err().to_string(),
            "write_bwd: `d_partial` has shape [5, 5], expected [tokens, 2, d_model] = [5, 2, 8]"
        );

        let right = CloseFwd {
            partial: None,
            output: output.operand(),
            gate: gate.operand(),
            value: value.operand(),
            inv_rms: inv_rms.operand(),
            entry: 0,
            eps: EPS,
        };
        let run = |operands| close_fwd(&client, operands, Tuning::default());
        assert_eq!(run(right), Ok(()));
        let message = run(CloseFwd { entry: 3, ..right }).unwrap_err().to_string();
        assert!(message.starts_with("close_fwd: `value` has shape [3, 5, 2, 8]"), "{message}");
    }
}
