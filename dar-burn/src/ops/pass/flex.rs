//! The launches of a pass on the CPU: the composed operations forward, and their gradients by the same equations as the
//! kernels', in f32 for half types and in f64 for f64.

use burn::backend::Flex;
use burn::backend::tensor::FloatTensor;
use burn::tensor::{DType, Shape, Tensor, activation::sigmoid};
use dar_kernels::Routing;

use super::kernels::{
    Norms, OpenOutput, OptionalSite, OptionalTensor, PassKernels, Prefix, QueryBackward, Read, ReadBackward,
    ReadGradients, ReadOutput, Site, Wanted, Write,
};
use super::parameter_dtype;
use crate::ops::numeric::{BranchNorm, accumulate, accumulator, inverse_rms};
use crate::ops::read::{GateWeights, SiteWeights, residual_read, residual_read_first};
use crate::ops::retrieve::{Retrieved, merge};
use crate::ops::write::{write, write_first};

/// Gates a token: alpha of both streams, beta of both, rho.
const GATES: usize = 5;

fn tensor<const D: usize>(primitive: FloatTensor<Flex>) -> Tensor<D> {
    Tensor::from_primitive::<Flex>(primitive)
}

fn primitive<const D: usize>(tensor: Tensor<D>) -> FloatTensor<Flex> {
    tensor.try_into_primitive::<Flex>().expect("made of tensors of this backend")
}

fn optional<const D: usize>(tensor: OptionalTensor<Flex>) -> Option<Tensor<D>> {
    tensor.into_option().map(self::tensor)
}

/// Row `row` of the first axis.
fn row<const D: usize, const E: usize>(x: &Tensor<D>, row: usize) -> Tensor<E> {
    x.clone().narrow(0, row, 1).squeeze_dim(0)
}

/// `x` with row `row` of the first axis replaced, in place where nothing else holds `x`.
#[expect(clippy::single_range_in_vec_init, reason = "one range for one axis")]
fn with_row<const D: usize, const E: usize>(x: Tensor<D>, row: usize, value: Tensor<E>) -> Tensor<D> {
    let dtype = x.dtype();
    x.slice_assign([row..row + 1], value.cast(dtype).unsqueeze_dim(0))
}

/// Column `column` of the last axis, which stays with size 1.
fn column<const D: usize>(x: &Tensor<D>, column: usize) -> Tensor<D> {
    x.clone().narrow(D - 1, column, 1)
}

/// `[tokens, d_model]` of one stream.
fn stream(x: &Tensor<3>, stream: usize) -> Tensor<2> {
    x.clone().narrow(1, stream, 1).squeeze_dim(1)
}

fn streams(streams: Vec<Tensor<2>>) -> Tensor<3> {
    Tensor::stack(streams, 1)
}

/// `<a, b>` of every token. `[tokens, 1]`
fn dot(a: &Tensor<2>, b: &Tensor<2>) -> Tensor<2> {
    (a.clone() * b.clone()).sum_dim(1)
}

/// The gate parameters of a packed site.
fn unpack(site: &Tensor<1>, d_model: usize) -> SiteWeights {
    let rows = site.clone().narrow(0, 0, 2 * GATES * d_model).reshape([GATES, 2 * d_model]);
    let scalars = site.clone().narrow(0, 2 * GATES * d_model, GATES + 3);
    let gate = |first: usize, outputs: usize, index: usize| GateWeights {
        weight: rows.clone().narrow(0, first, outputs).transpose(),
        bias: scalars.clone().narrow(0, first, outputs),
        scale: scalars.clone().narrow(0, GATES + index, 1),
    };
    SiteWeights { alpha: gate(0, 2, 0), beta: gate(2, 2, 1), rho: gate(4, 1, 2) }
}

/// Whether packed parameters hold those of gates.
fn has_gates(packed: &Tensor<1>, d_model: usize) -> bool {
    packed.dims()[0] > d_model
}

/// The gain of the branch's norm, at the end of packed parameters.
fn gain(packed: &Tensor<1>, d_model: usize) -> Tensor<1> {
    packed.clone().narrow(0, packed.dims()[0] - d_model, d_model)
}

/// The state after branch `branch`. `[tokens, streams, d_model]`
fn written(operands: Write<Flex>, branch: usize, streams: usize) -> Tensor<3> {
    let before = optional::<3>(operands.before);
    let output = tensor::<2>(operands.output);
    match (optional::<3>(operands.gate), before) {
        (Some(gate), before) => {
            let gate = row::<3, 2>(&gate, branch);
            let beta = gate.clone().narrow(1, 2, 2);
            match before {
                Some(before) => write(before, output, beta, column(&gate, 4)),
                None => write_first(output, beta),
            }
        }
        (None, before) => {
            let output = output.unsqueeze_dim::<3>(1);
            debug_assert_eq!(streams, 1);
            match before {
                Some(before) => before + output,
                None => output,
            }
        }
    }
}

/// Through an RMSNorm of `x` over its last axis: `n (d - x n² <d, x> / length)`.
fn norm_backward(x: &Tensor<2>, norm: &Tensor<2>, d: Tensor<2>) -> Tensor<2> {
    let length = x.dims()[1] as f64;
    let along = dot(&d, x) * norm.clone().square() / length;
    (d - x.clone() * along) * norm.clone()
}

/// Backward of one gate group, `sigmoid(scale * (norm(x) W) + bias)`: from the gradient of the logits `[tokens, outputs]`,
/// that of `x`, and of weight, bias and scale.
fn gate_backward(
    x: &Tensor<2>,
    norm: &Tensor<2>,
    gate: &GateWeights,
    d_logit: Tensor<2>,
) -> (Tensor<2>, [Tensor<2>; 3]) {
    let normed = x.clone() * norm.clone();
    let scale = gate.scale.clone().unsqueeze_dim::<2>(0);
    let product = normed.clone().matmul(gate.weight.clone());
    let d_scale = (d_logit.clone() * product).sum().reshape([1, 1]);
    let d_bias = d_logit.clone().sum_dim(0);
    let d_product = d_logit * scale;
    let d_weight = normed.transpose().matmul(d_product.clone());
    let d_x = norm_backward(x, norm, d_product.matmul(gate.weight.clone().transpose()));
    (d_x, [d_weight, d_bias, d_scale])
}

impl PassKernels for Flex {
    fn pass_arena(_like: FloatTensor<Self>, shape: Shape, dtype: DType) -> FloatTensor<Self> {
        use burn::backend::ops::FloatTensorOps;
        Self::float_zeros(shape, &Default::default(), dtype.into())
    }

    fn pass_copy(x: FloatTensor<Self>) -> FloatTensor<Self> {
        x // writes copy what is shared
    }

    fn pass_pack_site(site: OptionalSite<Self>, gain: OptionalTensor<Self>, storage: DType) -> FloatTensor<Self> {
        let dtype = parameter_dtype(storage);
        let weight = |weight| tensor::<2>(weight).cast(dtype).transpose().flatten::<1>(0, 1);
        let row = |row| tensor::<1>(row).cast(dtype);
        let mut parts = Vec::new();
        if let Some(site) = site.into_option() {
            parts.extend([weight(site.alpha_weight), weight(site.beta_weight), weight(site.rho_weight)]);
            parts.extend([row(site.alpha_bias), row(site.beta_bias), row(site.rho_bias)]);
            parts.extend([row(site.alpha_scale), row(site.beta_scale), row(site.rho_scale)]);
        }
        parts.extend(gain.into_option().map(row));
        primitive(Tensor::cat(parts, 0))
    }

    fn pass_pack(
        state: FloatTensor<Self>,
        value: FloatTensor<Self>,
        inv_rms: FloatTensor<Self>,
        entry: usize,
        eps: f64,
    ) -> (FloatTensor<Self>, FloatTensor<Self>) {
        use burn::backend::TensorMetadata;
        let (value, inv_rms) = (tensor::<4>(value), tensor::<3>(inv_rms));
        let state = if state.rank() == 2 {
            tensor::<2>(state).unsqueeze_dim::<3>(1).repeat_dim(1, value.dims()[2])
        } else {
            tensor::<3>(state)
        };
        let norm = inverse_rms(state.clone(), eps).squeeze_dim::<2>(2);
        (primitive(with_row(value, entry, state)), primitive(with_row(inv_rms, entry, norm)))
    }

    fn pass_close(
        operands: Write<Self>,
        value: FloatTensor<Self>,
        inv_rms: FloatTensor<Self>,
        branch: usize,
        entry: usize,
        eps: f64,
    ) -> (FloatTensor<Self>, FloatTensor<Self>) {
        let streams = tensor::<4>(value.clone()).dims()[2];
        let state = primitive(written(operands, branch, streams));
        Self::pass_pack(state, value, inv_rms, entry, eps)
    }

    fn pass_write(operands: Write<Self>, branch: usize, streams: usize) -> FloatTensor<Self> {
        primitive(written(operands, branch, streams))
    }

    fn pass_prefix(
        prefix: Prefix<Self>,
        entries: usize,
        first: usize,
        count: usize,
        slot: usize,
        routing: Routing,
    ) -> (FloatTensor<Self>, FloatTensor<Self>, FloatTensor<Self>) {
        let (value, inv_rms) = (tensor::<4>(prefix.value), tensor::<3>(prefix.inv_rms));
        let query = tensor::<3>(prefix.query);
        let (mut lse, mut logit) = (tensor::<3>(prefix.lse), tensor::<4>(prefix.logit));
        let mut state = tensor::<4>(prefix.state);
        let [_, _, outputs, _] = state.dims();
        let dtype = query.dtype();

        let history: Vec<Tensor<3>> = (0..entries).map(|r| row::<4, 3>(&value, r).cast(dtype)).collect();
        let norms: Vec<Tensor<2>> = (0..entries).map(|r| row(&inv_rms, r)).collect();
        for read in first..first + count {
            let query = row::<3, 2>(&query, read);
            let mut found = Vec::with_capacity(outputs);
            let mut of_read: Vec<Vec<Tensor<2>>> = vec![Vec::new(); entries]; // logits by entry and stream
            let mut sums = Vec::with_capacity(outputs);
            for j in 0..outputs {
                let (key, from) = (routing.key_stream(j), routing.value_stream(j));
                let column_of_query = query.clone().narrow(0, j, 1).transpose(); // [d_model, 1]
                let logits: Vec<Tensor<2>> = (0..entries)
                    .map(|r| stream(&history[r], key).matmul(column_of_query.clone()) * column(&norms[r], key))
                    .collect(); // (A.1)
                let all = Tensor::cat(logits.clone(), 1); // [tokens, entries]
                let max = all.clone().max_dim(1); // (A.2)
                let shifted = (all - max.clone()).exp();
                let partition = shifted.clone().sum_dim(1); // (A.3)
                let weights = shifted / partition.clone();
                let terms = (0..entries).map(|r| stream(&history[r], from) * column(&weights, r));
                found.push(terms.reduce(|sum, term| sum + term).expect("a history has an entry")); // (A.4)
                sums.push(max + partition.log()); // (A.5)
                for (r, logit) in logits.into_iter().enumerate() {
                    of_read[r].push(logit);
                }
            }
            lse = with_row(lse, read, Tensor::cat(sums, 1));
            state = with_row(state, slot + read - first, streams(found));
            for (r, logits) in of_read.into_iter().enumerate() {
                let logits = Tensor::cat(logits, 1).unsqueeze::<4>();
                logit = logit.slice_assign([r..r + 1, read..read + 1], logits);
            }
        }
        (primitive(lse), primitive(logit), primitive(state))
    }

    fn pass_open(
        prefix: Prefix<Self>,
        site: OptionalTensor<Self>,
        gate: OptionalTensor<Self>,
        entries: usize,
        first: usize,
        count: usize,
        slot: usize,
        routing: Routing,
        norms: Norms,
        _keep: bool,
    ) -> OpenOutput<Self> {
        let query = prefix.query.clone();
        let (lse, logit, state) = Self::pass_prefix(prefix, entries, first, count, slot, routing);
        let (before, output) = (OptionalTensor::Absent, OptionalTensor::Absent);
        let read = Read { state: state.clone(), before, output, query, lse: lse.clone(), site, gate };
        let ReadOutput { input, gate, .. } = Self::pass_merge(read, first, slot, routing, norms);
        OpenOutput { input, lse, logit, state, gate }
    }

    fn pass_merge(read: Read<Self>, index: usize, slot: usize, routing: Routing, norms: Norms) -> ReadOutput<Self> {
        let eps = norms.eps;
        let state = row::<4, 3>(&tensor(read.state), slot);
        let [_, outputs, d_model] = state.dims();
        let storage = state.dtype();
        let gate = optional::<3>(read.gate);
        let partial = read.output.into_option().map(|output| {
            let gate = gate.clone().map(primitive).into();
            written(Write { before: read.before, output, gate }, index - 1, outputs)
        });
        let query = row::<3, 2>(&tensor(read.query), index);
        let lse = row::<3, 2>(&tensor(read.lse), index);
        let retrieved = Retrieved { lse, state: state.clone() };
        let packed = optional::<1>(read.site);
        let gain = packed.as_ref().filter(|_| norms.branch.is_some()).map(|packed| gain(packed, d_model));
        let (input, gate) = match packed.filter(|packed| has_gates(packed, d_model)) {
            Some(site) => {
                let site = unpack(&site, d_model);
                let (read, rho, merged) = match &partial {
                    Some(partial) => {
                        let merged = merge(retrieved.clone(), partial.clone(), query.clone(), routing, eps);
                        let (read, rho) = residual_read(retrieved, partial.clone(), query, &site, routing, eps);
                        (read, rho, merged)
                    }
                    None => {
                        let read = residual_read_first(state.clone(), &site, eps);
                        let rho = read.beta.clone().narrow(1, 0, 1).ones_like();
                        (read, rho, state)
                    }
                };
                let alpha = alpha(&merged, &site.alpha, eps);
                let gate = gate.expect("a read with a site keeps its gates");
                let gates = Tensor::cat(vec![alpha, read.beta, rho], 1);
                (read.input, Some(with_row(gate, index, gates)))
            }
            None => {
                let merged = match &partial {
                    Some(partial) => merge(retrieved, partial.clone(), query, routing, eps),
                    None => state,
                };
                (accumulate(merged).sum_dim(1).squeeze_dim(1).cast(storage), gate)
            }
        };
        let input = match (norms.branch, gain) {
            (Some(eps), Some(gain)) => BranchNorm { gain, eps }.apply(input),
            _ => input,
        };
        ReadOutput { input: primitive(input), partial: partial.map(primitive).into(), gate: gate.map(primitive).into() }
    }

    fn pass_merge_backward(
        read: ReadBackward<Self>,
        index: usize,
        slot: usize,
        routing: Routing,
        norms: Norms,
        wanted: Wanted,
    ) -> ReadGradients<Self> {
        let eps = norms.eps;
        let state = tensor::<4>(read.state);
        let storage = state.dtype();
        let dtype = accumulator(storage);
        let retrieved = row::<4, 3>(&state, slot).cast(dtype);
        let [tokens, outputs, d_model] = retrieved.dims();
        let mut d_input = tensor::<2>(read.d_input).cast(dtype);
        let d_written = optional::<3>(read.d_written).map(|d| d.cast(dtype));
        let open = optional::<3>(read.partial).map(|partial| partial.cast(dtype));
        let query = row::<3, 2>(&tensor(read.query), index);
        let lse = row::<3, 2>(&tensor(read.lse), index);
        let gate = optional::<3>(read.gate);
        let packed = optional::<1>(read.site);
        let site = packed.as_ref().filter(|packed| has_gates(packed, d_model)).map(|site| unpack(site, d_model));
        let mut d_token = tensor::<3>(read.d_token);
        let mut d_query = tensor::<3>(read.d_query);
        let own = row::<3, 2>(&d_token, index); // d_beta, shift
        let gates = gate.as_ref().map(|gate| row::<3, 2>(gate, index));

        // The merge once more (A.8–A.10).
        let share = open.as_ref().map(|open| {
            let parts = (0..outputs).map(|j| {
                let key = stream(open, routing.key_stream(j));
                let norm = inverse_rms(key.clone(), eps);
                let logit = key.matmul(query.clone().narrow(0, j, 1).transpose()) * norm;
                sigmoid(column(&lse, j) - logit)
            });
            parts.collect::<Vec<_>>()
        });
        let merged: Vec<Tensor<2>> = (0..outputs)
            .map(|j| match (&open, &share) {
                (Some(open), Some(share)) => {
                    let value = stream(open, routing.value_stream(j));
                    stream(&retrieved, j) * share[j].clone() + value * (share[j].clone().neg() + 1.0)
                }
                _ => stream(&retrieved, j),
            })
            .collect();

        // The branch's own norm.
        let mut d_gain = None;
        if let (Some(eps), Some(packed)) = (norms.branch, &packed) {
            let input = match &gates {
                Some(gates) => merged[0].clone() * column(gates, 0) + merged[1].clone() * column(gates, 1),
                None => merged.iter().cloned().reduce(|sum, merged| sum + merged).expect("a read has an output"),
            };
            let norm = inverse_rms(input.clone(), eps);
            d_gain = Some((d_input.clone() * input.clone() * norm.clone()).sum_dim(0).flatten::<1>(0, 1));
            d_input = norm_backward(&input, &norm, d_input * gain(packed, d_model).unsqueeze());
        }

        // Gates and branch input (13–15).
        let mut d_merged = Vec::with_capacity(outputs);
        let mut d_site = None;
        match (&site, &gates) {
            (Some(site), Some(gates)) => {
                let flat = Tensor::cat(merged.clone(), 1);
                let norm = inverse_rms(flat.clone(), eps);
                let alpha = gates.clone().narrow(1, 0, 2);
                let beta = gates.clone().narrow(1, 2, 2);
                let d_alpha = Tensor::cat(merged.iter().map(|merged| dot(&d_input, merged)).collect(), 1);
                let d_alpha = d_alpha * alpha.clone() * (alpha.clone().neg() + 1.0);
                let d_beta = match &d_written {
                    Some(_) => own.narrow(1, 0, 2) * beta.clone() * (beta * -0.5 + 1.0),
                    None => beta.zeros_like(),
                };
                let (by_alpha, alpha_parameters) = gate_backward(&flat, &norm, &site.alpha, d_alpha);
                let (by_beta, beta_parameters) = gate_backward(&flat, &norm, &site.beta, d_beta);
                let d_flat = by_alpha + by_beta;
                for j in 0..2 {
                    let by_gates = d_flat.clone().narrow(1, j * d_model, d_model);
                    d_merged.push(d_input.clone() * column(&alpha, j) + by_gates);
                }
                d_site = Some((alpha_parameters, beta_parameters));
            }
            _ => d_merged = vec![d_input; outputs],
        }

        // Write of the branch of this read (16, 17), then the merge.
        let mut d_found = Vec::with_capacity(outputs);
        let mut d_partial = None;
        let mut rho_parameters = None;
        let mut d_lse = Vec::with_capacity(outputs);
        match (&open, share) {
            (Some(open), Some(share)) => {
                let mut d_open: Vec<Tensor<2>> = (0..outputs).map(|j| stream(open, j).zeros_like()).collect();
                match (&d_written, &gates, &site) {
                    (Some(d), Some(gates), Some(site)) => {
                        let (d0, d1) = (stream(d, 0), stream(d, 1));
                        let (p0, p1) = (stream(open, 0), stream(open, 1));
                        let rho = column(gates, 4);
                        let other = rho.clone().neg() + 1.0;
                        d_open[0] = d0.clone() * rho.clone() + d1.clone() * other.clone();
                        d_open[1] = d1.clone() * rho.clone() + d0.clone() * other.clone();
                        let d_rho = dot(&(d0 - d1), &(p0.clone() - p1.clone())) * rho * other;
                        let flat = Tensor::cat(vec![p0, p1], 1);
                        let norm = inverse_rms(flat.clone(), eps);
                        let (by_rho, parameters) = gate_backward(&flat, &norm, &site.rho, d_rho);
                        for (j, d_open) in d_open.iter_mut().enumerate() {
                            *d_open = d_open.clone() + by_rho.clone().narrow(1, j * d_model, d_model);
                        }
                        rho_parameters = Some(parameters);
                    }
                    (Some(d), None, _) => d_open = (0..outputs).map(|j| stream(d, j)).collect(),
                    _ => {}
                }
                let mut d_queries = Vec::with_capacity(outputs);
                for j in 0..outputs {
                    let (key, from) = (routing.key_stream(j), routing.value_stream(j));
                    let other = share[j].clone().neg() + 1.0;
                    let gap = dot(&d_merged[j], &(stream(&retrieved, j) - stream(open, from)));
                    let d = gap * share[j].clone() * other.clone(); // of lse, and the opposite of the logit's (A.9)
                    d_open[from] = d_open[from].clone() + d_merged[j].clone() * other; // (A.10)
                    let key_state = stream(open, key);
                    let norm = inverse_rms(key_state.clone(), eps);
                    let normed = key_state.clone() * norm.clone();
                    d_queries.push((normed * d.clone().neg()).sum_dim(0));
                    let by_key = d.clone().neg().matmul(query.clone().narrow(0, j, 1));
                    d_open[key] = d_open[key].clone() + norm_backward(&key_state, &norm, by_key); // (A.8)
                    d_found.push(d_merged[j].clone() * share[j].clone());
                    d_lse.push(d);
                }
                d_query = with_row(d_query, index, Tensor::cat(d_queries, 0));
                d_partial = Some(d_open);
            }
            _ => {
                d_found = d_merged;
                d_lse = vec![Tensor::zeros([tokens, 1], (&d_found[0].device(), dtype)); outputs];
            }
        }

        // What every logit's gradient has in common: d_lse - <d_hist, hist>, of the gradient as it is stored. The gradients of
        // all logits of a query sum to d_lse only if all of them see the same d_hist.
        let d_found: Vec<Tensor<2>> = d_found.into_iter().map(|d| d.cast(storage).cast(dtype)).collect();
        let shifts = (0..outputs).map(|j| d_lse[j].clone() - dot(&d_found[j], &stream(&retrieved, j)));
        let shifts = Tensor::cat(shifts.chain(d_lse.iter().cloned()).collect(), 1).unsqueeze_dim::<3>(0);
        d_token = d_token.slice_assign([index..index + 1, 0..tokens, 2..2 + 2 * outputs], shifts);

        // Write of the branch before (17).
        let mut d_output = None;
        if let (Some(d_partial), Some(output)) = (&d_partial, optional::<2>(read.output)) {
            let output = output.cast(dtype);
            d_output = Some(match &gate {
                Some(gate) => {
                    let beta = row::<3, 2>(gate, index - 1).narrow(1, 2, 2);
                    let d_beta = d_partial.iter().map(|d| dot(d, &output)).collect();
                    let d_beta = Tensor::cat(d_beta, 1).unsqueeze_dim::<3>(0);
                    d_token = d_token.slice_assign([index - 1..index, 0..tokens, 0..2], d_beta);
                    d_partial[0].clone() * column(&beta, 0) + d_partial[1].clone() * column(&beta, 1)
                }
                None => d_partial[0].clone(),
            });
        }

        // Nothing may share the arena that is written, or it would be copied.
        drop((retrieved, merged));
        let d_site = match (d_site, wanted.site) {
            (Some((alpha, beta)), true) => {
                let rho = rho_parameters.unwrap_or_else(|| {
                    let zeros = |shape| Tensor::zeros(shape, (&lse.device(), dtype));
                    [zeros([2 * d_model, 1]), zeros([1, 1]), zeros([1, 1])]
                });
                let [a, b, c] = of_gate(alpha);
                let [d, e, f] = of_gate(beta);
                let [g, h, i] = of_gate(rho);
                OptionalSite::Given(Site::from_array([a, b, c, d, e, f, g, h, i]))
            }
            _ => OptionalSite::Absent,
        };
        ReadGradients {
            state: primitive(with_row(state, slot, streams(d_found))),
            d_partial: d_partial.map(|d| primitive(streams(d).cast(storage))).into(),
            d_output: d_output.map(|d| primitive(d.cast(storage))).into(),
            d_site,
            d_gain: d_gain.filter(|_| wanted.gain).map(primitive).into(),
            d_token: primitive(d_token),
            d_query: primitive(d_query),
        }
    }

    fn pass_write_backward(
        d_state: FloatTensor<Self>,
        output: FloatTensor<Self>,
        gate: FloatTensor<Self>,
        d_token: FloatTensor<Self>,
        branch: usize,
    ) -> (FloatTensor<Self>, FloatTensor<Self>) {
        let (d_state, output) = (accumulate(tensor::<3>(d_state)), tensor::<2>(output));
        let storage = output.dtype();
        let output = accumulate(output);
        let beta = row::<3, 2>(&tensor(gate), branch).narrow(1, 2, 2);
        let (d0, d1) = (stream(&d_state, 0), stream(&d_state, 1));
        let d_output = d0.clone() * column(&beta, 0) + d1.clone() * column(&beta, 1);
        let d_beta = Tensor::cat(vec![dot(&d0, &output), dot(&d1, &output)], 1).unsqueeze_dim::<3>(0);
        let tokens = output.dims()[0];
        let d_token = tensor::<3>(d_token).slice_assign([branch..branch + 1, 0..tokens, 0..2], d_beta);
        (primitive(d_output.cast(storage)), primitive(d_token))
    }

    fn pass_entry_backward(
        prefix: Prefix<Self>,
        d_token: FloatTensor<Self>,
        d_logit: FloatTensor<Self>,
        entry: usize,
        first: usize,
        last: usize,
        routing: Routing,
        sum: bool,
    ) -> (FloatTensor<Self>, FloatTensor<Self>) {
        let (value, inv_rms) = (tensor::<4>(prefix.value), row::<3, 2>(&tensor(prefix.inv_rms), entry));
        let storage = value.dtype();
        let value = accumulate(row::<4, 3>(&value, entry));
        let [_, lanes, _] = value.dims();
        let (query, lse, d_token) = (tensor::<3>(prefix.query), tensor::<3>(prefix.lse), tensor::<3>(d_token));
        let (of_entry, d_states) = (row::<4, 3>(&tensor(prefix.logit), entry), tensor::<4>(prefix.state));
        let [_, _, outputs, _] = d_states.dims();
        let mut all_d_logits = tensor::<4>(d_logit);

        let mut by_value: Vec<Tensor<2>> = (0..lanes).map(|j| stream(&value, j).zeros_like()).collect();
        let mut by_key = by_value.clone();
        for read in first..last {
            let logits = row::<3, 2>(&of_entry, read);
            let p = (logits - row(&lse, read)).exp();
            let d_state = accumulate(row::<4, 3>(&d_states, read));
            let shift = row::<3, 2>(&d_token, read).narrow(1, 2, outputs);
            let query = row::<3, 2>(&query, read);
            let mut d_logits = Vec::with_capacity(outputs);
            for j in 0..outputs {
                let (key, from) = (routing.key_stream(j), routing.value_stream(j));
                let d = stream(&d_state, j);
                let p = column(&p, j);
                let d_logit = p.clone() * (dot(&d, &stream(&value, from)) + column(&shift, j));
                by_value[from] = by_value[from].clone() + d * p;
                by_key[key] = by_key[key].clone() + d_logit.clone().matmul(query.clone().narrow(0, j, 1));
                d_logits.push(d_logit);
            }
            let d_logits = Tensor::cat(d_logits, 1).unsqueeze::<4>();
            all_d_logits = all_d_logits.slice_assign([entry..entry + 1, read..read + 1], d_logits);
        }
        let parts = by_value.into_iter().zip(by_key).enumerate();
        let parts: Vec<Tensor<2>> = parts
            .map(|(j, (by_value, by_key))| by_value + norm_backward(&stream(&value, j), &column(&inv_rms, j), by_key))
            .collect();
        let d_value = if sum {
            let total = parts.into_iter().reduce(|total, part| total + part).expect("a history has a stream");
            primitive(total.cast(storage))
        } else {
            primitive(streams(parts).cast(storage))
        };
        (d_value, primitive(all_d_logits))
    }

    fn pass_query_backward(
        queries: QueryBackward<Self>,
        first: usize,
        last: usize,
        branches_per_block: usize,
        routing: Routing,
    ) -> FloatTensor<Self> {
        let (value, inv_rms) = (tensor::<4>(queries.value), tensor::<3>(queries.inv_rms));
        let (lse, logit) = (tensor::<3>(queries.lse), tensor::<4>(queries.logit));
        let (d_logit, d_token) = (tensor::<4>(queries.d_logit), tensor::<3>(queries.d_token));
        let mut d_query = tensor::<3>(queries.d_query);
        let [entries, _, _, outputs] = d_logit.dims();
        for read in first..last {
            let seen = (read / branches_per_block + 1).min(entries);
            let of_read = |x: &Tensor<4>, entry| row::<3, 2>(&row::<4, 3>(x, entry), read); // [tokens, outputs]
            // Retrieved states are stored, so that the shift is rounded, and the sum of the gradients is not d_lse. What is
            // left over goes back in proportion to the weights.
            let d_logits: Vec<Tensor<2>> = (0..seen).map(|entry| of_read(&d_logit, entry)).collect();
            let sum = d_logits.iter().cloned().reduce(|sum, d| sum + d).expect("a read sees an entry");
            let excess = sum - row::<3, 2>(&d_token, read).narrow(1, 2 + outputs, outputs);
            let mut total = row::<3, 2>(&d_query, read);
            for (entry, d_logit) in d_logits.into_iter().enumerate() {
                let p = (of_read(&logit, entry) - row(&lse, read)).exp();
                let d_logit = d_logit - p * excess.clone();
                let value = accumulate(row::<4, 3>(&value, entry));
                let inv_rms = row::<3, 2>(&inv_rms, entry);
                let rows = (0..outputs).map(|j| {
                    let key = routing.key_stream(j);
                    let key = stream(&value, key) * column(&inv_rms, key);
                    column(&d_logit, j).transpose().matmul(key)
                });
                total = total + Tensor::cat(rows.collect(), 0);
            }
            d_query = with_row(d_query, read, total);
        }
        primitive(d_query)
    }
}

/// Mixing gates of a merged state (13, 14).
fn alpha(merged: &Tensor<3>, gate: &GateWeights, eps: f64) -> Tensor<2> {
    sigmoid(crate::ops::read::gate_logit(merged.clone(), gate, eps))
}

/// Gradients of weight, bias and scale in the shapes of the parameters.
fn of_gate([weight, bias, scale]: [Tensor<2>; 3]) -> [FloatTensor<Flex>; 3] {
    [primitive(weight), primitive(bias.flatten::<1>(0, 1)), primitive(scale.flatten::<1>(0, 1))]
}
