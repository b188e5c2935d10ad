use cubecl::prelude::*;

use super::config::{ReadConfig, choose_backward};
use super::fwd::{Inputs, gates_and_gain, inputs, merge, mixed, own_lse, partial_sums, publish_shares, sum_of_streams};
use crate::columns::{inside, load, narrowed, reload, store, unknown_zero, widen, widened, widened_again};
use crate::dims::token_gradients;
use crate::launch::{Tuning, cube_index, cubes};
use crate::numeric::{add_dot, inverse_rms};
use crate::operand::{Check, F32, Operand};
use crate::reduce::CubeSum;
use crate::rows::{Rows, rows};
use crate::site::{ALPHA, BETA, GATES, RHO, ROWS, SCALARS, SiteOperands, SiteSum, site_gain, site_scalar};
use crate::{Dims, KernelError, Routing};

/// The operands of [`read_bwd`].
#[derive(Debug, Clone, Copy)]
pub struct ReadBwd<'a> {
    /// In place, f32, f16 or bf16: the retrieved state of this read becomes its gradient.
    /// `[slots, tokens, outputs, d_model]`
    pub state: Operand<'a>,
    /// The slot of this read.
    pub slot: usize,
    /// Saved, f32. Read with `open` only. `[reads, tokens, outputs]`
    pub lse: Operand<'a>,
    /// Saved, f32. Read with `open` only. `[reads, outputs, d_model]`
    pub query: Operand<'a>,
    /// Saved, f32, as in the forward. [`packed_length`](crate::site::packed_length)
    pub site: Option<Operand<'a>>,
    /// Saved, f32, as the forward left it. `[reads, tokens, 5]`
    pub gate: Option<Operand<'a>>,
    /// Input, in the type of `state`: the gradient of the branch input. `[tokens, d_model]`
    pub d_input: Operand<'a>,
    /// Whether a branch follows this read and has been written, so that gradients of its write come in: of beta in
    /// `d_token`, and of the state after it in `open.d_partial`. With gates it takes a site.
    pub written: bool,
    /// The write of the branch before, as in the forward.
    pub open: Option<OpenBwd<'a>>,
    /// In place, f32, per token d_beta (two columns), shift `d_lse - <d_state, state>` and d_lse (one an output each).
    /// Row `read`: d_beta is read if `written` with a site, shift and d_lse are written. Row `read - 1`: d_beta is
    /// written with `open` and gates. `[reads, tokens, 2 + 2 * outputs]`
    pub d_token: Operand<'a>,
    /// Output, f32: the gradients of the site's parameters; none if they are frozen.
    pub d_site: Option<SiteOperands<'a>>,
    /// Output, f32: with `norm`, the gradient of its gain; none if it is frozen. `[d_model]`
    pub d_gain: Option<Operand<'a>>,
    /// Output, f32: with `open`, row `read` is written with what the merge gives. `[reads, outputs, d_model]`
    pub d_query: Operand<'a>,
    /// Which read this is.
    pub read: usize,
    /// Epsilon of the norms of keys and gates.
    pub eps: f64,
    /// Epsilon of the branch's own norm, as in the forward.
    pub norm: Option<f64>,
}

/// The open block's part of [`ReadBwd`].
#[derive(Debug, Clone, Copy)]
pub struct OpenBwd<'a> {
    /// Saved, in the type of the retrieved state: the state after branch `read - 1`. `[tokens, outputs, d_model]`
    pub partial: Operand<'a>,
    /// In place, in the same type: the gradient of the state after branch `read` becomes that of `partial`; without
    /// `written` it is written only. `[tokens, outputs, d_model]`
    pub d_partial: Operand<'a>,
    /// Saved, in the same type, needed with gates: what branch `read - 1` computed. `[tokens, d_model]`
    pub output: Option<Operand<'a>>,
    /// Output, in the same type: the gradient of that. Without gates it is the new `d_partial`, and may be left out.
    /// `[tokens, d_model]`
    pub d_output: Option<Operand<'a>>,
}

/// The backward of read `read` and of the write of branch `read - 1` together. The gradients of the parameters are
/// summed over the tokens in two stages; without tokens they are zero.
///
/// # Errors
/// If an operand has another shape, element type or a too short buffer, or operands are missing that others need.
pub fn read_bwd(client: &Client, operands: ReadBwd, routing: Routing, tuning: Tuning) -> Result<(), KernelError> {
    const NAME: &str = "read_bwd";
    const STATE: &str = "[tokens, outputs, d_model]";
    const BRANCH: &str = "[tokens, d_model]";
    let ReadBwd { state, slot, lse, query, site, gate, d_input, written, open, .. } = operands;
    let ReadBwd { d_token, d_site, d_gain, d_query, read, eps, norm, .. } = operands;

    let mut check = Check::of(NAME);
    let shared = Inputs { state, slot, query, lse, site, gate, read, open: open.is_some(), norm };
    let dims = inputs(client, &mut check, shared, routing)?;
    let Dims { tokens, streams: outputs, d_model } = dims;
    let reads = query.shape[0];
    check
        .eps(eps)?
        .fits("d_input", &d_input, state.dtype, BRANCH, &dims.branch())?
        .fits("d_token", &d_token, F32, "[reads, tokens, 2 + 2 * outputs]", &[reads, tokens, token_gradients(outputs)])?
        .fits("d_query", &d_query, F32, "[reads, outputs, d_model]", &[reads, outputs, d_model])?;
    if written && gate.is_some() && site.is_none() {
        return Err(KernelError::value(NAME, "site", "the gates of the branch that was `written`", "none"));
    }
    if let Some(d_gain) = &d_gain {
        if norm.is_none() {
            return Err(KernelError::value(NAME, "norm", "the norm whose gain's gradient `d_gain` takes", "none"));
        }
        check.fits("d_gain", d_gain, F32, "[d_model]", &[d_model])?;
    }
    let (site, gain) = gates_and_gain(site, gate);
    if let Some(d_site) = &d_site {
        if site.is_none() {
            return Err(KernelError::value(NAME, "site", "the parameters whose gradients `d_site` takes", "none"));
        }
        d_site.check(&mut check, d_model, F32)?;
    }
    if let Some(OpenBwd { partial, d_partial, output, d_output }) = &open {
        check.fits("open.partial", partial, state.dtype, STATE, &dims.state())?.fits(
            "open.d_partial",
            d_partial,
            state.dtype,
            STATE,
            &dims.state(),
        )?;
        if gate.is_some() && output.is_none() {
            return Err(KernelError::value(NAME, "open.output", "what the gated branch computed", "none"));
        }
        for (argument, operand) in [("open.output", output), ("open.d_output", d_output)] {
            if let Some(operand) = operand {
                check.fits(argument, operand, state.dtype, BRANCH, &dims.branch())?;
            }
        }
    }

    // What a cube sums over its tokens: rows of the site, then the query, the gain, then the site's scalars.
    let rows_of_site = if d_site.is_some() { ROWS } else { 0 };
    let rows_of_query = if open.is_some() { outputs } else { 0 };
    let rows_of_gain = usize::from(d_gain.is_some());
    let scalars = if d_site.is_some() { SCALARS } else { 0 };
    let all_rows = rows_of_site + rows_of_query + rows_of_gain;
    let length = all_rows * d_model + scalars;
    let sums = length > 0;
    let cubes_of_tokens = if sums { rows(tokens, length) } else { tokens };
    let stage = sums.then(|| Rows::new(client, cubes_of_tokens, length));
    if let Some(stage) = &stage {
        stage.check(&mut check)?;
    }
    let address = check.address(client)?;
    if tokens == 0 && !sums {
        return Ok(());
    }

    let what = [open.is_some(), written, d_site.is_some(), norm.is_some(), d_gain.is_some()];
    let config = choose_backward(client, dims, state.dtype, all_rows, what, routing, tuning);
    let lanes = config.row.lanes;
    let gated = gate.filter(|_| site.is_some() || open.is_some());
    read_bwd_kernel::launch(
        client,
        cubes(client, cubes_of_tokens),
        config.row.cube_dim(),
        address,
        lanes,
        state.argument(lanes),
        open.map(|_| lse.argument(1)).into(),
        open.map(|_| query.argument(lanes)).into(),
        site.map(|site| site.argument(lanes)).into(),
        gain.map(|gain| gain.argument(lanes)).into(),
        gated.map(|gate| gate.argument(1)).into(),
        d_input.argument(lanes),
        open.map(|open| open.partial.argument(lanes)).into(),
        open.map(|open| open.d_partial.argument(lanes)).into(),
        open.and_then(|open| open.output).filter(|_| gate.is_some()).map(|output| output.argument(lanes)).into(),
        open.and_then(|open| open.d_output).map(|d_output| d_output.argument(lanes)).into(),
        d_token.argument(1),
        stage.as_ref().map(|stage| stage.operand().argument(lanes)).into(),
        slot,
        read,
        cubes_of_tokens,
        tokens,
        d_model / lanes,
        1.0 / d_model as f32,
        eps as f32,
        norm.unwrap_or_default() as f32,
        config,
        state.dtype,
    );
    let d_query = open.map(|_| d_query);
    match (stage, d_site) {
        (Some(stage), Some(gradients)) => {
            SiteSum { gradients, d_query, d_gain, read, d_model }.sum(client, &stage, address);
        }
        (Some(stage), None) => {
            let queries = 0..rows_of_query * d_model;
            if let Some(d_query) = d_query {
                stage.sum(client, queries.clone(), &d_query, read * outputs * d_model, false, address);
            }
            if let Some(d_gain) = d_gain {
                stage.sum(client, queries.end..length, &d_gain, 0, false, address);
            }
        }
        (None, _) => {}
    }
    Ok(())
}

#[cube(launch, address_type = "dynamic")]
#[expect(clippy::too_many_arguments, reason = "one argument a tensor and size")]
fn read_bwd_kernel<E: Float, N: Size>(
    state: &mut [Vector<E, N>],                         // [slots, tokens, streams, vectors]
    lse: ComptimeOption<&[f32]>,                        // [reads, tokens, streams]
    query: ComptimeOption<&[Vector<f32, N>]>,           // [reads, streams, vectors]
    site: ComptimeOption<&[Vector<f32, N>]>,            // [10 * vectors + 8 / lanes], then the gain
    gain: ComptimeOption<&[Vector<f32, N>]>,            // [vectors], without a site
    gate: ComptimeOption<&[f32]>,                       // [reads, tokens, 5]
    d_input: &[Vector<E, N>],                           // [tokens, vectors]
    partial: ComptimeOption<&[Vector<E, N>]>,           // [tokens, streams, vectors]
    mut d_partial: ComptimeOption<&mut [Vector<E, N>]>, // [tokens, streams, vectors]
    output: ComptimeOption<&[Vector<E, N>]>,            // [tokens, vectors]
    mut d_output: ComptimeOption<&mut [Vector<E, N>]>,  // [tokens, vectors]
    d_token: &mut [f32],                                // [reads, tokens, 2 + 2 * streams]
    mut row_sum: ComptimeOption<&mut [Vector<f32, N>]>, // [rows, 10 * vectors, streams * vectors, vectors, 8 / lanes]
    slot: usize,
    read: usize,
    rows: usize,
    tokens: usize,
    vectors: usize,
    inv_d_model: f32,
    eps: f32,
    norm_eps: f32,
    #[comptime] config: ReadConfig,
    #[define(E)] _dtype: ElemType,
) {
    let row = cube_index();
    if row >= rows {
        terminate!();
    }
    let streams = comptime!(config.streams);
    let columns = comptime!(config.row.columns);
    let units = comptime!(config.row.units);
    let unit = UNIT_POS_X as usize;
    let opened = comptime!(partial.is_some());
    let sited = comptime!(site.is_some());
    let gated = comptime!(gate.is_some());
    let written = comptime!(config.written);
    let trained = comptime!(config.trained);
    let normed = comptime!(config.normed);
    let gain_trained = comptime!(config.gain_trained);
    let width = comptime!(token_gradients(streams)); // of a row of `d_token`
    let transported = comptime!(config.written && site.is_some()); // M(rho) lies between the two states
    // Sums over the partial state beyond those of the streams.
    let more = comptime!(if transported {
        2usize
    } else if sited {
        1
    } else {
        0
    });
    let most_sums = comptime!(if sited { if normed { 11 } else { 7 } } else { 2 * streams });
    // Sums about the partial state, and the shares of the merge.
    let sums_of_merge = comptime!(2 * streams + more);
    let published = comptime!(if opened { sums_of_merge + 2 * streams } else { 0 });
    let mut sums = CubeSum::publishing(most_sums, comptime!(most_sums.max(published)), comptime!(config.row));

    // Gradients of the parameters over the tokens of this cube.
    let site_rows = comptime!(if trained { ROWS } else { 0 });
    let query_rows = comptime!(if opened { streams } else { 0 });
    let gain_row = comptime!(site_rows + query_rows); // the last one, if it is there
    let all_rows = comptime!(gain_row + if gain_trained { 1 } else { 0 });
    let mut d_rows = Array::<Vector<f32, N>>::new(comptime!((all_rows * columns).max(1)));
    #[unroll]
    for k in 0..comptime!(all_rows * columns) {
        d_rows[k] = Vector::new(0.0f32);
    }
    // Of the site's scalars, which every unit knows, one adds them up; in registers they would take eight of all.
    let scalars = comptime!(if trained { SCALARS } else { 0 });
    let mut d_scalars = Shared::<[f32]>::new_slice(comptime!(scalars.max(1)));
    if unit == 0 {
        #[unroll]
        for k in 0..scalars {
            d_scalars[k] = f32::new(0.0);
        }
    }

    for token in range_stepped(row, tokens, rows) {
        // Addresses of parameters, made once for all tokens, would take two registers each.
        let zero = unknown_zero(vectors, token);
        let vectors = vectors + zero as usize;
        let tokens = tokens + zero as usize;
        let at = (slot * tokens + token) * streams; // row of the retrieved state
        let own = read * tokens + token; // row of the scalars of this read
        // Gates first, so that they are in flight with what follows.
        let mut alpha = Array::<f32>::new(2usize);
        if comptime!(sited) {
            let gate = gate.unwrap();
            #[unroll]
            for j in 0usize..2 {
                alpha[j] = gate[own * GATES + ALPHA + j];
            }
        }
        let states = state.slice(0, (slot + 1) * tokens * streams * vectors);
        let stored = load::<E, N>(states, at, vectors, streams, comptime!(config.row));
        let d_stored = load::<E, N>(d_input, token, vectors, 1usize, comptime!(config.row));

        // The merge again, and with the same sum <D^0 - D^1, P^0 - P^1>, where D is the gradient of the state after the
        // branch.
        let mut merged = Array::<Vector<f32, N>>::new(comptime!(streams * columns));
        let mut open = Array::<Vector<f32, N>>::new(comptime!(streams * columns)); // the partial state P
        let mut about = Array::<f32>::new(sums_of_merge);
        let mut share = Array::<f32>::new(comptime!(2 * streams));
        if comptime!(!opened) {
            merged = widened::<E, N>(&stored);
        }
        #[comptime]
        match partial {
            ComptimeOption::Some(partial) => {
                let stored_open = load::<E, N>(partial, token * streams, vectors, streams, comptime!(config.row));
                let mut after = Array::<Vector<E, N>>::new(comptime!(streams * columns)); // D
                if comptime!(transported) {
                    let d_partial = d_partial.as_mut().unwrap().slice(0, tokens * streams * vectors);
                    after = load::<E, N>(d_partial, token * streams, vectors, streams, comptime!(config.row));
                }
                open = widened::<E, N>(&stored_open);
                let query = query.unwrap();
                about = partial_sums::<N>(&open, query, &site, read, vectors, more, config);
                if comptime!(transported) {
                    let mut d_rho = f32::new(0.0);
                    #[unroll]
                    for c in 0..columns {
                        let other = comptime!(columns + c);
                        if inside(c, vectors, comptime!(config.row)) {
                            let gap = widen(after[c]) - widen(after[other]);
                            d_rho = add_dot(d_rho, gap, open[c] - open[other]);
                        }
                    }
                    about[5] = d_rho;
                }
                let lses = own_lse(lse.unwrap(), own * streams, streams, comptime!(config.row));
                sums.gather(&mut about);
                publish_shares(&mut sums, sums_of_merge, &lses, inv_d_model, eps, config);
                sums.publish_totals(sums_of_merge);
                sync_cube();
                #[unroll]
                for k in 0..sums_of_merge {
                    about[k] = sums.published(k);
                }
                #[unroll]
                for k in 0..comptime!(2 * streams) {
                    share[k] = sums.published(comptime!(sums_of_merge + k));
                }
                merged = widened::<E, N>(&stored);
                open = widened_again::<E, N>(&stored_open, zero);
                merge::<N>(&mut merged, &open, &share, config);
            }
            ComptimeOption::None => {}
        }
        let mut d_inputs = widened::<E, N>(&d_stored);

        // Through the norm of a branch without gates.
        #[comptime]
        match gain {
            ComptimeOption::Some(gain) => {
                let inputs = sum_of_streams::<N>(&merged, streams, comptime!(config.row));
                let mut d_normed = Array::<Vector<f32, N>>::new(columns);
                let mut squares = f32::new(0.0);
                let mut along = f32::new(0.0);
                #[unroll]
                for c in 0..columns {
                    let column = c * units + unit;
                    d_normed[c] = d_inputs[c];
                    if column < vectors {
                        d_inputs[c] *= gain[column];
                        squares = add_dot(squares, inputs[c], inputs[c]);
                        along = add_dot(along, d_inputs[c], inputs[c]);
                    }
                }
                let mut sum = Array::<f32>::new(2usize);
                sum[0] = squares;
                sum[1] = along;
                sums.sum(&mut sum);
                let norm = inverse_rms(sum[0], inv_d_model, norm_eps);
                let back = norm * norm * norm * sum[1] * inv_d_model;
                #[unroll]
                for c in 0..columns {
                    d_inputs[c] = Vector::new(norm) * d_inputs[c] - Vector::new(back) * inputs[c];
                    if comptime!(gain_trained) {
                        d_rows[comptime!(gain_row * columns + c)] += Vector::new(norm) * inputs[c] * d_normed[c];
                    }
                }
            }
            ComptimeOption::None => {}
        }

        // The gradient of the merged state.
        let mut d_merged = Array::<Vector<f32, N>>::new(comptime!(streams * columns));
        #[comptime]
        match site {
            ComptimeOption::Some(site) => {
                // <W, [h0; h1]> of alpha0, alpha1, beta0, beta1; squares of [h0; h1]; d_alpha^j = <d_input, h^j>. With the
                // branch's norm of u = alpha0 h0 + alpha1 h1, where d_input becomes gain d_input, first: <u, u>,
                // <d_input, u>, <u, h^j>.
                let mut sum = Array::<f32>::new(comptime!(if normed { 11usize } else { 7 }));
                if comptime!(normed) {
                    let inputs = mixed::<N>(&merged, &alpha, comptime!(config.row)); // u
                    let start = site_gain::<N>(vectors);
                    let mut squares = f32::new(0.0);
                    let mut along = f32::new(0.0);
                    #[unroll]
                    for c in 0..columns {
                        let column = c * units + unit;
                        if column < vectors {
                            d_inputs[c] *= site[start + column];
                            squares = add_dot(squares, inputs[c], inputs[c]);
                            along = add_dot(along, d_inputs[c], inputs[c]);
                        }
                    }
                    sum[7] = squares;
                    sum[8] = along;
                    #[unroll]
                    for j in 0usize..2 {
                        let mut dot = f32::new(0.0);
                        #[unroll]
                        for c in 0..columns {
                            if inside(c, vectors, comptime!(config.row)) {
                                dot = add_dot(dot, inputs[c], merged[comptime!(j * columns + c)]);
                            }
                        }
                        sum[j + 9] = dot;
                    }
                }
                let mut squares = f32::new(0.0);
                #[unroll]
                for j in 0usize..2 {
                    let mut dot = f32::new(0.0);
                    #[unroll]
                    for c in 0..columns {
                        let h = merged[comptime!(j * columns + c)];
                        if inside(c, vectors, comptime!(config.row)) {
                            squares = add_dot(squares, h, h);
                            dot = add_dot(dot, d_inputs[c], h);
                        }
                    }
                    sum[j + 5] = dot;
                }
                sum[4] = squares;
                #[unroll]
                for k in 0usize..4 {
                    let mut dot = f32::new(0.0);
                    #[unroll]
                    for j in 0usize..2 {
                        #[unroll]
                        for c in 0..columns {
                            let column = c * units + unit;
                            if column < vectors {
                                dot = add_dot(
                                    dot,
                                    site[(2 * k + j) * vectors + column],
                                    merged[comptime!(j * columns + c)],
                                );
                            }
                        }
                    }
                    sum[k] = dot;
                }
                // Before the barriers of the sum, past which no load is moved.
                let gate = gate.unwrap();
                let mut beta = Array::<f32>::new(2usize);
                let mut d_beta = Array::<f32>::new(2usize);
                #[unroll]
                for j in 0usize..2 {
                    beta[j] = gate[own * GATES + BETA + j];
                    d_beta[j] = f32::new(0.0);
                    if comptime!(written) {
                        d_beta[j] = d_token[own * width + j];
                    }
                }
                sums.sum(&mut sum);

                if comptime!(normed) {
                    let norm = inverse_rms(sum[7], inv_d_model, norm_eps);
                    let back = norm * norm * norm * sum[8] * inv_d_model;
                    let mut d_normed = Array::<Vector<f32, N>>::new(columns);
                    if comptime!(gain_trained) {
                        d_normed = reload::<E, N>(d_input, token, vectors, 1usize, comptime!(config.row));
                    }
                    #[unroll]
                    for c in 0..columns {
                        // u again, of its parts: in registers over the barrier it would make others spill.
                        let (h0, h1) = (merged[c], merged[comptime!(columns + c)]);
                        d_inputs[c] = Vector::new(norm) * d_inputs[c]
                            - Vector::new(back * alpha[0]) * h0
                            - Vector::new(back * alpha[1]) * h1;
                        if comptime!(gain_trained) {
                            let normed = Vector::new(norm * alpha[0]) * h0 + Vector::new(norm * alpha[1]) * h1;
                            d_rows[comptime!(gain_row * columns + c)] += normed * d_normed[c];
                        }
                    }
                    #[unroll]
                    for j in 0usize..2 {
                        sum[j + 5] = norm * sum[j + 5] - back * sum[j + 9];
                    }
                }

                // Through the sigmoids (13, 14), then the norm: with z = n <W, hc>, d_hc = n v - hc n³ <v, hc> / (2
                // d_model), where v = sum of scale d_logit W.
                let norm = inverse_rms(sum[4], 0.5f32 * inv_d_model, eps);
                let scale_alpha = site_scalar::<N>(site, vectors, GATES);
                let scale_beta = site_scalar::<N>(site, vectors, comptime!(GATES + 1));
                let mut scaled = Array::<f32>::new(4usize); // scale d_logit
                let mut inner = f32::new(0.0); // <v, hc>
                #[unroll]
                for j in 0usize..2 {
                    let d_alpha = sum[j + 5] * alpha[j] * (1.0f32 - alpha[j]);
                    let d_beta = d_beta[j] * beta[j] * (1.0f32 - 0.5f32 * beta[j]);
                    scaled[ALPHA + j] = scale_alpha * d_alpha;
                    scaled[BETA + j] = scale_beta * d_beta;
                    inner += scaled[ALPHA + j] * sum[ALPHA + j] + scaled[BETA + j] * sum[BETA + j];
                    if comptime!(trained) && unit == 0 {
                        d_scalars[ALPHA + j] += d_alpha;
                        d_scalars[BETA + j] += d_beta;
                        d_scalars[GATES] += d_alpha * norm * sum[ALPHA + j];
                        d_scalars[GATES + 1] += d_beta * norm * sum[BETA + j];
                    }
                }
                let back = norm * norm * norm * inner * (0.5f32 * inv_d_model);
                #[unroll]
                for j in 0usize..2 {
                    #[unroll]
                    for c in 0..columns {
                        let column = c * units + unit;
                        let h = merged[comptime!(j * columns + c)];
                        let mut d = Vector::new(alpha[j]) * d_inputs[c] - Vector::new(back) * h; // (15)
                        #[unroll]
                        for k in 0usize..4 {
                            if column < vectors {
                                d += Vector::new(norm * scaled[k]) * site[(2 * k + j) * vectors + column];
                            }
                            if comptime!(trained) {
                                d_rows[comptime!((2 * k + j) * columns + c)] += Vector::new(norm * scaled[k]) * h;
                            }
                        }
                        d_merged[comptime!(j * columns + c)] = d;
                    }
                }
            }
            ComptimeOption::None =>
            {
                #[unroll]
                for j in 0..streams {
                    #[unroll]
                    for c in 0..columns {
                        d_merged[comptime!(j * columns + c)] = d_inputs[c];
                    }
                }
            }
        }

        // With a merge both of its states again.
        let mut retrieved = Array::<Vector<f32, N>>::new(comptime!(streams * columns));
        #[comptime]
        match partial {
            ComptimeOption::Some(partial) => {
                let states = state.slice(0, (slot + 1) * tokens * streams * vectors);
                retrieved = reload::<E, N>(states, at, vectors, streams, comptime!(config.row));
                open = reload::<E, N>(partial, token * streams, vectors, streams, comptime!(config.row));
            }
            ComptimeOption::None => {}
        }
        // The gradient of the retrieved state as it is stored, for the history's backward compares with it:
        // <d_hist, hist>; and <d_h, hist - P>.
        let pairs = comptime!(if opened { 2 * streams } else { streams });
        let mut inner = Array::<f32>::new(pairs);
        #[unroll]
        for j in 0..streams {
            let from = comptime!(config.routing.value_stream(j));
            let mut dot = f32::new(0.0);
            let mut gap = f32::new(0.0);
            #[unroll]
            for c in 0..columns {
                let column = c * units + unit;
                let k = comptime!(j * columns + c);
                let mut hist = merged[k];
                let mut d = d_merged[k];
                if comptime!(opened) {
                    hist = retrieved[k];
                    d *= Vector::new(share[j]);
                }
                let stored = Vector::<E, N>::cast_from(d);
                if inside(c, vectors, comptime!(config.row)) {
                    dot = add_dot(dot, widen(stored), hist);
                    if comptime!(opened) {
                        gap = add_dot(gap, d_merged[k], hist - open[comptime!(from * columns + c)]);
                    }
                    state[(at + j) * vectors + column] = stored;
                }
            }
            inner[j] = dot;
            if comptime!(opened) {
                inner[comptime!(streams + j)] = gap;
            }
        }
        sums.sum(&mut inner);
        let mut d_lse = Array::<f32>::new(streams);
        #[unroll]
        for j in 0..streams {
            d_lse[j] = f32::new(0.0);
            if comptime!(opened) {
                let other = comptime!(streams + j);
                d_lse[j] = inner[other] * share[j] * share[other]; // (A.9)
            }
            if unit == 0 {
                d_token[own * width + 2 + j] = d_lse[j] - inner[j];
                d_token[own * width + 2 + streams + j] = d_lse[j];
            }
        }

        #[comptime]
        match partial {
            ComptimeOption::Some(_) => {
                // The transport (17), or the plain sum.
                // D again.
                let mut d_open = Array::<Vector<f32, N>>::new(comptime!(streams * columns));
                #[unroll]
                for k in 0..comptime!(streams * columns) {
                    d_open[k] = Vector::new(0.0f32);
                }
                if comptime!(written) {
                    let d_partial = d_partial.as_mut().unwrap().slice(0, tokens * streams * vectors);
                    d_open = reload::<E, N>(d_partial, token * streams, vectors, streams, comptime!(config.row));
                }
                if comptime!(transported) {
                    let gate = gate.unwrap();
                    let site = site.unwrap();
                    let rho = gate[own * GATES + RHO];
                    let keep = Vector::<f32, N>::new(rho);
                    let exchange = Vector::<f32, N>::new(1.0f32 - rho);
                    // (16), as above.
                    let d_rho = about[5] * rho * (1.0f32 - rho);
                    let norm = inverse_rms(about[0] + about[1], 0.5f32 * inv_d_model, eps);
                    let scaled = site_scalar::<N>(site, vectors, comptime!(GATES + 2)) * d_rho;
                    let back = norm * norm * norm * scaled * about[4] * (0.5f32 * inv_d_model);
                    if comptime!(trained) && unit == 0 {
                        d_scalars[RHO] += d_rho;
                        d_scalars[GATES + 2] += d_rho * norm * about[4];
                    }
                    #[unroll]
                    for c in 0..columns {
                        let (first, second) = (c, comptime!(columns + c));
                        let (after0, after1) = (d_open[first], d_open[second]);
                        d_open[first] = keep * after0 + exchange * after1;
                        d_open[second] = keep * after1 + exchange * after0;
                    }
                    #[unroll]
                    for j in 0usize..2 {
                        #[unroll]
                        for c in 0..columns {
                            let k = comptime!(j * columns + c);
                            let column = c * units + unit;
                            d_open[k] -= Vector::new(back) * open[k];
                            if column < vectors {
                                d_open[k] += Vector::new(norm * scaled) * site[(2 * RHO + j) * vectors + column];
                            }
                            if comptime!(trained) {
                                d_rows[comptime!((2 * RHO + j) * columns + c)] += Vector::new(norm * scaled) * open[k];
                            }
                        }
                    }
                }

                // The merge.
                let query = query.unwrap();
                #[unroll]
                for j in 0..streams {
                    let key = comptime!(config.routing.key_stream(j));
                    let from = comptime!(config.routing.value_stream(j));
                    let norm = inverse_rms(about[key], inv_d_model, eps);
                    let d_logit = 0.0f32 - d_lse[j];
                    let back = norm * norm * norm * d_logit * about[comptime!(streams + j)] * inv_d_model;
                    let added = share[comptime!(streams + j)];
                    #[unroll]
                    for c in 0..columns {
                        let column = c * units + unit;
                        let by_value = comptime!(from * columns + c);
                        let by_key = comptime!(key * columns + c);
                        d_open[by_value] += Vector::new(added) * d_merged[comptime!(j * columns + c)]; // (A.10)
                        d_open[by_key] -= Vector::new(back) * open[by_key]; // (A.8)
                        if column < vectors {
                            d_open[by_key] +=
                                Vector::new(norm * d_logit) * query[(read * streams + j) * vectors + column];
                        }
                        d_rows[comptime!((site_rows + j) * columns + c)] += Vector::new(norm * d_logit) * open[by_key];
                    }
                }

                // The write of the branch before: dy = sum over j of beta^j dP^j; d_beta^j = <dP^j, y>.
                let before = own - tokens; // row of the scalars of the read before
                let mut beta = Array::<f32>::new(streams);
                #[unroll]
                for j in 0..streams {
                    beta[j] = f32::new(1.0);
                    if comptime!(gated) {
                        let gate = gate.unwrap();
                        beta[j] = gate[before * GATES + BETA + j];
                    }
                }
                if comptime!(d_output.is_some()) {
                    let d_output = d_output.as_mut().unwrap().slice_mut(0, tokens * vectors);
                    let mut d = Array::<Vector<f32, N>>::new(columns);
                    #[unroll]
                    for c in 0..columns {
                        d[c] = Vector::new(0.0f32);
                        #[unroll]
                        for j in 0..streams {
                            d[c] += Vector::new(beta[j]) * d_open[comptime!(j * columns + c)];
                        }
                    }
                    store::<E, N>(&narrowed::<E, N>(&d), d_output, token, vectors, 1usize, comptime!(config.row));
                }
                #[comptime]
                match output {
                    ComptimeOption::Some(output) => {
                        let outputs = load::<E, N>(output, token, vectors, 1usize, comptime!(config.row));
                        let outputs = widened::<E, N>(&outputs);
                        let mut d_beta = Array::<f32>::new(streams);
                        #[unroll]
                        for j in 0..streams {
                            let mut dot = f32::new(0.0);
                            #[unroll]
                            for c in 0..columns {
                                if inside(c, vectors, comptime!(config.row)) {
                                    dot = add_dot(dot, d_open[comptime!(j * columns + c)], outputs[c]);
                                }
                            }
                            d_beta[j] = dot;
                        }
                        sums.sum(&mut d_beta);
                        if unit == 0 {
                            #[unroll]
                            for j in 0..streams {
                                d_token[before * width + j] = d_beta[j];
                            }
                        }
                    }
                    ComptimeOption::None => {}
                }
                let d_partial = d_partial.as_mut().unwrap().slice_mut(0, tokens * streams * vectors);
                store::<E, N>(
                    &narrowed::<E, N>(&d_open),
                    d_partial,
                    token * streams,
                    vectors,
                    streams,
                    comptime!(config.row),
                );
            }
            ComptimeOption::None => {}
        }
    }

    if comptime!(row_sum.is_some()) {
        let row_sum = row_sum.as_mut().unwrap();
        let lanes = N::value();
        let scalars = comptime!(scalars / lanes);
        let start = row * (all_rows * vectors + scalars);
        #[unroll]
        for k in 0..all_rows {
            #[unroll]
            for c in 0..columns {
                let column = c * units + unit;
                if column < vectors {
                    row_sum[start + k * vectors + column] = d_rows[comptime!(k * columns + c)];
                }
            }
        }
        if unit == 0 {
            #[unroll]
            for k in 0..scalars {
                let mut packed = Vector::<f32, N>::new(0.0f32);
                #[unroll]
                for lane in 0..lanes {
                    packed.insert(lane, d_scalars[comptime!(k * lanes + lane)]);
                }
                row_sum[start + all_rows * vectors + k] = packed;
            }
        }
    }
}
