//! Every operation as a function of operands `[tokens or 1, rows, columns]`, so that one tester covers them all.

use burn::tensor::{DType, Tensor};
use dar_burn::Routing;
use dar_burn::ops::{
    GateWeights, History, HyperWeights, MhcWeights, Retrieved, SinkhornOrder, SiteWeights, StreamMaps, accumulator,
    attnres_read, hyper_maps, merge, mhc_maps, output_read, pack, prefix, residual_read, residual_read_first, sinkhorn,
    streams_read, streams_write, write, write_first,
};

pub const EPS: f64 = 1e-6;
/// Queries of a prefix.
const BRANCHES: usize = 2;
/// Streams of the hyper-connection operations.
const STREAMS: usize = 3;
const ITERATIONS: usize = 4;

#[derive(Debug, Clone, Copy)]
pub struct Sizes {
    pub tokens: usize,
    pub entries: usize,
    pub d_model: usize,
}

#[derive(Debug, Clone, Copy)]
pub struct Operand {
    pub name: &'static str,
    /// The first axis has length `tokens` of what it was made for, or 1 for a parameter.
    pub shape: [usize; 3],
    pub per_token: bool,
    /// Of its values: parameters are drawn as in a model, so that no gate saturates.
    pub scale: f64,
}

type Run = Box<dyn Fn(&[Tensor<3>]) -> Vec<Tensor<3>>>;

pub struct Operation {
    pub name: String,
    operands: fn(Sizes) -> Vec<Operand>,
    run: Run,
    /// Outputs in the accumulator type, as bits by position; the others are in the storage type.
    accumulated: &'static [usize],
}

impl Operation {
    pub fn operands(&self, sizes: Sizes) -> Vec<Operand> {
        (self.operands)(sizes)
    }

    /// Outputs, each `[tokens, rows, columns]`.
    pub fn run(&self, operands: &[Tensor<3>]) -> Vec<Tensor<3>> {
        (self.run)(operands)
    }

    pub fn output_dtype(&self, output: usize, storage: DType) -> DType {
        if self.accumulated.contains(&output) { accumulator(storage) } else { storage }
    }
}

fn state(name: &'static str, tokens: usize, rows: usize, columns: usize) -> Operand {
    Operand { name, shape: [tokens, rows, columns], per_token: true, scale: 1.5 }
}

fn parameter(name: &'static str, rows: usize, columns: usize) -> Operand {
    let scale = 2.0 / (rows.max(columns) as f64).sqrt();
    Operand { name, shape: [1, rows, columns], per_token: false, scale }
}

fn gates(d_model: usize) -> Vec<Operand> {
    vec![
        parameter("alpha.weight", 2 * d_model, 2),
        parameter("alpha.bias", 1, 2),
        parameter("alpha.scale", 1, 1),
        parameter("beta.weight", 2 * d_model, 2),
        parameter("beta.bias", 1, 2),
        parameter("beta.scale", 1, 1),
        parameter("rho.weight", 2 * d_model, 1),
        parameter("rho.bias", 1, 1),
        parameter("rho.scale", 1, 1),
    ]
}

fn site(gates: &[Tensor<3>]) -> SiteWeights {
    let gate = |at: usize| GateWeights {
        weight: matrix(&gates[at]),
        bias: vector(&gates[at + 1]),
        scale: vector(&gates[at + 2]),
    };
    SiteWeights { alpha: gate(0), beta: gate(3), rho: gate(6) }
}

/// `[1, rows, columns]` as `[rows, columns]`.
fn matrix(x: &Tensor<3>) -> Tensor<2> {
    x.clone().squeeze_dim(0)
}

fn vector(x: &Tensor<3>) -> Tensor<1> {
    x.clone().flatten(0, 2)
}

/// `[tokens, 1, columns]` as `[tokens, columns]`.
fn row(x: &Tensor<3>) -> Tensor<2> {
    x.clone().squeeze_dim(1)
}

/// What an operation hands on in the accumulator type.
fn accumulated<const D: usize>(x: Tensor<D>) -> Tensor<D> {
    let dtype = accumulator(x.dtype());
    x.cast(dtype)
}

/// A history of `streams` streams from `[tokens, entries * streams, d_model]`: every entry is a view with gaps.
fn history(states: &Tensor<3>, streams: usize) -> History {
    let entries = states.dims()[1] / streams;
    let entry = |index: usize| states.clone().narrow(1, index * streams, streams);
    (1..entries).map(entry).fold(History::new(entry(0), EPS), History::append)
}

fn retrieved(lse: &Tensor<3>, state: &Tensor<3>) -> Retrieved {
    Retrieved { lse: accumulated(lse.clone().squeeze_dim(2)), state: state.clone() }
}

fn maps(maps: StreamMaps) -> Vec<Tensor<3>> {
    vec![maps.pre.unsqueeze_dim(1), maps.post.unsqueeze_dim(1), maps.res]
}

/// All operations, the routed ones in each routing.
pub fn operations() -> Vec<Operation> {
    let mut all = Vec::new();
    let mut add = |name: String, accumulated, operands, run: Run| {
        all.push(Operation { name, operands, run, accumulated });
    };
    for routing in Routing::ALL {
        let name = |operation: &str| format!("{operation} {routing:?}");
        add(
            name("pack"),
            &[],
            |s| vec![state("states", s.tokens, 2 * s.entries, s.d_model)],
            Box::new(move |x| {
                let (keys, values) = pack(&history(&x[0], 2), routing);
                [keys, values].map(|packed| packed.permute([1, 0, 2, 3]).flatten(1, 2)).into()
            }),
        );
        add(
            name("prefix"),
            &[0, 2],
            |s| {
                vec![state("states", s.tokens, 2 * s.entries, s.d_model), parameter("queries", 2 * BRANCHES, s.d_model)]
            },
            Box::new(move |x| {
                let d_model = x[1].dims()[2];
                let queries = x[1].clone().reshape([BRANCHES, 2, d_model]);
                let found = prefix(&history(&x[0], 2), queries, routing).into_iter();
                found.flat_map(|Retrieved { lse, state }| [lse.unsqueeze_dim(2), state]).collect()
            }),
        );
        add(
            name("merge"),
            &[],
            |s| {
                vec![
                    state("lse", s.tokens, 2, 1),
                    state("retrieved", s.tokens, 2, s.d_model),
                    state("partial", s.tokens, 2, s.d_model),
                    parameter("query", 2, s.d_model),
                ]
            },
            Box::new(move |x| vec![merge(retrieved(&x[0], &x[1]), x[2].clone(), matrix(&x[3]), routing, EPS)]),
        );
        add(
            name("residual_read"),
            &[1, 2],
            |s| {
                let mut operands = vec![
                    state("lse", s.tokens, 2, 1),
                    state("retrieved", s.tokens, 2, s.d_model),
                    state("partial", s.tokens, 2, s.d_model),
                    parameter("query", 2, s.d_model),
                ];
                operands.extend(gates(s.d_model));
                operands
            },
            Box::new(move |x| {
                let found = retrieved(&x[0], &x[1]);
                let (read, rho) = residual_read(found, x[2].clone(), matrix(&x[3]), &site(&x[4..]), routing, EPS);
                vec![read.input.unsqueeze_dim(1), read.beta.unsqueeze_dim(1), rho.unsqueeze_dim(1)]
            }),
        );
        add(
            name("output_read"),
            &[],
            |s| {
                vec![
                    state("states", s.tokens, 2 * s.entries, s.d_model),
                    state("partial", s.tokens, 2, s.d_model),
                    parameter("query", 2, s.d_model),
                ]
            },
            Box::new(move |x| {
                let read = output_read(&history(&x[0], 2), Some(x[1].clone()), matrix(&x[2]), routing);
                vec![read.unsqueeze_dim(1)]
            }),
        );
    }
    add(
        "residual_read_first".into(),
        &[1],
        |s| {
            let mut operands = vec![state("retrieved", s.tokens, 2, s.d_model)];
            operands.extend(gates(s.d_model));
            operands
        },
        Box::new(|x| {
            let read = residual_read_first(x[0].clone(), &site(&x[1..]), EPS);
            vec![read.input.unsqueeze_dim(1), read.beta.unsqueeze_dim(1)]
        }),
    );
    add(
        "write".into(),
        &[],
        |s| {
            vec![
                state("partial", s.tokens, 2, s.d_model),
                state("output", s.tokens, 1, s.d_model),
                state("beta", s.tokens, 1, 2),
                state("rho", s.tokens, 1, 1),
            ]
        },
        Box::new(|x| vec![write(x[0].clone(), row(&x[1]), accumulated(row(&x[2])), accumulated(row(&x[3])))]),
    );
    add(
        "write_first".into(),
        &[],
        |s| vec![state("output", s.tokens, 1, s.d_model), state("beta", s.tokens, 1, 2)],
        Box::new(|x| vec![write_first(row(&x[0]), accumulated(row(&x[1])))]),
    );
    add(
        "attnres_read".into(),
        &[],
        |s| {
            vec![
                state("states", s.tokens, s.entries, s.d_model),
                state("partial", s.tokens, 1, s.d_model),
                parameter("query", 1, s.d_model),
            ]
        },
        Box::new(|x| vec![attnres_read(&history(&x[0], 1), Some(x[1].clone()), vector(&x[2])).unsqueeze_dim(1)]),
    );
    for order in [SinkhornOrder::ColumnsThenRows, SinkhornOrder::SoftmaxFirst] {
        add(
            format!("sinkhorn {order:?}"),
            &[0],
            |s| vec![state("logits", s.tokens, STREAMS, STREAMS)],
            Box::new(move |x| vec![sinkhorn(x[0].clone(), ITERATIONS, order)]),
        );
        add(
            format!("mhc_maps {order:?}"),
            &[0, 1, 2],
            |s| {
                let columns = 2 * STREAMS + STREAMS * STREAMS;
                vec![
                    state("streams", s.tokens, STREAMS, s.d_model),
                    parameter("phi", STREAMS * s.d_model, columns),
                    parameter("bias", 1, columns),
                    parameter("scale", 1, 3),
                ]
            },
            Box::new(move |x| {
                let weights = MhcWeights { phi: matrix(&x[1]), bias: vector(&x[2]), scale: vector(&x[3]) };
                maps(mhc_maps(x[0].clone(), &weights, ITERATIONS, order, EPS))
            }),
        );
    }
    add(
        "hyper_maps".into(),
        &[0, 1, 2],
        |s| {
            vec![
                state("streams", s.tokens, STREAMS, s.d_model),
                parameter("static_pre", 1, STREAMS),
                parameter("static_post", 1, STREAMS),
                parameter("static_res", STREAMS, STREAMS),
                parameter("w_pre", 1, s.d_model),
                parameter("w_post", 1, s.d_model),
                parameter("w_res", s.d_model, STREAMS),
                parameter("scale", 1, 3),
            ]
        },
        Box::new(|x| {
            let weights = HyperWeights {
                static_pre: vector(&x[1]),
                static_post: vector(&x[2]),
                static_res: matrix(&x[3]),
                w_pre: vector(&x[4]),
                w_post: vector(&x[5]),
                w_res: matrix(&x[6]),
                scale: vector(&x[7]),
            };
            maps(hyper_maps(x[0].clone(), &weights, EPS))
        }),
    );
    add(
        "streams_read".into(),
        &[],
        |s| vec![state("streams", s.tokens, STREAMS, s.d_model), state("pre", s.tokens, 1, STREAMS)],
        Box::new(|x| vec![streams_read(x[0].clone(), accumulated(row(&x[1]))).unsqueeze_dim(1)]),
    );
    add(
        "streams_write".into(),
        &[],
        |s| {
            vec![
                state("streams", s.tokens, STREAMS, s.d_model),
                state("output", s.tokens, 1, s.d_model),
                state("post", s.tokens, 1, STREAMS),
                state("res", s.tokens, STREAMS, STREAMS),
            ]
        },
        Box::new(|x| {
            let post = accumulated(row(&x[2]));
            let maps = StreamMaps { pre: post.clone(), post, res: accumulated(x[3].clone()) };
            vec![streams_write(x[0].clone(), row(&x[1]), &maps)]
        }),
    );
    all
}
