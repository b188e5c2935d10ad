use cubecl::prelude::*;

use crate::gate::{BETA, GATES, RHO};
use crate::launch::{Row, Tuning, cube_count, cube_index, lanes};
use crate::numeric::{inverse_rms, lane_sum};
use crate::operand::{Check, F32, Operand};
use crate::reduce::{CubeSum, Reduction};
use crate::{Dims, KernelError};

/// Units of an elementwise cube: enough warps to hide memory, few enough that small inputs spread over the device.
const UNITS: usize = 256;

/// The operands of [`write_fwd`].
#[derive(Debug, Clone, Copy)]
pub struct WriteFwd<'a> {
    /// Input, in the type of `output`: the state before this branch; none before a block's first. `[tokens, 2, d_model]`
    pub partial: Option<Operand<'a>>,
    /// Input, f32, f16 or bf16: what the branch computed. `[tokens, d_model]`
    pub output: Operand<'a>,
    /// Input, f32: the gates of the read; rho is not used without `partial`. `[tokens, 5]`
    pub gate: Operand<'a>,
    /// Output, in the type of `output`: the state after the branch. `[tokens, 2, d_model]`
    pub state: Operand<'a>,
}

/// Gated write and constrained transport, forward (17).
///
/// # Errors
/// If an operand has another shape, element type or a too short buffer.
pub fn write_fwd(client: &Client, operands: WriteFwd) -> Result<(), KernelError> {
    let WriteFwd { partial, output, gate, state } = operands;

    let mut check = Check::of("write_fwd");
    let dims = inputs(client, &mut check, partial, output, gate)?;
    let Dims { tokens, d_model, .. } = dims;
    check.dtype("state", &state, output.dtype)?.shape("state", &state, "[tokens, 2, d_model]", &dims.state())?;
    if tokens == 0 {
        return Ok(());
    }

    let lanes = lanes(client, output.dtype, d_model);
    let vectors = d_model / lanes;
    let units = UNITS.min(client.properties().hardware.max_units_per_cube as usize);
    write_fwd_kernel::launch(
        client,
        cube_count(client, (tokens * vectors).div_ceil(units), 1),
        CubeDim::new_1d(units as u32),
        check.address(client)?,
        lanes,
        partial.map(|partial| partial.argument(lanes)).into(),
        output.argument(lanes),
        gate.argument(1),
        state.argument(lanes),
        tokens,
        vectors,
        output.dtype,
    );
    Ok(())
}

/// The operands of [`close_fwd`].
#[derive(Debug, Clone, Copy)]
pub struct CloseFwd<'a> {
    /// As in [`WriteFwd`]. `[tokens, 2, d_model]`
    pub partial: Option<Operand<'a>>,
    /// As in [`WriteFwd`]. `[tokens, d_model]`
    pub output: Operand<'a>,
    /// As in [`WriteFwd`]. `[tokens, 5]`
    pub gate: Operand<'a>,
    /// Output, in the type of `output`: the history, of which one entry is written. `[capacity, tokens, 2, d_model]`
    pub value: Operand<'a>,
    /// Output, f32: inverse RMS of the history, of which one entry is written. `[capacity, tokens, 2]`
    pub inv_rms: Operand<'a>,
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
    let CloseFwd { partial, output, gate, value, inv_rms, entry, eps } = operands;

    let mut check = Check::of("close_fwd");
    let Dims { tokens, d_model, .. } = inputs(client, &mut check, partial, output, gate)?;
    let capacity = check.room("value", &value, entry)?;
    check
        .eps(eps)?
        .dtype("value", &value, output.dtype)?
        .dtype("inv_rms", &inv_rms, F32)?
        .shape("value", &value, "[capacity, tokens, 2, d_model]", &[capacity, tokens, 2, d_model])?
        .shape("inv_rms", &inv_rms, "[capacity, tokens, 2]", &[capacity, tokens, 2])?;
    if tokens == 0 {
        return Ok(());
    }

    let lanes = lanes(client, output.dtype, d_model);
    let reduction = tuning.reduction(client);
    let row = Row::choose(client, d_model / lanes, Row::ANY_COLUMNS, reduction);
    close_fwd_kernel::launch(
        client,
        cube_count(client, tokens, 1),
        row.cube_dim(),
        check.address(client)?,
        lanes,
        partial.map(|partial| partial.argument(lanes)).into(),
        output.argument(lanes),
        gate.argument(1),
        value.argument(lanes),
        inv_rms.argument(1),
        entry,
        tokens,
        d_model / lanes,
        d_model as f32,
        eps as f32,
        row.units,
        reduction,
        output.dtype,
    );
    Ok(())
}

/// Checks what forward and backward read.
pub(super) fn inputs(
    client: &Client,
    check: &mut Check,
    partial: Option<Operand>,
    output: Operand,
    gate: Operand,
) -> Result<Dims, KernelError> {
    let [tokens, d_model] = check.branch("output", &output)?;
    let dims = Dims { tokens, streams: 2, d_model };
    check
        .storage("output", &output, client)?
        .dtype("gate", &gate, F32)?
        .shape("output", &output, "[tokens, d_model]", &dims.branch())?
        .shape("gate", &gate, "[tokens, 5]", &[tokens, GATES])?;
    if let Some(partial) = partial {
        check.dtype("partial", &partial, output.dtype)?.shape(
            "partial",
            &partial,
            "[tokens, 2, d_model]",
            &dims.state(),
        )?;
    }
    Ok(dims)
}

#[cube(launch, address_type = "dynamic")]
fn write_fwd_kernel<E: Float, N: Size>(
    partial: ComptimeOption<&[Vector<E, N>]>, // [tokens, 2, vectors]
    output: &[Vector<E, N>],                  // [tokens, vectors]
    gate: &[f32],                             // [tokens, 5]
    state: &mut [Vector<E, N>],               // [tokens, 2, vectors]
    tokens: usize,
    vectors: usize,
    #[define(E)] _dtype: ElemType,
) {
    let position = cube_index() * CUBE_DIM_X as usize + UNIT_POS_X as usize;
    if position >= tokens * vectors {
        terminate!();
    }
    let token = position / vectors;
    let column = position % vectors;
    let (first, second) = written::<E, N>(&partial, output, gate, token, column, vectors);
    state[2 * token * vectors + column] = Vector::cast_from(first);
    state[(2 * token + 1) * vectors + column] = Vector::cast_from(second);
}

#[cube(launch, address_type = "dynamic")]
#[expect(clippy::too_many_arguments, reason = "one argument a tensor and size")]
fn close_fwd_kernel<E: Float, N: Size>(
    partial: ComptimeOption<&[Vector<E, N>]>, // [tokens, 2, vectors]
    output: &[Vector<E, N>],                  // [tokens, vectors]
    gate: &[f32],                             // [tokens, 5]
    value: &mut [Vector<E, N>],               // [capacity, tokens, 2, vectors]
    inv_rms: &mut [f32],                      // [capacity, tokens, 2]
    entry: usize,
    tokens: usize,
    vectors: usize,
    d_model: f32,
    eps: f32,
    #[comptime] units: usize,
    #[comptime] reduction: Reduction,
    #[define(E)] _dtype: ElemType,
) {
    let token = cube_index();
    if token >= tokens {
        terminate!();
    }
    let row = (entry * tokens + token) * 2;
    let mut sums = CubeSum::new(2usize, units, reduction);
    let mut squares = Array::<Vector<f32, N>>::new(2usize);
    squares[0] = Vector::new(0.0f32);
    squares[1] = Vector::new(0.0f32);
    for column in range_stepped(UNIT_POS_X as usize, vectors, units) {
        let (first, second) = written::<E, N>(&partial, output, gate, token, column, vectors);
        // The key is the norm of what is stored.
        let first = Vector::<E, N>::cast_from(first);
        let second = Vector::<E, N>::cast_from(second);
        value[row * vectors + column] = first;
        value[(row + 1) * vectors + column] = second;
        let first = Vector::<f32, N>::cast_from(first);
        let second = Vector::<f32, N>::cast_from(second);
        squares[0] += first * first;
        squares[1] += second * second;
    }
    let mut sum = Array::<f32>::new(2usize);
    sum[0] = lane_sum(squares[0]);
    sum[1] = lane_sum(squares[1]);
    sums.sum(&mut sum);
    if UNIT_POS_X == 0 {
        inv_rms[row] = inverse_rms(sum[0], d_model, eps);
        inv_rms[row + 1] = inverse_rms(sum[1], d_model, eps);
    }
}

/// Both streams of the state after a branch (17).
#[cube]
fn written<E: Float, N: Size>(
    partial: &ComptimeOption<&[Vector<E, N>]>,
    output: &[Vector<E, N>],
    gate: &[f32],
    token: usize,
    column: usize,
    vectors: usize,
) -> (Vector<f32, N>, Vector<f32, N>) {
    let y = Vector::<f32, N>::cast_from(output[token * vectors + column]);
    let gates = token * GATES;
    let first = Vector::new(gate[gates + BETA]) * y;
    let second = Vector::new(gate[gates + BETA + 1]) * y;
    #[comptime]
    match partial {
        ComptimeOption::Some(partial) => {
            let rho = gate[gates + RHO];
            let keep = Vector::<f32, N>::new(rho);
            let exchange = Vector::<f32, N>::new(1.0f32 - rho);
            let p0 = Vector::<f32, N>::cast_from(partial[2 * token * vectors + column]);
            let p1 = Vector::<f32, N>::cast_from(partial[(2 * token + 1) * vectors + column]);
            (keep * p0 + exchange * p1 + first, keep * p1 + exchange * p0 + second)
        }
        ComptimeOption::None => (first, second),
    }
}
