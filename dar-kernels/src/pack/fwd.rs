use cubecl::prelude::*;

use crate::launch::{Row, Tuning, cube_count, cube_index, lanes};
use crate::numeric::{inverse_rms, lane_sum};
use crate::operand::{Check, F32, Operand};
use crate::reduce::{CubeSum, Reduction};
use crate::{Dims, KernelError};

/// The operands of [`pack_fwd`].
#[derive(Debug, Clone, Copy)]
pub struct PackFwd<'a> {
    /// Input, f32, f16 or bf16. `[tokens, streams, d_model]`
    pub state: Operand<'a>,
    /// Output, in the type of `state`: the history, of which one entry is written. `[capacity, tokens, streams, d_model]`
    pub value: Operand<'a>,
    /// Output, f32: inverse RMS of the history, of which one entry is written. `[capacity, tokens, streams]`
    pub inv_rms: Operand<'a>,
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
    const NAME: &str = "pack_fwd";
    let PackFwd { state, value, inv_rms, entry, eps } = operands;

    let mut check = Check::of(NAME);
    let dims = check.state("state", &state)?;
    let capacity = check.room("value", &value, entry)?;
    let Dims { tokens, streams, d_model } = dims;
    check
        .eps(eps)?
        .storage("state", &state, client)?
        .dtype("value", &value, state.dtype)?
        .dtype("inv_rms", &inv_rms, F32)?
        .shape("state", &state, "[tokens, streams, d_model]", &dims.state())?
        .shape("value", &value, "[capacity, tokens, streams, d_model]", &[capacity, tokens, streams, d_model])?
        .shape("inv_rms", &inv_rms, "[capacity, tokens, streams]", &[capacity, tokens, streams])?;
    if tokens == 0 {
        return Ok(());
    }

    let lanes = lanes(client, state.dtype, d_model);
    let reduction = tuning.reduction(client);
    let row = Row::choose(client, d_model / lanes, Row::ANY_COLUMNS, reduction);
    pack_fwd_kernel::launch(
        client,
        cube_count(client, tokens * streams, 1),
        row.cube_dim(),
        check.address(client)?,
        lanes,
        state.argument(lanes),
        value.argument(lanes),
        inv_rms.argument(1),
        entry,
        tokens * streams,
        d_model / lanes,
        d_model as f32,
        eps as f32,
        row.units,
        reduction,
        state.dtype,
    );
    Ok(())
}

#[cube(launch, address_type = "dynamic")]
#[expect(clippy::too_many_arguments, reason = "one argument a tensor and size")]
fn pack_fwd_kernel<E: Float, N: Size>(
    state: &[Vector<E, N>],     // [rows, vectors]
    value: &mut [Vector<E, N>], // [capacity, rows, vectors]
    inv_rms: &mut [f32],        // [capacity, rows]
    entry: usize,
    rows: usize, // tokens × streams
    vectors: usize,
    d_model: f32,
    eps: f32,
    #[comptime] units: usize,
    #[comptime] reduction: Reduction,
    #[define(E)] _dtype: ElemType,
) {
    let row = cube_index();
    if row >= rows {
        terminate!();
    }
    let packed = entry * rows + row;
    let mut sums = CubeSum::new(1usize, units, reduction);
    let mut squares = Vector::<f32, N>::new(0.0f32);
    for column in range_stepped(UNIT_POS_X as usize, vectors, units) {
        let x = state[row * vectors + column];
        value[packed * vectors + column] = x;
        let x = Vector::<f32, N>::cast_from(x);
        squares += x * x;
    }
    let mut sum = Array::<f32>::new(1usize);
    sum[0] = lane_sum(squares);
    sums.sum(&mut sum);
    if UNIT_POS_X == 0 {
        inv_rms[packed] = inverse_rms(sum[0], d_model, eps);
    }
}
