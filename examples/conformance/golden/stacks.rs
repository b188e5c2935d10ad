//! Cases of whole models: every scheme as a module, around branches `f_l(h) = tanh(rmsnorm(h) W[l])`.

use burn::module::Param;
use burn::tensor::Tensor;
use dar_burn::nn::{AttnRes, AttnResConfig, Dar, DarConfig, Mhc, MhcConfig, Residual, Scheme, SeparateValues, Tying};
use dar_burn::ops::rms_norm;
use dar_burn::{BranchLayout, ResidualConfig};

use super::Reason;
use super::graph::Axes::Same;
use super::graph::Graph;
use super::ops::{routing, sinkhorn_order};

/// Builds inputs and output of the model `op`.
pub fn run(op: &str, graph: &mut Graph) -> Result<(), Reason> {
    let config = config(op, graph)?.with_implementation(graph.implementation);
    let weights = graph.rows::<2>("W")?;
    let x = graph.input::<2>("x", Same)?;
    let layout = BranchLayout::new(x.dims()[1], weights.len());
    config.validate(&layout).map_err(|error| error.to_string())?;
    let mut residual = config.init(&layout, &graph.device);
    match residual.scheme_mut() {
        Scheme::AttnRes(scheme) => place_attn_res(scheme, graph)?,
        Scheme::Dar(scheme) => place_dar(scheme, graph)?,
        Scheme::Mhc(scheme) => place_mhc(scheme, graph)?,
        Scheme::Standard(_) | Scheme::Hyper(_) | Scheme::Cascade(_) => {}
    }
    let hidden = pass(&residual, x, weights, graph)?;
    graph.output("y", Same, hidden)
}

fn config(op: &str, graph: &Graph) -> Result<ResidualConfig, Reason> {
    let case = graph.case;
    let eps = || case.eps();
    let layers = || case.number("K");
    Ok(match op {
        "residual_stack" => ResidualConfig::Standard,
        "parallel_split_stack" => ResidualConfig::Cascade,
        "attnres_full_stack" => ResidualConfig::AttnRes(AttnResConfig::full().with_eps(eps()?)),
        "attnres_block_stack" => ResidualConfig::AttnRes(AttnResConfig::block(layers()?).with_eps(eps()?)),
        "attnres_sepv_stack" => {
            let config = AttnResConfig::full().with_separate_values(SeparateValues::PerSource);
            ResidualConfig::AttnRes(config.with_eps(eps()?))
        }
        "dar_stack" | "dar_tied_stack" => {
            let tying = if op == "dar_stack" { Tying::PerBranch } else { Tying::PerBlock };
            let config = DarConfig::block(layers()?).with_routing(routing(case)?);
            ResidualConfig::Dar(config.with_tying(tying).with_eps(eps()?))
        }
        "mhc_stack" => {
            let config = MhcConfig::new().with_streams(case.number("n")?).with_iterations(case.number("iters")?);
            ResidualConfig::Mhc(config.with_order(sinkhorn_order(case)?).with_eps(eps()?))
        }
        unknown => return Err(format!("op `{unknown}` is unknown")),
    })
}

fn pass(residual: &Residual, x: Tensor<2>, weights: Vec<Tensor<2>>, graph: &Graph) -> Result<Tensor<2>, Reason> {
    let eps = graph.case.eps()?;
    let mut state = residual.start(x);
    for weight in weights {
        let weight = weight.cast(graph.accumulator());
        state = residual.branch(state, |h| rms_norm(h, eps).matmul(weight).tanh().cast(graph.storage));
    }
    Ok(residual.finish(state))
}

fn place_attn_res(scheme: &mut AttnRes, graph: &mut Graph) -> Result<(), Reason> {
    let queries = rows::<1>(graph, "w", scheme.queries.len())?;
    for (query, row) in scheme.queries.iter_mut().zip(queries) {
        place_query(query, row);
    }
    scheme.output_query = Param::from_tensor(graph.input("w_out", Same)?);
    if scheme.value_maps.is_some() {
        scheme.value_maps = Some(Param::from_tensor(graph.input("W_sep", Same)?));
    }
    Ok(())
}

fn place_dar(scheme: &mut Dar, graph: &mut Graph) -> Result<(), Reason> {
    let count = scheme.sites.len();
    let mut queries = rows::<2>(graph, "q", count)?;
    let mut weights = [rows::<2>(graph, "Wa", count)?, rows(graph, "Wb", count)?, rows(graph, "Wr", count)?];
    let mut biases = [rows::<1>(graph, "ba", count)?, rows(graph, "bb", count)?, rows(graph, "br", count)?];
    for site in scheme.sites.iter_mut().rev() {
        place_query(&mut site.query, queries.pop().expect("a row a site"));
        for (index, gate) in [&mut site.alpha, &mut site.beta, &mut site.rho].into_iter().enumerate() {
            gate.weight = Param::from_tensor(weights[index].pop().expect("a row a site"));
            gate.bias = Param::from_tensor(biases[index].pop().expect("a row a site"));
        }
    }
    scheme.output_query = Param::from_tensor(graph.input("q_out", Same)?);
    Ok(())
}

fn place_mhc(scheme: &mut Mhc, graph: &mut Graph) -> Result<(), Reason> {
    let count = scheme.sites.len();
    let parameters = rows::<2>(graph, "phi", count)?.into_iter().zip(rows::<1>(graph, "b", count)?);
    for ((site, (phi, bias)), scale) in scheme.sites.iter_mut().zip(parameters).zip(rows::<1>(graph, "a", count)?) {
        site.phi = Param::from_tensor(phi);
        site.bias = Param::from_tensor(bias);
        site.scale = Param::from_tensor(scale);
    }
    Ok(())
}

/// A site that only ever sees one candidate has no query: its row stays out of the model, with a zero gradient.
fn place_query<const D: usize>(query: &mut Option<Param<Tensor<D>>>, row: Tensor<D>) {
    if query.is_some() {
        *query = Some(Param::from_tensor(row));
    }
}

/// One leaf a site.
fn rows<const D: usize>(graph: &mut Graph, name: &'static str, sites: usize) -> Result<Vec<Tensor<D>>, Reason> {
    let rows = graph.rows(name)?;
    if rows.len() == sites {
        Ok(rows)
    } else {
        Err(format!("tensor `{name}` has {} rows, expected one for each of the {sites} sites", rows.len()))
    }
}
