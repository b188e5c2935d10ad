//! Scalar functions of the equations.

use cubecl::prelude::*;

/// `sum + <a, b>` by one multiply-add a lane. Products of whole vectors, whose lanes are added in the end, would take twice
/// as many instructions and a register a lane.
#[cube]
pub(crate) fn add_dot<N: Size>(sum: f32, a: Vector<f32, N>, b: Vector<f32, N>) -> f32 {
    let mut total = sum;
    #[unroll]
    for lane in 0usize..N::value() {
        total += a.extract(lane) * b.extract(lane);
    }
    total
}

/// `1 / sqrt(squares / length + eps)`, of the inverse length.
#[cube]
pub(crate) fn inverse_rms(squares: f32, inv_length: f32, eps: f32) -> f32 {
    (squares * inv_length + eps).inverse_sqrt()
}

/// `1 / x` of an `x` from 1 to 2, to the last bit or the one before, where a division that is exact for every number would
/// call a function for the rare ones, to which a GPU's compiler gives up registers.
#[cube]
pub(crate) fn reciprocal_to_two(x: f32) -> f32 {
    // The line nearest to 1 / x, off by 1/17; each step of Newton's method squares that.
    let mut reciprocal = f32::new(24.0 / 17.0) - f32::new(8.0 / 17.0) * x;
    #[unroll]
    for _ in 0usize..3 {
        reciprocal += reciprocal * (1.0f32 - x * reciprocal);
    }
    reciprocal
}

/// `1 / (1 + exp(-x))`, without an exponential that overflows.
#[cube]
pub(crate) fn sigmoid(x: f32) -> f32 {
    let small = (-x.abs()).exp();
    let of_magnitude = reciprocal_to_two(1.0f32 + small);
    if x < 0.0f32 { small * of_magnitude } else { of_magnitude }
}
