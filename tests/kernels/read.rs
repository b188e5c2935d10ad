use burn::tensor::Tensor;
use cubecl::prelude::*;
use dar_burn::Routing;
use dar_burn::ops::{GateWeights, Retrieved, SiteWeights, residual_read, residual_read_first};
use dar_kernels::Tuning;
use dar_kernels::read::{ReadBwd, ReadFwd, ReadPartial, ReadPartialBwd, read_bwd, read_fwd};

use super::support::{
    Buffer, EPS, F16, F32, STORAGE, assert_close, assert_only_token, bound, clients, golden_cases, gradient, host,
    leaf, reductions, routing, stores, truth,
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

/// What forward and backward read.
struct Saved {
    state: Buffer,
    partial: Option<Open>,
    weight: Buffer,
    scalars: Buffer,
}

struct Open {
    state: Buffer,
    lse: Buffer,
}

impl Open {
    fn operands(&self) -> ReadPartial<'_> {
        ReadPartial { state: self.state.operand(), lse: self.lse.operand() }
    }
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

    /// Weights and scalars as the kernels have them: columns of the gates' weights are rows.
    fn site(&self) -> [Vec<f64>; 2] {
        let row =
            |gate: &Gate, output| gate.weight.iter().copied().skip(output).step_by(gate.outputs).collect::<Vec<_>>();
        let weight = self.gates.iter().flat_map(|gate| (0..gate.outputs).flat_map(move |output| row(gate, output)));
        let query = self.partial.as_ref().map_or_else(|| vec![f64::NAN; 2 * self.d_model], |open| open.query.clone());
        let biases = self.gates.iter().flat_map(|gate| gate.bias.iter().copied());
        [weight.chain(query).collect(), biases.chain(self.gates.iter().map(|gate| gate.scale)).collect()]
    }

    fn saved(&self, client: &Client, dtype: ElemType) -> Saved {
        let Self { tokens, d_model, .. } = *self;
        let [weight, scalars] = self.site();
        Saved {
            state: Buffer::new(client, &[tokens, 2, d_model], dtype, &self.state),
            partial: self.partial.as_ref().map(|partial| Open {
                state: Buffer::new(client, &[tokens, 2, d_model], dtype, &partial.state),
                lse: Buffer::new(client, &[tokens, 2], F32, &partial.lse),
            }),
            weight: Buffer::new(client, &[6, 2, d_model], dtype, &weight),
            scalars: Buffer::new(client, &[8], F32, &scalars),
        }
    }

    fn run(&self, client: &Client, dtype: ElemType, tuning: Tuning) -> Found {
        let Self { tokens, d_model, .. } = *self;
        let Saved { state, partial, weight, scalars } = self.saved(client, dtype);
        let input = Buffer::output(client, &[tokens, d_model], dtype);
        let gate = Buffer::output(client, &[tokens, 5], F32);
        let operands = ReadFwd {
            state: state.operand(),
            partial: partial.as_ref().map(Open::operands),
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
        let Graph { input, beta, rho, .. } = self.graph(truth, truth, truth);
        let rho = rho.map_or_else(|| vec![1.0; self.tokens], host);
        Found { input: host(input), beta: host(beta), rho }
    }

    /// The composed operation on tensors that these make.
    fn graph(
        &self,
        vector: fn(&[f64], [usize; 1]) -> Tensor<1>,
        matrix: fn(&[f64], [usize; 2]) -> Tensor<2>,
        state: fn(&[f64], [usize; 3]) -> Tensor<3>,
    ) -> Graph {
        let Self { tokens, d_model, .. } = *self;
        let [alpha, beta, rho] = self.gates.each_ref().map(|gate| GateWeights {
            weight: matrix(&gate.weight, [2 * d_model, gate.outputs]),
            bias: vector(&gate.bias, [gate.outputs]),
            scale: vector(&[gate.scale], [1]),
        });
        let site = SiteWeights { alpha, beta, rho };
        let retrieved = state(&self.state, [tokens, 2, d_model]);
        let partial = self.partial.as_ref().map(|partial| {
            (
                state(&partial.state, [tokens, 2, d_model]),
                matrix(&partial.lse, [tokens, 2]),
                matrix(&partial.query, [2, d_model]),
            )
        });
        let (read, rho) = match &partial {
            Some((partial, lse, query)) => {
                let retrieved = Retrieved { lse: lse.clone(), state: retrieved.clone() };
                let (read, rho) =
                    residual_read(retrieved, partial.clone(), query.clone(), &site, self.routing, self.eps);
                (read, Some(rho))
            }
            None => (residual_read_first(retrieved.clone(), &site, self.eps), None),
        };
        Graph { retrieved, partial, site, input: read.input, beta: read.beta, rho }
    }

    fn cotangents(&self) -> Cotangents {
        Cotangents {
            input: values(40, self.tokens * self.d_model, 1.0),
            beta: values(41, self.tokens * 2, 1.0),
            rho: values(42, self.tokens, 1.0),
        }
    }

    /// The backward with the gates of the forward.
    fn run_bwd(&self, client: &Client, dtype: ElemType, tuning: Tuning, cotangents: &Cotangents) -> Gradients {
        let Self { tokens, d_model, .. } = *self;
        let Saved { state, partial, weight, scalars } = self.saved(client, dtype);
        let (input, gate) =
            (Buffer::output(client, &[tokens, d_model], dtype), Buffer::output(client, &[tokens, 5], F32));
        let forward = ReadFwd {
            state: state.operand(),
            partial: partial.as_ref().map(Open::operands),
            weight: weight.operand(),
            scalars: scalars.operand(),
            input: input.operand(),
            gate: gate.operand(),
            eps: self.eps,
        };
        read_fwd(client, forward, self.routing, tuning).unwrap();

        let d_gate = cotangents.beta.chunks(2).zip(&cotangents.rho);
        let d_gate: Vec<f64> = d_gate.flat_map(|(beta, &rho)| [f64::NAN, f64::NAN, beta[0], beta[1], rho]).collect();
        let d_input = Buffer::new(client, &[tokens, d_model], dtype, &cotangents.input);
        let d_gate = Buffer::new(client, &[tokens, 5], F32, &d_gate);
        let d_state = Buffer::output(client, &[tokens, 2, d_model], dtype);
        let d_partial = Buffer::output(client, &[tokens, 2, d_model], dtype);
        let d_lse = Buffer::output(client, &[tokens, 2], F32);
        let d_site = Buffer::output(client, &[12 * d_model + 8], F32);
        let operands = ReadBwd {
            state: state.operand(),
            partial: partial.as_ref().map(|open| ReadPartialBwd {
                saved: open.operands(),
                d_state: d_partial.operand(),
                d_lse: d_lse.operand(),
            }),
            weight: weight.operand(),
            scalars: scalars.operand(),
            gate: gate.operand(),
            d_input: d_input.operand(),
            d_gate: d_gate.operand(),
            d_state: d_state.operand(),
            d_site: d_site.operand(),
            eps: self.eps,
        };
        read_bwd(client, operands, self.routing, tuning).unwrap();
        let open = |buffer: &Buffer| if partial.is_some() { buffer.read() } else { Vec::new() };
        Gradients { state: d_state.read(), partial: open(&d_partial), lse: open(&d_lse), site: d_site.read() }
    }

    /// Automatic differentiation of the composed operation in f64.
    fn truth_bwd(&self, cotangents: &Cotangents) -> Gradients {
        let Self { tokens, d_model, .. } = *self;
        let Graph { retrieved, partial, site, input, beta, rho } = self.graph(leaf, leaf, leaf);
        let mut loss = (input * leaf(&cotangents.input, [tokens, d_model])).sum()
            + (beta * leaf(&cotangents.beta, [tokens, 2])).sum();
        if let Some(rho) = rho {
            loss = loss + (rho * leaf(&cotangents.rho, [tokens, 1])).sum();
        }
        let gradients = loss.backward();
        let gates = [site.alpha, site.beta, site.rho];
        // As `site` packs the parameters.
        let d_site = Self {
            gates: gates.map(|gate| Gate {
                outputs: gate.bias.dims()[0],
                weight: gradient(&gate.weight, &gradients),
                bias: gradient(&gate.bias, &gradients),
                scale: gradient(&gate.scale, &gradients)[0],
            }),
            partial: Some(Partial {
                state: partial.as_ref().map_or_else(Vec::new, |(state, ..)| gradient(state, &gradients)),
                lse: partial.as_ref().map_or_else(Vec::new, |(_, lse, _)| gradient(lse, &gradients)),
                query: partial
                    .as_ref()
                    .map_or_else(|| vec![0.0; 2 * d_model], |(.., query)| gradient(query, &gradients)),
            }),
            ..self.clone()
        };
        let site = d_site.site().concat();
        let Partial { state: partial, lse, .. } = d_site.partial.unwrap();
        Gradients { state: gradient(&retrieved, &gradients), partial, lse, site }
    }
}

struct Graph {
    retrieved: Tensor<3>,
    partial: Option<(Tensor<3>, Tensor<2>, Tensor<2>)>, // state, lse, query
    site: SiteWeights,
    input: Tensor<2>,
    beta: Tensor<2>,
    rho: Option<Tensor<2>>,
}

/// What reaches the outputs of a read.
struct Cotangents {
    input: Vec<f64>, // [tokens, d_model]
    beta: Vec<f64>,  // [tokens, 2]
    rho: Vec<f64>,   // [tokens]
}

/// Gradients of a read.
#[derive(Debug, PartialEq)]
struct Gradients {
    state: Vec<f64>,   // [tokens, 2, d_model]
    partial: Vec<f64>, // [tokens, 2, d_model]
    lse: Vec<f64>,     // [tokens, 2]
    site: Vec<f64>,    // [12 * d_model + 8]
}

impl Gradients {
    #[track_caller]
    fn assert_close(&self, truth: &Self, dtype: ElemType, about: &str) {
        let (rows, truth_rows) = (self.site.len() - 8, truth.site.len() - 8);
        assert_close(
            about,
            &[
                ("d_state", &self.state, &truth.state, bound(dtype)),
                ("d_partial", &self.partial, &truth.partial, bound(dtype)),
                ("d_lse", &self.lse, &truth.lse, 1e-5),
                ("d_weight", &self.site[..rows], &truth.site[..truth_rows], 1e-5),
                ("d_query", &self.site[rows * 5 / 6..rows], &truth.site[rows * 5 / 6..rows], 1e-5),
                ("d_scalars", &self.site[rows..], &truth.site[truth_rows..], 1e-5),
            ],
        );
    }
}

/// All routings and types at the sizes of the golden cases; any width, no token, one, more than the first stage has
/// cubes for at once.
#[test]
fn backward_of_any_size() {
    for (client, device) in clients() {
        let routed = Routing::ALL.map(|routing| (7, 24, routing));
        let sized = [(5, 1), (5, 3), (1, 37), (5, 130), (3, 257), (2100, 3)];
        let sized = sized.map(|(tokens, d_model)| (tokens, d_model, Routing::CrossKey));
        for (tokens, d_model, routing) in routed.into_iter().chain(sized) {
            for first in [false, true] {
                let problem = Problem::new(tokens, d_model, routing, first);
                let cotangents = problem.cotangents();
                let truth = problem.truth_bwd(&cotangents);
                for tuning in reductions(&client) {
                    let about = format!("{tokens} × {d_model}, {routing:?}, first {first}, on {device}, {tuning:?}");
                    let found = problem.run_bwd(&client, F32, tuning, &cotangents);
                    found.assert_close(&truth, F32, &about);
                    assert_eq!(found, problem.run_bwd(&client, F32, tuning, &cotangents), "{about}: other bits");
                }
                if d_model == 24 && stores(&client, F16) {
                    let about = format!("{tokens} × {d_model}, {routing:?}, first {first}, f16 on {device}");
                    let found = problem.run_bwd(&client, F16, Tuning::default(), &cotangents);
                    found.assert_close(&truth, F16, &about);
                }
            }
        }
        let empty = Problem::new(0, 24, Routing::CrossKey, false);
        let found = empty.run_bwd(&client, F32, Tuning::default(), &empty.cotangents());
        assert!(found.state.is_empty() && found.partial.is_empty(), "{device}");
        assert_eq!(found.site, vec![0.0; 12 * 24 + 8], "{device}");
    }
}

/// The golden gradients where the loss goes through the branch input and the gates (`carried` has none here).
#[test]
fn golden_backward_of_the_first_branch() {
    for (client, device) in clients() {
        for case in golden_cases("read_first_") {
            let problem = Problem::golden(&case);
            let output = |name| case.tensor(name).unwrap().values.clone();
            let cotangents =
                Cotangents { input: output("cot.h"), beta: output("cot.beta"), rho: vec![0.0; problem.tokens] };
            let found = problem.run_bwd(&client, F32, Tuning::default(), &cotangents);
            let d_model = problem.d_model;
            let columns = |name, at: usize| {
                let rows: Vec<f64> = case.tensor(name).unwrap().swap_axes(0).values;
                (found.site[at * 2 * d_model..][..4 * d_model].to_vec(), rows)
            };
            let ((d_alpha, alpha), (d_beta, beta)) = (columns("grad.Wa", 0), columns("grad.Wb", 2));
            assert_close(
                &format!("{} on {device}", case.name),
                &[
                    ("d_state", &found.state, &case.tensor("grad.hist").unwrap().swap_axes(0).values, 1e-5),
                    ("d_alpha", &d_alpha, &alpha, 1e-5),
                    ("d_beta", &d_beta, &beta, 1e-5),
                ],
            );
        }
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
fn no_gradient_of_one_token_leaks_into_another() {
    for (client, device) in clients() {
        let problem = Problem::new(5, 130, Routing::CrossKey, false);
        let mut cotangents = problem.cotangents();
        let clean = problem.run_bwd(&client, F32, Tuning::default(), &cotangents);
        cotangents.input[2 * 130 + 7] = f64::NAN;
        let found = problem.run_bwd(&client, F32, Tuning::default(), &cotangents);
        assert_only_token(device, &found.state, &clean.state, [5, 2, 260]);
        assert_only_token(device, &found.partial, &clean.partial, [5, 2, 260]);
        assert_only_token(device, &found.lse, &clean.lse, [5, 2, 2]);
    }
}

#[test]
fn refusals_name_operation_argument_expected_and_got() {
    for (client, _) in clients() {
        let buffer = |shape: &[usize]| Buffer::new(&client, shape, F32, &vec![1.0; shape.iter().product()]);
        let (state, weight, scalars) = (buffer(&[5, 2, 8]), buffer(&[6, 2, 8]), buffer(&[8]));
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
                ReadFwd { partial: Some(ReadPartial { state: state.operand(), lse: gate.operand() }), ..right },
                "read_fwd: `partial.lse` has shape [5, 5], expected [tokens, 2] = [5, 2]",
            ),
        ] {
            assert_eq!(run(operands).unwrap_err().to_string(), message);
        }

        let (d_state, short) = (buffer(&[5, 2, 8]), buffer(&[12 * 8]));
        let operands = ReadBwd {
            state: state.operand(),
            partial: None,
            weight: weight.operand(),
            scalars: scalars.operand(),
            gate: gate.operand(),
            d_input: input.operand(),
            d_gate: gate.operand(),
            d_state: d_state.operand(),
            d_site: short.operand(),
            eps: EPS,
        };
        assert_eq!(
            read_bwd(&client, operands, Routing::CrossKey, Tuning::default()).unwrap_err().to_string(),
            "read_bwd: `d_site` has shape [96], expected [12 * d_model + 8] = [104]"
        );
    }
}
