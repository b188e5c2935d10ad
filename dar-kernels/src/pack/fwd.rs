use cubecl::prelude::*;

use crate::launch::{Row, Tuning, cube_index, cubes};
use crate::numeric::{inverse_rms, lane_sum};
use crate::operand::{Check, F32, Operand};
use crate::reduce::CubeSum;
use crate::{Dims, KernelError};

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
    let PackFwd { state, value, inv_rms, entry, eps } = operands;

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
    let address = check.address(client)?;
    if tokens == 0 {
        return Ok(());
    }

    let row = Row::walked(client, state.dtype, d_model, tuning);
    pack_fwd_kernel::launch(
        client,
        cubes(client, tokens * streams, 1),
        row.cube_dim(),
        address,
        row.lanes,
        state.argument(row.lanes),
        value.argument(row.lanes),
        inv_rms.argument(1),
        entry,
        tokens * streams,
        if state.shape.len() == 2 { streams } else { 1 },
        d_model / row.lanes,
        d_model as f32,
        eps as f32,
        row,
        state.dtype,
    );
    Ok(())
}

#[cube(launch, address_type = "dynamic")]
#[expect(clippy::too_many_arguments, reason = "one argument a tensor and size")]
fn pack_fwd_kernel<E: Float, N: Size>(
    state: &[Vector<E, N>],     // [rows / sharing, vectors]
    value: &mut [Vector<E, N>], // [capacity, rows, vectors]
    inv_rms: &mut [f32],        // [capacity, rows]
    entry: usize,
    rows: usize,    // tokens × streams
    sharing: usize, // rows of an entry that hold the same row of the state
    vectors: usize,
    d_model: f32,
    eps: f32,
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
    let mut squares = Vector::<f32, N>::new(0.0f32);
    for column in range_stepped(UNIT_POS_X as usize, vectors, comptime!(config.units)) {
        let x = state[source * vectors + column];
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
