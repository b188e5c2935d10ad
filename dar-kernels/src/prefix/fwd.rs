use cubecl::prelude::*;

use super::config::{PrefixConfig, Work, told};
use crate::columns::{clamped, narrowed, store, unknown_zero, widen, widen_again};
use crate::launch::{Tuning, cube_index, cubes};
use crate::numeric::add_dot;
use crate::operand::{Check, F32, Operand};
use crate::read::{check_packed, gates_and_gain, mixed, mixing_gates, normalised, sum_of_streams};
use crate::reduce::CubeSum;
use crate::routing::key_stream_of;
use crate::site::{GATES, RHO, site_gain};
use crate::softmax::{FLOOR, OnlineSoftmax};
use crate::{Dims, KernelError, Routing};

/// Sums of a mix at a time: four gates and the squares.
const SUMS_OF_MIX: usize = 5;

/// The operands of [`prefix_fwd`]. There are as many `outputs` as streams, or one of two streams with
/// [`Routing::FixedKeyValue`].
#[derive(Debug, Clone, Copy)]
pub struct PrefixFwd<'a> {
    /// Input, f32, f16 or bf16: the history; entries past `entries` are not read.
    /// `[capacity, tokens, streams, d_model]`
    pub value: Operand<'a>,
    /// Input, f32: inverse RMS of the history; not read with `key`. `[capacity, tokens, streams]`
    pub inv_rms: Operand<'a>,
    /// Input, in the type of `value`: the [keys](crate::pack::Key) of the history, if they were packed; none takes them
    /// from `value` and `inv_rms`, which halves what is read. `[capacity, tokens, outputs, d_model]`
    pub key: Option<Operand<'a>>,
    /// Input, f32. `[reads, outputs, d_model]`
    pub query: Operand<'a>,
    /// Output, f32: log-sum-exp, in the rows of the reads. `[reads, tokens, outputs]`
    pub lse: Operand<'a>,
    /// Output, f32: what the backward needs beside `lse`, in the rows of the entries and reads.
    /// `[capacity, reads, tokens, outputs]`
    pub logit: Operand<'a>,
    /// Output, in the type of `value`: retrieved states, from row `slot` on. `[slots, tokens, outputs, d_model]`
    pub state: Operand<'a>,
    /// What goes on to the input of a branch at once, for read `first`; none leaves that to
    /// [`read_fwd`](crate::read::read_fwd).
    pub mix: Option<Mix<'a>>,
    /// How many entries the history has, at least one.
    pub entries: usize,
    /// The first of the reads that are served.
    pub first: usize,
    /// How many reads are served.
    pub count: usize,
    /// Where the state of the first one goes.
    pub slot: usize,
}

/// The read of a block's first branch, or of the output where all blocks are complete, within [`PrefixFwd`]: what
/// [`read_fwd`](crate::read::read_fwd) does without `open`.
#[derive(Debug, Clone, Copy)]
pub struct Mix<'a> {
    /// Input, f32: the packed parameters of the read, which are those of the gates with `gate` (of two outputs), and the
    /// gain with `norm`; none sums the outputs. [`packed_length`](crate::site::packed_length)
    pub site: Option<Operand<'a>>,
    /// Output, f32: gates of all reads, of which row `first` is written with `site`. `[reads, tokens, 5]`
    pub gate: Option<Operand<'a>>,
    /// Output, in the type of the history: branch input, or hidden state. `[tokens, d_model]`
    pub input: Operand<'a>,
    /// Whether the retrieved state of read `first` is written too, as a backward takes it; else its row stays.
    pub keep_first: bool,
    /// Epsilon of the gates' norm.
    pub eps: f64,
    /// Epsilon of the branch's own norm, if that is folded in: `input` is then its output.
    pub norm: Option<f64>,
}

impl Mix<'_> {
    fn check(
        &self,
        check: &mut Check,
        dtype: ElemType,
        [reads, tokens, outputs, d_model]: [usize; 4],
    ) -> Result<(), KernelError> {
        let Self { site, gate, input, keep_first: _, eps, norm } = self;
        check.eps(*eps)?.fits("mix.input", input, dtype, "[tokens, d_model]", &[tokens, d_model])?;
        if let Some(gate) = gate {
            check.fits("mix.gate", gate, F32, "[reads, tokens, 5]", &[reads, tokens, GATES])?;
        }
        check_packed(check, ["mix.site", "mix.gate", "mix.norm"], site, gate, *norm, d_model)?;
        if site.is_some() && gate.is_some() && outputs != 2 {
            return Err(KernelError::value(check.operation, "outputs of the query", "2 with `mix.site`", outputs));
        }
        Ok(())
    }
}

/// Completed-history prefix of some reads, forward (A.2–A.5), and the input of the first one's branch (13–15).
///
/// # Errors
/// If an operand has another shape, element type or a too short buffer, if there is no entry or no row for a read, or
/// `routing` does not fit the streams.
pub fn prefix_fwd(client: &Client, operands: PrefixFwd, routing: Routing, tuning: Tuning) -> Result<(), KernelError> {
    const NAME: &str = "prefix_fwd";
    let PrefixFwd { value, inv_rms, key, query, lse, logit, state, mix, entries, first, count, slot } = operands;

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
    if let Some(key) = &key {
        let shape = [capacity, tokens, outputs, d_model];
        check.fits("key", key, value.dtype, "[capacity, tokens, outputs, d_model]", &shape)?;
    }
    if let Some(mix) = &mix {
        mix.check(&mut check, value.dtype, [reads, tokens, outputs, d_model])?;
        if count == 0 {
            return Err(KernelError::value(NAME, "count", "at least 1 with `mix`", count));
        }
    }
    let address = check.address(client)?;
    if tokens * count == 0 {
        return Ok(());
    }

    let work = Work { dims, dtype: value.dtype, outputs, queries: count, routing, keyed: key.is_some() };
    let config = work.choose(client, tuning, mix.map_or(0, |_| SUMS_OF_MIX));
    let gate = mix.and_then(|mix| mix.site.and(mix.gate));
    let norm = mix.and_then(|mix| mix.norm);
    let (site, gain) = mix.map_or((None, None), |mix| gates_and_gain(mix.site, mix.gate));
    let lanes = config.row.lanes;
    prefix_fwd_kernel::launch(
        client,
        cubes(client, tokens * config.groups),
        config.row.cube_dim(),
        address,
        lanes,
        value.argument(lanes),
        key.is_none().then(|| inv_rms.argument(1)).into(),
        key.map(|key| key.argument(lanes)).into(),
        query.argument(lanes),
        lse.argument(1),
        logit.argument(1),
        state.argument(lanes),
        site.map(|site| site.argument(lanes)).into(),
        gain.map(|gain| gain.argument(lanes)).into(),
        gate.map(|gate| gate.argument(1)).into(),
        mix.map(|mix| mix.input.argument(lanes)).into(),
        entries,
        first,
        count,
        slot,
        reads,
        tokens,
        d_model / lanes,
        1.0 / d_model as f32,
        mix.map_or(0.0, |mix| mix.eps) as f32,
        norm.unwrap_or_default() as f32,
        mix.is_none_or(|mix| mix.keep_first),
        norm.is_some(),
        config,
        value.dtype,
    );
    Ok(())
}

#[cube(launch, address_type = "dynamic")]
#[expect(clippy::too_many_arguments, reason = "one argument a tensor and size")]
fn prefix_fwd_kernel<E: Float, N: Size>(
    value: &[Vector<E, N>],                         // [capacity, tokens, streams, vectors]
    inv_rms: ComptimeOption<&[f32]>,                // [capacity, tokens, streams]
    key: ComptimeOption<&[Vector<E, N>]>,           // [capacity, tokens, outputs, vectors]
    query: &[Vector<f32, N>],                       // [reads, outputs, vectors]
    lse: &mut [f32],                                // [reads, tokens, outputs]
    logit: &mut [f32],                              // [capacity, reads, tokens, outputs]
    state: &mut [Vector<E, N>],                     // [slots, tokens, outputs, vectors]
    site: ComptimeOption<&[Vector<f32, N>]>,        // [10 * vectors + 8 / lanes], then the gain
    gain: ComptimeOption<&[Vector<f32, N>]>,        // [vectors], without a site
    mut gate: ComptimeOption<&mut [f32]>,           // [reads, tokens, 5]
    mut input: ComptimeOption<&mut [Vector<E, N>]>, // [tokens, vectors]
    entries: usize,
    first: usize,
    count: usize,
    slot: usize,
    reads: usize,
    tokens: usize,
    vectors: usize,
    inv_d_model: f32,
    eps: f32,
    norm_eps: f32,
    #[comptime] keep_first: bool,
    #[comptime] normed: bool,
    #[comptime] config: PrefixConfig,
    #[define(E)] _value_dtype: ElemType,
) {
    let cube = cube_index();
    let token = cube / comptime!(config.groups);
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
    let begin = cube % comptime!(config.groups) * group; // of the `count` queries, that of head 0

    let keyed = comptime!(key.is_some());
    let spares = comptime!(config.spares_registers());
    let mixing = comptime!(input.is_some());
    let of_mix = comptime!(if mixing { SUMS_OF_MIX } else { 0usize });
    let told = comptime!(told(chunk));
    let mut sums = CubeSum::publishing(
        comptime!(of_mix.max(chunk * heads)),
        comptime!(of_mix.max(told * heads)),
        comptime!(config.row),
    );
    // One unit makes the softmax of a head.
    let rounds = comptime!(heads.div_ceil(units));
    let mut softmax = OnlineSoftmax::empty(rounds);
    let mut retrieved = Array::<Vector<f32, N>>::new(comptime!(heads * columns)); // U, in the end divided by Z
    #[unroll]
    for k in 0..comptime!(heads * columns) {
        retrieved[k] = Vector::new(0.0f32);
    }

    for start in range_stepped(0, entries, chunk) {
        // Addresses of queries, made once for all chunks, would take two registers each.
        let zero = unknown_zero(vectors, start);
        let vectors = vectors + zero as usize;
        // All loads of the chunk, so that they are in flight together.
        let mut values = Array::<Vector<E, N>>::new(comptime!(chunk * streams * columns));
        let mut keys = Array::<Vector<E, N>>::new(comptime!(if keyed { chunk * outputs * columns } else { 1 }));
        let mut scales = Array::<f32>::new(comptime!(rounds * chunk)); // of the keys of the unit's heads
        #[unroll]
        for r in 0..chunk {
            // Past the last entry the last one again, of no weight; past the last column queries are zero.
            let entry = min(start + r, entries - 1);
            #[unroll]
            for j in 0..streams {
                let row = (entry * tokens + token) * streams + j;
                #[unroll]
                for c in 0..columns {
                    let k = comptime!((r * streams + j) * columns + c);
                    values[k] = value[row * vectors + clamped(c, vectors, comptime!(config.row))];
                }
            }
        }

        #[comptime]
        match key {
            ComptimeOption::Some(key) =>
            {
                #[unroll]
                for r in 0..chunk {
                    let entry = min(start + r, entries - 1);
                    #[unroll]
                    for j in 0..outputs {
                        let row = (entry * tokens + token) * outputs + j;
                        #[unroll]
                        for c in 0..columns {
                            let k = comptime!((r * outputs + j) * columns + c);
                            keys[k] = key[row * vectors + clamped(c, vectors, comptime!(config.row))];
                        }
                    }
                }
            }
            ComptimeOption::None => {}
        }
        #[comptime]
        match inv_rms {
            ComptimeOption::Some(inv_rms) =>
            {
                #[unroll]
                for round in 0..rounds {
                    let head = round * units + unit;
                    if head < heads {
                        let key = key_stream_of(head % outputs, comptime!(config.routing));
                        #[unroll]
                        for r in 0..chunk {
                            let entry = min(start + r, entries - 1);
                            scales[comptime!(round * chunk + r)] = inv_rms[(entry * tokens + token) * streams + key];
                        }
                    }
                }
            }
            ComptimeOption::None => {}
        }

        // (A.1) By column. Sparing registers, the queries come first and take one key after the other; else the keys, which
        // stay in f32 for (A.4), take one query after the other.
        let mut logits = Array::<f32>::new(comptime!(chunk * heads));
        #[unroll]
        for k in 0..comptime!(chunk * heads) {
            logits[k] = f32::new(0.0);
        }
        #[unroll]
        for j in 0..outputs {
            let states = comptime!(if keyed { outputs } else { streams });
            let from = comptime!(if keyed { j } else { config.routing.key_stream(j) });
            let stored = if comptime!(keyed) { &keys } else { &values };
            #[unroll]
            for c in 0..columns {
                let column = c * units + unit;
                if comptime!(spares && group <= chunk) {
                    let mut queries = Array::<Vector<f32, N>>::new(group);
                    #[unroll]
                    for s in 0..group {
                        queries[s] = Vector::new(0.0f32);
                        if column < vectors {
                            // Past the last query the last one again, which goes nowhere.
                            let row = (first + min(begin + s, count - 1)) * outputs + j;
                            queries[s] = query[row * vectors + column];
                        }
                    }
                    #[unroll]
                    for r in 0..chunk {
                        let own = widen(stored[comptime!((r * states + from) * columns + c)]);
                        #[unroll]
                        for s in 0..group {
                            let k = comptime!((r * group + s) * outputs + j);
                            logits[k] = add_dot(logits[k], queries[s], own);
                        }
                    }
                } else {
                    let mut own = Array::<Vector<f32, N>>::new(chunk);
                    #[unroll]
                    for r in 0..chunk {
                        own[r] = widen(stored[comptime!((r * states + from) * columns + c)]);
                    }
                    #[unroll]
                    for s in 0..group {
                        let mut query_of = Vector::<f32, N>::new(0.0f32);
                        if column < vectors {
                            let row = (first + min(begin + s, count - 1)) * outputs + j;
                            query_of = query[row * vectors + column];
                        }
                        #[unroll]
                        for r in 0..chunk {
                            let k = comptime!((r * group + s) * outputs + j);
                            logits[k] = add_dot(logits[k], query_of, own[r]);
                        }
                    }
                }
            }
        }
        sums.gather(&mut logits);
        #[unroll]
        for round in 0..rounds {
            let head = round * units + unit;
            if head < heads {
                let (query, j) = (begin + head / outputs, head % outputs);
                let served = query < count;
                let row = ((first + query) * tokens + token) * outputs + j; // of one entry
                let mut own = Array::<f32>::new(chunk);
                let mut top = f32::new(FLOOR);
                #[unroll]
                for r in 0..chunk {
                    own[r] = f32::new(FLOOR); // no weight
                    if start + r < entries {
                        own[r] = sums.total(r * heads + head);
                        if comptime!(!keyed) {
                            own[r] *= scales[comptime!(round * chunk + r)];
                        }
                        if served {
                            logit[(start + r) * (reads * tokens * outputs) + row] = own[r];
                        }
                    }
                    top = max(top, own[r]);
                }
                let mut factors = Array::<f32>::new(told);
                factors[0] = softmax.raise(round, top); // (A.2)
                #[unroll]
                for r in 0..chunk {
                    factors[comptime!(1 + r)] = softmax.push(round, own[r]); // (A.3)
                }
                // (A.5)
                if start + chunk >= entries {
                    let normaliser = softmax.normaliser(round);
                    #[unroll]
                    for k in 0..told {
                        factors[k] *= normaliser;
                    }
                    if served {
                        lse[row] = softmax.lse(round);
                    }
                }
                #[unroll]
                for k in 0..told {
                    sums.publish(head * told + k, factors[k]);
                }
            }
        }
        sync_cube();

        // (A.4)
        #[unroll]
        for s in 0..group {
            #[unroll]
            for j in 0..outputs {
                let head = comptime!(s * outputs + j);
                let from = comptime!(config.routing.value_stream(j));
                let scale = sums.published(comptime!(head * told));
                #[unroll]
                for c in 0..columns {
                    let k = comptime!(head * columns + c);
                    retrieved[k] *= Vector::new(scale);
                }
                #[unroll]
                for r in 0..chunk {
                    let weight = sums.published(comptime!(head * told + 1 + r));
                    #[unroll]
                    for c in 0..columns {
                        let k = comptime!(head * columns + c);
                        let from = comptime!((r * streams + from) * columns + c);
                        let value =
                            if comptime!(spares) { widen_again(values[from], zero) } else { widen(values[from]) };
                        retrieved[k] += Vector::new(weight) * value;
                    }
                }
            }
        }
    }

    #[unroll]
    for s in 0..group {
        if begin + s < count {
            #[unroll]
            for j in 0..outputs {
                let row = ((slot + begin + s) * tokens + token) * outputs + j;
                let kept = comptime!(keep_first || s > 0) || begin > 0;
                #[unroll]
                for c in 0..columns {
                    let column = c * units + unit;
                    let k = comptime!((s * outputs + j) * columns + c);
                    if kept && column < vectors {
                        state[row * vectors + column] = Vector::cast_from(retrieved[k]);
                    }
                }
            }
        }
    }

    // The first query is of the first group.
    if comptime!(mixing) && begin == 0 {
        let input = input.as_mut().unwrap().slice_mut(0, tokens * vectors);
        let mut merged = Array::<Vector<f32, N>>::new(comptime!(outputs * columns));
        #[unroll]
        for k in 0..comptime!(outputs * columns) {
            merged[k] = retrieved[k];
        }
        let mut inputs = Array::<Vector<f32, N>>::new(columns);
        if comptime!(site.is_none()) {
            inputs = sum_of_streams::<N>(&merged, outputs, comptime!(config.row));
        }
        #[comptime]
        match site {
            ComptimeOption::Some(site) => {
                let row = (first * tokens + token) * GATES;
                let gate = gate.as_mut().unwrap().slice_mut(0, row + GATES);
                if unit == 0 {
                    gate[row + RHO] = f32::new(1.0);
                }
                let config = comptime!(config.row);
                let gates = mixing_gates::<N>(&merged, site, &mut sums, gate, row, vectors, inv_d_model, eps, config);
                inputs = mixed::<N>(&merged, &gates, config);
                if comptime!(normed) {
                    let start = site_gain::<N>(vectors);
                    inputs = normalised::<N>(&inputs, site, start, &mut sums, vectors, inv_d_model, norm_eps, config);
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
}
