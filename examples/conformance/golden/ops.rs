//! Cases of single operations.

use burn::tensor::Tensor;
use dar_burn::Routing;
use dar_burn::ops::{
    GateWeights, History, HyperWeights, MhcWeights, Retrieved, SinkhornOrder, SiteWeights, StreamMaps, attnres_read,
    hyper_maps, merge, mhc_maps, output_read, pack, prefix, residual_read, residual_read_first, sinkhorn, streams_read,
    streams_write, write, write_first,
};

use super::Reason;
use super::case::Case;
use super::graph::Axes::{Same, Swap};
use super::graph::Graph;

/// Builds inputs and outputs of operation `op`.
pub fn run(op: &str, graph: &mut Graph) -> Result<(), Reason> {
    match op {
        "pack" => run_pack(graph),
        "prefix" => run_prefix(graph),
        "merge" => run_merge(graph),
        "residual_read" => run_residual_read(graph, false),
        "residual_read_scaled" => run_residual_read(graph, true),
        "residual_read_first" => run_residual_read_first(graph),
        "write" => run_write(graph),
        "write_first" => run_write_first(graph),
        "attnres_read" => run_attnres_read(graph),
        "output_read" => run_output_read(graph),
        "sinkhorn" => run_sinkhorn(graph),
        "mhc_step" => run_mhc_step(graph),
        "hc_step" => run_hc_step(graph),
        unknown => Err(format!("op `{unknown}` is unknown")),
    }
}

pub fn routing(case: &Case) -> Result<Routing, Reason> {
    match case.text("routing")? {
        "cross_key" => Ok(Routing::CrossKey),
        "self" => Ok(Routing::SelfKeyValue),
        "cross_value" => Ok(Routing::CrossValue),
        "fixed" => Ok(Routing::FixedKeyValue),
        unknown => Err(format!("routing `{unknown}` is unknown")),
    }
}

pub fn sinkhorn_order(case: &Case) -> Result<SinkhornOrder, Reason> {
    match case.optional_text("order") {
        None | Some("exp, columns then rows") => Ok(SinkhornOrder::ColumnsThenRows),
        Some("softmax first") => Ok(SinkhornOrder::SoftmaxFirst),
        Some(unknown) => Err(format!("order `{unknown}` is unknown")),
    }
}

/// A history of the entries of `states`. `[entries, tokens, streams, d_model]`
fn history(states: Tensor<4>, eps: f64) -> Result<History, Reason> {
    let [entries, tokens, streams, d_model] = states.dims();
    let entry = |index| states.clone().narrow(0, index, 1).reshape([tokens, streams, d_model]);
    if entries == 0 {
        return Err("a history holds at least one entry".into());
    }
    Ok((1..entries).map(entry).fold(History::new(entry(0), eps), History::append))
}

fn run_pack(graph: &mut Graph) -> Result<(), Reason> {
    let history = history(graph.input("H", Swap(1))?, graph.case.eps()?)?;
    let (keys, values) = pack(&history, routing(graph.case)?);
    graph.output("K", Swap(1), keys)?;
    graph.output("V", Swap(1), values)
}

fn run_prefix(graph: &mut Graph) -> Result<(), Reason> {
    let history = history(graph.input("H", Swap(1))?, graph.case.eps()?)?;
    let found = prefix(&history, graph.input("q", Same)?, routing(graph.case)?);
    let (lse, states) = found.into_iter().map(|Retrieved { lse, state }| (lse, state)).unzip();
    graph.output("zeta", Swap(1), Tensor::stack::<3>(lse, 0))?;
    graph.output("hist", Swap(1), Tensor::stack::<4>(states, 0))
}

/// What the history gave, the partial state, the query.
fn merge_operands(graph: &mut Graph) -> Result<(Retrieved, Tensor<3>, Tensor<2>), Reason> {
    let lse = graph.accumulated("zeta", Swap(0))?;
    let state = graph.input("hist", Swap(0))?;
    Ok((Retrieved { lse, state }, graph.input("P", Swap(0))?, graph.input("q", Same)?))
}

fn run_merge(graph: &mut Graph) -> Result<(), Reason> {
    let (retrieved, partial, query) = merge_operands(graph)?;
    let merged = merge(retrieved, partial, query, routing(graph.case)?, graph.case.eps()?);
    graph.output("h", Swap(0), merged)
}

fn run_residual_read(graph: &mut Graph, scaled: bool) -> Result<(), Reason> {
    let (retrieved, partial, query) = merge_operands(graph)?;
    let scale = if scaled { graph.input("scale", Same)? } else { ones(graph, 3) };
    let scale = |gate: usize| scale.clone().narrow(0, gate, 1);
    let site = SiteWeights {
        alpha: GateWeights { weight: graph.input("Wa", Same)?, bias: graph.input("ba", Same)?, scale: scale(0) },
        beta: GateWeights { weight: graph.input("Wb", Same)?, bias: graph.input("bb", Same)?, scale: scale(1) },
        rho: GateWeights { weight: graph.input("Wr", Same)?, bias: graph.input("br", Same)?, scale: scale(2) },
    };
    let (read, rho) = residual_read(retrieved, partial.clone(), query, &site, routing(graph.case)?, graph.case.eps()?);
    // M(rho) P is the write of a branch whose output is zero.
    let carried = write(partial, read.input.zeros_like(), read.beta.clone(), rho);
    graph.output("h", Same, read.input)?;
    graph.output("beta", Same, read.beta)?;
    graph.output("carried", Swap(0), carried)
}

fn run_residual_read_first(graph: &mut Graph) -> Result<(), Reason> {
    let retrieved = graph.input::<3>("hist", Swap(0))?;
    let one = ones(graph, 1);
    let rho = GateWeights {
        weight: Tensor::zeros([2 * retrieved.dims()[2], 1], (&graph.device, graph.storage)),
        bias: one.zeros_like(),
        scale: one.clone(),
    };
    let site = SiteWeights {
        alpha: GateWeights { weight: graph.input("Wa", Same)?, bias: graph.input("ba", Same)?, scale: one.clone() },
        beta: GateWeights { weight: graph.input("Wb", Same)?, bias: graph.input("bb", Same)?, scale: one },
        rho,
    };
    let read = residual_read_first(retrieved, &site, graph.case.eps()?);
    graph.output("h", Same, read.input)?;
    graph.output("beta", Same, read.beta)
}

fn run_write(graph: &mut Graph) -> Result<(), Reason> {
    let beta = graph.accumulated::<2>("beta", Same)?;
    let output = graph.input("y", Same)?;
    let carried = graph.input("carried", Swap(0))?;
    // The file gives what was carried, so nothing is exchanged here.
    let rho = Tensor::ones([beta.dims()[0], 1], (&graph.device, graph.accumulator()));
    graph.output("P", Swap(0), write(carried, output, beta, rho))
}

fn run_write_first(graph: &mut Graph) -> Result<(), Reason> {
    let beta = graph.accumulated("beta", Same)?;
    let output = graph.input("y", Same)?;
    graph.output("P", Swap(0), write_first(output, beta))
}

fn run_attnres_read(graph: &mut Graph) -> Result<(), Reason> {
    let sources = graph.input::<3>("V", Same)?;
    let history = history(sources.unsqueeze_dim(2), graph.case.eps()?)?;
    let query = graph.input("w", Same)?;
    graph.output("h", Same, attnres_read(&history, None, query))
}

fn run_output_read(graph: &mut Graph) -> Result<(), Reason> {
    let history = history(graph.input("H", Swap(1))?, graph.case.eps()?)?;
    let query = graph.input("q", Same)?;
    graph.output("h", Same, output_read(&history, None, query, routing(graph.case)?))
}

fn run_sinkhorn(graph: &mut Graph) -> Result<(), Reason> {
    let logits = graph.input("A", Same)?;
    let mixer = sinkhorn(logits, graph.case.number("iters")?, sinkhorn_order(graph.case)?);
    graph.output("M", Same, mixer)
}

fn run_mhc_step(graph: &mut Graph) -> Result<(), Reason> {
    let streams = graph.input::<3>("X", Swap(0))?;
    let weights =
        MhcWeights { phi: graph.input("phi", Same)?, bias: graph.input("b", Same)?, scale: graph.input("a", Same)? };
    let (iterations, order) = (graph.case.number("iters")?, sinkhorn_order(graph.case)?);
    let maps = mhc_maps(streams.clone(), &weights, iterations, order, graph.case.eps()?);
    run_step(graph, streams, &maps)
}

fn run_hc_step(graph: &mut Graph) -> Result<(), Reason> {
    let streams = graph.input::<3>("X", Swap(0))?;
    let weights = HyperWeights {
        static_pre: graph.input("static_pre", Same)?,
        static_post: graph.input("static_post", Same)?,
        static_res: graph.input("static_res", Same)?,
        w_pre: graph.input("w_pre", Same)?,
        w_post: graph.input("w_post", Same)?,
        w_res: graph.input("w_res", Same)?,
        scale: graph.input("s", Same)?,
    };
    let maps = hyper_maps(streams.clone(), &weights, graph.case.eps()?);
    run_step(graph, streams, &maps)
}

/// Read, the branch `f(h) = h * y`, write.
fn run_step(graph: &mut Graph, streams: Tensor<3>, maps: &StreamMaps) -> Result<(), Reason> {
    let acc = graph.accumulator();
    let factor = graph.input::<2>("y", Same)?.cast(acc);
    let input = streams_read(streams.clone(), maps.pre.clone());
    let output = (input.cast(acc) * factor).cast(graph.storage);
    graph.output("X", Swap(0), streams_write(streams, output, maps))
}

fn ones(graph: &Graph, length: usize) -> Tensor<1> {
    Tensor::ones([length], (&graph.device, graph.storage))
}
