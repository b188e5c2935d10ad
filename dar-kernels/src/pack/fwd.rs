use cubecl::prelude::*;

use crate::columns::{inside, load, narrowed, store, widened};
use crate::launch::{Held, Row, Tuning, cube_index, cubes};
use crate::numeric::add_dot;
use crate::operand::{Check, F32, Operand};
use crate::reduce::CubeSum;
use crate::{Dims, KernelError, Routing};

/// Four columns of 8 lanes of a state.
const HELD: Held = Held { loads: 1, arrays: 1, registers: 32 };

/// Normalised keys beside the values of a history (A.1): the paper's packing.
#[derive(Debug, Clone, Copy)]
pub struct Key<'a> {
    /// Output, in the type of the history: keys `norm(value^key(j))` of output stream j, of which one entry is written.
    /// `[capacity, tokens, outputs, d_model]`
    pub key: Operand<'a>,
    /// Which stream gives the key of an output.
    pub routing: Routing,
}

/// What of a [`Key`] changes the code of a kernel.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, Default)]
pub(crate) struct KeyConfig {
    pub(crate) outputs: usize,
    pub(crate) routing: Routing,
}

impl Key<'_> {
    /// Checks the keys of a history.
    pub(crate) fn check(
        &self,
        check: &mut Check,
        dtype: ElemType,
        [capacity, tokens, streams, d_model]: [usize; 4],
    ) -> Result<KeyConfig, KernelError> {
        let Self { key, routing } = *self;
        let &[_, _, outputs @ (1..), _] = key.shape else {
            return Err(check.wrong_shape("key", &key, "[capacity, tokens, outputs, d_model] with outputs ≥ 1"));
        };
        routing.check(check.operation, streams, outputs)?;
        let shape = [capacity, tokens, outputs, d_model];
        check.fits("key", &key, dtype, "[capacity, tokens, outputs, d_model]", &shape)?;
        Ok(KeyConfig { outputs, routing })
    }
}

/// The operands of [`pack_fwd`].
#[derive(Debug, Clone, Copy)]
pub struct PackFwd<'a> {
    /// Input, f32, f16 or bf16: `[tokens, streams, d_model]`, or `[tokens, d_model]` for every stream the same (the
    /// embedding).
    pub state: Operand<'a>,
    /// Output, in the type of `state`: the history, of which one entry is written.
    /// `[capacity, tokens, streams, d_model]`
    pub value: Operand<'a>,
    /// Output, f32: inverse RMS of the history, of which one entry is written. `[capacity, tokens, streams]`
    pub inv_rms: Operand<'a>,
    /// The keys of the entry; none leaves them out, as `inv_rms` and `value` give them.
    pub key: Option<Key<'a>>,
    /// The entry to write.
    pub entry: usize,
    /// Epsilon of the key norm.
    pub eps: f64,
}

/// Packs a state as entry `entry` of the history (A.1).
///
/// # Errors
/// If an operand has another shape, element type or a too short buffer, or the history has no room for the entry.
pub fn pack_fwd(client: &Client, operands: PackFwd, tuning: Tuning) -> Result<(), KernelError> {
    let PackFwd { state, value, inv_rms, key, entry, eps } = operands;

    let mut check = Check::of("pack_fwd");
    let capacity = check.room("value", &value, entry)?;
    let dims = check.history(&value)?;
    let Dims { tokens, streams, d_model } = dims;
    check.eps(eps)?.storage("state", &state, client)?;
    match state.shape.len() {
        2 => check.shape("state", &state, "[tokens, d_model]", &dims.branch())?,
        _ => check.shape("state", &state, "[tokens, streams, d_model]", &dims.state())?,
    };
    check
        .fits(
            "value",
            &value,
            state.dtype,
            "[capacity, tokens, streams, d_model]",
            &[capacity, tokens, streams, d_model],
        )?
        .fits("inv_rms", &inv_rms, F32, "[capacity, tokens, streams]", &[capacity, tokens, streams])?;
    let keys = match &key {
        Some(key) => key.check(&mut check, state.dtype, [capacity, tokens, streams, d_model])?,
        None => KeyConfig::default(),
    };
    let address = check.address(client)?;
    if tokens == 0 {
        return Ok(());
    }

    let row = Row::choose(client, state.dtype, d_model, HELD, tuning);
    pack_fwd_kernel::launch(
        client,
        cubes(client, tokens * streams),
        row.cube_dim(),
        address,
        row.lanes,
        state.argument(row.lanes),
        value.argument(row.lanes),
        inv_rms.argument(1),
        key.map(|key| key.key.argument(row.lanes)).into(),
        entry,
        tokens * streams,
        streams,
        if state.shape.len() == 2 { streams } else { 1 },
        d_model / row.lanes,
        1.0 / d_model as f32,
        eps as f32,
        keys,
        row,
        state.dtype,
    );
    Ok(())
}

#[cube(launch, address_type = "dynamic")]
#[expect(clippy::too_many_arguments, reason = "one argument a tensor and size")]
fn pack_fwd_kernel<E: Float, N: Size>(
    state: &[Vector<E, N>],                       // [rows / sharing, vectors]
    value: &mut [Vector<E, N>],                   // [capacity, rows, vectors]
    inv_rms: &mut [f32],                          // [capacity, rows]
    mut key: ComptimeOption<&mut [Vector<E, N>]>, // [capacity, tokens, outputs, vectors]
    entry: usize,
    rows: usize, // tokens × streams
    streams: usize,
    sharing: usize, // rows of an entry that hold the same row of the state
    vectors: usize,
    inv_d_model: f32,
    eps: f32,
    #[comptime] keys: KeyConfig,
    #[comptime] config: Row,
    #[define(E)] _dtype: ElemType,
) {
    let row = cube_index();
    if row >= rows {
        terminate!();
    }
    let packed = entry * rows + row;
    let source = row / sharing;
    let mut sums = CubeSum::new(1usize, config);
    let mut squares = f32::new(0.0);
    let columns = comptime!(config.columns);
    let stored = load::<E, N>(state, source, vectors, 1usize, config);
    store::<E, N>(&stored, value, packed, vectors, 1usize, config);
    let mut x = widened::<E, N>(&stored);
    #[unroll]
    for c in 0..columns {
        if inside(c, vectors, config) {
            squares = add_dot(squares, x[c], x[c]);
        }
    }
    let mut sum = Array::<f32>::new(1usize);
    sum[0] = squares;
    sums.inverse_rms(&mut sum, inv_d_model, eps);
    let norm = sum[0];
    if UNIT_POS_X == 0 {
        inv_rms[packed] = norm;
    }
    if comptime!(key.is_some()) {
        let outputs = comptime!(keys.outputs);
        let key = key.as_mut().unwrap().slice_mut(0, (entry + 1) * (rows / streams) * outputs * vectors);
        let stream = row % streams;
        #[unroll]
        for c in 0..columns {
            x[c] *= Vector::new(norm);
        }
        let normed = narrowed::<E, N>(&x);
        #[unroll]
        for j in 0..outputs {
            if stream == comptime!(keys.routing.key_stream(j)) {
                store::<E, N>(&normed, key, packed / streams * outputs + j, vectors, 1usize, config);
            }
        }
    }
}
