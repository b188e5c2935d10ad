use cubecl::prelude::*;

use super::config::{PrefixConfig, TOLD_BACKWARD, Work};
use crate::columns::{clamped, inside, widen};
use crate::dims::token_gradients;
use crate::launch::{Tuning, cube_index, cubes, element_index, elements};
use crate::numeric::add_dot;
use crate::operand::{Check, F32, Operand};
use crate::reduce::CubeSum;
use crate::rows::{Rows, rows};
use crate::{Dims, KernelError, Routing};

const LOGIT: &str = "[capacity, reads, tokens, outputs]";
const TOKEN: &str = "[reads, tokens, 2 + 2 * outputs]";

/// Units of a cube of the correction: it is per token, read and output, without a sum over units.
const UNITS: usize = 256;

/// The operands of [`prefix_bwd_history`]; `outputs` as in the [forward](super::PrefixFwd).
#[derive(Debug, Clone, Copy)]
pub struct PrefixBwdHistory<'a> {
    /// Saved, f32, f16 or bf16: the history. `[capacity, tokens, streams, d_model]`
    pub value: Operand<'a>,
    /// Saved, f32. `[capacity, tokens, streams]`
    pub inv_rms: Operand<'a>,
    /// Saved, f32. `[reads, outputs, d_model]`
    pub query: Operand<'a>,
    /// Saved, f32. `[reads, tokens, outputs]`
    pub lse: Operand<'a>,
    /// Saved, f32. `[capacity, reads, tokens, outputs]`
    pub logit: Operand<'a>,
    /// Output, f32: the gradients of the logits of this entry and these reads. `[capacity, reads, tokens, outputs]`
    pub d_logit: Operand<'a>,
    /// Input, in the type of `value`: the gradients of the retrieved states. `[reads, tokens, outputs, d_model]`
    pub d_state: Operand<'a>,
    /// Input, f32: the shifts `d_lse - <d_state, state>`, one an output behind two columns of no concern.
    /// `[reads, tokens, 2 + 2 * outputs]`
    pub d_token: Operand<'a>,
    /// Output, in the type of `value`: the gradient of the entry. `[tokens, streams, d_model]`, or its sum over the
    /// streams `[tokens, d_model]` (the embedding)
    pub d_value: Operand<'a>,
    /// The entry.
    pub entry: usize,
    /// The first of the reads that saw the entry.
    pub first: usize,
    /// One past the last of them.
    pub last: usize,
}

/// The gradient of one entry of the history, whole and once: by value, and by key through the norm.
///
/// # Errors
/// If an operand has another shape, element type or a too short buffer, or `routing` does not fit the streams.
pub fn prefix_bwd_history(
    client: &Client,
    operands: PrefixBwdHistory,
    routing: Routing,
    tuning: Tuning,
) -> Result<(), KernelError> {
    const NAME: &str = "prefix_bwd_history";
    let PrefixBwdHistory { value, inv_rms, query, lse, logit, d_logit, d_state, d_token, d_value, entry, first, last } =
        operands;

    let mut check = Check::of(NAME);
    let capacity = check.room("value", &value, entry)?;
    let dims = check.history(&value)?;
    let Dims { tokens, streams, d_model } = dims;
    let [reads, outputs] = check.queries("query", &query)?;
    routing.check(NAME, streams, outputs)?;
    if first > last || last > reads {
        let got = format!("{first} to {last}");
        return Err(KernelError::value(NAME, "first and last", format!("a range of the {reads} reads"), got));
    }
    check
        .storage("value", &value, client)?
        .shape("value", &value, "[capacity, tokens, streams, d_model]", &[capacity, tokens, streams, d_model])?
        .fits("inv_rms", &inv_rms, F32, "[capacity, tokens, streams]", &[capacity, tokens, streams])?
        .fits("query", &query, F32, "[reads, outputs, d_model]", &[reads, outputs, d_model])?
        .fits("lse", &lse, F32, "[reads, tokens, outputs]", &[reads, tokens, outputs])?
        .fits("logit", &logit, F32, LOGIT, &[capacity, reads, tokens, outputs])?
        .fits("d_logit", &d_logit, F32, LOGIT, &[capacity, reads, tokens, outputs])?
        .fits(
            "d_state",
            &d_state,
            value.dtype,
            "[reads, tokens, outputs, d_model]",
            &[reads, tokens, outputs, d_model],
        )?
        .fits("d_token", &d_token, F32, TOKEN, &[reads, tokens, token_gradients(outputs)])?;
    let summed = d_value.shape.len() == 2;
    if summed {
        check.fits("d_value", &d_value, value.dtype, "[tokens, d_model]", &dims.branch())?;
    } else {
        check.fits("d_value", &d_value, value.dtype, "[tokens, streams, d_model]", &dims.state())?;
    }
    let address = check.address(client)?;
    if tokens == 0 {
        return Ok(());
    }

    let work = Work { dims, dtype: value.dtype, outputs, queries: last - first, routing, keyed: false };
    let config = work.choose_history(client, tuning);
    let lanes = config.row.lanes;
    prefix_bwd_kernel_history::launch(
        client,
        cubes(client, tokens),
        config.row.cube_dim(),
        address,
        lanes,
        value.argument(lanes),
        inv_rms.argument(1),
        query.argument(lanes),
        lse.argument(1),
        logit.argument(1),
        d_logit.argument(1),
        d_state.argument(lanes),
        d_token.argument(1),
        d_value.argument(lanes),
        entry,
        first,
        last,
        reads,
        tokens,
        d_model / lanes,
        1.0 / d_model as f32,
        summed,
        config,
        value.dtype,
    );
    Ok(())
}

#[cube(launch, address_type = "dynamic")]
#[expect(clippy::too_many_arguments, reason = "one argument a tensor and size")]
fn prefix_bwd_kernel_history<E: Float, N: Size>(
    value: &[Vector<E, N>],       // [capacity, tokens, streams, vectors]
    inv_rms: &[f32],              // [capacity, tokens, streams]
    query: &[Vector<f32, N>],     // [reads, outputs, vectors]
    lse: &[f32],                  // [reads, tokens, outputs]
    logit: &[f32],                // [capacity, reads, tokens, outputs]
    d_logit: &mut [f32],          // [capacity, reads, tokens, outputs]
    d_state: &[Vector<E, N>],     // [reads, tokens, outputs, vectors]
    d_token: &[f32],              // [reads, tokens, 2 + 2 * outputs]
    d_value: &mut [Vector<E, N>], // [tokens, streams or 1, vectors]
    entry: usize,
    first: usize,
    last: usize,
    reads: usize,
    tokens: usize,
    vectors: usize,
    inv_d_model: f32,
    #[comptime] summed: bool,
    #[comptime] config: PrefixConfig,
    #[define(E)] _value_dtype: ElemType,
) {
    let token = cube_index();
    if token >= tokens {
        terminate!();
    }
    let streams = comptime!(config.streams);
    let outputs = comptime!(config.outputs);
    let group = comptime!(config.group);
    let columns = comptime!(config.row.columns);
    let units = comptime!(config.row.units);
    let unit = UNIT_POS_X as usize;
    let packed = (entry * tokens + token) * streams; // row of the history

    let heads = comptime!(group * outputs);
    let mut sums = CubeSum::publishing(heads, comptime!(heads * TOLD_BACKWARD), comptime!(config.row));
    // One unit makes the scalars of a head.
    let rounds = comptime!(heads.div_ceil(units));
    let mut values = Array::<Vector<f32, N>>::new(comptime!(streams * columns));
    let mut by_value = Array::<Vector<f32, N>>::new(comptime!(streams * columns)); // sum of p d_state
    let mut by_key = Array::<Vector<f32, N>>::new(comptime!(streams * columns)); // d_key = sum of d_logit q
    let mut along = Array::<f32>::new(streams); // <d_key, key> = sum of d_logit logit
    #[unroll]
    for j in 0..streams {
        along[j] = f32::new(0.0);
        #[unroll]
        for c in 0..columns {
            let k = comptime!(j * columns + c);
            by_value[k] = Vector::new(0.0f32);
            by_key[k] = Vector::new(0.0f32);
            let column = clamped(c, vectors, comptime!(config.row));
            values[k] = widen(value[(packed + j) * vectors + column]);
        }
    }

    for start in range_stepped(first, last, group) {
        let mut gradients = Array::<Vector<E, N>>::new(comptime!(heads * columns));
        let mut dots = Array::<f32>::new(heads);
        // Before the sum, past whose barrier no load is moved.
        let mut logits = Array::<f32>::new(rounds);
        let mut weights = Array::<f32>::new(rounds); // p
        let mut shifts = Array::<f32>::new(rounds);
        #[unroll]
        for round in 0..rounds {
            let head = round * units + unit;
            let (read, j) = (start + head / outputs, head % outputs);
            logits[round] = f32::new(0.0);
            weights[round] = f32::new(0.0);
            shifts[round] = f32::new(0.0);
            if head < heads && read < last {
                let own = read * tokens + token; // row of the scalars of the read
                logits[round] = logit[((entry * reads + read) * tokens + token) * outputs + j];
                weights[round] = (logits[round] - lse[own * outputs + j]).exp();
                shifts[round] = d_token[own * comptime!(token_gradients(outputs)) + 2 + j];
            }
        }
        #[unroll]
        for s in 0..group {
            #[unroll]
            for j in 0..outputs {
                let head = comptime!(s * outputs + j);
                let from = comptime!(config.routing.value_stream(j));
                // Past the last read the last one again, whose sum is not taken.
                let row = (min(start + s, last - 1) * tokens + token) * outputs + j;
                let mut dot = f32::new(0.0);
                #[unroll]
                for c in 0..columns {
                    let k = comptime!(head * columns + c);
                    gradients[k] = d_state[row * vectors + clamped(c, vectors, comptime!(config.row))];
                    if inside(c, vectors, comptime!(config.row)) {
                        dot = add_dot(dot, widen(gradients[k]), values[comptime!(from * columns + c)]);
                    }
                }
                dots[head] = dot; // c = <d_state, value>
            }
        }
        sums.gather(&mut dots);
        #[unroll]
        for round in 0..rounds {
            let head = round * units + unit;
            if head < heads {
                // d_logit = p (c - <d_state, state> + d_lse)
                let d = weights[round] * (sums.total(head) + shifts[round]);
                let (read, j) = (start + head / outputs, head % outputs);
                if read < last {
                    d_logit[((entry * reads + read) * tokens + token) * outputs + j] = d;
                }
                sums.publish(head * TOLD_BACKWARD, weights[round]);
                sums.publish(head * TOLD_BACKWARD + 1, d);
                sums.publish(head * TOLD_BACKWARD + 2, d * logits[round]);
            }
        }
        sync_cube();

        #[unroll]
        for s in 0..group {
            if start + s < last {
                #[unroll]
                for j in 0..outputs {
                    let head = comptime!(s * outputs + j);
                    let key = comptime!(config.routing.key_stream(j));
                    let from = comptime!(config.routing.value_stream(j));
                    let p = sums.published(comptime!(head * TOLD_BACKWARD));
                    let d = sums.published(comptime!(head * TOLD_BACKWARD + 1));
                    along[key] += sums.published(comptime!(head * TOLD_BACKWARD + 2));
                    #[unroll]
                    for c in 0..columns {
                        let column = c * units + unit;
                        by_value[comptime!(from * columns + c)] +=
                            Vector::new(p) * widen(gradients[comptime!(head * columns + c)]);
                        if column < vectors {
                            by_key[comptime!(key * columns + c)] +=
                                Vector::new(d) * query[((start + s) * outputs + j) * vectors + column];
                        }
                    }
                }
            }
        }
    }

    // The norm's backward: d_x = n (d_key - key <d_key, key> / d_model) with key = n x.
    let mut total = Array::<Vector<f32, N>>::new(columns);
    #[unroll]
    for j in 0..streams {
        let norm = inv_rms[packed + j];
        let back = norm * norm * along[j] * inv_d_model;
        #[unroll]
        for c in 0..columns {
            let k = comptime!(j * columns + c);
            let column = c * units + unit;
            let gradient = by_value[k] + Vector::new(norm) * by_key[k] - Vector::new(back) * values[k];
            if comptime!(!summed) {
                if column < vectors {
                    d_value[(token * streams + j) * vectors + column] = Vector::cast_from(gradient);
                }
            } else if comptime!(j == 0) {
                total[c] = gradient;
            } else {
                total[c] += gradient;
            }
        }
    }
    if comptime!(summed) {
        #[unroll]
        for c in 0..columns {
            let column = c * units + unit;
            if column < vectors {
                d_value[token * vectors + column] = Vector::cast_from(total[c]);
            }
        }
    }
}

/// The operands of [`prefix_bwd_query`]; `outputs` as in the [forward](super::PrefixFwd).
#[derive(Debug, Clone, Copy)]
pub struct PrefixBwdQuery<'a> {
    /// Saved, f32, f16 or bf16: the history. `[capacity, tokens, streams, d_model]`
    pub value: Operand<'a>,
    /// Saved, f32. `[capacity, tokens, streams]`
    pub inv_rms: Operand<'a>,
    /// Saved, f32. `[all reads, tokens, outputs]`
    pub lse: Operand<'a>,
    /// Saved, f32. `[capacity, all reads, tokens, outputs]`
    pub logit: Operand<'a>,
    /// In place, f32: what [`prefix_bwd_history`] gives is corrected. Pairs of entries and reads that do not see them
    /// are not touched. `[capacity, all reads, tokens, outputs]`
    pub d_logit: Operand<'a>,
    /// Input, f32: the gradients of log-sum-exp in the last `outputs` columns. `[all reads, tokens, 2 + 2 * outputs]`
    pub d_token: Operand<'a>,
    /// In place, f32: the gradients are added to rows `first..reads`. `[all reads, outputs, d_model]`
    pub d_query: Operand<'a>,
    /// Entries of the history.
    pub entries: usize,
    /// The first of the reads whose queries get gradients.
    pub first: usize,
    /// One past the last of them.
    pub reads: usize,
    /// Read i sees the entries up to `i / branches_per_block`.
    pub branches_per_block: usize,
}

/// The gradient of the queries of a pass, in two stages:
/// `d_query[i,j] += sum over tokens and the entries that read i sees of d_logit key`, after a correction by which the
/// gradients of the logits of a read add up to d_lse.
///
/// # Errors
/// If an operand has another shape, element type or a too short buffer, or `routing` does not fit the streams.
pub fn prefix_bwd_query(client: &Client, operands: PrefixBwdQuery, routing: Routing) -> Result<(), KernelError> {
    const NAME: &str = "prefix_bwd_query";
    let PrefixBwdQuery {
        value,
        inv_rms,
        lse,
        logit,
        d_logit,
        d_token,
        d_query,
        entries,
        first,
        reads,
        branches_per_block,
    } = operands;

    let mut check = Check::of(NAME);
    let capacity = check.room("value", &value, entries.saturating_sub(1))?;
    let dims = check.history(&value)?;
    let Dims { tokens, streams, d_model } = dims;
    let [rows_of_reads, outputs] = check.queries("d_query", &d_query)?;
    routing.check(NAME, streams, outputs)?;
    if first > reads || reads > rows_of_reads {
        let got = format!("{first} to {reads}");
        let expected = format!("a range of the {rows_of_reads} rows of `d_query`");
        return Err(KernelError::value(NAME, "first and reads", expected, got));
    }
    for (argument, number) in [("entries", entries), ("branches_per_block", branches_per_block)] {
        if number == 0 {
            return Err(KernelError::value(NAME, argument, "at least 1", number));
        }
    }
    let logits = [capacity, rows_of_reads, tokens, outputs];
    check
        .storage("value", &value, client)?
        .shape("value", &value, "[capacity, tokens, streams, d_model]", &[capacity, tokens, streams, d_model])?
        .fits("inv_rms", &inv_rms, F32, "[capacity, tokens, streams]", &[capacity, tokens, streams])?
        .fits("lse", &lse, F32, "[reads, tokens, outputs]", &logits[1..])?
        .fits("logit", &logit, F32, LOGIT, &logits)?
        .fits("d_logit", &d_logit, F32, LOGIT, &logits)?
        .fits("d_token", &d_token, F32, TOKEN, &[rows_of_reads, tokens, token_gradients(outputs)])?
        .fits("d_query", &d_query, F32, "[reads, outputs, d_model]", &[rows_of_reads, outputs, d_model])?;
    let queries = reads - first;
    if tokens * queries == 0 {
        return Ok(());
    }

    let length = queries * outputs * d_model;
    let rows = rows(entries * tokens, length);
    let stage = Rows::new(client, rows, length);
    stage.check(&mut check)?;
    let address = check.address(client)?;

    let heads = queries * tokens * outputs;
    let (count, dim) = elements(client, heads, UNITS);
    prefix_bwd_kernel_correct::launch(
        client,
        count,
        dim,
        address,
        lse.argument(1),
        logit.argument(1),
        d_logit.argument(1),
        d_token.argument(1),
        heads,
        entries,
        first,
        branches_per_block,
        rows_of_reads,
        tokens,
        outputs,
    );

    let config = Work { dims, dtype: value.dtype, outputs, queries, routing, keyed: false }.choose_query(client);
    let lanes = config.row.lanes;
    prefix_bwd_kernel_query::launch(
        client,
        cubes(client, rows * config.groups),
        config.row.cube_dim(),
        address,
        lanes,
        value.argument(lanes),
        inv_rms.argument(1),
        d_logit.argument(1),
        stage.operand().argument(lanes),
        rows,
        entries,
        first,
        reads,
        branches_per_block,
        rows_of_reads,
        tokens,
        d_model / lanes,
        config,
        value.dtype,
    );
    stage.sum(client, 0..length, &d_query, first * outputs * d_model, true, address);
    Ok(())
}

/// Makes the gradients of a read's logits add up to d_lse: `d_logit -= p (sum of d_logit - d_lse)`, as the p of a read
/// add up to one.
#[cube(launch, address_type = "dynamic")]
#[expect(clippy::too_many_arguments, reason = "one argument a tensor and size")]
fn prefix_bwd_kernel_correct(
    lse: &[f32],         // [rows_of_reads, tokens, outputs]
    logit: &[f32],       // [capacity, rows_of_reads, tokens, outputs]
    d_logit: &mut [f32], // [capacity, rows_of_reads, tokens, outputs]
    d_token: &[f32],     // [rows_of_reads, tokens, 2 + 2 * outputs]
    heads: usize,        // reads - first, tokens, outputs
    entries: usize,
    first: usize,
    branches_per_block: usize,
    rows_of_reads: usize,
    tokens: usize,
    outputs: usize,
) {
    let head = element_index();
    if head >= heads {
        terminate!();
    }
    let own = first * tokens * outputs + head;
    let row = own / outputs; // of the scalars of the read
    let visible = min(row / tokens / branches_per_block + 1, entries);
    let stride = rows_of_reads * tokens * outputs; // from one entry to the next

    let mut excess = 0.0f32 - d_token[row * (2 + 2 * outputs) + 2 + outputs + own % outputs];
    for entry in 0..visible {
        excess += d_logit[entry * stride + own];
    }
    for entry in 0..visible {
        let p = (logit[entry * stride + own] - lse[own]).exp();
        d_logit[entry * stride + own] -= p * excess;
    }
}

#[cube(launch, address_type = "dynamic")]
#[expect(clippy::too_many_arguments, reason = "one argument a tensor and size")]
fn prefix_bwd_kernel_query<E: Float, N: Size>(
    value: &[Vector<E, N>],         // [capacity, tokens, streams, vectors]
    inv_rms: &[f32],                // [capacity, tokens, streams]
    d_logit: &[f32],                // [capacity, rows_of_reads, tokens, outputs]
    row_sum: &mut [Vector<f32, N>], // [rows, reads - first, outputs, vectors]
    rows: usize,
    entries: usize,
    first: usize,
    reads: usize,
    branches_per_block: usize,
    rows_of_reads: usize,
    tokens: usize,
    vectors: usize,
    #[comptime] config: PrefixConfig,
    #[define(E)] _value_dtype: ElemType,
) {
    let cube = cube_index();
    let row = cube / comptime!(config.groups);
    if row >= rows {
        terminate!();
    }
    let streams = comptime!(config.streams);
    let outputs = comptime!(config.outputs);
    let group = comptime!(config.group);
    let heads = comptime!(group * outputs);
    let chunk = comptime!(config.chunk); // pairs of an entry and a token at a time
    let columns = comptime!(config.row.columns);
    let units = comptime!(config.row.units);
    let unit = UNIT_POS_X as usize;
    let begin = first + cube % comptime!(config.groups) * group; // the read of head 0

    let mut sums = Array::<Vector<f32, N>>::new(comptime!(heads * columns));
    #[unroll]
    for k in 0..comptime!(heads * columns) {
        sums[k] = Vector::new(0.0f32);
    }
    // No read of the group sees more entries than its last.
    let last = min(begin + group, reads) - 1;
    let visible = min(last / branches_per_block + 1, entries);
    let items = visible * tokens;
    for start in range_stepped(row, items, rows * chunk) {
        // All loads of the chunk, so that they are in flight together.
        let mut values = Array::<Vector<E, N>>::new(comptime!(chunk * streams * columns));
        let mut scales = Array::<f32>::new(comptime!(chunk * streams));
        let mut d_logits = Array::<f32>::new(comptime!(chunk * heads));
        #[unroll]
        for i in 0..chunk {
            // Past the last item the last one again, whose gradients are zero.
            let item = min(start + i * rows, items - 1);
            #[unroll]
            for j in 0..streams {
                scales[comptime!(i * streams + j)] = inv_rms[item * streams + j];
                #[unroll]
                for c in 0..columns {
                    let k = comptime!((i * streams + j) * columns + c);
                    values[k] = value[(item * streams + j) * vectors + clamped(c, vectors, comptime!(config.row))];
                }
            }
        }
        #[unroll]
        for i in 0..chunk {
            let item = start + i * rows;
            let (entry, token) = (item / tokens, item % tokens);
            let first_to_see = entry * branches_per_block;
            #[unroll]
            for s in 0..group {
                let read = begin + s;
                let seen = item < items && read < reads && first_to_see <= read;
                #[unroll]
                for j in 0..outputs {
                    let k = comptime!((i * group + s) * outputs + j);
                    d_logits[k] = f32::new(0.0);
                    if seen {
                        d_logits[k] = d_logit[((entry * rows_of_reads + read) * tokens + token) * outputs + j];
                    }
                }
            }
        }

        #[unroll]
        for i in 0..chunk {
            let mut keys = Array::<Vector<f32, N>>::new(comptime!(streams * columns));
            #[unroll]
            for j in 0..streams {
                #[unroll]
                for c in 0..columns {
                    let k = comptime!(j * columns + c);
                    let x = widen(values[comptime!((i * streams + j) * columns + c)]);
                    keys[k] = Vector::new(scales[comptime!(i * streams + j)]) * x;
                }
            }
            #[unroll]
            for s in 0..group {
                #[unroll]
                for j in 0..outputs {
                    let key = comptime!(config.routing.key_stream(j));
                    let head = comptime!(s * outputs + j);
                    let d = d_logits[comptime!(i * heads + head)];
                    #[unroll]
                    for c in 0..columns {
                        sums[comptime!(head * columns + c)] += Vector::new(d) * keys[comptime!(key * columns + c)];
                    }
                }
            }
        }
    }
    #[unroll]
    for s in 0..group {
        let read = begin + s;
        if read < reads {
            #[unroll]
            for j in 0..outputs {
                #[unroll]
                for c in 0..columns {
                    let column = c * units + unit;
                    if column < vectors {
                        let at = ((row * (reads - first) + read - first) * outputs + j) * vectors + column;
                        row_sum[at] = sums[comptime!((s * outputs + j) * columns + c)];
                    }
                }
            }
        }
    }
}
