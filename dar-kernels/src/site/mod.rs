//! The gates of a site: how their parameters are packed, and what the gates of a pass look like.
//!
//! ```text
//! site:  rows alpha0, alpha1, beta0, beta1, rho, each for stream 0, then stream 1      [5, 2, d_model]
//!        biases alpha0, alpha1, beta0, beta1, rho; scales alpha, beta, rho             [8]
//!        with a norm of the branch behind the read: its gain                           [d_model]
//! gate:  alpha0, alpha1, beta0, beta1, rho of every read and token                     [reads, tokens, 5]
//! ```
//!
//! A row is a column of a weight `[2 * d_model, outputs]`: kernels walk it beside a state. Packing is one launch a
//! site and pass, and makes one binding of nine. All of it is f32.

mod pack;
mod sum;

use cubecl::prelude::*;

pub use pack::{PackSite, pack_site};
pub(crate) use sum::SiteSum;

use crate::KernelError;
use crate::operand::{Check, Operand};

/// Gates a token: alpha of both streams, beta of both streams, rho.
pub(crate) const GATES: usize = 5;
/// The first of the two mixing gates.
pub(crate) const ALPHA: usize = 0;
/// The first of the two write gates.
pub(crate) const BETA: usize = 2;
/// The transport gate.
pub(crate) const RHO: usize = 4;
/// Rows of a site: each gate's for stream 0, then for stream 1.
pub(crate) const ROWS: usize = 2 * GATES;
/// Biases of all gates, then the scales of alpha, beta and rho.
pub(crate) const SCALARS: usize = GATES + 3;

/// Elements of a packed site.
pub const fn site_length(d_model: usize) -> usize {
    ROWS * d_model + SCALARS
}

/// Elements of the packed parameters of a read: those of its gates, if it has them, then the gain of the norm of its
/// branch, if that is folded in.
pub const fn packed_length(d_model: usize, gates: bool, gain: bool) -> usize {
    (if gates { site_length(d_model) } else { 0 }) + (if gain { d_model } else { 0 })
}

/// The name of that length in messages.
pub(crate) const fn packed_axes(gates: bool, gain: bool) -> &'static str {
    match (gates, gain) {
        (true, false) => "[10 * d_model + 8]",
        (true, true) => "[10 * d_model + 8 + d_model]",
        (false, _) => "[d_model]",
    }
}

/// The parameters of a gate `sigmoid(scale * (norm(x) W) + bias)`, or their gradients.
#[derive(Debug, Clone, Copy)]
pub struct GateOperands<'a> {
    /// Row `stream * d_model + feature`. `[2 * d_model, outputs]`
    pub weight: Operand<'a>,
    /// `[outputs]`
    pub bias: Operand<'a>,
    /// `[1]`
    pub scale: Operand<'a>,
}

/// The parameters of a site's gates, or their gradients.
#[derive(Debug, Clone, Copy)]
pub struct SiteOperands<'a> {
    /// Mixes the two streams into the branch input: two outputs.
    pub alpha: GateOperands<'a>,
    /// Scales the write into each stream: two outputs.
    pub beta: GateOperands<'a>,
    /// Keeps or exchanges the streams: one output.
    pub rho: GateOperands<'a>,
}

impl SiteOperands<'_> {
    /// All nine fit `d_model` and are in `dtype`.
    pub(crate) fn check(&self, check: &mut Check, d_model: usize, dtype: ElemType) -> Result<(), KernelError> {
        for (gate, outputs, [weight, bias, scale]) in [
            (&self.alpha, 2, ["alpha.weight", "alpha.bias", "alpha.scale"]),
            (&self.beta, 2, ["beta.weight", "beta.bias", "beta.scale"]),
            (&self.rho, 1, ["rho.weight", "rho.bias", "rho.scale"]),
        ] {
            check
                .fits(weight, &gate.weight, dtype, "[2 * d_model, outputs]", &[2 * d_model, outputs])?
                .fits(bias, &gate.bias, dtype, "[outputs]", &[outputs])?
                .fits(scale, &gate.scale, dtype, "[1]", &[1])?;
        }
        Ok(())
    }
}

/// Scalar `k` of a packed site, which lies behind its rows.
#[cube]
pub(crate) fn site_scalar<N: Size>(site: &[Vector<f32, N>], vectors: usize, #[comptime] k: usize) -> f32 {
    let lanes = N::value();
    site[ROWS * vectors + comptime!(k / lanes)].extract(comptime!(k % lanes))
}

/// Where the gain of the branch's norm begins in a packed site.
#[cube]
pub(crate) fn site_gain<N: Size>(vectors: usize) -> usize {
    let lanes = N::value();
    ROWS * vectors + comptime!(SCALARS / lanes)
}
