use cubecl::prelude::*;

use crate::columns::{inside, load, narrowed, store, widen, widened};
use crate::launch::{Held, Row, Tuning, cube_index, cubes};
use crate::numeric::add_dot;
use crate::operand::{Check, F32, Operand};
use crate::pack::{Key, KeyConfig};
use crate::reduce::CubeSum;
use crate::site::{BETA, GATES};
use crate::{Dims, KernelError};

/// The operands of [`write_fwd`]. There are two streams with gates and one without.
#[derive(Debug, Clone, Copy)]
pub struct WriteFwd<'a> {
    /// Input, in the type of `output`: the state before this branch; none before a block's first.
    /// `[tokens, streams, d_model]`
    pub before: Option<Operand<'a>>,
    /// Input, f32, f16 or bf16: what the branch computed. `[tokens, d_model]`
    pub output: Operand<'a>,
    /// Input, f32: the gates of all reads; none for a plain sum. rho is not used without `before`. `[reads, tokens, 5]`
    pub gate: Option<Operand<'a>>,
    /// The read of this branch: its row of `gate`.
    pub read: usize,
    /// Output, in the type of `output`: the state after the branch. `[tokens, streams, d_model]`
    pub state: Operand<'a>,
}

/// Gated write and constrained transport, forward (17); without gates a sum.
///
/// # Errors
/// If an operand has another shape, element type or a too short buffer.
pub fn write_fwd(client: &Client, operands: WriteFwd) -> Result<(), KernelError> {
    let WriteFwd { before, output, gate, read, state } = operands;

    let mut check = Check::of("write_fwd");
    let dims = inputs(client, &mut check, before, output, gate, read)?;
    let Dims { tokens, streams, d_model } = dims;
    check.fits("state", &state, output.dtype, "[tokens, streams, d_model]", &dims.state())?;
    let address = check.address(client)?;
    if tokens == 0 {
        return Ok(());
    }

    let row = choose(client, output, 1 + before.map_or(0, |_| streams), streams, Tuning::default());
    write_fwd_kernel::launch(
        client,
        cubes(client, tokens),
        row.cube_dim(),
        address,
        row.lanes,
        before.map(|before| before.argument(row.lanes)).into(),
        output.argument(row.lanes),
        gate.map(|gate| gate.argument(1)).into(),
        state.argument(row.lanes),
        read,
        tokens,
        d_model / row.lanes,
        row,
        output.dtype,
    );
    Ok(())
}

/// The operands of [`close_fwd`]. There are two streams with gates and one without.
#[derive(Debug, Clone, Copy)]
pub struct CloseFwd<'a> {
    /// As in [`WriteFwd`]. `[tokens, streams, d_model]`
    pub before: Option<Operand<'a>>,
    /// As in [`WriteFwd`]. `[tokens, d_model]`
    pub output: Operand<'a>,
    /// As in [`WriteFwd`]. `[reads, tokens, 5]`
    pub gate: Option<Operand<'a>>,
    /// The read of this branch: its row of `gate`.
    pub read: usize,
    /// Output, in the type of `output`: the history, of which one entry is written.
    /// `[capacity, tokens, streams, d_model]`
    pub value: Operand<'a>,
    /// Output, f32: inverse RMS of the history, of which one entry is written. `[capacity, tokens, streams]`
    pub inv_rms: Operand<'a>,
    /// The keys of the entry, as in [`PackFwd`](crate::pack::PackFwd).
    pub key: Option<Key<'a>>,
    /// The entry to write.
    pub entry: usize,
    /// Epsilon of the key norm.
    pub eps: f64,
}

/// The write of a block's last branch, straight into the history (17, A.1).
///
/// # Errors
/// If an operand has another shape, element type or a too short buffer, or the history has no room for the entry.
pub fn close_fwd(client: &Client, operands: CloseFwd, tuning: Tuning) -> Result<(), KernelError> {
    let CloseFwd { before, output, gate, read, value, inv_rms, key, entry, eps } = operands;

    let mut check = Check::of("close_fwd");
    let Dims { tokens, streams, d_model } = inputs(client, &mut check, before, output, gate, read)?;
    let capacity = check.room("value", &value, entry)?;
    let history = [capacity, tokens, streams, d_model];
    check.eps(eps)?.fits("value", &value, output.dtype, "[capacity, tokens, streams, d_model]", &history)?.fits(
        "inv_rms",
        &inv_rms,
        F32,
        "[capacity, tokens, streams]",
        &history[..3],
    )?;
    let keys = match &key {
        Some(key) => key.check(&mut check, output.dtype, history)?,
        None => KeyConfig::default(),
    };
    let address = check.address(client)?;
    if tokens == 0 {
        return Ok(());
    }

    let row = choose(client, output, 1 + before.map_or(0, |_| streams), streams, tuning);
    close_fwd_kernel::launch(
        client,
        cubes(client, tokens),
        row.cube_dim(),
        address,
        row.lanes,
        before.map(|before| before.argument(row.lanes)).into(),
        output.argument(row.lanes),
        gate.map(|gate| gate.argument(1)).into(),
        value.argument(row.lanes),
        inv_rms.argument(1),
        key.map(|key| key.key.argument(row.lanes)).into(),
        read,
        entry,
        tokens,
        d_model / row.lanes,
        1.0 / d_model as f32,
        eps as f32,
        keys,
        row,
        output.dtype,
    );
    Ok(())
}

/// How the units of a cube share a row of `loads` operands, of which a state of `streams` is kept: four columns of 8
/// lanes of two streams at most.
pub(super) fn choose(client: &Client, output: Operand, loads: usize, streams: usize, tuning: Tuning) -> Row {
    let held = Held { loads, arrays: streams, registers: 64 };
    Row::choose(client, output.dtype, output.shape[1], held, tuning)
}

/// Checks what all writes read; the sizes of the states.
pub(super) fn inputs(
    client: &Client,
    check: &mut Check,
    before: Option<Operand>,
    output: Operand,
    gate: Option<Operand>,
    read: usize,
) -> Result<Dims, KernelError> {
    let [tokens, d_model] = check.branch("output", &output)?;
    let dims = Dims { tokens, streams: if gate.is_some() { 2 } else { 1 }, d_model };
    check.storage("output", &output, client)?.shape("output", &output, "[tokens, d_model]", &dims.branch())?;
    if let Some(gate) = gate {
        let reads = check.leading("gate", &gate)?;
        check.index("read", read, "rows of `gate`", reads)?.fits(
            "gate",
            &gate,
            F32,
            "[reads, tokens, 5]",
            &[reads, tokens, GATES],
        )?;
    }
    if let Some(before) = before {
        check.fits("before", &before, output.dtype, "[tokens, streams, d_model]", &dims.state())?;
    }
    Ok(dims)
}

#[cube(launch, address_type = "dynamic")]
#[expect(clippy::too_many_arguments, reason = "one argument a tensor and size")]
fn write_fwd_kernel<E: Float, N: Size>(
    before: ComptimeOption<&[Vector<E, N>]>, // [tokens, streams, vectors]
    output: &[Vector<E, N>],                 // [tokens, vectors]
    gate: ComptimeOption<&[f32]>,            // [reads, tokens, 5]
    state: &mut [Vector<E, N>],              // [tokens, streams, vectors]
    read: usize,
    tokens: usize,
    vectors: usize,
    #[comptime] config: Row,
    #[define(E)] _dtype: ElemType,
) {
    let token = cube_index();
    if token >= tokens {
        terminate!();
    }
    let gated = comptime!(gate.is_some());
    let streams = comptime!(if gated { 2usize } else { 1 });
    let mut gates = Array::<f32>::new(3usize);
    #[comptime]
    match gate {
        ComptimeOption::Some(gate) => gates = write_gates(gate, read * tokens + token),
        ComptimeOption::None => {}
    }
    let written = written::<E, N>(before, output, &gates, token, vectors, gated, config);
    store::<E, N>(&written, state, token * streams, vectors, streams, config);
}

#[cube(launch, address_type = "dynamic")]
#[expect(clippy::too_many_arguments, reason = "one argument a tensor and size")]
fn close_fwd_kernel<E: Float, N: Size>(
    before: ComptimeOption<&[Vector<E, N>]>,      // [tokens, streams, vectors]
    output: &[Vector<E, N>],                      // [tokens, vectors]
    gate: ComptimeOption<&[f32]>,                 // [reads, tokens, 5]
    value: &mut [Vector<E, N>],                   // [capacity, tokens, streams, vectors]
    inv_rms: &mut [f32],                          // [capacity, tokens, streams]
    mut key: ComptimeOption<&mut [Vector<E, N>]>, // [capacity, tokens, outputs, vectors]
    read: usize,
    entry: usize,
    tokens: usize,
    vectors: usize,
    inv_d_model: f32,
    eps: f32,
    #[comptime] keys: KeyConfig,
    #[comptime] config: Row,
    #[define(E)] _dtype: ElemType,
) {
    let token = cube_index();
    if token >= tokens {
        terminate!();
    }
    let gated = comptime!(gate.is_some());
    let streams = comptime!(if gated { 2usize } else { 1 });
    let row = (entry * tokens + token) * streams;
    let mut gates = Array::<f32>::new(3usize);
    #[comptime]
    match gate {
        ComptimeOption::Some(gate) => gates = write_gates(gate, read * tokens + token),
        ComptimeOption::None => {}
    }
    let mut sums = CubeSum::new(streams, config);
    let columns = comptime!(config.columns);
    let stored = written::<E, N>(before, output, &gates, token, vectors, gated, config);
    let rounded = widened::<E, N>(&stored); // the key is the norm of what is stored
    let mut norms = Array::<f32>::new(streams);
    #[unroll]
    for j in 0..streams {
        let mut squares = f32::new(0.0);
        #[unroll]
        for c in 0..columns {
            let own = rounded[comptime!(j * columns + c)];
            if inside(c, vectors, config) {
                squares = add_dot(squares, own, own);
            }
        }
        norms[j] = squares;
    }
    sums.inverse_rms(&mut norms, inv_d_model, eps);
    store::<E, N>(&stored, value, row, vectors, streams, config);
    if UNIT_POS_X == 0 {
        #[unroll]
        for j in 0..streams {
            inv_rms[row + j] = norms[j];
        }
    }
    if comptime!(key.is_some()) {
        let outputs = comptime!(keys.outputs);
        let key = key.as_mut().unwrap().slice_mut(0, (entry + 1) * tokens * outputs * vectors);
        #[unroll]
        for j in 0..outputs {
            let from = comptime!(keys.routing.key_stream(j));
            let mut normed = Array::<Vector<f32, N>>::new(columns);
            #[unroll]
            for c in 0..columns {
                normed[c] = Vector::new(norms[from]) * rounded[comptime!(from * columns + c)];
            }
            let row = (entry * tokens + token) * outputs + j;
            store::<E, N>(&narrowed::<E, N>(&normed), key, row, vectors, 1usize, config);
        }
    }
}

/// What a write takes of the gates of a read and token, which are row `row` of them: beta of both streams, rho.
#[cube]
fn write_gates(gate: &[f32], row: usize) -> Array<f32> {
    let mut gates = Array::<f32>::new(3usize);
    #[unroll]
    for k in 0usize..3 {
        gates[k] = gate[row * GATES + BETA + k];
    }
    gates
}

/// The columns of all streams of the state after a branch (17), as they are stored: `[streams, columns]`. `gates`:
/// [`write_gates`], not read without gates.
#[cube]
pub(crate) fn written<E: Float, N: Size>(
    before: ComptimeOption<&[Vector<E, N>]>,
    output: &[Vector<E, N>],
    gates: &Array<f32>,
    token: usize,
    vectors: usize,
    #[comptime] gated: bool,
    #[comptime] config: Row,
) -> Array<Vector<E, N>> {
    let streams = comptime!(if gated { 2usize } else { 1 });
    let columns = comptime!(config.columns);
    let started = comptime!(before.is_none()); // from zero
    let y = load::<E, N>(output, token, vectors, 1usize, config);
    let mut states = Array::<Vector<E, N>>::new(comptime!(if started { 1 } else { streams * columns }));
    #[comptime]
    match before {
        ComptimeOption::Some(before) => {
            states = load::<E, N>(before, token * streams, vectors, streams, config);
        }
        ComptimeOption::None => {}
    }
    // By column, so that few are in f32 at once.
    let mut written = Array::<Vector<E, N>>::new(comptime!(streams * columns));
    #[unroll]
    for c in 0..columns {
        let y = widen(y[c]);
        #[unroll]
        for j in 0..streams {
            let k = comptime!(j * columns + c);
            let mut sum = y;
            if comptime!(gated) {
                sum *= Vector::new(gates[j]);
            }
            if comptime!(!started) {
                let own = widen(states[k]);
                if comptime!(gated) {
                    let other = widen(states[comptime!((1 - j) * columns + c)]);
                    sum += Vector::new(gates[2]) * own;
                    sum += Vector::new(1.0f32 - gates[2]) * other;
                } else {
                    sum += own;
                }
            }
            written[k] = Vector::cast_from(sum);
        }
    }
    written
}
