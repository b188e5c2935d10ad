use cubecl::prelude::*;

use super::fwd::{choose, inputs};
use crate::columns::{inside, load, narrowed, store, widened};
use crate::dims::token_gradients;
use crate::launch::{Row, Tuning, cube_index, cubes};
use crate::numeric::add_dot;
use crate::operand::{Check, F32, Operand};
use crate::reduce::CubeSum;
use crate::site::{BETA, GATES};
use crate::{Dims, KernelError};

/// Columns of `d_token`: a gated write has two streams.
const TOKEN: usize = token_gradients(2);

/// The operands of [`write_bwd`].
#[derive(Debug, Clone, Copy)]
pub struct WriteBwd<'a> {
    /// Input, in the type of `output`: the gradient of the state after the branch. `[tokens, 2, d_model]`
    pub d_state: Operand<'a>,
    /// Saved, f32, f16 or bf16: what the branch computed. `[tokens, d_model]`
    pub output: Operand<'a>,
    /// Saved, f32: the gates of all reads. `[reads, tokens, 5]`
    pub gate: Operand<'a>,
    /// The read of this branch: its row of `gate` and `d_token`.
    pub read: usize,
    /// Output, in the type of `output`. `[tokens, d_model]`
    pub d_output: Operand<'a>,
    /// Output, f32: the gradient of beta, in the first two columns of row `read`; the others stay. `[reads, tokens, 6]`
    pub d_token: Operand<'a>,
}

/// The backward of a block's last write up to its output and beta; [`read_bwd`](crate::read::read_bwd) does so for the
/// other branches, and the transport for all.
///
/// # Errors
/// If an operand has another shape, element type or a too short buffer.
pub fn write_bwd(client: &Client, operands: WriteBwd, tuning: Tuning) -> Result<(), KernelError> {
    let WriteBwd { d_state, output, gate, read, d_output, d_token } = operands;

    let mut check = Check::of("write_bwd");
    let dims = inputs(client, &mut check, None, output, Some(gate), read)?;
    let Dims { tokens, d_model, .. } = dims;
    check
        .fits("d_state", &d_state, output.dtype, "[tokens, 2, d_model]", &dims.state())?
        .fits("d_output", &d_output, output.dtype, "[tokens, d_model]", &dims.branch())?
        .fits("d_token", &d_token, F32, "[reads, tokens, 6]", &[gate.shape[0], tokens, TOKEN])?;
    let address = check.address(client)?;
    if tokens == 0 {
        return Ok(());
    }

    let row = choose(client, output, 3, 2, tuning);
    write_bwd_kernel::launch(
        client,
        cubes(client, tokens),
        row.cube_dim(),
        address,
        row.lanes,
        d_state.argument(row.lanes),
        output.argument(row.lanes),
        gate.argument(1),
        d_output.argument(row.lanes),
        d_token.argument(1),
        read,
        tokens,
        d_model / row.lanes,
        row,
        output.dtype,
    );
    Ok(())
}

#[cube(launch, address_type = "dynamic")]
#[expect(clippy::too_many_arguments, reason = "one argument a tensor and size")]
fn write_bwd_kernel<E: Float, N: Size>(
    d_state: &[Vector<E, N>],      // [tokens, 2, vectors]
    output: &[Vector<E, N>],       // [tokens, vectors]
    gate: &[f32],                  // [reads, tokens, 5]
    d_output: &mut [Vector<E, N>], // [tokens, vectors]
    d_token: &mut [f32],           // [reads, tokens, 6]
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
    let row = read * tokens + token;
    let beta0 = Vector::<f32, N>::new(gate[row * GATES + BETA]);
    let beta1 = Vector::<f32, N>::new(gate[row * GATES + BETA + 1]);

    let mut sums = CubeSum::new(2usize, config);
    let mut d_beta0 = f32::new(0.0);
    let mut d_beta1 = f32::new(0.0);
    let columns = comptime!(config.columns);
    let d = load::<E, N>(d_state, 2 * token, vectors, 2usize, config);
    let y = load::<E, N>(output, token, vectors, 1usize, config);
    let (d, y) = (widened::<E, N>(&d), widened::<E, N>(&y));
    // dy = sum over j of beta^j dP^j;  d_beta^j = <dP^j, y>
    let mut d_y = Array::<Vector<f32, N>>::new(columns);
    #[unroll]
    for c in 0..columns {
        let (d0, d1) = (d[c], d[comptime!(columns + c)]);
        d_y[c] = beta0 * d0 + beta1 * d1;
        if inside(c, vectors, config) {
            d_beta0 = add_dot(d_beta0, d0, y[c]);
            d_beta1 = add_dot(d_beta1, d1, y[c]);
        }
    }
    let mut sum = Array::<f32>::new(2usize);
    sum[0] = d_beta0;
    sum[1] = d_beta1;
    sums.sum(&mut sum);
    store::<E, N>(&narrowed::<E, N>(&d_y), d_output, token, vectors, 1usize, config);
    if UNIT_POS_X == 0 {
        d_token[row * TOKEN] = sum[0];
        d_token[row * TOKEN + 1] = sum[1];
    }
}
