use cubecl::prelude::*;

use super::config::{ReadConfig, choose};
use crate::gate::{ALPHA, BETA, GATES, QUERY, RHO, ROWS, SCALARS};
use crate::launch::{Tuning, cube_count, cube_index};
use crate::numeric::{inverse_rms, lane_sum, sigmoid};
use crate::operand::{Check, F32, Operand};
use crate::reduce::CubeSum;
use crate::softmax::OnlineSoftmax;
use crate::{Dims, KernelError, Routing};

/// The operands of [`read_fwd`].
#[derive(Debug, Clone, Copy)]
pub struct ReadFwd<'a> {
    /// Input, f32, f16 or bf16: the retrieved state of this branch's query. `[tokens, 2, d_model]`
    pub state: Operand<'a>,
    /// What the state is merged with; none in a block's first branch.
    pub partial: Option<ReadPartial<'a>>,
    /// Input, f32, f16 or bf16: the site's rows alpha0, alpha1, beta0, beta1, rho, query; each for stream 0, then stream 1.
    /// `[6, 2, d_model]`
    pub weight: Operand<'a>,
    /// Input, f32: five biases in the order of `weight`, then the scales of alpha, beta and rho. `[8]`
    pub scalars: Operand<'a>,
    /// Output, in the type of `state`: branch input (15). `[tokens, d_model]`
    pub input: Operand<'a>,
    /// Output, f32: alpha0, alpha1, beta0, beta1, rho; rho is 1 without a partial state. `[tokens, 5]`
    pub gate: Operand<'a>,
    /// Epsilon of all norms.
    pub eps: f64,
}

/// The open block's part of [`ReadFwd`].
#[derive(Debug, Clone, Copy)]
pub struct ReadPartial<'a> {
    /// Input, in the type of the retrieved state. `[tokens, 2, d_model]`
    pub state: Operand<'a>,
    /// Input, f32: log-sum-exp of the history. `[tokens, 2]`
    pub lse: Operand<'a>,
}

/// Residual read, forward (A.6–A.10, 13–16).
///
/// # Errors
/// If an operand has another shape, element type or a too short buffer.
pub fn read_fwd(client: &Client, operands: ReadFwd, routing: Routing, tuning: Tuning) -> Result<(), KernelError> {
    let ReadFwd { state, partial, weight, scalars, input, gate, eps } = operands;

    let mut check = Check::of("read_fwd");
    let Dims { tokens, d_model, .. } = check.state("state", &state)?;
    let dims = Dims { tokens, streams: 2, d_model };
    check
        .eps(eps)?
        .storage("state", &state, client)?
        .storage("weight", &weight, client)?
        .dtype("scalars", &scalars, F32)?
        .dtype("input", &input, state.dtype)?
        .dtype("gate", &gate, F32)?
        .shape("state", &state, "[tokens, 2, d_model]", &dims.state())?
        .shape("weight", &weight, "[6, 2, d_model]", &[ROWS, 2, d_model])?
        .shape("scalars", &scalars, "[8]", &[SCALARS])?
        .shape("input", &input, "[tokens, d_model]", &dims.branch())?
        .shape("gate", &gate, "[tokens, 5]", &[tokens, GATES])?;
    if let Some(partial) = partial {
        check
            .dtype("partial.state", &partial.state, state.dtype)?
            .dtype("partial.lse", &partial.lse, F32)?
            .shape("partial.state", &partial.state, "[tokens, 2, d_model]", &dims.state())?
            .shape("partial.lse", &partial.lse, "[tokens, 2]", &[tokens, 2])?;
    }
    if tokens == 0 {
        return Ok(());
    }

    let (lanes, config) = choose(client, d_model, state.dtype, routing, tuning);
    read_fwd_kernel::launch(
        client,
        cube_count(client, tokens, 1),
        config.row.cube_dim(),
        check.address(client)?,
        lanes,
        state.argument(lanes),
        partial.map(|partial| partial.state.argument(lanes)).into(),
        partial.map(|partial| partial.lse.argument(1)).into(),
        weight.argument(lanes),
        scalars.argument(1),
        input.argument(lanes),
        gate.argument(1),
        tokens,
        d_model / lanes,
        d_model as f32,
        eps as f32,
        config,
        state.dtype,
        weight.dtype,
    );
    Ok(())
}

#[cube(launch, address_type = "dynamic")]
#[expect(clippy::too_many_arguments, reason = "one argument a tensor and size")]
fn read_fwd_kernel<E: Float, Q: Float, N: Size>(
    state: &[Vector<E, N>],                   // [tokens, 2, vectors]
    partial: ComptimeOption<&[Vector<E, N>]>, // [tokens, 2, vectors]
    lse: ComptimeOption<&[f32]>,              // [tokens, 2]
    weight: &[Vector<Q, N>],                  // [6, 2, vectors]
    scalars: &[f32],                          // [8]
    input: &mut [Vector<E, N>],               // [tokens, vectors]
    gate: &mut [f32],                         // [tokens, 5]
    tokens: usize,
    vectors: usize,
    d_model: f32,
    eps: f32,
    #[comptime] config: ReadConfig,
    #[define(E)] _state_dtype: ElemType,
    #[define(Q)] _weight_dtype: ElemType,
) {
    let token = cube_index();
    if token >= tokens {
        terminate!();
    }
    let units = comptime!(config.row.units);
    let columns = comptime!(config.row.columns);
    let unit = UNIT_POS_X as usize;
    let mut sums = CubeSum::new(5usize, units, comptime!(config.reduction));

    let mut merged = load_pair::<E, N>(state, token, vectors, columns, units);
    let mut rho = f32::new(1.0);
    #[comptime]
    match partial {
        ComptimeOption::Some(partial) => {
            let partial = load_pair::<E, N>(partial, token, vectors, columns, units);
            let lse = lse.unwrap();
            let mut sum = partial_sums::<Q, N>(&partial, weight, vectors, config);
            sums.sum(&mut sum);

            let norm = inverse_rms(sum[0] + sum[1], 2.0f32 * d_model, eps);
            rho = sigmoid(scalars[GATES + 2] * norm * sum[4] + scalars[RHO]); // (16)

            let mut share = Array::<f32>::new(4usize);
            merged = merge::<N>(&merged, &partial, &sum, lse, &mut share, token, d_model, eps, config);
        }
        ComptimeOption::None => {}
    }

    // <W, [h0; h1]> of alpha0, alpha1, beta0, beta1, and the squares of [h0; h1].
    let mut sum = Array::<f32>::new(5usize);
    #[unroll]
    for k in 0usize..5 {
        let mut dot = Vector::<f32, N>::new(0.0f32);
        #[unroll]
        for j in 0usize..2 {
            #[unroll]
            for c in 0..columns {
                let column = c * units + unit;
                let own = merged[comptime!(j * columns + c)];
                if comptime!(k == 4) {
                    dot += own * own;
                } else if column < vectors {
                    dot += Vector::cast_from(weight[(2 * k + j) * vectors + column]) * own;
                }
            }
        }
        sum[k] = lane_sum(dot);
    }
    sums.sum(&mut sum);

    let norm = inverse_rms(sum[4], 2.0f32 * d_model, eps);
    let alpha0 = sigmoid(scalars[GATES] * norm * sum[ALPHA] + scalars[ALPHA]); // (13, 14)
    let alpha1 = sigmoid(scalars[GATES] * norm * sum[ALPHA + 1] + scalars[ALPHA + 1]);
    #[unroll]
    for c in 0..columns {
        let column = c * units + unit;
        if column < vectors {
            let mixed = Vector::new(alpha0) * merged[c] + Vector::new(alpha1) * merged[comptime!(columns + c)]; // (15)
            input[token * vectors + column] = Vector::cast_from(mixed);
        }
    }
    if unit == 0 {
        let gates = token * GATES;
        gate[gates + ALPHA] = alpha0;
        gate[gates + ALPHA + 1] = alpha1;
        #[unroll]
        for j in BETA..BETA + 2 {
            gate[gates + j] = 2.0f32 * sigmoid(scalars[GATES + 1] * norm * sum[j] + scalars[j]); // (13, 14)
        }
        gate[gates + RHO] = rho;
    }
}

/// The columns of this unit of both streams of a token, zero past the end: `[2, columns]`.
#[cube]
pub(super) fn load_pair<E: Float, N: Size>(
    pair: &[Vector<E, N>],
    token: usize,
    vectors: usize,
    #[comptime] columns: usize,
    #[comptime] units: usize,
) -> Array<Vector<f32, N>> {
    let mut loaded = Array::<Vector<f32, N>>::new(comptime!(2 * columns));
    #[unroll]
    for j in 0usize..2 {
        #[unroll]
        for c in 0..columns {
            let column = c * units + UNIT_POS_X as usize;
            let k = comptime!(j * columns + c);
            loaded[k] = Vector::new(0.0f32);
            if column < vectors {
                loaded[k] = Vector::cast_from(pair[(2 * token + j) * vectors + column]);
            }
        }
    }
    loaded
}

/// What the sums over the cube give about the partial state: squares of both streams, `<q, P^key>` of both streams,
/// `<W_rho, [P0; P1]>`.
#[cube]
pub(super) fn partial_sums<Q: Float, N: Size>(
    partial: &Array<Vector<f32, N>>,
    weight: &[Vector<Q, N>],
    vectors: usize,
    #[comptime] config: ReadConfig,
) -> Array<f32> {
    let columns = comptime!(config.row.columns);
    let units = comptime!(config.row.units);
    let mut sum = Array::<f32>::new(5usize);
    sum[4] = f32::new(0.0);
    #[unroll]
    for j in 0usize..2 {
        let key = comptime!(config.routing.key_stream(j));
        let mut squares = Vector::<f32, N>::new(0.0f32);
        let mut dot = Vector::<f32, N>::new(0.0f32);
        let mut rho = Vector::<f32, N>::new(0.0f32);
        #[unroll]
        for c in 0..columns {
            let column = c * units + UNIT_POS_X as usize;
            if column < vectors {
                let own = partial[comptime!(j * columns + c)];
                let query = Vector::<f32, N>::cast_from(weight[(2 * QUERY + j) * vectors + column]);
                squares += own * own;
                dot += query * partial[comptime!(key * columns + c)];
                rho += Vector::cast_from(weight[(2 * RHO + j) * vectors + column]) * own;
            }
        }
        sum[j] = lane_sum(squares);
        sum[j + 2] = lane_sum(dot);
        sum[4] += lane_sum(rho);
    }
    sum
}

/// Merges the retrieved state with the partial one (A.8–A.10). `share`: lambda of both streams, then 1 - lambda.
#[cube]
#[expect(clippy::too_many_arguments, reason = "everything of one token")]
pub(super) fn merge<N: Size>(
    state: &Array<Vector<f32, N>>,
    partial: &Array<Vector<f32, N>>,
    sum: &Array<f32>,
    lse: &[f32],
    share: &mut Array<f32>,
    token: usize,
    d_model: f32,
    eps: f32,
    #[comptime] config: ReadConfig,
) -> Array<Vector<f32, N>> {
    let columns = comptime!(config.row.columns);
    let mut softmax = OnlineSoftmax::empty(2usize);
    let mut merged = Array::<Vector<f32, N>>::new(comptime!(2 * columns));
    #[unroll]
    for j in 0usize..2 {
        let key = comptime!(config.routing.key_stream(j));
        let from = comptime!(config.routing.value_stream(j));
        let logit = sum[j + 2] * inverse_rms(sum[key], d_model, eps); // (A.8)
        softmax.resume(j, lse[2 * token + j]);
        let kept = softmax.raise(j, logit);
        let added = softmax.push(j, logit);
        let normaliser = softmax.normaliser(j);
        share[j] = kept * normaliser; // (A.9)
        share[j + 2] = added * normaliser;
        #[unroll]
        for c in 0..columns {
            let k = comptime!(j * columns + c);
            let partial = partial[comptime!(from * columns + c)];
            merged[k] = Vector::new(share[j]) * state[k] + Vector::new(share[j + 2]) * partial; // (A.10)
        }
    }
    merged
}
