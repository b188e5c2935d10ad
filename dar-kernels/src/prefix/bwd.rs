use cubecl::prelude::*;

use super::config::{PrefixConfig, choose_history, choose_query};
use crate::launch::{Row, Tuning, cube_count, cube_index, lanes};
use crate::numeric::lane_sum;
use crate::operand::{Check, F32, Operand};
use crate::reduce::{CubeSum, Reduction};
use crate::rows::{Rows, rows};
use crate::{Dims, KernelError, Routing};

/// The operands of [`prefix_bwd_shift`].
#[derive(Debug, Clone, Copy)]
pub struct PrefixBwdShift<'a> {
    /// Saved, f32, f16 or bf16: retrieved states. `[branches, tokens, streams, d_model]`
    pub state: Operand<'a>,
    /// Input, in the type of `state`: their gradient. `[branches, tokens, streams, d_model]`
    pub d_state: Operand<'a>,
    /// Input, f32: the gradient of the log-sum-exp. `[branches, tokens, streams]`
    pub d_lse: Operand<'a>,
    /// Output, f32: `d_lse - <d_state, state>`. `[branches, tokens, streams]`
    pub shift: Operand<'a>,
}

/// The part of every logit's gradient that does not depend on the entry.
///
/// # Errors
/// If an operand has another shape, element type or a too short buffer.
pub fn prefix_bwd_shift(client: &Client, operands: PrefixBwdShift, tuning: Tuning) -> Result<(), KernelError> {
    const NAME: &str = "prefix_bwd_shift";
    const AXES: &str = "[branches, tokens, streams, d_model]";
    let PrefixBwdShift { state, d_state, d_lse, shift } = operands;

    let mut check = Check::of(NAME);
    let &[branches, tokens, streams, d_model @ (1..)] = state.shape else {
        return Err(check.wrong_shape("state", &state, "[branches, tokens, streams, d_model] with d_model ≥ 1"));
    };
    let shape = [branches, tokens, streams, d_model];
    check
        .storage("state", &state, client)?
        .dtype("d_state", &d_state, state.dtype)?
        .dtype("d_lse", &d_lse, F32)?
        .dtype("shift", &shift, F32)?
        .shape("state", &state, AXES, &shape)?
        .shape("d_state", &d_state, AXES, &shape)?
        .shape("d_lse", &d_lse, "[branches, tokens, streams]", &shape[..3])?
        .shape("shift", &shift, "[branches, tokens, streams]", &shape[..3])?;
    let rows = branches * tokens * streams;
    if rows == 0 {
        return Ok(());
    }

    let lanes = lanes(client, state.dtype, d_model);
    let reduction = tuning.reduction(client);
    let row = Row::choose(client, d_model / lanes, Row::ANY_COLUMNS, reduction);
    prefix_bwd_kernel_shift::launch(
        client,
        cube_count(client, rows, 1),
        row.cube_dim(),
        check.address(client)?,
        lanes,
        state.argument(lanes),
        d_state.argument(lanes),
        d_lse.argument(1),
        shift.argument(1),
        rows,
        d_model / lanes,
        row.units,
        reduction,
        state.dtype,
    );
    Ok(())
}

#[cube(launch, address_type = "dynamic")]
fn prefix_bwd_kernel_shift<E: Float, N: Size>(
    state: &[Vector<E, N>],   // [rows, vectors]
    d_state: &[Vector<E, N>], // [rows, vectors]
    d_lse: &[f32],            // [rows]
    shift: &mut [f32],        // [rows]
    rows: usize,              // branches × tokens × streams
    vectors: usize,
    #[comptime] units: usize,
    #[comptime] reduction: Reduction,
    #[define(E)] _dtype: ElemType,
) {
    let row = cube_index();
    if row >= rows {
        terminate!();
    }
    let mut sums = CubeSum::new(1usize, units, reduction);
    let mut dot = Vector::<f32, N>::new(0.0f32);
    for column in range_stepped(UNIT_POS_X as usize, vectors, units) {
        let k = row * vectors + column;
        dot += Vector::cast_from(state[k]) * Vector::cast_from(d_state[k]);
    }
    let mut sum = Array::<f32>::new(1usize);
    sum[0] = lane_sum(dot);
    sums.sum(&mut sum);
    if UNIT_POS_X == 0 {
        shift[row] = d_lse[row] - sum[0];
    }
}

/// The operands of [`prefix_bwd_history`].
#[derive(Debug, Clone, Copy)]
pub struct PrefixBwdHistory<'a> {
    /// Saved, f32, f16 or bf16: the history. `[capacity, tokens, streams, d_model]`
    pub value: Operand<'a>,
    /// Saved, f32. `[capacity, tokens, streams]`
    pub inv_rms: Operand<'a>,
    /// Saved, f32, f16 or bf16. `[branches, streams, d_model]`
    pub query: Operand<'a>,
    /// Saved, f32. `[branches, tokens, streams]`
    pub lse: Operand<'a>,
    /// Saved, f32. `[entries, branches, tokens, streams]`
    pub logit: Operand<'a>,
    /// Input, in the type of `value`: the gradient of the retrieved states. `[branches, tokens, streams, d_model]`
    pub d_state: Operand<'a>,
    /// Input, f32: the output of [`prefix_bwd_shift`]. `[branches, tokens, streams]`
    pub shift: Operand<'a>,
    /// Output, f32: only the entries of `count` are written. `[entries, branches, tokens, streams]`
    pub d_logit: Operand<'a>,
    /// Output, in the type of `value`: the gradient of `count` entries. `[count, tokens, streams, d_model]`
    pub d_value: Operand<'a>,
    /// The first of the entries whose gradient is formed.
    pub first: usize,
}

/// The gradient of some entries of the history, whole and once: by value, and by key through the norm.
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
    let PrefixBwdHistory { value, inv_rms, query, lse, logit, d_state, shift, d_logit, d_value, first } = operands;

    let mut check = Check::of(NAME);
    let capacity = check.room("value", &value, first)?;
    let dims = check.history(&value)?;
    let Dims { tokens, streams, d_model } = dims;
    routing.check(NAME, streams)?;
    let branches = check.leading("query", &query)?;
    let entries = check.leading("logit", &logit)?;
    let count = d_value.shape.first().copied().unwrap_or(0);
    if first + count > entries || entries > capacity {
        return Err(KernelError::value(
            NAME,
            "first",
            format!(
                "at most {}, as `d_value` has {count} of {entries} entries",
                entries.min(capacity).saturating_sub(count)
            ),
            first,
        ));
    }
    check
        .storage("value", &value, client)?
        .storage("query", &query, client)?
        .dtype("inv_rms", &inv_rms, F32)?
        .dtype("lse", &lse, F32)?
        .dtype("logit", &logit, F32)?
        .dtype("d_state", &d_state, value.dtype)?
        .dtype("shift", &shift, F32)?
        .dtype("d_logit", &d_logit, F32)?
        .dtype("d_value", &d_value, value.dtype)?
        .shape("value", &value, "[capacity, tokens, streams, d_model]", &[capacity, tokens, streams, d_model])?
        .shape("inv_rms", &inv_rms, "[capacity, tokens, streams]", &[capacity, tokens, streams])?
        .shape("query", &query, "[branches, streams, d_model]", &[branches, streams, d_model])?
        .shape("lse", &lse, "[branches, tokens, streams]", &[branches, tokens, streams])?
        .shape("logit", &logit, "[entries, branches, tokens, streams]", &[entries, branches, tokens, streams])?
        .shape("d_state", &d_state, "[branches, tokens, streams, d_model]", &[branches, tokens, streams, d_model])?
        .shape("shift", &shift, "[branches, tokens, streams]", &[branches, tokens, streams])?
        .shape("d_logit", &d_logit, "[entries, branches, tokens, streams]", &[entries, branches, tokens, streams])?
        .shape("d_value", &d_value, "[count, tokens, streams, d_model]", &[count, tokens, streams, d_model])?;
    if tokens * count == 0 {
        return Ok(());
    }

    let (lanes, config) = choose_history(client, dims, value.dtype, branches, routing, tuning);
    prefix_bwd_kernel_history::launch(
        client,
        cube_count(client, tokens * count, 1),
        config.row.cube_dim(),
        check.address(client)?,
        lanes,
        value.argument(lanes),
        inv_rms.argument(1),
        query.argument(lanes),
        lse.argument(1),
        logit.argument(1),
        d_state.argument(lanes),
        shift.argument(1),
        d_logit.argument(1),
        d_value.argument(lanes),
        first,
        count,
        branches,
        tokens,
        d_model / lanes,
        d_model as f32,
        config,
        value.dtype,
        query.dtype,
    );
    Ok(())
}

#[cube(launch, address_type = "dynamic")]
#[expect(clippy::too_many_arguments, reason = "one argument a tensor and size")]
fn prefix_bwd_kernel_history<E: Float, Q: Float, N: Size>(
    value: &[Vector<E, N>],       // [capacity, tokens, streams, vectors]
    inv_rms: &[f32],              // [capacity, tokens, streams]
    query: &[Vector<Q, N>],       // [branches, streams, vectors]
    lse: &[f32],                  // [branches, tokens, streams]
    logit: &[f32],                // [entries, branches, tokens, streams]
    d_state: &[Vector<E, N>],     // [branches, tokens, streams, vectors]
    shift: &[f32],                // [branches, tokens, streams]
    d_logit: &mut [f32],          // [entries, branches, tokens, streams]
    d_value: &mut [Vector<E, N>], // [count, tokens, streams, vectors]
    first: usize,
    count: usize,
    branches: usize,
    tokens: usize,
    vectors: usize,
    d_model: f32,
    #[comptime] config: PrefixConfig,
    #[define(E)] _value_dtype: ElemType,
    #[define(Q)] _query_dtype: ElemType,
) {
    let item = cube_index();
    if item >= tokens * count {
        terminate!();
    }
    let entry = first + item / tokens;
    let token = item % tokens;
    let streams = comptime!(config.streams);
    let group = comptime!(config.group);
    let columns = comptime!(config.row.columns);
    let units = comptime!(config.row.units);
    let unit = UNIT_POS_X as usize;

    let mut sums = CubeSum::new(comptime!(group * streams), units, comptime!(config.reduction));
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
            let column = c * units + unit;
            values[k] = Vector::new(0.0f32);
            by_value[k] = Vector::new(0.0f32);
            by_key[k] = Vector::new(0.0f32);
            if column < vectors {
                values[k] = Vector::cast_from(value[((entry * tokens + token) * streams + j) * vectors + column]);
            }
        }
    }

    for start in range_stepped(0, branches, group) {
        let mut gradients = Array::<Vector<f32, N>>::new(comptime!(group * streams * columns));
        let mut dots = Array::<f32>::new(comptime!(group * streams));
        #[unroll]
        for s in 0..group {
            #[unroll]
            for j in 0..streams {
                let head = comptime!(s * streams + j);
                let from = comptime!(config.routing.value_stream(j));
                let mut dot = Vector::<f32, N>::new(0.0f32);
                #[unroll]
                for c in 0..columns {
                    let k = comptime!(head * columns + c);
                    let column = c * units + unit;
                    gradients[k] = Vector::new(0.0f32);
                    if start + s < branches && column < vectors {
                        let row = ((start + s) * tokens + token) * streams + j;
                        gradients[k] = Vector::cast_from(d_state[row * vectors + column]);
                    }
                    dot += gradients[k] * values[comptime!(from * columns + c)];
                }
                dots[head] = lane_sum(dot); // c = <d_state, value>
            }
        }
        sums.sum(&mut dots);

        #[unroll]
        for s in 0..group {
            if start + s < branches {
                #[unroll]
                for j in 0..streams {
                    let head = comptime!(s * streams + j);
                    let key = comptime!(config.routing.key_stream(j));
                    let from = comptime!(config.routing.value_stream(j));
                    let row = ((start + s) * tokens + token) * streams + j;
                    let at = ((entry * branches + start + s) * tokens + token) * streams + j;
                    // d_logit = p (c - <d_state, state> + d_lse)
                    let p = (logit[at] - lse[row]).exp();
                    let d = p * (dots[head] + shift[row]);
                    along[key] += d * logit[at];
                    if unit == 0 {
                        d_logit[at] = d;
                    }
                    #[unroll]
                    for c in 0..columns {
                        let column = c * units + unit;
                        by_value[comptime!(from * columns + c)] +=
                            Vector::new(p) * gradients[comptime!(head * columns + c)];
                        if column < vectors {
                            by_key[comptime!(key * columns + c)] += Vector::new(d)
                                * Vector::cast_from(query[((start + s) * streams + j) * vectors + column]);
                        }
                    }
                }
            }
        }
    }

    // The norm's backward: d_x = n (d_key - key <d_key, key> / d_model) with key = n x.
    #[unroll]
    for j in 0..streams {
        let norm = inv_rms[(entry * tokens + token) * streams + j];
        let back = norm * norm * along[j] / d_model;
        #[unroll]
        for c in 0..columns {
            let k = comptime!(j * columns + c);
            let column = c * units + unit;
            if column < vectors {
                let gradient = by_value[k] + Vector::new(norm) * by_key[k] - Vector::new(back) * values[k];
                d_value[(item * streams + j) * vectors + column] = Vector::cast_from(gradient);
            }
        }
    }
}

/// The operands of [`prefix_bwd_query`].
#[derive(Debug, Clone, Copy)]
pub struct PrefixBwdQuery<'a> {
    /// Saved, f32, f16 or bf16: the history. `[capacity, tokens, streams, d_model]`
    pub value: Operand<'a>,
    /// Saved, f32. `[capacity, tokens, streams]`
    pub inv_rms: Operand<'a>,
    /// Input, f32: what [`prefix_bwd_history`] writes, of all entries. `[entries, branches, tokens, streams]`
    pub d_logit: Operand<'a>,
    /// Output, f32. `[branches, streams, d_model]`
    pub d_query: Operand<'a>,
}

/// The gradient of the queries, in two stages: `d_query[s,j] = sum over entries and tokens of d_logit key`.
///
/// # Errors
/// If an operand has another shape, element type or a too short buffer, or `routing` does not fit the streams.
pub fn prefix_bwd_query(
    client: &Client,
    operands: PrefixBwdQuery,
    routing: Routing,
    tuning: Tuning,
) -> Result<(), KernelError> {
    const NAME: &str = "prefix_bwd_query";
    let PrefixBwdQuery { value, inv_rms, d_logit, d_query } = operands;

    let mut check = Check::of(NAME);
    let entries = check.leading("d_logit", &d_logit)?;
    let capacity = check.room("value", &value, entries - 1)?;
    let dims = check.history(&value)?;
    let Dims { tokens, streams, d_model } = dims;
    routing.check(NAME, streams)?;
    let branches = check.leading("d_query", &d_query)?;
    check
        .storage("value", &value, client)?
        .dtype("inv_rms", &inv_rms, F32)?
        .dtype("d_logit", &d_logit, F32)?
        .dtype("d_query", &d_query, F32)?
        .shape("value", &value, "[capacity, tokens, streams, d_model]", &[capacity, tokens, streams, d_model])?
        .shape("inv_rms", &inv_rms, "[capacity, tokens, streams]", &[capacity, tokens, streams])?
        .shape("d_logit", &d_logit, "[entries, branches, tokens, streams]", &[entries, branches, tokens, streams])?
        .shape("d_query", &d_query, "[branches, streams, d_model]", &[branches, streams, d_model])?;

    let (lanes, groups, config) = choose_query(client, dims, value.dtype, branches, routing, tuning);
    let length = branches * streams * d_model;
    let rows = rows(entries * tokens, length);
    let stage = Rows::new(client, rows, length);
    stage.check(&mut check)?;
    let address = check.address(client)?;
    prefix_bwd_kernel_query::launch(
        client,
        cube_count(client, rows, groups),
        config.row.cube_dim(),
        address,
        lanes,
        value.argument(lanes),
        inv_rms.argument(1),
        d_logit.argument(1),
        stage.operand().argument(lanes),
        rows,
        entries,
        branches,
        tokens,
        d_model / lanes,
        config,
        value.dtype,
    );
    stage.sum(client, &d_query, address);
    Ok(())
}

#[cube(launch, address_type = "dynamic")]
#[expect(clippy::too_many_arguments, reason = "one argument a tensor and size")]
fn prefix_bwd_kernel_query<E: Float, N: Size>(
    value: &[Vector<E, N>],         // [capacity, tokens, streams, vectors]
    inv_rms: &[f32],                // [capacity, tokens, streams]
    d_logit: &[f32],                // [entries, branches, tokens, streams]
    row_sum: &mut [Vector<f32, N>], // [rows, branches, streams, vectors]
    rows: usize,
    entries: usize,
    branches: usize,
    tokens: usize,
    vectors: usize,
    #[comptime] config: PrefixConfig,
    #[define(E)] _value_dtype: ElemType,
) {
    let row = cube_index();
    if row >= rows {
        terminate!();
    }
    let streams = comptime!(config.streams);
    let group = comptime!(config.group);
    let heads = comptime!(group * streams);
    let columns = comptime!(config.row.columns);
    let units = comptime!(config.row.units);
    let unit = UNIT_POS_X as usize;
    let first = CUBE_POS_Z as usize * group;

    let mut sums = Array::<Vector<f32, N>>::new(comptime!(heads * columns));
    #[unroll]
    for k in 0..comptime!(heads * columns) {
        sums[k] = Vector::new(0.0f32);
    }
    for item in range_stepped(row, entries * tokens, rows) {
        let entry = item / tokens;
        let token = item % tokens;
        let mut keys = Array::<Vector<f32, N>>::new(comptime!(streams * columns));
        #[unroll]
        for j in 0..streams {
            let norm = inv_rms[item * streams + j];
            #[unroll]
            for c in 0..columns {
                let column = c * units + unit;
                keys[comptime!(j * columns + c)] = Vector::new(0.0f32);
                if column < vectors {
                    let x = Vector::<f32, N>::cast_from(value[(item * streams + j) * vectors + column]);
                    keys[comptime!(j * columns + c)] = Vector::new(norm) * x;
                }
            }
        }
        #[unroll]
        for s in 0..group {
            if first + s < branches {
                #[unroll]
                for j in 0..streams {
                    let key = comptime!(config.routing.key_stream(j));
                    let d = d_logit[((entry * branches + first + s) * tokens + token) * streams + j];
                    #[unroll]
                    for c in 0..columns {
                        sums[comptime!((s * streams + j) * columns + c)] +=
                            Vector::new(d) * keys[comptime!(key * columns + c)];
                    }
                }
            }
        }
    }
    #[unroll]
    for s in 0..group {
        if first + s < branches {
            #[unroll]
            for j in 0..streams {
                #[unroll]
                for c in 0..columns {
                    let column = c * units + unit;
                    if column < vectors {
                        let at = ((row * branches + first + s) * streams + j) * vectors + column;
                        row_sum[at] = sums[comptime!((s * streams + j) * columns + c)];
                    }
                }
            }
        }
    }
}
