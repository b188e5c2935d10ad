use cubecl::prelude::*;
use dar_burn::Routing;
use dar_burn::ops::{GateWeights, Retrieved, SiteWeights, residual_read, residual_read_first};
use dar_kernels::Tuning;
use dar_kernels::read::{ReadFwd, ReadPartial, read_fwd};

use super::support::{
    Buffer, EPS, F16, F32, STORAGE, assert_close, assert_only_token, bound, clients, golden_cases, host, reductions,
    routing, stores, truth,
};
use crate::support::golden::Case;
use crate::support::host::values;

/// One read; without a partial state it is a block's first.
#[derive(Debug, Clone)]
struct Problem {
    tokens: usize,
    d_model: usize,
    routing: Routing,
    eps: f64,
    state: Vec<f64>, // [tokens, 2, d_model]
    partial: Option<Partial>,
    gates: [Gate; 3],
}

#[derive(Debug, Clone)]
struct Partial {
    state: Vec<f64>, // [tokens, 2, d_model]
    lse: Vec<f64>,   // [tokens, 2]
    query: Vec<f64>, // [2, d_model]
}

#[derive(Debug, Clone)]
struct Gate {
    outputs: usize,
    weight: Vec<f64>, // [2 * d_model, outputs]
    bias: Vec<f64>,   // [outputs]
    scale: f64,
}

#[derive(Debug, PartialEq)]
struct Found {
    input: Vec<f64>, // [tokens, d_model]
    beta: Vec<f64>,  // [tokens, 2]
    rho: Vec<f64>,   // [tokens]
}

impl Problem {
    fn new(tokens: usize, d_model: usize, routing: Routing, first: bool) -> Self {
        let scale = 2.0 / (d_model as f64).sqrt();
        let gate = |seed, outputs| Gate {
            outputs,
            weight: values(seed, 2 * d_model * outputs, scale),
            bias: values(seed + 1, outputs, 1.0),
            scale: 1.5,
        };
        Self {
            tokens,
            d_model,
            routing,
            eps: EPS,
            state: values(1, tokens * 2 * d_model, 1.5),
            partial: (!first).then(|| Partial {
                state: values(2, tokens * 2 * d_model, 1.5),
                lse: values(3, tokens * 2, 2.0),
                query: values(4, 2 * d_model, scale),
            }),
            gates: [gate(10, 2), gate(20, 2), gate(30, 1)],
        }
    }

    fn golden(case: &Case) -> Self {
        let first = case.op().unwrap() == "residual_read_first";
        let state = case.tensor("hist").unwrap().swap_axes(0); // [N, 2, D]
        let &[tokens, 2, d_model] = state.shape.as_slice() else { panic!("two streams") };
        let scales = case.tensor("scale").map_or(vec![1.0; 3], |scale| scale.values.clone());
        let gate = |index: usize, outputs, weight: &str, bias: &str| Gate {
            outputs,
            weight: case.tensor(weight).map_or(vec![0.0; 2 * d_model * outputs], |weight| weight.values.clone()),
            bias: case.tensor(bias).map_or(vec![0.0; outputs], |bias| bias.values.clone()),
            scale: scales[index],
        };
        Self {
            tokens,
            d_model,
            routing: if first { Routing::CrossKey } else { routing(case) },
            eps: case.eps().unwrap(),
            state: state.values,
            partial: (!first).then(|| Partial {
                state: case.tensor("P").unwrap().swap_axes(0).values,
                lse: case.tensor("zeta").unwrap().swap_axes(0).values,
                query: case.tensor("q").unwrap().values.clone(),
            }),
            gates: [gate(0, 2, "Wa", "ba"), gate(1, 2, "Wb", "bb"), gate(2, 1, "Wr", "br")],
        }
    }

    fn run(&self, client: &Client, dtype: ElemType, tuning: Tuning) -> Found {
        let Self { tokens, d_model, .. } = *self;
        // Columns of the gates' weights are rows of the kernel's.
        let row =
            |gate: &Gate, output| gate.weight.iter().copied().skip(output).step_by(gate.outputs).collect::<Vec<_>>();
        let weight = self.gates.iter().flat_map(|gate| (0..gate.outputs).flat_map(|output| row(gate, output)));
        let biases = self.gates.iter().flat_map(|gate| gate.bias.iter().copied());
        let scalars: Vec<f64> = biases.chain(self.gates.iter().map(|gate| gate.scale)).collect();

        let state = Buffer::new(client, &[tokens, 2, d_model], dtype, &self.state);
        let partial = self.partial.as_ref().map(|partial| {
            (
                Buffer::new(client, &[tokens, 2, d_model], dtype, &partial.state),
                Buffer::new(client, &[tokens, 2], F32, &partial.lse),
                Buffer::new(client, &[2, d_model], dtype, &partial.query),
            )
        });
        let weight = Buffer::new(client, &[5, 2, d_model], dtype, &weight.collect::<Vec<_>>());
        let scalars = Buffer::new(client, &[8], F32, &scalars);
        let input = Buffer::output(client, &[tokens, d_model], dtype);
        let gate = Buffer::output(client, &[tokens, 5], F32);
        let operands = ReadFwd {
            state: state.operand(),
            partial: partial.as_ref().map(|(state, lse, query)| ReadPartial {
                state: state.operand(),
                lse: lse.operand(),
                query: query.operand(),
            }),
            weight: weight.operand(),
            scalars: scalars.operand(),
            input: input.operand(),
            gate: gate.operand(),
            eps: self.eps,
        };
        read_fwd(client, operands, self.routing, tuning).unwrap();
        let gate = gate.read();
        Found {
            input: input.read(),
            beta: gate.chunks(5).flat_map(|gates| [gates[2], gates[3]]).collect(),
            rho: gate.chunks(5).map(|gates| gates[4]).collect(),
        }
    }

    /// The composed operation in f64.
    fn truth(&self) -> Found {
        let Self { tokens, d_model, .. } = *self;
        let [alpha, beta, rho] = self.gates.each_ref().map(|gate| GateWeights {
            weight: truth(&gate.weight, [2 * d_model, gate.outputs]),
            bias: truth(&gate.bias, [gate.outputs]),
            scale: truth(&[gate.scale], [1]),
        });
        let site = SiteWeights { alpha, beta, rho };
        let state = truth(&self.state, [tokens, 2, d_model]);
        let (read, rho) = match &self.partial {
            Some(partial) => {
                let retrieved = Retrieved { lse: truth(&partial.lse, [tokens, 2]), state };
                let query = truth(&partial.query, [2, d_model]);
                let partial = truth(&partial.state, [tokens, 2, d_model]);
                let (read, rho) = residual_read(retrieved, partial, query, &site, self.routing, self.eps);
                (read, host(rho))
            }
            None => (residual_read_first(state, &site, self.eps), vec![1.0; tokens]),
        };
        Found { input: host(read.input), beta: host(read.beta), rho }
    }
}

impl Found {
    #[track_caller]
    fn assert_close(&self, truth: &Self, dtype: ElemType, about: &str) {
        assert_close(
            about,
            &[
                ("input", &self.input, &truth.input, bound(dtype)),
                ("beta", &self.beta, &truth.beta, 1e-5),
                ("rho", &self.rho, &truth.rho, 1e-5),
            ],
        );
    }
}

#[test]
fn golden() {
    for (client, device) in clients() {
        for case in golden_cases("read_") {
            let problem = Problem::golden(&case);
            let truth = Found {
                input: case.tensor("out.h").unwrap().values.clone(),
                beta: case.tensor("out.beta").unwrap().values.clone(),
                rho: problem.truth().rho, // the cases hold the transported state instead
            };
            for dtype in STORAGE.into_iter().filter(|&dtype| stores(&client, dtype)) {
                for tuning in reductions(&client) {
                    let about = format!("{} in {dtype} on {device}, {tuning:?}", case.name);
                    problem.run(&client, dtype, tuning).assert_close(&truth, dtype, &about);
                }
            }
        }
    }
}

/// Any width, no token, one.
#[test]
fn any_size() {
    for (client, device) in clients() {
        for (tokens, d_model) in [(5, 1), (5, 3), (1, 37), (5, 130), (3, 257), (0, 8)] {
            for first in [false, true] {
                let problem = Problem::new(tokens, d_model, Routing::CrossKey, first);
                let truth = problem.truth();
                for tuning in reductions(&client) {
                    let about = format!("{tokens} × {d_model}, first {first}, on {device}, {tuning:?}");
                    problem.run(&client, F32, tuning).assert_close(&truth, F32, &about);
                }
            }
        }
    }
}

/// Logits so far apart that one side of the merge vanishes, and gates at their ends.
#[test]
fn extremes_are_finite() {
    for (client, device) in clients() {
        for sign in [1.0, -1.0] {
            let mut problem = Problem::new(5, 24, Routing::CrossKey, false);
            let partial = problem.partial.as_mut().unwrap();
            partial.lse.iter_mut().for_each(|lse| *lse = sign * 1e4);
            for gate in &mut problem.gates {
                gate.bias.iter_mut().for_each(|bias| *bias = -sign * 1e4);
            }
            let about = format!("{sign} on {device}");
            let (found, truth) = (problem.run(&client, F32, Tuning::default()), problem.truth());
            assert_eq!([&found.beta, &found.rho], [&truth.beta, &truth.rho], "{about}");
            assert_close(&about, &[("input", &found.input, &truth.input, 1e-5)]);
        }
    }
}

#[test]
fn reruns_are_bit_identical() {
    for (client, device) in clients() {
        let problem = Problem::new(5, 130, Routing::CrossKey, false);
        for tuning in reductions(&client) {
            let first = problem.run(&client, F32, tuning);
            assert_eq!(problem.run(&client, F32, tuning), first, "{device}, {tuning:?}");
        }
    }
}

#[test]
fn one_token_never_leaks_into_another() {
    for (client, device) in clients() {
        let mut problem = Problem::new(5, 130, Routing::CrossKey, false);
        let clean = problem.run(&client, F32, Tuning::default());
        problem.partial.as_mut().unwrap().state[2 * 260 + 7] = f64::NAN;
        let found = problem.run(&client, F32, Tuning::default());
        assert_only_token(device, &found.input, &clean.input, [5, 2, 130]);
        assert_only_token(device, &found.beta, &clean.beta, [5, 2, 2]);
        assert_only_token(device, &found.rho, &clean.rho, [5, 2, 1]);
    }
}

#[test]
fn refusals_name_operation_argument_expected_and_got() {
    for (client, _) in clients() {
        let buffer = |shape: &[usize]| Buffer::new(&client, shape, F32, &vec![1.0; shape.iter().product()]);
        let (state, weight, scalars) = (buffer(&[5, 2, 8]), buffer(&[5, 2, 8]), buffer(&[8]));
        let (input, gate, three) = (buffer(&[5, 8]), buffer(&[5, 5]), buffer(&[5, 3, 8]));
        let half = Buffer::new(&client, &[5, 8], F16, &[1.0; 40]);
        let right = ReadFwd {
            state: state.operand(),
            partial: None,
            weight: weight.operand(),
            scalars: scalars.operand(),
            input: input.operand(),
            gate: gate.operand(),
            eps: EPS,
        };
        let run = |operands| read_fwd(&client, operands, Routing::CrossKey, Tuning::default());
        assert_eq!(run(right), Ok(()));
        for (operands, message) in [
            (
                ReadFwd { state: three.operand(), ..right },
                "read_fwd: `state` has shape [5, 3, 8], expected [tokens, 2, d_model] = [5, 2, 8]",
            ),
            (ReadFwd { input: half.operand(), ..right }, "read_fwd: `input` has element type f16, expected f32"),
            (ReadFwd { eps: -1.0, ..right }, "read_fwd: `eps` is -1, expected a finite number ≥ 0"),
            (
                ReadFwd {
                    partial: Some(ReadPartial { state: state.operand(), lse: gate.operand(), query: state.operand() }),
                    ..right
                },
                "read_fwd: `partial.lse` has shape [5, 5], expected [tokens, 2] = [5, 2]",
            ),
        ] {
            assert_eq!(run(operands).unwrap_err().to_string(), message);
        }
    }
}
