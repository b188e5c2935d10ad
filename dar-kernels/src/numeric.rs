//! Scalar functions of the equations.

use cubecl::prelude::*;

/// The sum of the lanes of a vector.
#[cube]
pub(crate) fn lane_sum<N: Size>(vector: Vector<f32, N>) -> f32 {
    let mut sum = vector.extract(0usize);
    #[unroll]
    for lane in 1usize..N::value() {
        sum += vector.extract(lane);
    }
    sum
}

/// `1 / sqrt(squares / length + eps)`, of the inverse length.
#[cube]
pub(crate) fn inverse_rms(squares: f32, inv_length: f32, eps: f32) -> f32 {
    (squares * inv_length + eps).inverse_sqrt()
}

/// `1 / (1 + exp(-x))`, without an exponential that overflows.
#[cube]
pub(crate) fn sigmoid(x: f32) -> f32 {
    let small = (-x.abs()).exp();
    let of_magnitude = 1.0f32 / (1.0f32 + small);
    if x < 0.0f32 { small * of_magnitude } else { of_magnitude }
}
