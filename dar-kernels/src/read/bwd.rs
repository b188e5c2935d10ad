use cubecl::prelude::*;

use super::config::{ReadConfig, choose_backward};
use super::fwd::{ReadPartial, load_pair, merge, partial_sums};
use crate::gate::{ALPHA, BETA, GATES, QUERY, RHO, ROWS, SCALARS};
use crate::launch::{Tuning, cube_count, cube_index};
use crate::numeric::{inverse_rms, lane_sum};
use crate::operand::{Check, F32, Operand};
use crate::reduce::CubeSum;
use crate::rows::{Rows, rows};
use crate::{Dims, KernelError, Routing};

/// The operands of [`read_bwd`].
#[derive(Debug, Clone, Copy)]
pub struct ReadBwd<'a> {
    /// Saved, f32, f16 or bf16: the retrieved state of this branch's query. `[tokens, 2, d_model]`
    pub state: Operand<'a>,
    /// Saved, and the gradients of it; none in a block's first branch.
    pub partial: Option<ReadPartialBwd<'a>>,
    /// Saved, f32, f16 or bf16. `[6, 2, d_model]`
    pub weight: Operand<'a>,
    /// Saved, f32. `[8]`
    pub scalars: Operand<'a>,
    /// Saved, f32: the gates of the forward. `[tokens, 5]`
    pub gate: Operand<'a>,
    /// Input, in the type of `state`: the gradient of the branch input. `[tokens, d_model]`
    pub d_input: Operand<'a>,
    /// Input, f32: the gradient of beta and rho; alpha's is not read. `[tokens, 5]`
    pub d_gate: Operand<'a>,
    /// Output, in the type of `state`. `[tokens, 2, d_model]`
    pub d_state: Operand<'a>,
    /// Output, f32: the gradients of `weight`, then of `scalars`; the query's and rho's are zero without a partial state.
    /// `[12 * d_model + 8]`
    pub d_site: Operand<'a>,
    /// Epsilon of all norms.
    pub eps: f64,
}

/// The open block's part of [`ReadBwd`].
#[derive(Debug, Clone, Copy)]
pub struct ReadPartialBwd<'a> {
    /// Saved, as in the forward.
    pub saved: ReadPartial<'a>,
    /// Output, in the type of the retrieved state: what the read adds to the gradient of the partial state.
    /// `[tokens, 2, d_model]`
    pub d_state: Operand<'a>,
    /// Output, f32. `[tokens, 2]`
    pub d_lse: Operand<'a>,
}

/// Residual read, backward. The gradients of the parameters are summed over the tokens in two stages.
///
/// # Errors
/// If an operand has another shape, element type or a too short buffer.
pub fn read_bwd(client: &Client, operands: ReadBwd, routing: Routing, tuning: Tuning) -> Result<(), KernelError> {
    let ReadBwd { state, partial, weight, scalars, gate, d_input, d_gate, d_state, d_site, eps } = operands;

    let mut check = Check::of("read_bwd");
    let Dims { tokens, d_model, .. } = check.state("state", &state)?;
    let dims = Dims { tokens, streams: 2, d_model };
    check
        .eps(eps)?
        .storage("state", &state, client)?
        .storage("weight", &weight, client)?
        .dtype("scalars", &scalars, F32)?
        .dtype("gate", &gate, F32)?
        .dtype("d_input", &d_input, state.dtype)?
        .dtype("d_gate", &d_gate, F32)?
        .dtype("d_state", &d_state, state.dtype)?
        .dtype("d_site", &d_site, F32)?
        .shape("state", &state, "[tokens, 2, d_model]", &dims.state())?
        .shape("weight", &weight, "[6, 2, d_model]", &[ROWS, 2, d_model])?
        .shape("scalars", &scalars, "[8]", &[SCALARS])?
        .shape("gate", &gate, "[tokens, 5]", &[tokens, GATES])?
        .shape("d_input", &d_input, "[tokens, d_model]", &dims.branch())?
        .shape("d_gate", &d_gate, "[tokens, 5]", &[tokens, GATES])?
        .shape("d_state", &d_state, "[tokens, 2, d_model]", &dims.state())?
        .shape("d_site", &d_site, "[12 * d_model + 8]", &[2 * ROWS * d_model + SCALARS])?;
    if let Some(ReadPartialBwd { saved, d_state: d_partial, d_lse }) = &partial {
        check
            .dtype("partial.saved.state", &saved.state, state.dtype)?
            .dtype("partial.saved.lse", &saved.lse, F32)?
            .dtype("partial.d_state", d_partial, state.dtype)?
            .dtype("partial.d_lse", d_lse, F32)?
            .shape("partial.saved.state", &saved.state, "[tokens, 2, d_model]", &dims.state())?
            .shape("partial.saved.lse", &saved.lse, "[tokens, 2]", &[tokens, 2])?
            .shape("partial.d_state", d_partial, "[tokens, 2, d_model]", &dims.state())?
            .shape("partial.d_lse", d_lse, "[tokens, 2]", &[tokens, 2])?;
    }

    let (lanes, config) = choose_backward(client, d_model, state.dtype, routing, tuning);
    let length = 2 * ROWS * d_model + SCALARS;
    let cubes = rows(tokens, length);
    let stage = Rows::new(client, cubes, length);
    stage.check(&mut check)?;
    let address = check.address(client)?;
    read_bwd_kernel::launch(
        client,
        cube_count(client, cubes, 1),
        config.row.cube_dim(),
        address,
        lanes,
        state.argument(lanes),
        partial.map(|partial| partial.saved.state.argument(lanes)).into(),
        partial.map(|partial| partial.saved.lse.argument(1)).into(),
        weight.argument(lanes),
        scalars.argument(1),
        gate.argument(1),
        d_input.argument(lanes),
        d_gate.argument(1),
        d_state.argument(lanes),
        partial.map(|partial| partial.d_state.argument(lanes)).into(),
        partial.map(|partial| partial.d_lse.argument(1)).into(),
        stage.operand().argument(lanes),
        cubes,
        tokens,
        d_model / lanes,
        d_model as f32,
        eps as f32,
        config,
        state.dtype,
        weight.dtype,
    );
    stage.sum(client, &d_site, address);
    Ok(())
}

#[cube(launch, address_type = "dynamic")]
#[expect(clippy::too_many_arguments, reason = "one argument a tensor and size")]
fn read_bwd_kernel<E: Float, Q: Float, N: Size>(
    state: &[Vector<E, N>],                             // [tokens, 2, vectors]
    partial: ComptimeOption<&[Vector<E, N>]>,           // [tokens, 2, vectors]
    lse: ComptimeOption<&[f32]>,                        // [tokens, 2]
    weight: &[Vector<Q, N>],                            // [6, 2, vectors]
    scalars: &[f32],                                    // [8]
    gate: &[f32],                                       // [tokens, 5]
    d_input: &[Vector<E, N>],                           // [tokens, vectors]
    d_gate: &[f32],                                     // [tokens, 5]
    d_state: &mut [Vector<E, N>],                       // [tokens, 2, vectors]
    mut d_partial: ComptimeOption<&mut [Vector<E, N>]>, // [tokens, 2, vectors]
    mut d_lse: ComptimeOption<&mut [f32]>,              // [tokens, 2]
    row_sum: &mut [Vector<f32, N>],                     // [rows, 12 * vectors + 8 / lanes]
    rows: usize,
    tokens: usize,
    vectors: usize,
    d_model: f32,
    eps: f32,
    #[comptime] config: ReadConfig,
    #[define(E)] _state_dtype: ElemType,
    #[define(Q)] _weight_dtype: ElemType,
) {
    let row = cube_index();
    if row >= rows {
        terminate!();
    }
    let units = comptime!(config.row.units);
    let columns = comptime!(config.row.columns);
    let unit = UNIT_POS_X as usize;
    let mut sums = CubeSum::new(7usize, units, comptime!(config.reduction));

    // Gradients of the site's rows and scalars over the tokens of this cube.
    let mut d_rows = Array::<Vector<f32, N>>::new(comptime!(2 * ROWS * columns));
    #[unroll]
    for k in 0..comptime!(2 * ROWS * columns) {
        d_rows[k] = Vector::new(0.0f32);
    }
    let mut d_scalars = Array::<f32>::new(comptime!(SCALARS));
    #[unroll]
    for k in 0..comptime!(SCALARS) {
        d_scalars[k] = f32::new(0.0);
    }

    for token in range_stepped(row, tokens, rows) {
        let gates = token * GATES;
        let retrieved = load_pair::<E, N>(state, token, vectors, columns, units);
        let mut merged = load_pair::<E, N>(state, token, vectors, columns, units);
        let mut open = Array::<Vector<f32, N>>::new(comptime!(2 * columns)); // the partial state
        let mut about = Array::<f32>::new(5usize); // its sums
        let mut share = Array::<f32>::new(4usize);
        #[comptime]
        match partial {
            ComptimeOption::Some(partial) => {
                open = load_pair::<E, N>(partial, token, vectors, columns, units);
                about = partial_sums::<Q, N>(&open, weight, vectors, config);
                sums.sum(&mut about);
                let lse = lse.unwrap();
                merged = merge::<N>(&retrieved, &open, &about, lse, &mut share, token, d_model, eps, config);
            }
            ComptimeOption::None => {}
        }

        // <W, [h0; h1]> of alpha0, alpha1, beta0, beta1; squares of [h0; h1]; d_alpha^j = <d_input, h^j>.
        let mut d_inputs = Array::<Vector<f32, N>>::new(columns);
        #[unroll]
        for c in 0..columns {
            let column = c * units + unit;
            d_inputs[c] = Vector::new(0.0f32);
            if column < vectors {
                d_inputs[c] = Vector::cast_from(d_input[token * vectors + column]);
            }
        }
        let mut sum = Array::<f32>::new(7usize);
        let mut squares = Vector::<f32, N>::new(0.0f32);
        #[unroll]
        for j in 0usize..2 {
            let mut dot = Vector::<f32, N>::new(0.0f32);
            #[unroll]
            for c in 0..columns {
                let own = merged[comptime!(j * columns + c)];
                squares += own * own;
                dot += d_inputs[c] * own;
            }
            sum[j + 5] = lane_sum(dot);
        }
        sum[4] = lane_sum(squares);
        #[unroll]
        for k in 0usize..4 {
            let mut dot = Vector::<f32, N>::new(0.0f32);
            #[unroll]
            for j in 0usize..2 {
                #[unroll]
                for c in 0..columns {
                    let column = c * units + unit;
                    if column < vectors {
                        dot += Vector::cast_from(weight[(2 * k + j) * vectors + column])
                            * merged[comptime!(j * columns + c)];
                    }
                }
            }
            sum[k] = lane_sum(dot);
        }
        sums.sum(&mut sum);

        // Through the sigmoids (13, 14), then the norm: with z = n <W, hc>, d_hc = n v - hc n³ <v, hc> / (2 d_model),
        // where v = sum of scale d_logit W.
        let norm = inverse_rms(sum[4], 2.0f32 * d_model, eps);
        let mut scaled = Array::<f32>::new(4usize); // scale d_logit
        let mut inner = f32::new(0.0); // <v, hc>
        #[unroll]
        for j in 0usize..2 {
            let alpha = gate[gates + ALPHA + j];
            let beta = gate[gates + BETA + j];
            let d_alpha = sum[j + 5] * alpha * (1.0f32 - alpha);
            let d_beta = d_gate[gates + BETA + j] * beta * (1.0f32 - 0.5f32 * beta);
            scaled[ALPHA + j] = scalars[GATES] * d_alpha;
            scaled[BETA + j] = scalars[GATES + 1] * d_beta;
            inner += scaled[ALPHA + j] * sum[ALPHA + j] + scaled[BETA + j] * sum[BETA + j];
            d_scalars[ALPHA + j] += d_alpha;
            d_scalars[BETA + j] += d_beta;
            d_scalars[GATES] += d_alpha * norm * sum[ALPHA + j];
            d_scalars[GATES + 1] += d_beta * norm * sum[BETA + j];
        }
        let back = norm * norm * norm * inner / (2.0f32 * d_model);
        let mut d_merged = Array::<Vector<f32, N>>::new(comptime!(2 * columns));
        #[unroll]
        for j in 0usize..2 {
            let alpha = gate[gates + ALPHA + j];
            #[unroll]
            for c in 0..columns {
                let column = c * units + unit;
                let own = merged[comptime!(j * columns + c)];
                let mut d = Vector::new(alpha) * d_inputs[c] - Vector::new(back) * own; // (15)
                #[unroll]
                for k in 0usize..4 {
                    if column < vectors {
                        d += Vector::new(norm * scaled[k]) * Vector::cast_from(weight[(2 * k + j) * vectors + column]);
                    }
                    d_rows[comptime!((2 * k + j) * columns + c)] += Vector::new(norm * scaled[k]) * own;
                }
                d_merged[comptime!(j * columns + c)] = d;
            }
        }

        #[comptime]
        match partial {
            ComptimeOption::Some(_) => {
                let d_partial = d_partial.as_mut().unwrap();
                let d_lse = d_lse.as_mut().unwrap();
                // (A.9): d_lse = <d_h, hist - P> lambda (1 - lambda), and the opposite for the logit.
                let mut gap = Array::<f32>::new(2usize);
                #[unroll]
                for j in 0usize..2 {
                    let from = comptime!(config.routing.value_stream(j));
                    let mut dot = Vector::<f32, N>::new(0.0f32);
                    #[unroll]
                    for c in 0..columns {
                        let k = comptime!(j * columns + c);
                        dot += d_merged[k] * (retrieved[k] - open[comptime!(from * columns + c)]);
                    }
                    gap[j] = lane_sum(dot);
                }
                sums.sum(&mut gap);
                #[unroll]
                for j in 0usize..2 {
                    gap[j] *= share[j] * share[j + 2];
                    if unit == 0 {
                        d_lse[2 * token + j] = gap[j];
                    }
                }

                // (16), as above.
                let rho = gate[gates + RHO];
                let d_rho = d_gate[gates + RHO] * rho * (1.0f32 - rho);
                let norm = inverse_rms(about[0] + about[1], 2.0f32 * d_model, eps);
                let scaled = scalars[GATES + 2] * d_rho;
                let back = norm * norm * norm * scaled * about[4] / (2.0f32 * d_model);
                d_scalars[RHO] += d_rho;
                d_scalars[GATES + 2] += d_rho * norm * about[4];

                let mut d_open = Array::<Vector<f32, N>>::new(comptime!(2 * columns));
                #[unroll]
                for j in 0usize..2 {
                    #[unroll]
                    for c in 0..columns {
                        let k = comptime!(j * columns + c);
                        let column = c * units + unit;
                        d_open[k] = Vector::new(0.0f32 - back) * open[k];
                        if column < vectors {
                            d_open[k] += Vector::new(norm * scaled)
                                * Vector::cast_from(weight[(2 * RHO + j) * vectors + column]);
                        }
                        d_rows[comptime!((2 * RHO + j) * columns + c)] += Vector::new(norm * scaled) * open[k];
                    }
                }
                #[unroll]
                for j in 0usize..2 {
                    let key = comptime!(config.routing.key_stream(j));
                    let from = comptime!(config.routing.value_stream(j));
                    let norm = inverse_rms(about[key], d_model, eps);
                    let d_logit = 0.0f32 - gap[j];
                    let back = norm * norm * norm * d_logit * about[j + 2] / d_model;
                    #[unroll]
                    for c in 0..columns {
                        let column = c * units + unit;
                        let by_value = comptime!(from * columns + c);
                        let by_key = comptime!(key * columns + c);
                        d_open[by_value] += Vector::new(share[j + 2]) * d_merged[comptime!(j * columns + c)]; // (A.10)
                        d_open[by_key] -= Vector::new(back) * open[by_key]; // (A.8)
                        if column < vectors {
                            d_open[by_key] += Vector::new(norm * d_logit)
                                * Vector::cast_from(weight[(2 * QUERY + j) * vectors + column]);
                        }
                        d_rows[comptime!((2 * QUERY + j) * columns + c)] += Vector::new(norm * d_logit) * open[by_key];
                    }
                }
                #[unroll]
                for j in 0usize..2 {
                    #[unroll]
                    for c in 0..columns {
                        let k = comptime!(j * columns + c);
                        let column = c * units + unit;
                        if column < vectors {
                            let at = (2 * token + j) * vectors + column;
                            d_state[at] = Vector::cast_from(Vector::new(share[j]) * d_merged[k]);
                            d_partial[at] = Vector::cast_from(d_open[k]);
                        }
                    }
                }
            }
            ComptimeOption::None =>
            {
                #[unroll]
                for j in 0usize..2 {
                    #[unroll]
                    for c in 0..columns {
                        let column = c * units + unit;
                        if column < vectors {
                            let d = d_merged[comptime!(j * columns + c)];
                            d_state[(2 * token + j) * vectors + column] = Vector::cast_from(d);
                        }
                    }
                }
            }
        }
    }

    let lanes = N::value();
    let start = row * (2 * ROWS * vectors + comptime!(SCALARS / lanes));
    #[unroll]
    for k in 0..comptime!(2 * ROWS) {
        #[unroll]
        for c in 0..columns {
            let column = c * units + unit;
            if column < vectors {
                row_sum[start + k * vectors + column] = d_rows[comptime!(k * columns + c)];
            }
        }
    }
    if unit == 0 {
        #[unroll]
        for k in 0..comptime!(SCALARS / lanes) {
            let mut packed = Vector::<f32, N>::new(0.0f32);
            #[unroll]
            for lane in 0..lanes {
                packed.insert(lane, d_scalars[comptime!(k * lanes + lane)]);
            }
            row_sum[start + 2 * ROWS * vectors + k] = packed;
        }
    }
}
