//! The operations as Burn's graph, in any element type and on any device: what is compared, and in f64 what is true.

use burn::tensor::{DType, Device, Gradients, Tensor, TensorData};
use cubecl::prelude::ElemType;
use dar_burn::Routing;
use dar_burn::ops::{
    GateWeights, History, Retrieved, SiteWeights, accumulator, attnres_read, output_read, pack, prefix, residual_read,
    write, write_first,
};

use crate::buffer::{PERIOD, Pattern};
use crate::shapes::{BF16, Direction, F16, Operation, Problem};

pub const EPS: f64 = 1e-6;

/// What the operands hold. Logits are a few units apart, and gates in the middle of their range.
pub mod patterns {
    use super::Pattern;

    pub const HISTORY: Pattern = Pattern::state(1);
    pub const QUERY: Pattern = Pattern { seed: 2, middle: 0.0, width: 0.125 };
    pub const BEFORE: Pattern = Pattern::state(3);
    pub const OUTPUT: Pattern = Pattern::state(4);
    pub const RETRIEVED: Pattern = Pattern::state(5);
    pub const LSE: Pattern = Pattern { seed: 6, middle: 2.0, width: 2.0 };
    /// Gates of the branch before: alpha, beta, rho.
    pub const GATE: Pattern = Pattern { seed: 7, middle: 0.5, width: 0.4 };
    pub const NEXT_OUTPUT: Pattern = Pattern::state(8);
    pub const WEIGHTS: [Pattern; 3] = [weight(9), weight(10), weight(11)];
    pub const BIASES: [Pattern; 3] = [bias(12), bias(13), bias(14)];

    const fn weight(seed: u32) -> Pattern {
        Pattern { seed, middle: 0.0, width: 0.0625 }
    }

    const fn bias(seed: u32) -> Pattern {
        Pattern { seed, middle: 0.0, width: 0.5 }
    }
}

/// Outputs of alpha, beta and rho.
pub const GATE_OUTPUTS: [usize; 3] = [2, 2, 1];

/// Gradients of the two streams after a read's branch. Equal ones would leave none for rho, which only exchanges them.
pub const STREAM_WEIGHTS: [f64; 2] = [1.0, 0.5];

/// How a history of so many streams is routed.
pub fn routing(streams: usize) -> Routing {
    if streams == 1 { Routing::SelfKeyValue } else { Routing::CrossKey }
}

/// The first and the last tokens of what an operation computed, or all of a sum over tokens.
pub struct Output {
    pub name: &'static str,
    pub kind: OutputKind,
}

pub enum OutputKind {
    /// A period from the start, and one from the end.
    Tokens([Vec<f64>; 2]),
    /// Summed over all tokens.
    Sum(Vec<f64>),
}

/// A tensor that an operation computed.
pub struct Computed {
    name: &'static str,
    tensor: Tensor<2>,
    sum: bool,
}

impl Computed {
    fn tokens<const D: usize>(name: &'static str, tensor: Tensor<D>) -> Self {
        Self { name, tensor: tensor.flatten(1, D - 1), sum: false }
    }

    fn sum<const D: usize>(name: &'static str, tensor: Tensor<D>) -> Self {
        let length = tensor.shape().num_elements();
        Self { name, tensor: tensor.reshape([1, length]), sum: true }
    }

    /// Reads what is compared.
    pub fn output(self) -> Output {
        let host = |tensor: Tensor<2>| tensor.try_into_vec_as::<f64>().expect("the graph of the benchmark ran");
        let rows = self.tensor.dims()[0];
        let kind = if self.sum {
            OutputKind::Sum(host(self.tensor))
        } else {
            let ends = [0..PERIOD, rows - PERIOD..rows];
            OutputKind::Tokens(ends.map(|range| host(self.tensor.clone().slice([range]))))
        };
        Output { name: self.name, kind }
    }
}

/// One problem on one device.
pub struct Graph {
    problem: Problem,
    source: Source,
    operands: Operands,
}

/// The operands of all operations; those of others are empty.
struct Operands {
    entries: Vec<Tensor<3>>,
    queries: Tensor<3>,
    /// Of the entries, where no gradient goes through it.
    history: Option<History>,
    read: Option<ReadOperands>,
}

struct ReadOperands {
    before: Tensor<3>,
    output: Tensor<2>,
    beta: Tensor<2>,
    rho: Tensor<2>,
    retrieved: Tensor<3>,
    lse: Tensor<2>,
    next_output: Tensor<2>,
    site: SiteWeights,
    /// Added to the partial state, so that its gradient is seen.
    probe: Option<Tensor<3>>,
}

/// Makes operands.
struct Source {
    device: Device,
    state: DType,
    tokens: usize,
    tracked: bool,
    truth: bool,
}

impl Source {
    /// Row `row` of a pattern `[_, tokens, inner..]`, as `[tokens, inner..]`.
    fn tokens<const D: usize>(&self, pattern: Pattern, row: usize, inner: [usize; D], dtype: DType) -> Tensor<D> {
        // The first of `inner` stands for the tokens.
        let width = inner[1..].iter().product::<usize>();
        let values = pattern.values(row + 1, width, PERIOD).split_off(row * PERIOD * width);
        let mut shape = inner;
        shape[0] = PERIOD;
        let period = Tensor::from_data(TensorData::new(values, shape), (&self.device, dtype));
        period.repeat_dim(0, self.tokens / PERIOD)
    }

    fn state<const D: usize>(&self, pattern: Pattern, row: usize, inner: [usize; D]) -> Tensor<D> {
        self.tokens(pattern, row, inner, self.state)
    }

    /// A parameter, in the accumulator type.
    fn parameter<const D: usize>(&self, pattern: Pattern, shape: [usize; D]) -> Tensor<D> {
        let values = pattern.values(1, shape.iter().product(), 1);
        self.leaf(Tensor::from_data(TensorData::new(values, shape), (&self.device, self.wide())))
    }

    fn wide(&self) -> DType {
        accumulator(self.state)
    }

    fn leaf<const D: usize>(&self, tensor: Tensor<D>) -> Tensor<D> {
        if self.tracked { tensor.require_grad() } else { tensor }
    }
}

impl Graph {
    /// On `device`, at the size and in the type of `problem`.
    pub fn new(problem: Problem, direction: Direction, device: &Device) -> Self {
        let state = match problem.dtype {
            F16 => DType::F16,
            BF16 => DType::BF16,
            _ => DType::F32,
        };
        Self::with(problem, direction, device, state, problem.tokens, false)
    }

    /// The truth on the CPU, for a period of tokens.
    pub fn truth(problem: Problem, direction: Direction, cpu: &Device) -> Self {
        Self::with(problem, direction, cpu, DType::F64, PERIOD, true)
    }

    fn with(problem: Problem, direction: Direction, device: &Device, state: DType, tokens: usize, truth: bool) -> Self {
        let tracked = direction == Direction::Backward;
        let device = if tracked { device.clone().autodiff() } else { device.clone() };
        let source = Source { device, state, tokens, tracked, truth };
        let Problem { entries, queries, streams, d_model, .. } = problem;
        let entry = |row| source.leaf(source.state(patterns::HISTORY, row, [0, streams, d_model]));
        let entries: Vec<Tensor<3>> =
            (0..entries.max(usize::from(problem.operation == Operation::Pack))).map(entry).collect();
        let history = (!tracked && !entries.is_empty()).then(|| history(&entries));
        let queries = source.parameter(patterns::QUERY, [queries.max(1), streams, d_model]);
        let read = matches!(problem.operation, Operation::Read | Operation::Write)
            .then(|| ReadOperands::new(&source, d_model));
        let operands = Operands { entries, queries, history, read };
        Self { problem, source, operands }
    }

    /// What the forward computes.
    pub fn forward(&self) -> Vec<Computed> {
        let Operands { entries, queries, history: packed, .. } = &self.operands;
        let packed = || packed.clone().unwrap_or_else(|| history(entries));
        let routing = routing(self.problem.streams);
        match self.problem.operation {
            Operation::Pack => {
                let history = history(entries);
                // The paper's packing: normalised keys beside values.
                let (key, value) = pack(&history, routing);
                let [_, tokens, streams, d_model] = key.dims();
                let flat = |x: Tensor<4>| x.reshape([tokens, streams * d_model]);
                vec![
                    Computed::tokens("key", flat(key)),
                    Computed::tokens("value", flat(value)),
                    Computed::tokens("inv_rms", history.inv_rms(0)),
                ]
            }
            Operation::Prefix => {
                let found = prefix(&packed(), queries.clone(), routing);
                let all = found.iter().flat_map(|found| {
                    [Computed::tokens("state", found.state.clone()), Computed::tokens("lse", found.lse.clone())]
                });
                all.collect()
            }
            Operation::OutputRead => {
                let query = queries.clone().squeeze_dim::<2>(0);
                vec![Computed::tokens("input", output_read(&packed(), None, query, routing))]
            }
            Operation::AttnResRead => {
                let query = queries.clone().reshape([self.problem.d_model]);
                vec![Computed::tokens("input", attnres_read(&packed(), None, query))]
            }
            Operation::Write => {
                let ReadOperands { before, output, beta, rho, .. } = self.read();
                vec![Computed::tokens("state", write(before.clone(), output.clone(), beta.clone(), rho.clone()))]
            }
            Operation::Read => {
                let (partial, input, beta, _) = self.residual_read();
                vec![
                    Computed::tokens("partial", partial),
                    Computed::tokens("input", input),
                    Computed::tokens("beta", beta),
                ]
            }
        }
    }

    /// What the backward starts from: a gradient of one for everything that the operation computed; the streams after a
    /// read's branch have gradients of their own.
    pub fn loss(&self) -> Tensor<2> {
        match self.problem.operation {
            Operation::Pack => unreachable!("packing has no backward of its own"),
            Operation::Prefix => {
                let found = prefix(
                    &history(&self.operands.entries),
                    self.operands.queries.clone(),
                    routing(self.problem.streams),
                );
                let sum = found.into_iter().map(|found| found.state).reduce(|sum, state| sum + state);
                sum.expect("there are queries").flatten(1, 2)
            }
            Operation::Write => {
                let ReadOperands { output, beta, .. } = self.read();
                write_first(output.clone(), beta.clone()).flatten(1, 2)
            }
            Operation::Read => {
                let (partial, input, beta, rho) = self.residual_read();
                let after = write(partial, self.read().next_output.clone(), beta, rho);
                let weights = TensorData::new(STREAM_WEIGHTS.to_vec(), [1, 2, 1]);
                let weights = Tensor::from_data(weights, (self.device(), self.source.state));
                input + (after * weights).sum_dim(1).squeeze_dim::<2>(1)
            }
            Operation::OutputRead | Operation::AttnResRead => self.forward().remove(0).tensor,
        }
    }

    /// What the backward computes.
    pub fn gradients(&self, gradients: &Gradients) -> Vec<Computed> {
        let Operands { entries, queries, .. } = &self.operands;
        match self.problem.operation {
            Operation::Pack => unreachable!("packing has no backward of its own"),
            Operation::Prefix | Operation::OutputRead | Operation::AttnResRead => {
                let entry = |entry: &Tensor<3>| Computed::tokens("d_value", gradient(entry, gradients));
                let entries = entries.iter().map(entry);
                entries.chain([Computed::sum("d_query", gradient(queries, gradients))]).collect()
            }
            Operation::Write => {
                let ReadOperands { output, beta, .. } = self.read();
                vec![
                    Computed::tokens("d_output", gradient(output, gradients)),
                    Computed::tokens("d_beta", gradient(beta, gradients)),
                ]
            }
            Operation::Read => {
                let read = self.read();
                let probe = read.probe.iter().map(|probe| Computed::tokens("d_partial", gradient(probe, gradients)));
                let others = [
                    Computed::tokens("d_state", gradient(&read.retrieved, gradients)),
                    Computed::tokens("d_output", gradient(&read.output, gradients)),
                    Computed::tokens("d_beta", gradient(&read.beta, gradients)),
                    Computed::sum("d_query", gradient(queries, gradients)),
                    Computed::sum("d_alpha", gradient(&read.site.alpha.weight, gradients)),
                    Computed::sum("d_rho", gradient(&read.site.rho.weight, gradients)),
                ];
                others.into_iter().chain(probe).collect()
            }
        }
    }

    /// The device that it runs on.
    pub fn device(&self) -> &Device {
        &self.source.device
    }

    fn read(&self) -> &ReadOperands {
        self.operands.read.as_ref().expect("the operation has these operands")
    }

    /// Partial state, branch input, beta and rho.
    fn residual_read(&self) -> (Tensor<3>, Tensor<2>, Tensor<2>, Tensor<2>) {
        let ReadOperands { before, output, beta, rho, retrieved, lse, site, probe, .. } = self.read();
        let mut partial = write(before.clone(), output.clone(), beta.clone(), rho.clone());
        if let Some(probe) = probe {
            partial = partial + probe.clone();
        }
        let retrieved = Retrieved { lse: lse.clone(), state: retrieved.clone() };
        let query = self.operands.queries.clone().squeeze_dim(0);
        let (read, rho) = residual_read(retrieved, partial.clone(), query, site, routing(2), EPS);
        (partial, read.input, read.beta, rho)
    }
}

impl ReadOperands {
    fn new(source: &Source, d_model: usize) -> Self {
        let gates = source.tokens(patterns::GATE, 0, [0, 5], source.wide());
        let gate = |index: usize| GateWeights {
            weight: source.parameter(patterns::WEIGHTS[index], [2 * d_model, GATE_OUTPUTS[index]]),
            bias: source.parameter(patterns::BIASES[index], [GATE_OUTPUTS[index]]),
            scale: source.leaf(Tensor::ones([1], (&source.device, source.wide()))),
        };
        let before = source.state(patterns::BEFORE, 0, [0, 2, d_model]);
        let probe = (source.truth && source.tracked).then(|| before.zeros_like().require_grad());
        Self {
            before,
            output: source.leaf(source.state(patterns::OUTPUT, 0, [0, d_model])),
            beta: source.leaf(gates.clone().narrow(1, 2, 2)),
            rho: gates.narrow(1, 4, 1),
            retrieved: source.leaf(source.state(patterns::RETRIEVED, 0, [0, 2, d_model])),
            lse: source.leaf(source.tokens(patterns::LSE, 0, [0, 2], source.wide())),
            next_output: source.state(patterns::NEXT_OUTPUT, 0, [0, d_model]),
            site: SiteWeights { alpha: gate(0), beta: gate(1), rho: gate(2) },
            probe,
        }
    }
}

fn history(entries: &[Tensor<3>]) -> History {
    let first = History::new(entries[0].clone(), EPS);
    entries[1..].iter().cloned().fold(first, History::append)
}

fn gradient<const D: usize>(leaf: &Tensor<D>, gradients: &Gradients) -> Tensor<D> {
    leaf.grad(gradients).expect("the backward reaches every operand")
}

/// Values of a period of tokens, for buffers that follow from the patterns: `[outer, tokens, inner]`.
pub fn inverse_rms(entries: usize, streams: usize, d_model: usize) -> Vec<f64> {
    let values = patterns::HISTORY.values(entries, streams * d_model, PERIOD);
    let inverse = |row: &[f64]| (row.iter().map(|x| x * x).sum::<f64>() / d_model as f64 + EPS).sqrt().recip();
    values.chunks(d_model).map(inverse).collect()
}

/// The storage type of Burn for one of CubeCL.
pub fn is_half(dtype: ElemType) -> bool {
    matches!(dtype, F16 | BF16)
}
