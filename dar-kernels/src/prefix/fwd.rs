use cubecl::prelude::*;

use super::config::{PrefixConfig, choose};
use crate::launch::{Tuning, cube_count, cube_index};
use crate::numeric::lane_sum;
use crate::operand::{Check, F32, Operand};
use crate::reduce::CubeSum;
use crate::softmax::{FLOOR, OnlineSoftmax};
use crate::{Dims, KernelError, Routing};

/// The operands of [`prefix_fwd`].
#[derive(Debug, Clone, Copy)]
pub struct PrefixFwd<'a> {
    /// Input, f32, f16 or bf16: the history; entries past `entries` are not read. `[capacity, tokens, streams, d_model]`
    pub value: Operand<'a>,
    /// Input, f32: inverse RMS of the history. `[capacity, tokens, streams]`
    pub inv_rms: Operand<'a>,
    /// Input, f32, f16 or bf16. `[branches, streams, d_model]`
    pub query: Operand<'a>,
    /// Output, f32: log-sum-exp. `[branches, tokens, streams]`
    pub lse: Operand<'a>,
    /// Output, f32: what the backward needs beside `lse`. `[entries, branches, tokens, streams]`
    pub logit: Operand<'a>,
    /// Output, in the type of `value`: retrieved states. `[branches, tokens, streams, d_model]`
    pub state: Operand<'a>,
    /// How many entries the history has, at least one.
    pub entries: usize,
}

/// Completed-history prefix, forward (A.2–A.5).
///
/// # Errors
/// If an operand has another shape, element type or a too short buffer, if there is no entry, or `routing` does not fit
/// the streams.
pub fn prefix_fwd(client: &Client, operands: PrefixFwd, routing: Routing, tuning: Tuning) -> Result<(), KernelError> {
    const NAME: &str = "prefix_fwd";
    let PrefixFwd { value, inv_rms, query, lse, logit, state, entries } = operands;

    let mut check = Check::of(NAME);
    let capacity = check.room("value", &value, entries.saturating_sub(1))?;
    let dims = check.history(&value)?;
    let Dims { tokens, streams, d_model } = dims;
    let branches = check.leading("query", &query)?;
    if entries == 0 {
        return Err(KernelError::value(NAME, "entries", "at least 1", entries));
    }
    routing.check(NAME, streams)?;
    check
        .storage("value", &value, client)?
        .storage("query", &query, client)?
        .dtype("inv_rms", &inv_rms, F32)?
        .dtype("lse", &lse, F32)?
        .dtype("logit", &logit, F32)?
        .dtype("state", &state, value.dtype)?
        .shape("value", &value, "[capacity, tokens, streams, d_model]", &[capacity, tokens, streams, d_model])?
        .shape("inv_rms", &inv_rms, "[capacity, tokens, streams]", &[capacity, tokens, streams])?
        .shape("query", &query, "[branches, streams, d_model]", &[branches, streams, d_model])?
        .shape("lse", &lse, "[branches, tokens, streams]", &[branches, tokens, streams])?
        .shape("logit", &logit, "[entries, branches, tokens, streams]", &[entries, branches, tokens, streams])?
        .shape("state", &state, "[branches, tokens, streams, d_model]", &[branches, tokens, streams, d_model])?;
    if tokens == 0 {
        return Ok(());
    }

    let (lanes, groups, config) = choose(client, dims, value.dtype, branches, routing, tuning);
    prefix_fwd_kernel::launch(
        client,
        cube_count(client, tokens, groups),
        config.row.cube_dim(),
        check.address(client)?,
        lanes,
        value.argument(lanes),
        inv_rms.argument(1),
        query.argument(lanes),
        lse.argument(1),
        logit.argument(1),
        state.argument(lanes),
        entries,
        branches,
        tokens,
        d_model / lanes,
        config,
        value.dtype,
        query.dtype,
    );
    Ok(())
}

#[cube(launch, address_type = "dynamic")]
#[expect(clippy::too_many_arguments, reason = "one argument a tensor and size")]
fn prefix_fwd_kernel<E: Float, Q: Float, N: Size>(
    value: &[Vector<E, N>],     // [capacity, tokens, streams, vectors]
    inv_rms: &[f32],            // [capacity, tokens, streams]
    query: &[Vector<Q, N>],     // [branches, streams, vectors]
    lse: &mut [f32],            // [branches, tokens, streams]
    logit: &mut [f32],          // [entries, branches, tokens, streams]
    state: &mut [Vector<E, N>], // [branches, tokens, streams, vectors]
    entries: usize,
    branches: usize,
    tokens: usize,
    vectors: usize,
    #[comptime] config: PrefixConfig,
    #[define(E)] _value_dtype: ElemType,
    #[define(Q)] _query_dtype: ElemType,
) {
    let token = cube_index();
    if token >= tokens {
        terminate!();
    }
    let streams = comptime!(config.streams);
    let group = comptime!(config.group);
    let heads = comptime!(group * streams);
    let chunk = comptime!(config.chunk);
    let columns = comptime!(config.row.columns);
    let units = comptime!(config.row.units);
    let unit = UNIT_POS_X as usize;
    let first = CUBE_POS_Z as usize * group; // query of head 0

    let mut sums = CubeSum::new(comptime!(chunk * heads), units, comptime!(config.reduction));
    let mut softmax = OnlineSoftmax::empty(heads);
    let mut retrieved = Array::<Vector<f32, N>>::new(comptime!(heads * columns)); // U, before the division by Z
    #[unroll]
    for k in 0..comptime!(heads * columns) {
        retrieved[k] = Vector::new(0.0f32);
    }

    for start in range_stepped(0, entries, chunk) {
        // All loads of the chunk, so that they are in flight together.
        let mut values = Array::<Vector<E, N>>::new(comptime!(chunk * streams * columns));
        let mut scales = Array::<f32>::new(comptime!(chunk * streams));
        #[unroll]
        for r in 0..chunk {
            #[unroll]
            for j in 0..streams {
                let row = ((start + r) * tokens + token) * streams + j;
                scales[r * streams + j] = f32::new(0.0);
                if start + r < entries {
                    scales[r * streams + j] = inv_rms[row];
                }
                #[unroll]
                for c in 0..columns {
                    let k = comptime!((r * streams + j) * columns + c);
                    let column = c * units + unit;
                    values[k] = Vector::new(E::from_int(0));
                    if start + r < entries && column < vectors {
                        values[k] = value[row * vectors + column];
                    }
                }
            }
        }

        // (A.1)
        let mut logits = Array::<f32>::new(comptime!(chunk * heads));
        #[unroll]
        for s in 0..group {
            #[unroll]
            for j in 0..streams {
                let mut queries = Array::<Vector<f32, N>>::new(columns);
                #[unroll]
                for c in 0..columns {
                    let column = c * units + unit;
                    queries[c] = Vector::new(0.0f32);
                    if first + s < branches && column < vectors {
                        queries[c] = Vector::cast_from(query[((first + s) * streams + j) * vectors + column]);
                    }
                }
                let key = comptime!(config.routing.key_stream(j));
                #[unroll]
                for r in 0..chunk {
                    let mut dot = Vector::<f32, N>::new(0.0f32);
                    #[unroll]
                    for c in 0..columns {
                        let k = comptime!((r * streams + key) * columns + c);
                        dot += queries[c] * Vector::cast_from(values[k]);
                    }
                    logits[comptime!((r * group + s) * streams + j)] = lane_sum(dot);
                }
            }
        }
        sums.sum(&mut logits);

        #[unroll]
        for s in 0..group {
            #[unroll]
            for j in 0..streams {
                let head = comptime!(s * streams + j);
                let key = comptime!(config.routing.key_stream(j));
                let from = comptime!(config.routing.value_stream(j));
                let mut top = f32::new(FLOOR);
                #[unroll]
                for r in 0..chunk {
                    let k = comptime!(r * heads + head);
                    if start + r < entries {
                        logits[k] *= scales[comptime!(r * streams + key)];
                        if unit == 0 && first + s < branches {
                            logit[(((start + r) * branches + first + s) * tokens + token) * streams + j] = logits[k];
                        }
                    } else {
                        logits[k] = f32::new(FLOOR); // no weight
                    }
                    top = max(top, logits[k]);
                }
                let scale = softmax.raise(head, top); // (A.2)
                #[unroll]
                for c in 0..columns {
                    let k = comptime!(head * columns + c);
                    retrieved[k] *= Vector::new(scale);
                }
                #[unroll]
                for r in 0..chunk {
                    let weight = softmax.push(head, logits[comptime!(r * heads + head)]); // (A.3)
                    #[unroll]
                    for c in 0..columns {
                        let k = comptime!(head * columns + c);
                        let from = comptime!((r * streams + from) * columns + c);
                        retrieved[k] += Vector::new(weight) * Vector::cast_from(values[from]); // (A.4)
                    }
                }
            }
        }
    }

    // (A.5)
    #[unroll]
    for s in 0..group {
        if first + s < branches {
            #[unroll]
            for j in 0..streams {
                let head = comptime!(s * streams + j);
                let row = ((first + s) * tokens + token) * streams + j;
                let normaliser = softmax.normaliser(head);
                if unit == 0 {
                    lse[row] = softmax.lse(head);
                }
                #[unroll]
                for c in 0..columns {
                    let column = c * units + unit;
                    if column < vectors {
                        let mean = retrieved[comptime!(head * columns + c)] * Vector::new(normaliser);
                        state[row * vectors + column] = Vector::cast_from(mean);
                    }
                }
            }
        }
    }
}
