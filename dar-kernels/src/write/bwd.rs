use cubecl::prelude::*;

use super::fwd::inputs;
use crate::gate::{ALPHA, BETA, GATES, RHO};
use crate::launch::{Row, Tuning, cube_count, cube_index, lanes};
use crate::numeric::lane_sum;
use crate::operand::{Check, F32, Operand};
use crate::reduce::{CubeSum, Reduction};
use crate::{Dims, KernelError};

/// The operands of [`write_bwd`].
#[derive(Debug, Clone, Copy)]
pub struct WriteBwd<'a> {
    /// Input, in the type of `output`: the gradient of the state after the branch. `[tokens, 2, d_model]`
    pub d_state: Operand<'a>,
    /// Saved, in the type of `output`: the state before this branch, and where its gradient goes; none before a block's
    /// first. Both `[tokens, 2, d_model]`
    pub partial: Option<(Operand<'a>, Operand<'a>)>,
    /// Saved, f32, f16 or bf16: what the branch computed. `[tokens, d_model]`
    pub output: Operand<'a>,
    /// Saved, f32: the gates of the read. `[tokens, 5]`
    pub gate: Operand<'a>,
    /// Output, in the type of `output`. `[tokens, d_model]`
    pub d_output: Operand<'a>,
    /// Output, f32: the gradient of the gates; zero for alpha, and for rho without a partial state. `[tokens, 5]`
    pub d_gate: Operand<'a>,
}

/// Gated write and constrained transport, backward; closing a block has the same one.
///
/// # Errors
/// If an operand has another shape, element type or a too short buffer.
pub fn write_bwd(client: &Client, operands: WriteBwd, tuning: Tuning) -> Result<(), KernelError> {
    let WriteBwd { d_state, partial, output, gate, d_output, d_gate } = operands;

    let mut check = Check::of("write_bwd");
    let dims = inputs(client, &mut check, partial.map(|(partial, _)| partial), output, gate)?;
    let Dims { tokens, d_model, .. } = dims;
    check
        .dtype("d_state", &d_state, output.dtype)?
        .dtype("d_output", &d_output, output.dtype)?
        .dtype("d_gate", &d_gate, F32)?
        .shape("d_state", &d_state, "[tokens, 2, d_model]", &dims.state())?
        .shape("d_output", &d_output, "[tokens, d_model]", &dims.branch())?
        .shape("d_gate", &d_gate, "[tokens, 5]", &[tokens, GATES])?;
    if let Some((_, d_partial)) = &partial {
        check.dtype("d_partial", d_partial, output.dtype)?.shape(
            "d_partial",
            d_partial,
            "[tokens, 2, d_model]",
            &dims.state(),
        )?;
    }
    if tokens == 0 {
        return Ok(());
    }

    let lanes = lanes(client, output.dtype, d_model);
    let reduction = tuning.reduction(client);
    let row = Row::choose(client, d_model / lanes, Row::ANY_COLUMNS, reduction);
    write_bwd_kernel::launch(
        client,
        cube_count(client, tokens, 1),
        row.cube_dim(),
        check.address(client)?,
        lanes,
        d_state.argument(lanes),
        partial.map(|(partial, _)| partial.argument(lanes)).into(),
        output.argument(lanes),
        gate.argument(1),
        partial.map(|(_, d_partial)| d_partial.argument(lanes)).into(),
        d_output.argument(lanes),
        d_gate.argument(1),
        tokens,
        d_model / lanes,
        row.units,
        reduction,
        output.dtype,
    );
    Ok(())
}

#[cube(launch, address_type = "dynamic")]
#[expect(clippy::too_many_arguments, reason = "one argument a tensor and size")]
fn write_bwd_kernel<E: Float, N: Size>(
    d_state: &[Vector<E, N>],                       // [tokens, 2, vectors]
    partial: ComptimeOption<&[Vector<E, N>]>,       // [tokens, 2, vectors]
    output: &[Vector<E, N>],                        // [tokens, vectors]
    gate: &[f32],                                   // [tokens, 5]
    d_partial: ComptimeOption<&mut [Vector<E, N>]>, // [tokens, 2, vectors]
    d_output: &mut [Vector<E, N>],                  // [tokens, vectors]
    d_gate: &mut [f32],                             // [tokens, 5]
    tokens: usize,
    vectors: usize,
    #[comptime] units: usize,
    #[comptime] reduction: Reduction,
    #[define(E)] _dtype: ElemType,
) {
    let token = cube_index();
    if token >= tokens {
        terminate!();
    }
    let unit = UNIT_POS_X as usize;
    let gates = token * GATES;
    let (beta0, beta1, rho) = (gate[gates + BETA], gate[gates + BETA + 1], gate[gates + RHO]);
    let (first, second) = (2 * token * vectors, (2 * token + 1) * vectors);

    let mut sums = CubeSum::new(3usize, units, reduction);
    let mut d_beta0 = Vector::<f32, N>::new(0.0f32);
    let mut d_beta1 = Vector::<f32, N>::new(0.0f32);
    for column in range_stepped(unit, vectors, units) {
        let d0 = Vector::<f32, N>::cast_from(d_state[first + column]);
        let d1 = Vector::<f32, N>::cast_from(d_state[second + column]);
        let y = Vector::<f32, N>::cast_from(output[token * vectors + column]);
        // dy = sum over j of beta^j dP^j;  d_beta^j = <dP^j, y>
        d_output[token * vectors + column] = Vector::cast_from(Vector::new(beta0) * d0 + Vector::new(beta1) * d1);
        d_beta0 += d0 * y;
        d_beta1 += d1 * y;
    }
    let mut d_rho = Vector::<f32, N>::new(0.0f32);
    #[comptime]
    match partial {
        ComptimeOption::Some(partial) => {
            let d_partial = d_partial.unwrap();
            let keep = Vector::<f32, N>::new(rho);
            let exchange = Vector::<f32, N>::new(1.0f32 - rho);
            for column in range_stepped(unit, vectors, units) {
                let d0 = Vector::<f32, N>::cast_from(d_state[first + column]);
                let d1 = Vector::<f32, N>::cast_from(d_state[second + column]);
                let p0 = Vector::<f32, N>::cast_from(partial[first + column]);
                let p1 = Vector::<f32, N>::cast_from(partial[second + column]);
                // M(rho) is its own transpose;  d_rho = <dP^0 - dP^1, P^0 - P^1>
                d_partial[first + column] = Vector::cast_from(keep * d0 + exchange * d1);
                d_partial[second + column] = Vector::cast_from(keep * d1 + exchange * d0);
                d_rho += (d0 - d1) * (p0 - p1);
            }
        }
        ComptimeOption::None => {}
    }

    let mut sum = Array::<f32>::new(3usize);
    sum[0] = lane_sum(d_beta0);
    sum[1] = lane_sum(d_beta1);
    sum[2] = lane_sum(d_rho);
    sums.sum(&mut sum);
    if unit == 0 {
        d_gate[gates + ALPHA] = f32::new(0.0);
        d_gate[gates + ALPHA + 1] = f32::new(0.0);
        d_gate[gates + BETA] = sum[0];
        d_gate[gates + BETA + 1] = sum[1];
        d_gate[gates + RHO] = sum[2];
    }
}
