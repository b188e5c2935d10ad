use burn::tensor::Tensor;
use cubecl::prelude::*;
use dar_burn::Routing;
use dar_burn::ops::{
    BranchNorm, GateWeights, Retrieved, SiteWeights, merge, residual_read, residual_read_first, write, write_first,
};
use dar_kernels::read::{Open, OpenBwd, ReadBwd, ReadFwd, read_bwd, read_fwd};
use dar_kernels::site::packed_length;
use dar_kernels::{Tuning, launches};

use super::support::{
    BF16, Buffer, EPS, F16, F32, STORAGE, SiteBuffers, assert_close, assert_only_token, bound, clients, few,
    golden_cases, gradient, host, leaf, reductions, routing, stores, truth,
};
use crate::support::golden::Case;
use crate::support::host::values;

/// Rows of the arenas, and that of the read; slots of the retrieved states, and that of the read.
const READS: usize = 5;
const READ: usize = 3;
const SLOTS: usize = 3;
const SLOT: usize = 1;

/// Epsilon of a folded norm: large, as the gradient behind a norm is orthogonal to its input but for epsilon, and their
/// product, the shift of a read of one stream, would be nothing but rounding.
const NORM_EPS: f64 = 0.5;

/// One read, after the write of the branch before it where a block is open.
#[derive(Debug, Clone)]
struct Problem {
    tokens: usize,
    streams: usize,
    d_model: usize,
    routing: Routing,
    eps: f64,
    state: Vec<f64>, // [tokens, streams, d_model]
    open: Option<OpenBlock>,
    site: Option<[Gate; 3]>, // alpha, beta, rho
    gain: Option<Vec<f64>>,  // [d_model], of a folded norm of the branch
}

#[derive(Debug, Clone)]
struct OpenBlock {
    before: Option<Vec<f64>>, // [tokens, streams, d_model]
    output: Vec<f64>,         // [tokens, d_model]
    gates: Option<Gates>,     // of the branch before; none for a plain sum of one stream
    lse: Vec<f64>,            // [tokens, streams]
    query: Vec<f64>,          // [streams, d_model]
}

#[derive(Debug, Clone)]
struct Gates {
    beta: Vec<f64>, // [tokens, 2]
    rho: Vec<f64>,  // [tokens, 1]
}

#[derive(Debug, Clone)]
struct Gate {
    outputs: usize,
    weight: Vec<f64>, // [2 * d_model, outputs]
    bias: Vec<f64>,   // [outputs]
    scale: f64,
}

/// Which operands a read has.
#[derive(Debug, Clone, Copy, PartialEq)]
enum Kind {
    /// The first branch of a block.
    First,
    /// The second one: the open block holds one write.
    Second,
    /// A later one.
    Later,
    /// The output read of a block that is still open.
    Output,
    /// The output read of completed blocks of so many streams, or a first branch of Attention Residuals.
    Completed(usize),
    /// One stream without gates (Attention Residuals), after the first write of a block or a later one.
    Plain { first: bool },
}

const KINDS: [Kind; 9] = [
    Kind::First,
    Kind::Second,
    Kind::Later,
    Kind::Output,
    Kind::Completed(1),
    Kind::Completed(2),
    Kind::Completed(4),
    Kind::Plain { first: true },
    Kind::Plain { first: false },
];

/// The operands of a forward.
struct Saved {
    state: Buffer,
    query: Buffer,
    lse: Buffer,
    site: Option<Buffer>,
    gate: Option<Buffer>,
    open: Option<SavedOpen>,
    input: Buffer,
}

struct SavedOpen {
    before: Option<Buffer>,
    output: Buffer,
    partial: Buffer,
}

#[derive(Debug, PartialEq)]
struct Found {
    partial: Vec<f64>, // [tokens, streams, d_model], empty where no block is open
    input: Vec<f64>,   // [tokens, d_model]
    beta: Vec<f64>,    // [tokens, 2], empty without a site
    rho: Vec<f64>,     // [tokens], empty without a site
}

impl Problem {
    fn new(tokens: usize, d_model: usize, routing: Routing, kind: Kind) -> Self {
        let scale = 2.0 / (d_model as f64).sqrt();
        let streams = match kind {
            Kind::Completed(streams) => streams,
            Kind::Plain { .. } => 1,
            _ => 2,
        };
        let gate = |seed, outputs| Gate {
            outputs,
            weight: values(seed, 2 * d_model * outputs, scale),
            bias: values(seed + 1, outputs, 1.0),
            scale: 1.5,
        };
        let gates = || Gates {
            beta: values(5, tokens * 2, 1.0).iter().map(|x| 1.0 + x).collect(),
            rho: values(6, tokens, 0.5).iter().map(|x| 0.5 + x).collect(),
        };
        let open = || OpenBlock {
            before: (!matches!(kind, Kind::Second | Kind::Plain { first: true }))
                .then(|| values(2, tokens * streams * d_model, 1.5)),
            output: values(7, tokens * d_model, 1.5),
            gates: (streams == 2).then(gates),
            lse: values(3, tokens * streams, 2.0),
            query: values(4, streams * d_model, scale),
        };
        Self {
            tokens,
            streams,
            d_model,
            routing: if streams == 2 { routing } else { Routing::SelfKeyValue },
            eps: EPS,
            state: values(1, tokens * streams * d_model, 1.5),
            open: (!matches!(kind, Kind::First | Kind::Completed(_))).then(open),
            site: matches!(kind, Kind::First | Kind::Second | Kind::Later)
                .then(|| [gate(10, 2), gate(20, 2), gate(30, 1)]),
            gain: None,
        }
    }

    /// With the norm of the branch folded in, if it may be: two streams without gates leave no room for its gain.
    fn normed(self) -> Option<Self> {
        let fits = self.site.is_some() || self.streams != 2;
        fits.then(|| Self { gain: Some(values(50, self.d_model, 0.5).iter().map(|x| 1.0 + x).collect()), ..self })
    }

    fn norm(&self) -> Option<f64> {
        self.gain.as_ref().map(|_| NORM_EPS)
    }

    /// The partial state of a case is what a write of nothing leaves of it.
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
            streams: 2,
            d_model,
            routing: if first { Routing::CrossKey } else { routing(case) },
            eps: case.eps().unwrap(),
            state: state.values,
            open: (!first).then(|| OpenBlock {
                before: Some(case.tensor("P").unwrap().swap_axes(0).values),
                output: vec![0.0; tokens * d_model],
                gates: Some(Gates { beta: vec![0.0; tokens * 2], rho: vec![1.0; tokens] }),
                lse: case.tensor("zeta").unwrap().swap_axes(0).values,
                query: case.tensor("q").unwrap().values.clone(),
            }),
            site: Some([gate(0, 2, "Wa", "ba"), gate(1, 2, "Wb", "bb"), gate(2, 1, "Wr", "br")]),
            gain: None,
        }
    }

    /// The parameters as kernels have them: columns of the gates' weights are rows, biases and scales follow, then the gain.
    fn packed(&self) -> Option<Vec<f64>> {
        let site = self.site.as_ref().map(Self::packed_site);
        let all = [site.as_ref(), self.gain.as_ref()].into_iter().flatten();
        (site.is_some() || self.gain.is_some()).then(|| all.flatten().copied().collect())
    }

    fn packed_site(gates: &[Gate; 3]) -> Vec<f64> {
        let column =
            |gate: &Gate, output| gate.weight.iter().copied().skip(output).step_by(gate.outputs).collect::<Vec<_>>();
        let rows = gates.iter().flat_map(|gate| (0..gate.outputs).flat_map(move |output| column(gate, output)));
        let biases = gates.iter().flat_map(|gate| gate.bias.iter().copied());
        rows.chain(biases).chain(gates.iter().map(|gate| gate.scale)).collect()
    }

    fn saved(&self, client: &Client, dtype: ElemType) -> Saved {
        let Self { tokens, streams, d_model, .. } = *self;
        let state = [tokens, streams, d_model];
        let (query, lse) = self.open.as_ref().map_or((&[][..], &[][..]), |open| (&open.query, &open.lse));
        // The gates of the branch before; alpha is of no concern to the write.
        let before = self.open.as_ref().and_then(|open| open.gates.as_ref()).map_or_else(Vec::new, |gates| {
            let tokens = gates.beta.chunks(2).zip(&gates.rho);
            tokens.flat_map(|(beta, &rho)| [f64::NAN, f64::NAN, beta[0], beta[1], rho]).collect()
        });
        Saved {
            state: Buffer::arena(client, [SLOTS, SLOT], &state, dtype, &self.state),
            query: Buffer::arena(client, [READS, READ], &[streams, d_model], F32, query),
            lse: Buffer::arena(client, [READS, READ], &[tokens, streams], F32, lse),
            site: self.packed().map(|packed| {
                let length = packed_length(d_model, self.site.is_some(), self.gain.is_some());
                Buffer::new(client, &[length], F32, &packed)
            }),
            gate: (streams == 2).then(|| Buffer::arena(client, [READS, READ - 1], &[tokens, 5], F32, &before)),
            open: self.open.as_ref().map(|open| SavedOpen {
                before: open.before.as_ref().map(|before| Buffer::new(client, &state, dtype, before)),
                output: Buffer::new(client, &[tokens, d_model], dtype, &open.output),
                partial: Buffer::output(client, &state, dtype),
            }),
            input: Buffer::output(client, &[tokens, d_model], dtype),
        }
    }

    fn forward(&self, client: &Client, dtype: ElemType, tuning: Tuning) -> Saved {
        let saved = self.saved(client, dtype);
        let operands = ReadFwd {
            state: saved.state.operand(),
            slot: SLOT,
            open: saved.open.as_ref().map(|open| Open {
                before: open.before.as_ref().map(Buffer::operand),
                output: open.output.operand(),
                partial: open.partial.operand(),
            }),
            query: saved.query.operand(),
            lse: saved.lse.operand(),
            site: saved.site.as_ref().map(Buffer::operand),
            gate: saved.gate.as_ref().map(Buffer::operand),
            input: saved.input.operand(),
            read: READ,
            eps: self.eps,
            norm: self.norm(),
        };
        let before = launches();
        read_fwd(client, operands, self.routing, tuning).unwrap();
        assert!(self.tokens == 0 || launches() > before);
        saved
    }

    fn run(&self, client: &Client, dtype: ElemType, tuning: Tuning) -> Found {
        let saved = self.forward(client, dtype, tuning);
        let gate = match (&saved.gate, &self.site) {
            (Some(gate), Some(_)) => gate.rows(READ - 1, 2).split_off(self.tokens * 5),
            _ => Vec::new(),
        };
        Found {
            partial: saved.open.map_or_else(Vec::new, |open| open.partial.read()),
            input: saved.input.read(),
            beta: gate.chunks(5).flat_map(|gates| [gates[2], gates[3]]).collect(),
            rho: gate.chunks(5).map(|gates| gates[4]).collect(),
        }
    }

    /// The state after the branch before by the composed operation in f64, empty where no block is open.
    fn written(&self) -> Vec<f64> {
        let Self { tokens, streams, d_model, .. } = *self;
        let Some(OpenBlock { before, output, gates, .. }) = &self.open else { return Vec::new() };
        let output = truth(output, [tokens, d_model]);
        let before: Option<Tensor<3>> = before.as_ref().map(|before| truth(before, [tokens, streams, d_model]));
        host(match (gates, before) {
            (Some(gates), Some(before)) => {
                write(before, output, truth(&gates.beta, [tokens, 2]), truth(&gates.rho, [tokens, 1]))
            }
            (Some(gates), None) => write_first(output, truth(&gates.beta, [tokens, 2])),
            (None, Some(before)) => before + output.unsqueeze_dim::<3>(1),
            (None, None) => output.unsqueeze_dim::<3>(1),
        })
    }

    /// The composed operations in f64, the read going on from `partial`, as a half type rounds what is written.
    fn truth(&self, partial: &[f64]) -> Found {
        let Graph { input, gates, .. } = self.graph(partial, truth, truth, truth);
        let (beta, rho) = gates.map_or_else(Default::default, |(beta, rho)| {
            (host(beta), rho.map_or_else(|| vec![1.0; self.tokens], host))
        });
        Found { partial: self.written(), input: host(input), beta, rho }
    }

    /// The composed read on tensors that these make.
    fn graph(
        &self,
        partial: &[f64],
        vector: fn(&[f64], [usize; 1]) -> Tensor<1>,
        matrix: fn(&[f64], [usize; 2]) -> Tensor<2>,
        state: fn(&[f64], [usize; 3]) -> Tensor<3>,
    ) -> Graph {
        let Self { tokens, streams, d_model, routing, eps, .. } = *self;
        let site = self.site.as_ref().map(|gates| {
            let [alpha, beta, rho] = gates.each_ref().map(|gate| GateWeights {
                weight: matrix(&gate.weight, [2 * d_model, gate.outputs]),
                bias: vector(&gate.bias, [gate.outputs]),
                scale: vector(&[gate.scale], [1]),
            });
            SiteWeights { alpha, beta, rho }
        });
        let retrieved = state(&self.state, [tokens, streams, d_model]);
        let open = self.open.as_ref().map(|open| GraphOpen {
            partial: state(partial, [tokens, streams, d_model]),
            lse: matrix(&open.lse, [tokens, streams]),
            query: matrix(&open.query, [streams, d_model]),
        });
        let merging = open
            .clone()
            .map(|GraphOpen { partial, lse, query }| (Retrieved { lse, state: retrieved.clone() }, partial, query));
        let (input, gates) = match (&site, merging) {
            (Some(site), Some((retrieved, partial, query))) => {
                let (read, rho) = residual_read(retrieved, partial, query, site, routing, eps);
                (read.input, Some((read.beta, Some(rho))))
            }
            (Some(site), None) => {
                let read = residual_read_first(retrieved.clone(), site, eps);
                (read.input, Some((read.beta, None)))
            }
            (None, Some((retrieved, partial, query))) => {
                (merge(retrieved, partial, query, routing, eps).sum_dim(1).squeeze_dim(1), None)
            }
            (None, None) => (retrieved.clone().sum_dim(1).squeeze_dim(1), None),
        };
        let gain = self.gain.as_ref().map(|gain| vector(gain, [d_model]));
        let input = match gain.clone() {
            Some(gain) => BranchNorm { gain, eps: NORM_EPS }.apply(input),
            None => input,
        };
        Graph { retrieved, open, site, gain, input, gates }
    }
}

/// A read as it is, and with the norm of its branch folded in: that knows no routing, and of the widths with and without
/// vectors one each is enough.
fn with_norm(problem: Problem) -> impl Iterator<Item = (Problem, bool)> {
    let fits = |problem: &Problem| {
        matches!(problem.d_model, 24 | 257) && (problem.streams != 2 || problem.routing == Routing::CrossKey)
    };
    let normed = Some(problem.clone()).filter(fits).and_then(Problem::normed).map(|problem| (problem, true));
    [Some((problem, false)), normed].into_iter().flatten()
}

struct Graph {
    retrieved: Tensor<3>,
    open: Option<GraphOpen>,
    site: Option<SiteWeights>,
    gain: Option<Tensor<1>>,
    input: Tensor<2>,
    gates: Option<(Tensor<2>, Option<Tensor<2>>)>, // beta, rho
}

#[derive(Clone)]
struct GraphOpen {
    partial: Tensor<3>,
    lse: Tensor<2>,
    query: Tensor<2>,
}

impl Found {
    #[track_caller]
    fn assert_close(&self, problem: &Problem, dtype: ElemType, about: &str) {
        let truth = problem.truth(&self.partial);
        assert_close(
            about,
            &[
                ("partial", &self.partial, &truth.partial, bound(dtype)),
                ("input", &self.input, &truth.input, bound(dtype)),
                ("beta", &self.beta, &truth.beta, 1e-5),
                ("rho", &self.rho, &truth.rho, 1e-5),
            ],
        );
    }
}

/// What reaches the outputs of a read, and of the write of the branch that follows it.
struct Cotangents {
    input: Vec<f64>,          // [tokens, d_model]
    written: Option<Written>, // none for a read that no branch follows
}

struct Written {
    beta: Vec<f64>,  // [tokens, 2], with a site
    after: Vec<f64>, // [tokens, streams, d_model], where a block is open
}

/// Gradients of a read and of the write before it.
#[derive(Debug, PartialEq)]
struct Gradients {
    state: Vec<f64>,     // [tokens, streams, d_model]
    shift: Vec<f64>,     // [tokens, streams]
    lse: Vec<f64>,       // [tokens, streams]
    partial: Vec<f64>,   // [tokens, streams, d_model], here and below empty where no block is open
    output: Vec<f64>,    // [tokens, d_model]
    beta: Vec<f64>,      // [tokens, 2], of the branch before
    query: Vec<f64>,     // [streams, d_model]
    site: Vec<Vec<f64>>, // weight, bias and scale of alpha, beta, rho; empty if frozen
    gain: Vec<f64>,      // [d_model], empty if frozen
}

impl Problem {
    fn cotangents(&self, written: bool) -> Cotangents {
        Cotangents {
            input: values(40, self.tokens * self.d_model, 1.0),
            written: written.then(|| Written {
                beta: values(41, self.tokens * 2, 1.0),
                after: values(42, self.tokens * self.streams * self.d_model, 1.0),
            }),
        }
    }

    /// Forward, then backward; also the state that the forward wrote.
    fn run_bwd(
        &self,
        client: &Client,
        dtype: ElemType,
        tuning: Tuning,
        cotangents: &Cotangents,
        trained: bool,
    ) -> (Gradients, Vec<f64>) {
        let Self { tokens, streams, d_model, .. } = *self;
        let saved = self.forward(client, dtype, tuning);
        let (gated, sited) = (saved.gate.is_some(), self.site.is_some());
        let written = cotangents.written.as_ref();
        let d_input = Buffer::new(client, &[tokens, d_model], dtype, &cotangents.input);
        // Only what is read is there: d_beta of this read.
        let width = 2 + 2 * streams;
        let beta = written.filter(|_| sited).map_or_else(Vec::new, |written| {
            let tokens = written.beta.chunks(2);
            tokens.flat_map(|beta| [beta, &vec![f64::NAN; 2 * streams]].concat()).collect::<Vec<_>>()
        });
        let d_token = Buffer::arena(client, [READS, READ], &[tokens, width], F32, &beta);
        let d_query = Buffer::output(client, &[READS, streams, d_model], F32);
        let state = [tokens, streams, d_model];
        let d_partial = match written {
            Some(written) => Buffer::new(client, &state, dtype, &written.after),
            None => Buffer::output(client, &state, dtype),
        };
        let d_output = Buffer::output(client, &[tokens, d_model], dtype);
        let parameters = SiteBuffers::new(client, d_model, F32, None);
        let d_gain = self.gain.as_ref().filter(|_| trained).map(|_| Buffer::output(client, &[d_model], F32));
        let operands = ReadBwd {
            state: saved.state.operand(),
            slot: SLOT,
            lse: saved.lse.operand(),
            query: saved.query.operand(),
            site: saved.site.as_ref().map(Buffer::operand),
            gate: saved.gate.as_ref().map(Buffer::operand),
            d_input: d_input.operand(),
            written: written.is_some(),
            open: saved.open.as_ref().map(|open| OpenBwd {
                partial: open.partial.operand(),
                d_partial: d_partial.operand(),
                output: gated.then(|| open.output.operand()),
                d_output: Some(d_output.operand()),
            }),
            d_token: d_token.operand(),
            d_site: (trained && sited).then(|| parameters.operands()),
            d_gain: d_gain.as_ref().map(Buffer::operand),
            d_query: d_query.operand(),
            read: READ,
            eps: self.eps,
            norm: self.norm(),
        };
        let before = launches();
        read_bwd(client, operands, self.routing, tuning).unwrap();
        assert!(tokens == 0 || launches() > before);

        let open = |buffer: &Buffer| if self.open.is_some() { buffer.read() } else { Vec::new() };
        let token = d_token.rows(READ - 1, 2);
        let (earlier, own) = token.split_at(tokens * width);
        let d_beta: Vec<f64> = earlier.chunks(width).flat_map(|token| token[..2].to_vec()).collect();
        let others = earlier.chunks(width).flat_map(|token| &token[2..]);
        assert!({ others }.all(|x| x.is_nan()), "the shift or d_lse of the read before changed");
        let wrote_beta = self.open.is_some() && gated;
        assert!(wrote_beta || d_beta.iter().all(|x| x.is_nan()), "the gradient of a beta of no concern changed");
        let gradients = Gradients {
            state: saved.state.rows(SLOT, 1),
            shift: own.chunks(width).flat_map(|token| token[2..][..streams].to_vec()).collect(),
            lse: own.chunks(width).flat_map(|token| token[2 + streams..].to_vec()).collect(),
            partial: open(&d_partial),
            output: open(&d_output),
            beta: if wrote_beta { d_beta } else { Vec::new() },
            query: d_query.rows(READ, usize::from(self.open.is_some())),
            site: if trained && sited { parameters.read() } else { Vec::new() },
            gain: d_gain.as_ref().map_or_else(Vec::new, Buffer::read),
        };
        (gradients, saved.open.map_or_else(Vec::new, |open| open.partial.read()))
    }

    /// Automatic differentiation of the composed operations in f64, from the state that the branch before wrote.
    fn truth_bwd(&self, partial: &[f64], cotangents: &Cotangents) -> Gradients {
        let Self { tokens, streams, d_model, .. } = *self;
        let state = [tokens, streams, d_model];
        let Graph { retrieved, open, site, gain, input, gates } = self.graph(partial, leaf, leaf, leaf);
        let mut loss = (input * leaf(&cotangents.input, [tokens, d_model])).sum();
        if let Some(written) = &cotangents.written {
            let after = match (&open, gates) {
                (Some(open), Some((beta, rho))) => {
                    loss = loss + (beta * leaf(&written.beta, [tokens, 2])).sum();
                    // The transport of a write of nothing.
                    let nothing = leaf(&vec![0.0; tokens * d_model], [tokens, d_model]);
                    let no_beta = leaf(&vec![0.0; tokens * 2], [tokens, 2]);
                    Some(write(open.partial.clone(), nothing, no_beta, rho.unwrap()))
                }
                (None, Some((beta, _))) => {
                    loss = loss + (beta * leaf(&written.beta, [tokens, 2])).sum();
                    None
                }
                (Some(open), None) => Some(open.partial.clone()),
                (None, None) => None,
            };
            if let Some(after) = after {
                loss = loss + (after * leaf(&written.after, state)).sum();
            }
        }
        let gradients = loss.backward();
        let d_state = gradient(&retrieved, &gradients);
        let d_lse = open.as_ref().map_or_else(|| vec![0.0; tokens * streams], |open| gradient(&open.lse, &gradients));
        let d_partial = open.as_ref().map_or_else(Vec::new, |open| gradient(&open.partial, &gradients));
        let [output, beta] = self.truth_bwd_of_write(&d_partial);
        let site = site.map_or_else(Vec::new, |SiteWeights { alpha, beta, rho }| {
            let gates = [alpha, beta, rho].map(|gate| {
                let GateWeights { weight, bias, scale } = gate;
                [gradient(&weight, &gradients), gradient(&bias, &gradients), gradient(&scale, &gradients)]
            });
            gates.into_iter().flatten().collect()
        });
        let dots = d_state.chunks(d_model).zip(self.state.chunks(d_model));
        let dots = dots.map(|(d, x)| d.iter().zip(x).map(|(d, x)| d * x).sum::<f64>());
        Gradients {
            shift: d_lse.iter().zip(dots).map(|(d_lse, dot)| d_lse - dot).collect(),
            lse: d_lse,
            state: d_state,
            partial: d_partial,
            output,
            beta,
            query: open.map_or_else(Vec::new, |open| gradient(&open.query, &gradients)),
            site,
            gain: gain.map_or_else(Vec::new, |gain| gradient(&gain, &gradients)),
        }
    }

    /// Gradients of output and beta of the branch before, from that of the state after it.
    fn truth_bwd_of_write(&self, d_partial: &[f64]) -> [Vec<f64>; 2] {
        let Self { tokens, d_model, .. } = *self;
        let Some(open) = &self.open else { return [Vec::new(), Vec::new()] };
        let Some(gates) = &open.gates else { return [d_partial.to_vec(), Vec::new()] };
        let (output, beta) = (leaf(&open.output, [tokens, d_model]), leaf(&gates.beta, [tokens, 2]));
        let state = write_first(output.clone(), beta.clone());
        let gradients = (state * leaf(d_partial, [tokens, 2, d_model])).sum().backward();
        [gradient(&output, &gradients), gradient(&beta, &gradients)]
    }
}

impl Gradients {
    #[track_caller]
    fn assert_close(&self, truth: &Self, dtype: ElemType, about: &str) {
        assert_close(
            about,
            &[
                ("d_state", &self.state, &truth.state, bound(dtype)),
                // Of the state's gradient as it is stored.
                ("shift", &self.shift, &truth.shift, bound(dtype)),
                ("d_lse", &self.lse, &truth.lse, 1e-5),
                ("d_partial", &self.partial, &truth.partial, bound(dtype)),
                ("d_output", &self.output, &truth.output, bound(dtype)),
                ("d_beta", &self.beta, &truth.beta, 1e-5),
                ("d_query", &self.query, &truth.query, 1e-5),
                ("d_gain", &self.gain, &truth.gain, 1e-5),
            ],
        );
        for (k, gate) in ["alpha", "beta", "rho"].into_iter().enumerate().take(self.site.len() / 3) {
            assert_close(about, &[(&format!("{gate}.weight"), &self.site[3 * k], &truth.site[3 * k], 1e-5)]);
        }
        // Together, for a sum over tokens may cancel in one of them.
        let scalars = |gradients: &Self| {
            let parameters = gradients.site.iter().enumerate().filter(|(k, _)| k % 3 > 0);
            parameters.flat_map(|(_, values)| values.clone()).collect::<Vec<_>>()
        };
        if !self.site.is_empty() {
            assert_close(about, &[("biases and scales", &scalars(self), &scalars(truth), 1e-5)]);
        }
        assert!(self.site.is_empty() || self.site.len() == truth.site.len(), "{about}");
    }
}

/// All routings, kinds and types at one size; any width, no token, one, more than the first stage has cubes for at
/// once.
#[test]
fn backward_of_any_size() {
    for (client, device) in clients() {
        let routed = Routing::ALL.map(|routing| (7, 24, routing));
        let sized = [(257, 1), (130, 3), (1, 37), (37, 130), (3, 257), (2100, 3)];
        let sized = sized.map(|(tokens, d_model)| (few(&client, tokens), d_model, Routing::CrossKey));
        for (tokens, d_model, routing) in routed.into_iter().chain(sized) {
            for kind in KINDS {
                // The other kinds differ in what they leave out.
                if d_model != 24 && !matches!(kind, Kind::First | Kind::Later | Kind::Plain { first: false }) {
                    continue;
                }
                for (problem, normed) in with_norm(Problem::new(tokens, d_model, routing, kind)) {
                    for written in [true, false].into_iter().filter(|&written| !(written && kind == Kind::Output)) {
                        // Two streams without gates are never written.
                        if written && matches!(kind, Kind::Completed(2 | 4)) || !written && problem.site.is_some() {
                            continue;
                        }
                        let cotangents = problem.cotangents(written);
                        for tuning in reductions(&client) {
                            let about = format!(
                                "{tokens} × {d_model}, {routing:?}, {kind:?}, normed {normed}, written {written}, on {device}, \
                             {tuning:?}"
                            );
                            let (found, partial) = problem.run_bwd(&client, F32, tuning, &cotangents, true);
                            found.assert_close(&problem.truth_bwd(&partial, &cotangents), F32, &about);
                            let (again, _) = problem.run_bwd(&client, F32, tuning, &cotangents, true);
                            assert_eq!(found, again, "{about}: other bits");
                        }
                        if d_model == 24 {
                            for dtype in [F16, BF16].into_iter().filter(|&dtype| stores(&client, dtype)) {
                                let about = format!(
                                    "{routing:?}, {kind:?}, normed {normed}, written {written}, {dtype} on {device}"
                                );
                                let (found, partial) =
                                    problem.run_bwd(&client, dtype, Tuning::default(), &cotangents, true);
                                found.assert_close(&problem.truth_bwd(&partial, &cotangents), dtype, &about);
                            }
                        }
                    }
                }
            }
        }
    }
}

/// A read whose branch has not been written is one whose write passes nothing back.
#[test]
fn backward_of_an_unwritten_branch() {
    for (client, device) in clients() {
        for kind in [Kind::First, Kind::Second, Kind::Later] {
            let problem = Problem::new(5, 24, Routing::CrossKey, kind);
            let cotangents = problem.cotangents(false);
            let (found, partial) = problem.run_bwd(&client, F32, Tuning::default(), &cotangents, true);
            found.assert_close(&problem.truth_bwd(&partial, &cotangents), F32, &format!("{kind:?} on {device}"));
        }
    }
}

/// Frozen parameters change no other gradient.
#[test]
fn backward_of_a_frozen_site() {
    for (client, device) in clients() {
        for kind in [Kind::First, Kind::Second, Kind::Later] {
            let problem = Problem::new(5, 130, Routing::CrossKey, kind).normed().unwrap();
            let cotangents = problem.cotangents(true);
            let (trained, _) = problem.run_bwd(&client, F32, Tuning::default(), &cotangents, true);
            let (frozen, _) = problem.run_bwd(&client, F32, Tuning::default(), &cotangents, false);
            assert_eq!(frozen, Gradients { site: Vec::new(), gain: Vec::new(), ..trained }, "{kind:?} on {device}");
        }
    }
}

/// Gradients of parameters without tokens are zero, and nothing else is there.
#[test]
fn backward_of_no_token() {
    for (client, device) in clients() {
        for kind in KINDS {
            let problem = Problem::new(0, 24, Routing::CrossKey, kind);
            let problem = problem.clone().normed().unwrap_or(problem);
            let written = problem.site.is_some();
            let (found, _) = problem.run_bwd(&client, F32, Tuning::default(), &problem.cotangents(written), true);
            assert!(
                found.state.is_empty() && found.partial.is_empty() && found.shift.is_empty() && found.lse.is_empty(),
                "{device}"
            );
            let parameters = found.site.iter().flatten().chain(&found.query).chain(&found.gain);
            assert!({ parameters }.all(|&x| x == 0.0), "{kind:?} on {device}");
        }
    }
}

/// Every gradient of the golden cases.
#[test]
fn golden_backward() {
    for (client, device) in clients() {
        for case in golden_cases("read_") {
            let problem = Problem::golden(&case);
            let d_model = problem.d_model;
            let tensor = |name: &str| case.tensor(name).map(|tensor| tensor.values.clone()).ok();
            let token_major = |name: &str| case.tensor(name).map(|tensor| tensor.swap_axes(0).values).ok();
            let written = Written {
                beta: tensor("cot.beta").unwrap(),
                after: token_major("cot.carried").unwrap_or_else(|| vec![0.0; problem.state.len()]),
            };
            let cotangents = Cotangents { input: tensor("cot.h").unwrap(), written: Some(written) };
            for dtype in STORAGE.into_iter().filter(|&dtype| stores(&client, dtype)) {
                let about = format!("{} in {dtype} on {device}", case.name);
                let (found, _) = problem.run_bwd(&client, dtype, Tuning::default(), &cotangents, true);
                let dots = found.state.chunks(d_model).zip(problem.state.chunks(d_model));
                let dots = dots.map(|(d, x)| d.iter().zip(x).map(|(d, x)| d * x).sum::<f64>());
                let d_lse: Vec<f64> = found.shift.iter().zip(dots).map(|(shift, dot)| shift + dot).collect();
                let scale = |k: usize| case.tensor("grad.scale").map(|scale| vec![scale.values[k]]).ok();
                let [alpha, beta, rho] = [0, 1, 2].map(|gate| &found.site[3 * gate..][..3]);
                let all = [
                    ("d_state", &found.state, token_major("grad.hist"), bound(dtype)),
                    ("d_partial", &found.partial, token_major("grad.P"), bound(dtype)),
                    ("d_lse", &d_lse, token_major("grad.zeta"), 1e-5),
                    ("d_query", &found.query, tensor("grad.q"), 1e-5),
                    ("alpha.weight", &alpha[0], tensor("grad.Wa"), 1e-5),
                    ("alpha.bias", &alpha[1], tensor("grad.ba"), 1e-5),
                    ("alpha.scale", &alpha[2], scale(0), 1e-5),
                    ("beta.weight", &beta[0], tensor("grad.Wb"), 1e-5),
                    ("beta.bias", &beta[1], tensor("grad.bb"), 1e-5),
                    ("beta.scale", &beta[2], scale(1), 1e-5),
                    ("rho.weight", &rho[0], tensor("grad.Wr"), 1e-5),
                    ("rho.bias", &rho[1], tensor("grad.br"), 1e-5),
                    ("rho.scale", &rho[2], scale(2), 1e-5),
                ];
                let mut checked = 0;
                for (name, got, truth, bound) in &all {
                    if let Some(truth) = truth {
                        assert_close(&about, &[(*name, &got[..], &truth[..], *bound)]);
                        checked += 1;
                    }
                }
                let expected = match case.op().unwrap() {
                    "residual_read_first" => 5,
                    "residual_read" => 10,
                    _ => 13, // with scales
                };
                assert_eq!(checked, expected, "{about}: not every gradient was compared");
            }
        }
    }
}

#[test]
fn no_gradient_of_one_token_leaks_into_another() {
    for (client, device) in clients() {
        for poison in [f64::NAN, f64::INFINITY] {
            let problem = Problem::new(5, 130, Routing::CrossKey, Kind::Later).normed().unwrap();
            let mut cotangents = problem.cotangents(true);
            let run = |cotangents: &Cotangents| problem.run_bwd(&client, F32, Tuning::default(), cotangents, true).0;
            let clean = run(&cotangents);
            cotangents.input[2 * 130 + 7] = poison;
            let found = run(&cotangents);
            let about = format!("{poison} on {device}");
            assert_only_token(&about, &found.state, &clean.state, [5, 2, 260]);
            assert_only_token(&about, &found.partial, &clean.partial, [5, 2, 260]);
            assert_only_token(&about, &found.output, &clean.output, [5, 2, 130]);
            assert_only_token(&about, &found.shift, &clean.shift, [5, 2, 2]);
            assert_only_token(&about, &found.beta, &clean.beta, [5, 2, 2]);
        }
    }
}

#[test]
fn golden() {
    for (client, device) in clients() {
        for case in golden_cases("read_") {
            let problem = Problem::golden(&case);
            let partial = problem.open.as_ref().map_or_else(Vec::new, |open| open.before.clone().unwrap());
            let (input, beta) = (&case.tensor("out.h").unwrap().values, &case.tensor("out.beta").unwrap().values);
            for dtype in STORAGE.into_iter().filter(|&dtype| stores(&client, dtype)) {
                for tuning in reductions(&client) {
                    let about = format!("{} in {dtype} on {device}, {tuning:?}", case.name);
                    let found = problem.run(&client, dtype, tuning);
                    assert_eq!(found.partial, partial, "{about}");
                    assert_close(
                        &about,
                        &[("input", &found.input, input, bound(dtype)), ("beta", &found.beta, beta, 1e-5)],
                    );
                    // The cases hold the transported state instead of rho.
                    found.assert_close(&problem, dtype, &about);
                }
            }
        }
    }
}

/// Any width, no token, one, all kinds of reads, all routings.
#[test]
fn any_size() {
    for (client, device) in clients() {
        let sized = [(257, 1), (130, 3), (1, 37), (37, 130), (3, 257), (0, 8)];
        let sized = sized.map(|(tokens, d_model)| (few(&client, tokens), d_model, Routing::CrossKey, F32));
        let routed = Routing::ALL.map(|routing| (5, 24, routing, F32));
        let stored = [F16, BF16].map(|dtype| (5, 130, Routing::CrossKey, dtype));
        for (tokens, d_model, routing, dtype) in sized.into_iter().chain(routed).chain(stored) {
            if !stores(&client, dtype) {
                continue;
            }
            for kind in KINDS {
                for (problem, normed) in with_norm(Problem::new(tokens, d_model, routing, kind)) {
                    for tuning in reductions(&client) {
                        let about = format!(
                            "{tokens} × {d_model}, {routing:?}, {kind:?}, normed {normed}, {dtype} on {device}, {tuning:?}"
                        );
                        problem.run(&client, dtype, tuning).assert_close(&problem, dtype, &about);
                    }
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
            let mut problem = Problem::new(5, 24, Routing::CrossKey, Kind::Later);
            problem.open.as_mut().unwrap().lse.iter_mut().for_each(|lse| *lse = sign * 1e4);
            for gate in problem.site.as_mut().unwrap() {
                gate.bias.iter_mut().for_each(|bias| *bias = -sign * 1e4);
            }
            let about = format!("{sign} on {device}");
            let found = problem.run(&client, F32, Tuning::default());
            let truth = problem.truth(&found.partial);
            assert_eq!([&found.beta, &found.rho], [&truth.beta, &truth.rho], "{about}");
            assert_close(&about, &[("input", &found.input, &truth.input, 1e-5)]);
        }
    }
}

#[test]
fn reruns_are_bit_identical() {
    for (client, device) in clients() {
        let problem = Problem::new(5, 130, Routing::CrossKey, Kind::Later).normed().unwrap();
        for tuning in reductions(&client) {
            let first = problem.run(&client, F32, tuning);
            assert_eq!(problem.run(&client, F32, tuning), first, "{device}, {tuning:?}");
        }
    }
}

#[test]
fn one_token_never_leaks_into_another() {
    for (client, device) in clients() {
        for poison in [f64::NAN, f64::INFINITY] {
            let mut problem = Problem::new(5, 130, Routing::CrossKey, Kind::Later).normed().unwrap();
            let clean = problem.run(&client, F32, Tuning::default());
            problem.open.as_mut().unwrap().output[2 * 130 + 7] = poison;
            let found = problem.run(&client, F32, Tuning::default());
            let about = format!("{poison} on {device}");
            assert_only_token(&about, &found.partial, &clean.partial, [5, 2, 260]);
            assert_only_token(&about, &found.input, &clean.input, [5, 2, 130]);
            assert_only_token(&about, &found.beta, &clean.beta, [5, 2, 2]);
            assert_only_token(&about, &found.rho, &clean.rho, [5, 2, 1]);
        }
    }
}

#[test]
fn refusals_name_operation_argument_expected_and_got() {
    for (client, _) in clients() {
        let buffer = |shape: &[usize]| Buffer::new(&client, shape, F32, &vec![1.0; shape.iter().product()]);
        let (state, query, lse) = (buffer(&[3, 5, 2, 8]), buffer(&[4, 2, 8]), buffer(&[4, 5, 2]));
        let (site, gate, input) = (buffer(&[88]), buffer(&[4, 5, 5]), buffer(&[5, 8]));
        let (partial, three) = (buffer(&[5, 2, 8]), buffer(&[3, 5, 3, 8]));
        let half = Buffer::new(&client, &[5, 8], F16, &[1.0; 40]);
        let right = ReadFwd {
            state: state.operand(),
            slot: 2,
            open: None,
            query: query.operand(),
            lse: lse.operand(),
            site: Some(site.operand()),
            gate: Some(gate.operand()),
            input: input.operand(),
            read: 3,
            eps: EPS,
            norm: None,
        };
        let open = Open { before: None, output: half.operand(), partial: partial.operand() };
        let run = |operands| read_fwd(&client, operands, Routing::CrossKey, Tuning::default());
        assert_eq!(run(right), Ok(()));
        for (operands, message) in [
            (
                ReadFwd { state: three.operand(), ..right },
                "read_fwd: `query` has shape [4, 2, 8], expected [reads, outputs, d_model] = [4, 3, 8]",
            ),
            (ReadFwd { input: half.operand(), ..right }, "read_fwd: `input` has element type f16, expected f32"),
            (ReadFwd { eps: -1.0, ..right }, "read_fwd: `eps` is -1, expected a finite number ≥ 0"),
            (ReadFwd { slot: 3, ..right }, "read_fwd: `slot` is 3, expected less than the 3 slots of `state`"),
            (ReadFwd { read: 4, ..right }, "read_fwd: `read` is 4, expected less than the 4 rows of `query`"),
            (
                ReadFwd { gate: None, ..right },
                "read_fwd: `gate` is none, expected the gates of all reads, as `site` is there",
            ),
            (
                ReadFwd { site: Some(lse.operand()), ..right },
                "read_fwd: `site` has shape [4, 5, 2], expected [10 * d_model + 8] = [88]",
            ),
            (
                ReadFwd { norm: Some(EPS), ..right },
                "read_fwd: `site` has shape [88], expected [10 * d_model + 8 + d_model] = [96]",
            ),
            (
                ReadFwd { norm: Some(EPS), site: None, ..right },
                "read_fwd: `site` is none, expected the parameters of the read, with the gain of `norm`",
            ),
            (ReadFwd { norm: Some(-1.0), ..right }, "read_fwd: `norm` is -1, expected a finite number ≥ 0"),
            (ReadFwd { open: Some(open), ..right }, "read_fwd: `open.output` has element type f16, expected f32"),
            (
                ReadFwd { open: Some(Open { output: input.operand(), ..open }), read: 0, ..right },
                "read_fwd: `read` is 0, expected at least 1 where a block is open",
            ),
            (
                ReadFwd { open: Some(Open { output: input.operand(), ..open }), site: None, gate: None, ..right },
                "read_fwd: `outputs of the state` is 2, expected 1 where a block is open without `gate`",
            ),
        ] {
            assert_eq!(run(operands).unwrap_err().to_string(), message);
        }
    }
}

#[test]
fn refused_backward() {
    for (client, _) in clients() {
        let buffer = |shape: &[usize]| Buffer::new(&client, shape, F32, &vec![1.0; shape.iter().product()]);
        let (state, query, lse) = (buffer(&[3, 5, 2, 8]), buffer(&[4, 2, 8]), buffer(&[4, 5, 2]));
        let (site, gate, d_input) = (buffer(&[88]), buffer(&[4, 5, 5]), buffer(&[5, 8]));
        let (partial, d_partial, d_token) = (buffer(&[5, 2, 8]), buffer(&[5, 2, 8]), buffer(&[4, 5, 6]));
        let (output, d_output, d_query) = (buffer(&[5, 8]), buffer(&[5, 8]), buffer(&[4, 2, 8]));
        let (parameters, wide) = (SiteBuffers::new(&client, 8, F32, None), SiteBuffers::new(&client, 9, F32, None));
        let open = OpenBwd {
            partial: partial.operand(),
            d_partial: d_partial.operand(),
            output: Some(output.operand()),
            d_output: Some(d_output.operand()),
        };
        let right = ReadBwd {
            state: state.operand(),
            slot: 2,
            lse: lse.operand(),
            query: query.operand(),
            site: Some(site.operand()),
            gate: Some(gate.operand()),
            d_input: d_input.operand(),
            written: true,
            open: Some(open),
            d_token: d_token.operand(),
            d_site: Some(parameters.operands()),
            d_gain: None,
            d_query: d_query.operand(),
            read: 3,
            eps: EPS,
            norm: None,
        };
        let run = |operands| read_bwd(&client, operands, Routing::CrossKey, Tuning::default());
        assert_eq!(run(right), Ok(()));
        for (operands, message) in [
            (
                ReadBwd { d_site: Some(wide.operands()), ..right },
                "read_bwd: `alpha.weight` has shape [18, 2], expected [2 * d_model, outputs] = [16, 2]",
            ),
            (
                ReadBwd { site: None, d_site: None, ..right },
                "read_bwd: `site` is none, expected the gates of the branch that was `written`",
            ),
            (
                ReadBwd { site: None, written: false, ..right },
                "read_bwd: `site` is none, expected the parameters whose gradients `d_site` takes",
            ),
            (
                ReadBwd { open: Some(OpenBwd { output: None, ..open }), ..right },
                "read_bwd: `open.output` is none, expected what the gated branch computed",
            ),
            (
                ReadBwd { d_token: lse.operand(), ..right },
                "read_bwd: `d_token` has shape [4, 5, 2], expected [reads, tokens, 2 + 2 * outputs] = [4, 5, 6]",
            ),
            (
                ReadBwd { d_gain: Some(query.operand()), ..right },
                "read_bwd: `norm` is none, expected the norm whose gain's gradient `d_gain` takes",
            ),
            (ReadBwd { read: 0, ..right }, "read_bwd: `read` is 0, expected at least 1 where a block is open"),
        ] {
            assert_eq!(run(operands).unwrap_err().to_string(), message);
        }
    }
}
