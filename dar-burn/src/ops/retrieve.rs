//! Depth-wise retrieval: completed-history prefix (A.2–A.5), exact merge with the partial state (A.6–A.10), and the
//! reads over all candidates that need no gates (AttnRes read, output read).
//!
//! ```text
//! a_r = inv_rms_r * <q, C_r^key>                                   (A.1)
//! m = max_r a_r;  Z = sum_r exp(a_r - m)                           (A.2, A.3)
//! lse = m + ln Z;  retrieved = sum_r exp(a_r - m) C_r^value / Z    (A.4, A.5)
//! lambda = sigmoid(lse - a_partial)                                (A.9)
//! merged = lambda * retrieved + (1 - lambda) * P^value             (A.10)
//! ```

use burn::tensor::{
    DType, Tensor,
    activation::{sigmoid, softmax},
};
use dar_kernels::{Dims, Routing};

use super::history::{Entry, History, check_routing, pick_streams};
use super::numeric::{accumulate, accumulator, exchange, require_device, require_dtype, require_shape, stack_first};

/// What a query of a block finds in the completed history.
#[derive(Debug, Clone)]
pub struct Retrieved {
    /// Natural-log partition `zeta` of the logits, in the accumulator type (A.5). `[tokens, streams]`
    pub lse: Tensor<2>,
    /// The retrieved state, in the storage type (A.5). `[tokens, streams, d_model]`
    pub state: Tensor<3>,
}

/// Completed-history prefix: all `queries` of a block over all entries (A.2–A.5).
///
/// # Shapes
/// - `queries`: `[branches, streams, d_model]`
/// - output: one [`Retrieved`] a query
///
/// # Panics
/// If `queries` does not fit the history, or `routing` does not fit its number of streams.
#[track_caller]
pub fn prefix(history: &History, queries: Tensor<3>, routing: Routing) -> Vec<Retrieved> {
    let Dims { tokens, streams, d_model } = history.dims();
    let branches = queries.dims()[0];
    check_routing("prefix", routing, streams);
    require_shape("prefix", "queries", "[branches, streams, d_model]", [branches, streams, d_model], &queries);
    require_device("prefix", "queries", &history.entries()[0].key, &queries);

    // Transposed once, not for every entry: a sum of transposed gradients is what Burn 0.22.1 fuses into a wrong result on
    // wgpu.
    let queries = columns(queries, history.entries()[0].key.dtype());
    // One flat axis beside the entries: Burn 0.22.1 cannot fuse a reduction over the first axis whose last axis has length
    // 1 (its kernel does not compile).
    let logits = history.entries().iter().map(|entry| logits(entry, queries.clone(), routing).flatten::<1>(0, 2));
    let logits = stack_first::<1, 2>(logits.collect()); // [entries, branches * streams * tokens]
    let max = logits.clone().detach().max_dim(0); // (A.2)
    let shifted = (logits - max.clone()).exp();
    let partition = shifted.clone().sum_dim(0); // (A.3)
    let lse = max + partition.clone().log(); // [1, branches * streams * tokens]
    let weights = shifted / partition; // [entries, branches * streams * tokens]

    (0..branches)
        .map(|branch| {
            let of_branch = |x: &Tensor<2>, entry| {
                let length = streams * tokens;
                let row = x.clone().slice([entry..entry + 1, branch * length..(branch + 1) * length]);
                row.reshape([streams, tokens]).transpose()
            };
            let terms = history.entries().iter().enumerate();
            let state = terms
                .map(|(r, entry)| weigh_value(of_branch(&weights, r), entry.value.clone(), routing))
                .reduce(|sum, term| sum + term)
                .expect("a history holds at least the embedding"); // (A.4)
            let dtype = history.entries()[0].key.dtype();
            Retrieved { lse: of_branch(&lse, 0), state: uncross(state, routing).cast(dtype) }
        })
        .collect()
}

/// Exact online-softmax merge of the history with the partial state (A.6–A.10).
///
/// # Shapes
/// - `retrieved`: lse `[tokens, streams]`, state `[tokens, streams, d_model]`
/// - `partial`: `[tokens, streams, d_model]`
/// - `query`: `[streams, d_model]`
/// - output: `[tokens, streams, d_model]`, in the storage type
///
/// # Panics
/// If an operand does not fit `partial`, or `routing` does not fit the number of streams.
#[track_caller]
pub fn merge(retrieved: Retrieved, partial: Tensor<3>, query: Tensor<2>, routing: Routing, eps: f64) -> Tensor<3> {
    check_merge("merge", &retrieved, &partial, &query, routing);
    let dtype = partial.dtype();
    merge_accumulated(retrieved, partial, query, routing, eps).cast(dtype)
}

/// The body of [`merge`] on checked operands; the result stays in the accumulator type.
pub(crate) fn merge_accumulated(
    retrieved: Retrieved,
    partial: Tensor<3>,
    query: Tensor<2>,
    routing: Routing,
    eps: f64,
) -> Tensor<3> {
    let entry = Entry::new(partial, eps);
    let query = columns(query.unsqueeze_dim(0), entry.key.dtype());
    let logit = logits(&entry, query, routing).squeeze_dim::<2>(0).transpose(); // (A.8)
    let gap = (retrieved.lse - logit).unsqueeze_dim::<3>(2);
    let value = pick_streams(accumulate(entry.value), |j| routing.value_stream(j)); // (A.7)
    // 1 - sigmoid(x) = sigmoid(-x), without the cancellation. (A.9, A.10)
    sigmoid(gap.clone()) * accumulate(retrieved.state) + sigmoid(gap.neg()) * value
}

#[track_caller]
pub(crate) fn check_merge(
    operation: &'static str,
    retrieved: &Retrieved,
    partial: &Tensor<3>,
    query: &Tensor<2>,
    routing: Routing,
) {
    let dims = Dims::of_state(partial.dims());
    check_routing(operation, routing, dims.streams);
    require_shape(operation, "retrieved.lse", "[tokens, streams]", [dims.tokens, dims.streams], &retrieved.lse);
    require_shape(operation, "retrieved.state", "[tokens, streams, d_model]", dims.state(), &retrieved.state);
    require_shape(operation, "query", "[streams, d_model]", [dims.streams, dims.d_model], query);
    require_dtype(operation, "retrieved.state", partial, &retrieved.state);
    require_device(operation, "retrieved.state", partial, &retrieved.state);
    require_device(operation, "query", partial, query);
}

/// AttnRes read (2–5): retrieval of one stream over the history and, in block form, the open block's sum.
///
/// # Shapes
/// - `history`: entries `[tokens, 1, d_model]`
/// - `partial`: `[tokens, 1, d_model]`
/// - `query`: `[d_model]`
/// - output: `[tokens, d_model]`
///
/// # Panics
/// If an operand does not fit the history.
#[track_caller]
pub fn attnres_read(history: &History, partial: Option<Tensor<3>>, query: Tensor<1>) -> Tensor<2> {
    retrieve("attnres_read", history, partial, query.unsqueeze_dim(0), Routing::SelfKeyValue).squeeze_dim(1)
}

/// Output read: the retrieval of the output queries over the completed history and the partial state of a block that is
/// still open, summed over the streams.
///
/// # Shapes
/// - `partial`: `[tokens, streams, d_model]`
/// - `query`: `[streams, d_model]`
/// - output: `[tokens, d_model]`
///
/// # Panics
/// If an operand does not fit the history.
#[track_caller]
pub fn output_read(history: &History, partial: Option<Tensor<3>>, query: Tensor<2>, routing: Routing) -> Tensor<2> {
    let read = retrieve("output_read", history, partial, query, routing);
    let dtype = read.dtype();
    accumulate(read).sum_dim(1).squeeze_dim::<2>(1).cast(dtype)
}

/// Retrieval weights `pi` over all candidates (11): the entries of the history in order, then the partial state of a block
/// that is open. Those that the reads apply without ever holding them together.
///
/// # Shapes
/// - `partial`: `[tokens, streams, d_model]`
/// - `query`: `[streams, d_model]`
/// - output: `[candidates, tokens, streams]`, in the accumulator type
///
/// # Panics
/// If an operand does not fit the history, or `routing` does not fit its number of streams.
#[track_caller]
pub fn retrieval_weights(
    history: &History,
    partial: Option<Tensor<3>>,
    query: Tensor<2>,
    routing: Routing,
) -> Tensor<3> {
    let Dims { tokens, streams, d_model } = history.dims();
    check_routing("retrieval_weights", routing, streams);
    require_shape("retrieval_weights", "query", "[streams, d_model]", [streams, d_model], &query);
    require_device("retrieval_weights", "query", &history.entries()[0].key, &query);
    if let Some(partial) = &partial {
        history.check("retrieval_weights", "partial", partial);
    }
    let partial = partial.map(|partial| Entry::new(partial, history.eps()));
    let candidates = history.entries().iter().chain(&partial);
    let query = columns(query.unsqueeze_dim(0), history.entries()[0].key.dtype());
    let logits: Vec<Tensor<1>> = candidates.map(|entry| logits(entry, query.clone(), routing).flatten(0, 2)).collect();
    let count = logits.len();
    let weights = softmax(stack_first::<1, 2>(logits), 0); // [candidates, streams * tokens]
    weights.reshape([count, streams, tokens]).swap_dims(1, 2)
}

/// Prefix and merge over all candidates (11, 12). `[tokens, streams, d_model]`
#[track_caller]
fn retrieve(
    operation: &'static str,
    history: &History,
    partial: Option<Tensor<3>>,
    query: Tensor<2>,
    routing: Routing,
) -> Tensor<3> {
    let mut found = prefix(history, query.clone().unsqueeze_dim(0), routing);
    let retrieved = found.remove(0);
    match partial {
        None => retrieved.state,
        Some(partial) => {
            history.check(operation, "partial", &partial);
            merge(retrieved, partial, query, routing, history.eps())
        }
    }
}

/// Queries as columns, in the accumulator type of `storage`. `[streams, d_model, branches]`
fn columns(queries: Tensor<3>, storage: DType) -> Tensor<3> {
    queries.cast(accumulator(storage)).permute([1, 2, 0])
}

/// Logits of one candidate (A.1), in the accumulator type. `queries`: [`columns`];
/// output: `[branches, streams, tokens]`.
fn logits(entry: &Entry, queries: Tensor<3>, routing: Routing) -> Tensor<3> {
    let dtype = accumulator(entry.key.dtype());
    let keys = entry.key.clone().cast(dtype).swap_dims(0, 1); // [streams, tokens, d_model]
    let inv_rms = entry.inv_rms.clone().swap_dims(0, 1).unsqueeze_dim::<3>(2); // [streams, tokens, 1]
    // Crossing the streams of the small operands leaves the states where they are.
    let dot = match routing {
        Routing::SelfKeyValue | Routing::CrossValue => keys.matmul(queries) * inv_rms,
        Routing::CrossKey => exchange(keys.matmul(queries.flip([0])) * inv_rms, 0),
        Routing::FixedKeyValue => {
            let shape = keys.shape(); // an array may not hold a 0 here
            let keys = keys.narrow(0, 0, 1).expand(shape);
            keys.matmul(queries) * inv_rms.narrow(0, 0, 1)
        }
    };
    dot.permute([2, 0, 1])
}

/// `weight^j * value^(value_stream(j))`, left on the value's own stream where the routing crosses values:
/// [`prefix`] crosses the finished sum once.
fn weigh_value(weight: Tensor<2>, value: Tensor<3>, routing: Routing) -> Tensor<3> {
    let weight = weight.unsqueeze_dim::<3>(2);
    let weight = match routing {
        Routing::CrossValue => exchange(weight, 1),
        _ => weight,
    };
    let value = match routing {
        Routing::FixedKeyValue => value.narrow(1, 1, 1),
        _ => value,
    };
    accumulate(value) * weight
}

/// Puts a sum of [`weigh_value`] terms on its output streams.
fn uncross(sum: Tensor<3>, routing: Routing) -> Tensor<3> {
    match routing {
        Routing::CrossValue => exchange(sum, 1),
        _ => sum,
    }
}
