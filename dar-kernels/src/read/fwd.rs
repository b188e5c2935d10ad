use cubecl::prelude::*;

use super::config::{ReadConfig, choose};
use crate::columns::{load, narrowed, store, unknown_zero, widened, widened_again};
use crate::launch::{Row, Tuning, cube_index, cubes};
use crate::numeric::{add_dot, inverse_rms, sigmoid};
use crate::operand::{Check, F32, Operand};
use crate::reduce::CubeSum;
use crate::routing::key_stream_of;
use crate::site::{ALPHA, BETA, GATES, RHO, packed_axes, packed_length, site_gain, site_scalar};
use crate::softmax::OnlineSoftmax;
use crate::write::written;
use crate::{Dims, KernelError, Routing};

/// The operands of [`read_fwd`].
#[derive(Debug, Clone, Copy)]
pub struct ReadFwd<'a> {
    /// Input, f32, f16 or bf16: retrieved states. `[slots, tokens, outputs, d_model]`
    pub state: Operand<'a>,
    /// The slot of this read.
    pub slot: usize,
    /// The branch before, whose write comes first; none where no block is open.
    pub open: Option<Open<'a>>,
    /// Input, f32: queries of all reads. Read with `open` only. `[reads, outputs, d_model]`
    pub query: Operand<'a>,
    /// Input, f32: log-sum-exps of all reads. Read with `open` only. `[reads, tokens, outputs]`
    pub lse: Operand<'a>,
    /// Input, f32: the packed parameters of the read, which are those of the gates with `gate` (of two outputs), and the
    /// gain with `norm`; none sums the streams. [`packed_length`](crate::site::packed_length)
    pub site: Option<Operand<'a>>,
    /// In place, f32: gates of all reads, of which row `read` is written with `site`, and row `read - 1` is read with
    /// `open`; none writes plain sums of one stream. `[reads, tokens, 5]`
    pub gate: Option<Operand<'a>>,
    /// Output, in the type of `state`: branch input, or hidden state. `[tokens, d_model]`
    pub input: Operand<'a>,
    /// Which read this is.
    pub read: usize,
    /// Epsilon of the norms of keys and gates.
    pub eps: f64,
    /// Epsilon of the branch's own norm, if that is folded in: `input` is then its output.
    pub norm: Option<f64>,
}

/// What [`ReadFwd`] writes before it reads.
#[derive(Debug, Clone, Copy)]
pub struct Open<'a> {
    /// Input, in the type of the retrieved state: the state before branch `read - 1`; none where that was a block's
    /// first. `[tokens, outputs, d_model]`
    pub before: Option<Operand<'a>>,
    /// Input, in the same type: what branch `read - 1` computed. `[tokens, d_model]`
    pub output: Operand<'a>,
    /// Output, in the same type: the state after that branch, which the read goes on with. `[tokens, outputs, d_model]`
    pub partial: Operand<'a>,
}

/// The write of branch `read - 1`, then read `read`, forward (17, A.6–A.10, 13–16), and the norm of its branch.
///
/// # Errors
/// If an operand has another shape, element type or a too short buffer, or operands are missing that others need.
pub fn read_fwd(client: &Client, operands: ReadFwd, routing: Routing, tuning: Tuning) -> Result<(), KernelError> {
    const STATE: &str = "[tokens, outputs, d_model]";
    let ReadFwd { state, slot, open, query, lse, site, gate, input, read, eps, norm } = operands;

    let mut check = Check::of("read_fwd");
    let dims = inputs(
        client,
        &mut check,
        Inputs { state, slot, query, lse, site, gate, read, open: open.is_some(), norm },
        routing,
    )?;
    let Dims { tokens, d_model, .. } = dims;
    check.eps(eps)?.fits("input", &input, state.dtype, "[tokens, d_model]", &dims.branch())?;
    if let Some(Open { before, output, partial }) = &open {
        if let Some(before) = before {
            check.fits("open.before", before, state.dtype, STATE, &dims.state())?;
        }
        check.fits("open.output", output, state.dtype, "[tokens, d_model]", &dims.branch())?.fits(
            "open.partial",
            partial,
            state.dtype,
            STATE,
            &dims.state(),
        )?;
    }
    let address = check.address(client)?;
    if tokens == 0 {
        return Ok(());
    }

    let opened = open.map_or(0, |open| 1 + open.before.map_or(0, |_| dims.streams));
    let config = choose(client, dims, state.dtype, dims.streams + opened, routing, norm.is_some(), tuning);
    let lanes = config.row.lanes;
    let (site, gain) = gates_and_gain(site, gate);
    read_fwd_kernel::launch(
        client,
        cubes(client, tokens),
        config.row.cube_dim(),
        address,
        lanes,
        state.argument(lanes),
        open.and_then(|open| open.before).map(|before| before.argument(lanes)).into(),
        open.map(|open| open.output.argument(lanes)).into(),
        open.map(|open| open.partial.argument(lanes)).into(),
        open.map(|_| query.argument(lanes)).into(),
        open.map(|_| lse.argument(1)).into(),
        site.map(|site| site.argument(lanes)).into(),
        gain.map(|gain| gain.argument(lanes)).into(),
        gate.filter(|_| site.is_some() || open.is_some()).map(|gate| gate.argument(1)).into(),
        input.argument(lanes),
        slot,
        read,
        tokens,
        d_model / lanes,
        1.0 / d_model as f32,
        eps as f32,
        norm.unwrap_or_default() as f32,
        config,
        state.dtype,
    );
    Ok(())
}

/// The packed parameters of a read as kernels take them: of gates, with the gain of the branch's norm behind them, or of
/// that norm alone.
pub(crate) fn gates_and_gain<'a>(
    site: Option<Operand<'a>>,
    gate: Option<Operand<'a>>,
) -> (Option<Operand<'a>>, Option<Operand<'a>>) {
    if gate.is_some() { (site, None) } else { (None, site) }
}

/// Checks the packed parameters of a read against what they are for, by the names of the arguments.
pub(crate) fn check_packed(
    check: &mut Check,
    [site_name, gate_name, norm_name]: [&'static str; 3],
    site: &Option<Operand>,
    gate: &Option<Operand>,
    norm: Option<f64>,
    d_model: usize,
) -> Result<(), KernelError> {
    if let Some(eps) = norm {
        check.epsilon(norm_name, eps)?;
    }
    let (gates, gain) = (gate.is_some(), norm.is_some());
    match site {
        None if gain => {
            let expected = format!("the parameters of the read, with the gain of `{norm_name}`");
            Err(KernelError::value(check.operation, site_name, expected, "none"))
        }
        None => Ok(()),
        Some(_) if !gates && !gain => {
            let expected = format!("the gates of all reads, as `{site_name}` is there");
            Err(KernelError::value(check.operation, gate_name, expected, "none"))
        }
        Some(site) => {
            let length = packed_length(d_model, gates, gain);
            check.fits(site_name, site, F32, packed_axes(gates, gain), &[length]).map(|_| ())
        }
    }
}

/// What forward and backward share.
pub(super) struct Inputs<'a> {
    pub(super) state: Operand<'a>,
    pub(super) slot: usize,
    pub(super) query: Operand<'a>,
    pub(super) lse: Operand<'a>,
    pub(super) site: Option<Operand<'a>>,
    pub(super) gate: Option<Operand<'a>>,
    pub(super) read: usize,
    pub(super) open: bool,
    pub(super) norm: Option<f64>,
}

/// Checks what forward and backward share; the sizes of the states.
pub(super) fn inputs(
    client: &Client,
    check: &mut Check,
    inputs: Inputs,
    routing: Routing,
) -> Result<Dims, KernelError> {
    let Inputs { state, slot, query, lse, site, gate, read, open, norm } = inputs;
    let &[slots, tokens, outputs @ (1..), d_model @ (1..)] = state.shape else {
        let expected = "[slots, tokens, outputs, d_model] with outputs ≥ 1 and d_model ≥ 1";
        return Err(check.wrong_shape("state", &state, expected));
    };
    let [reads, _] = check.queries("query", &query)?;
    check
        .index("slot", slot, "slots of `state`", slots)?
        .index("read", read, "rows of `query`", reads)?
        .storage("state", &state, client)?
        .shape("state", &state, "[slots, tokens, outputs, d_model]", &[slots, tokens, outputs, d_model])?
        .fits("query", &query, F32, "[reads, outputs, d_model]", &[reads, outputs, d_model])?
        .fits("lse", &lse, F32, "[reads, tokens, outputs]", &[reads, tokens, outputs])?;
    if open {
        routing.check(check.operation, outputs, outputs)?;
        if read == 0 {
            return Err(KernelError::value(check.operation, "read", "at least 1 where a block is open", read));
        }
    }
    let streams = match (&gate, open) {
        (Some(_), _) => Some((2, "2 with `gate`")),
        (None, true) => Some((1, "1 where a block is open without `gate`")),
        (None, false) => None,
    };
    if let Some((streams, expected)) = streams
        && streams != outputs
    {
        return Err(KernelError::value(check.operation, "outputs of the state", expected, outputs));
    }
    if let Some(gate) = &gate {
        check.fits("gate", gate, F32, "[reads, tokens, 5]", &[reads, tokens, GATES])?;
    }
    check_packed(check, ["site", "gate", "norm"], &site, &gate, norm, d_model)?;
    Ok(Dims { tokens, streams: outputs, d_model })
}

#[cube(launch, address_type = "dynamic")]
#[expect(clippy::too_many_arguments, reason = "one argument a tensor and size")]
fn read_fwd_kernel<E: Float, N: Size>(
    state: &[Vector<E, N>],                           // [slots, tokens, streams, vectors]
    before: ComptimeOption<&[Vector<E, N>]>,          // [tokens, streams, vectors]
    output: ComptimeOption<&[Vector<E, N>]>,          // [tokens, vectors]
    mut partial: ComptimeOption<&mut [Vector<E, N>]>, // [tokens, streams, vectors]
    query: ComptimeOption<&[Vector<f32, N>]>,         // [reads, streams, vectors]
    lse: ComptimeOption<&[f32]>,                      // [reads, tokens, streams]
    site: ComptimeOption<&[Vector<f32, N>]>,          // [10 * vectors + 8 / lanes], then the gain
    gain: ComptimeOption<&[Vector<f32, N>]>,          // [vectors], without a site
    mut gate: ComptimeOption<&mut [f32]>,             // [reads, tokens, 5]
    input: &mut [Vector<E, N>],                       // [tokens, vectors]
    slot: usize,
    read: usize,
    tokens: usize,
    vectors: usize,
    inv_d_model: f32,
    eps: f32,
    norm_eps: f32,
    #[comptime] config: ReadConfig,
    #[define(E)] _dtype: ElemType,
) {
    let token = cube_index();
    if token >= tokens {
        terminate!();
    }
    let streams = comptime!(config.streams);
    let columns = comptime!(config.row.columns);
    let unit = UNIT_POS_X as usize;
    let gated = comptime!(gate.is_some());
    let sited = comptime!(site.is_some());
    let own = (read * tokens + token) * GATES;
    // Sums about the partial state, or five for the gates; shares of the merge, or gates.
    let mut sums =
        CubeSum::publishing(comptime!(2 * streams + 1), comptime!((2 * streams).max(4)), comptime!(config.row));

    let retrieved = load::<E, N>(state, (slot * tokens + token) * streams, vectors, streams, comptime!(config.row));
    let mut merged = Array::<Vector<f32, N>>::new(comptime!(streams * columns));
    if comptime!(output.is_none()) {
        merged = widened::<E, N>(&retrieved);
    }
    #[comptime]
    match output {
        ComptimeOption::Some(output) => {
            // (17), and what is stored goes on.
            let partial = partial.as_mut().unwrap().slice_mut(0, tokens * streams * vectors);
            let mut gates = Array::<f32>::new(3usize);
            if comptime!(gated) {
                // As `write_gates`, which takes what cannot be written.
                let gate = gate.as_mut().unwrap();
                #[unroll]
                for k in 0usize..3 {
                    gates[k] = gate[own - tokens * GATES + BETA + k];
                }
            }
            let row = comptime!(config.row);
            let stored = written::<E, N>(before, output, &gates, token, vectors, gated, row);
            store::<E, N>(&stored, partial, token * streams, vectors, streams, row);

            let open = widened::<E, N>(&stored);
            let logits = query.unwrap();
            let mut about = partial_sums::<N>(&open, logits, &site, read, vectors, comptime!(sited as usize), config);
            let lses = own_lse(lse.unwrap(), (read * tokens + token) * streams, streams, row);
            let (mut scale, mut bias) = (f32::new(0.0), f32::new(0.0));
            #[comptime]
            match site {
                ComptimeOption::Some(site) => {
                    scale = site_scalar::<N>(site, vectors, comptime!(GATES + 2));
                    bias = site_scalar::<N>(site, vectors, RHO);
                }
                ComptimeOption::None => {}
            }
            sums.gather(&mut about);
            publish_shares(&mut sums, 0usize, &lses, inv_d_model, eps, config);
            // By a unit that has no share to make, if there is one.
            if comptime!(sited) && unit == comptime!(streams % config.row.units) {
                let norm = inverse_rms(sums.total(0) + sums.total(1), 0.5f32 * inv_d_model, eps);
                let gate = gate.as_mut().unwrap();
                gate[own + RHO] = sigmoid(scale * norm * sums.total(4) + bias); // (16)
            }
            sync_cube();
            merged = widened::<E, N>(&retrieved);
            let open = widened_again::<E, N>(&stored, unknown_zero(vectors, token));
            let mut share = Array::<f32>::new(comptime!(2 * streams));
            #[unroll]
            for k in 0..comptime!(2 * streams) {
                share[k] = sums.published(k);
            }
            merge::<N>(&mut merged, &open, &share, config);
        }
        ComptimeOption::None => {
            if comptime!(sited) && unit == 0 {
                let gate = gate.as_mut().unwrap();
                gate[own + RHO] = f32::new(1.0);
            }
        }
    }

    let mut inputs = Array::<Vector<f32, N>>::new(columns);
    if comptime!(!sited) {
        inputs = sum_of_streams::<N>(&merged, streams, comptime!(config.row));
    }
    #[comptime]
    match site {
        ComptimeOption::Some(site) => {
            let row = comptime!(config.row);
            let gate = gate.as_mut().unwrap().slice_mut(0, own + GATES);
            let gates = mixing_gates::<N>(&merged, site, &mut sums, gate, own, vectors, inv_d_model, eps, row);
            inputs = mixed::<N>(&merged, &gates, row);
            if comptime!(config.normed) {
                let start = site_gain::<N>(vectors);
                inputs = normalised::<N>(&inputs, site, start, &mut sums, vectors, inv_d_model, norm_eps, row);
            }
        }
        ComptimeOption::None => {}
    }
    #[comptime]
    match gain {
        ComptimeOption::Some(gain) => {
            let row = comptime!(config.row);
            inputs = normalised::<N>(&inputs, gain, 0usize, &mut sums, vectors, inv_d_model, norm_eps, row);
        }
        ComptimeOption::None => {}
    }
    store::<E, N>(&narrowed::<E, N>(&inputs), input, token, vectors, 1usize, comptime!(config.row));
}

/// alpha0, alpha1, beta0, beta1 of a merged state (13, 14), which also go to `to` from `row` on. `sums` has room for five,
/// and for four published values.
#[cube]
#[expect(clippy::too_many_arguments, reason = "everything of one token")]
pub(crate) fn mixing_gates<N: Size>(
    merged: &Array<Vector<f32, N>>,
    site: &[Vector<f32, N>],
    sums: &mut CubeSum,
    to: &mut [f32],
    row: usize,
    vectors: usize,
    inv_d_model: f32,
    eps: f32,
    #[comptime] config: Row,
) -> Array<f32> {
    let columns = comptime!(config.columns);
    // <W, [h0; h1]> of alpha0, alpha1, beta0, beta1, and the squares of [h0; h1].
    let mut sum = Array::<f32>::new(5usize);
    let mut squares = f32::new(0.0);
    #[unroll]
    for k in 0usize..4 {
        let mut dot = f32::new(0.0);
        #[unroll]
        for j in 0usize..2 {
            #[unroll]
            for c in 0..columns {
                let column = c * comptime!(config.units) + UNIT_POS_X as usize;
                let own = merged[comptime!(j * columns + c)];
                if column < vectors {
                    dot = add_dot(dot, site[(2 * k + j) * vectors + column], own);
                    if comptime!(k == 0) {
                        squares = add_dot(squares, own, own);
                    }
                }
            }
        }
        sum[k] = dot;
    }
    sum[4] = squares;

    // One unit makes a gate. Its scalars come before the barrier, past which no load is moved.
    let units = comptime!(config.units);
    let unit = UNIT_POS_X as usize;
    let rounds = comptime!(4usize.div_ceil(units));
    let mut scales = Array::<f32>::new(rounds);
    let mut biases = Array::<f32>::new(rounds);
    #[unroll]
    for round in 0..rounds {
        scales[round] = f32::new(0.0);
        biases[round] = f32::new(0.0);
    }
    #[unroll]
    for k in 0usize..4 {
        let round = comptime!(k / units);
        if unit == comptime!(k % units) {
            scales[round] = site_scalar::<N>(site, vectors, comptime!(GATES + k / 2));
            biases[round] = site_scalar::<N>(site, vectors, k);
        }
    }
    sums.gather(&mut sum);
    #[unroll]
    for round in 0..rounds {
        let k = round * units + unit;
        if k < 4 {
            let norm = inverse_rms(sums.total(4), 0.5f32 * inv_d_model, eps);
            let mut gate = sigmoid(scales[round] * norm * sums.total(k) + biases[round]);
            if k >= BETA {
                gate *= 2.0f32;
            }
            to[row + k] = gate;
            sums.publish(k, gate);
        }
    }
    sync_cube();
    let mut gates = Array::<f32>::new(4usize);
    #[unroll]
    for k in 0usize..4 {
        gates[k] = sums.published(k);
    }
    gates
}

/// The branch input (15): a unit's columns.
#[cube]
pub(crate) fn mixed<N: Size>(
    merged: &Array<Vector<f32, N>>,
    gates: &Array<f32>,
    #[comptime] config: Row,
) -> Array<Vector<f32, N>> {
    let columns = comptime!(config.columns);
    let mut mixed = Array::<Vector<f32, N>>::new(columns);
    #[unroll]
    for c in 0..columns {
        mixed[c] =
            Vector::new(gates[ALPHA]) * merged[c] + Vector::new(gates[ALPHA + 1]) * merged[comptime!(columns + c)];
    }
    mixed
}

/// RMSNorm with a gain of a branch input: a unit's columns. `start`: where the gain lies.
#[cube]
#[expect(clippy::too_many_arguments, reason = "everything of one token")]
pub(crate) fn normalised<N: Size>(
    input: &Array<Vector<f32, N>>,
    gain: &[Vector<f32, N>],
    start: usize,
    sums: &mut CubeSum,
    vectors: usize,
    inv_d_model: f32,
    eps: f32,
    #[comptime] config: Row,
) -> Array<Vector<f32, N>> {
    let columns = comptime!(config.columns);
    let mut normalised = Array::<Vector<f32, N>>::new(columns);
    let mut squares = f32::new(0.0);
    #[unroll]
    for c in 0..columns {
        let column = c * comptime!(config.units) + UNIT_POS_X as usize;
        normalised[c] = Vector::new(0.0f32);
        if column < vectors {
            squares = add_dot(squares, input[c], input[c]);
            normalised[c] = gain[start + column];
        }
    }
    let mut sum = Array::<f32>::new(1usize);
    sum[0] = squares;
    sums.inverse_rms(&mut sum, inv_d_model, eps);
    #[unroll]
    for c in 0..columns {
        normalised[c] *= Vector::new(sum[0]) * input[c];
    }
    normalised
}

/// What a read without gates gives: a unit's columns.
#[cube]
pub(crate) fn sum_of_streams<N: Size>(
    merged: &Array<Vector<f32, N>>,
    #[comptime] streams: usize,
    #[comptime] config: Row,
) -> Array<Vector<f32, N>> {
    let columns = comptime!(config.columns);
    let mut total = Array::<Vector<f32, N>>::new(columns);
    #[unroll]
    for c in 0..columns {
        let mut sum = merged[c];
        #[unroll]
        for j in 1..streams {
            sum += merged[comptime!(j * columns + c)];
        }
        total[c] = sum;
    }
    total
}

/// What the sums over the cube give about the partial state: squares of all streams, `<q, P^key>` of all streams, then
/// `<W_rho, [P0; P1]>` if there is a site, and room: `more` values in all beyond those of the streams.
#[cube]
pub(super) fn partial_sums<N: Size>(
    partial: &Array<Vector<f32, N>>,
    query: &[Vector<f32, N>],
    site: &ComptimeOption<&[Vector<f32, N>]>,
    read: usize,
    vectors: usize,
    #[comptime] more: usize,
    #[comptime] config: ReadConfig,
) -> Array<f32> {
    let streams = comptime!(config.streams);
    let columns = comptime!(config.row.columns);
    let units = comptime!(config.row.units);
    let unit = UNIT_POS_X as usize;
    let mut sum = Array::<f32>::new(comptime!(2 * streams + more));
    #[unroll]
    for j in 0..streams {
        let key = comptime!(config.routing.key_stream(j));
        let mut squares = f32::new(0.0);
        let mut dot = f32::new(0.0);
        #[unroll]
        for c in 0..columns {
            let column = c * units + unit;
            if column < vectors {
                let own = partial[comptime!(j * columns + c)];
                squares = add_dot(squares, own, own);
                dot =
                    add_dot(dot, query[(read * streams + j) * vectors + column], partial[comptime!(key * columns + c)]);
            }
        }
        sum[j] = squares;
        sum[comptime!(streams + j)] = dot;
    }
    #[comptime]
    match site {
        ComptimeOption::Some(site) => {
            let mut dot = f32::new(0.0);
            #[unroll]
            for j in 0..streams {
                #[unroll]
                for c in 0..columns {
                    let column = c * units + unit;
                    if column < vectors {
                        dot = add_dot(dot, site[(2 * RHO + j) * vectors + column], partial[comptime!(j * columns + c)]);
                    }
                }
            }
            sum[comptime!(2 * streams)] = dot;
        }
        ComptimeOption::None => {}
    }
    sum
}

/// The log-sum-exps of the streams whose shares the unit makes, before the sums, past whose barrier no load is moved.
#[cube]
pub(super) fn own_lse(lse: &[f32], row: usize, #[comptime] streams: usize, #[comptime] config: Row) -> Array<f32> {
    let units = comptime!(config.units);
    let rounds = comptime!(streams.div_ceil(units));
    let mut own = Array::<f32>::new(rounds);
    #[unroll]
    for round in 0..rounds {
        let j = round * units + UNIT_POS_X as usize;
        own[round] = f32::new(0.0);
        if j < streams {
            own[round] = lse[row + j];
        }
    }
    own
}

/// Publishes, from `at` on, lambda of all streams, then 1 - lambda (A.8, A.9), by one unit a stream, once
/// [`partial_sums`] are gathered. `lses`: see [`own_lse`].
#[cube]
pub(super) fn publish_shares(
    sums: &mut CubeSum,
    #[comptime] at: usize,
    lses: &Array<f32>,
    inv_d_model: f32,
    eps: f32,
    #[comptime] config: ReadConfig,
) {
    let streams = comptime!(config.streams);
    let units = comptime!(config.row.units);
    #[unroll]
    for round in 0..comptime!(streams.div_ceil(units)) {
        let j = round * units + UNIT_POS_X as usize;
        if j < streams {
            let key = key_stream_of(j, comptime!(config.routing));
            let logit = sums.total(streams + j) * inverse_rms(sums.total(key), inv_d_model, eps); // (A.8)
            let mut softmax = OnlineSoftmax::empty(1usize);
            softmax.resume(0usize, lses[round]);
            let kept = softmax.raise(0usize, logit);
            let added = softmax.push(0usize, logit);
            let normaliser = softmax.normaliser_of_two(0usize);
            sums.publish(at + j, kept * normaliser); // (A.9)
            sums.publish(at + streams + j, added * normaliser);
        }
    }
}

/// Merges the retrieved state, in place, with the partial one (A.10). `share`: lambda of all streams, then 1 - lambda.
#[cube]
pub(super) fn merge<N: Size>(
    state: &mut Array<Vector<f32, N>>,
    partial: &Array<Vector<f32, N>>,
    share: &Array<f32>,
    #[comptime] config: ReadConfig,
) {
    let streams = comptime!(config.streams);
    let columns = comptime!(config.row.columns);
    #[unroll]
    for j in 0..streams {
        let from = comptime!(config.routing.value_stream(j));
        #[unroll]
        for c in 0..columns {
            let k = comptime!(j * columns + c);
            let partial = partial[comptime!(from * columns + c)];
            state[k] = Vector::new(share[j]) * state[k] + Vector::new(share[comptime!(streams + j)]) * partial;
        }
    }
}
