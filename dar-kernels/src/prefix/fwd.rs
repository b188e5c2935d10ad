use cubecl::prelude::*;

use super::config::{PrefixConfig, Work};
use crate::launch::{Tuning, cube_index, cubes};
use crate::numeric::lane_sum;
use crate::operand::{Check, F32, Operand};
use crate::reduce::CubeSum;
use crate::softmax::{FLOOR, OnlineSoftmax};
use crate::{Dims, KernelError, Routing};

/// The operands of [`prefix_fwd`]. There are as many `outputs` as streams, or one of two streams with
/// [`Routing::FixedKeyValue`].
#[derive(Debug, Clone, Copy)]
pub struct PrefixFwd<'a> {
    /// Input, f32, f16 or bf16: the history; entries past `entries` are not read.
    /// `[capacity, tokens, streams, d_model]`
    pub value: Operand<'a>,
    /// Input, f32: inverse RMS of the history. `[capacity, tokens, streams]`
    pub inv_rms: Operand<'a>,
    /// Input, f32. `[reads, outputs, d_model]`
    pub query: Operand<'a>,
    /// Output, f32: log-sum-exp, in the rows of the reads. `[reads, tokens, outputs]`
    pub lse: Operand<'a>,
    /// Output, f32: what the backward needs beside `lse`, in the rows of the entries and reads.
    /// `[capacity, reads, tokens, outputs]`
    pub logit: Operand<'a>,
    /// Output, in the type of `value`: retrieved states, from row `slot` on. `[slots, tokens, outputs, d_model]`
    pub state: Operand<'a>,
    /// How many entries the history has, at least one.
    pub entries: usize,
    /// The first of the reads that are served.
    pub first: usize,
    /// How many reads are served.
    pub count: usize,
    /// Where the state of the first one goes.
    pub slot: usize,
}

/// Completed-history prefix of some reads, forward (A.2–A.5).
///
/// # Errors
/// If an operand has another shape, element type or a too short buffer, if there is no entry or no row for a read, or
/// `routing` does not fit the streams.
pub fn prefix_fwd(client: &Client, operands: PrefixFwd, routing: Routing, tuning: Tuning) -> Result<(), KernelError> {
    const NAME: &str = "prefix_fwd";
    let PrefixFwd { value, inv_rms, query, lse, logit, state, entries, first, count, slot } = operands;

    let mut check = Check::of(NAME);
    let capacity = check.room("value", &value, entries.saturating_sub(1))?;
    let dims = check.history(&value)?;
    let Dims { tokens, streams, d_model } = dims;
    if entries == 0 {
        return Err(KernelError::value(NAME, "entries", "at least 1", entries));
    }
    let [reads, outputs] = check.queries("query", &query)?;
    routing.check(NAME, streams, outputs)?;
    let slots = check.leading("state", &state)?;
    check
        .range("first", [first, count], "reads", reads)?
        .range("slot", [slot, count], "slots", slots)?
        .storage("value", &value, client)?
        .shape("value", &value, "[capacity, tokens, streams, d_model]", &[capacity, tokens, streams, d_model])?
        .fits("inv_rms", &inv_rms, F32, "[capacity, tokens, streams]", &[capacity, tokens, streams])?
        .fits("query", &query, F32, "[reads, outputs, d_model]", &[reads, outputs, d_model])?
        .fits("lse", &lse, F32, "[reads, tokens, outputs]", &[reads, tokens, outputs])?
        .fits("logit", &logit, F32, "[capacity, reads, tokens, outputs]", &[capacity, reads, tokens, outputs])?
        .fits("state", &state, value.dtype, "[slots, tokens, outputs, d_model]", &[slots, tokens, outputs, d_model])?;
    let address = check.address(client)?;
    if tokens * count == 0 {
        return Ok(());
    }

    let work = Work { dims, dtype: value.dtype, outputs, queries: count, routing };
    let (groups, config) = work.choose(client, tuning);
    let lanes = config.row.lanes;
    prefix_fwd_kernel::launch(
        client,
        cubes(client, tokens, groups),
        config.row.cube_dim(),
        address,
        lanes,
        value.argument(lanes),
        inv_rms.argument(1),
        query.argument(lanes),
        lse.argument(1),
        logit.argument(1),
        state.argument(lanes),
        entries,
        first,
        count,
        slot,
        reads,
        tokens,
        d_model / lanes,
        config,
        value.dtype,
    );
    Ok(())
}

#[cube(launch, address_type = "dynamic")]
#[expect(clippy::too_many_arguments, reason = "one argument a tensor and size")]
fn prefix_fwd_kernel<E: Float, N: Size>(
    value: &[Vector<E, N>],     // [capacity, tokens, streams, vectors]
    inv_rms: &[f32],            // [capacity, tokens, streams]
    query: &[Vector<f32, N>],   // [reads, outputs, vectors]
    lse: &mut [f32],            // [reads, tokens, outputs]
    logit: &mut [f32],          // [capacity, reads, tokens, outputs]
    state: &mut [Vector<E, N>], // [slots, tokens, outputs, vectors]
    entries: usize,
    first: usize,
    count: usize,
    slot: usize,
    reads: usize,
    tokens: usize,
    vectors: usize,
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
    let heads = comptime!(group * outputs);
    let chunk = comptime!(config.chunk);
    let columns = comptime!(config.row.columns);
    let units = comptime!(config.row.units);
    let unit = UNIT_POS_X as usize;
    let begin = CUBE_POS_Z as usize * group; // of the `count` queries, that of head 0

    let mut sums = CubeSum::new(comptime!(chunk * heads), comptime!(config.row));
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
            for j in 0..outputs {
                let mut queries = Array::<Vector<f32, N>>::new(columns);
                #[unroll]
                for c in 0..columns {
                    let column = c * units + unit;
                    queries[c] = Vector::new(0.0f32);
                    if begin + s < count && column < vectors {
                        queries[c] = query[((first + begin + s) * outputs + j) * vectors + column];
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
                    logits[comptime!((r * group + s) * outputs + j)] = lane_sum(dot);
                }
            }
        }
        sums.sum(&mut logits);

        #[unroll]
        for s in 0..group {
            let read = first + begin + s;
            #[unroll]
            for j in 0..outputs {
                let head = comptime!(s * outputs + j);
                let key = comptime!(config.routing.key_stream(j));
                let from = comptime!(config.routing.value_stream(j));
                let mut top = f32::new(FLOOR);
                #[unroll]
                for r in 0..chunk {
                    let k = comptime!(r * heads + head);
                    if start + r < entries {
                        logits[k] *= scales[comptime!(r * streams + key)];
                        if unit == 0 && begin + s < count {
                            logit[(((start + r) * reads + read) * tokens + token) * outputs + j] = logits[k];
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
        if begin + s < count {
            #[unroll]
            for j in 0..outputs {
                let head = comptime!(s * outputs + j);
                let normaliser = softmax.normaliser(head);
                if unit == 0 {
                    lse[((first + begin + s) * tokens + token) * outputs + j] = softmax.lse(head);
                }
                let row = ((slot + begin + s) * tokens + token) * outputs + j;
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
