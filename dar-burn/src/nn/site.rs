use burn::module::{Module, Param};
use burn::tensor::{Device, Tensor};

use super::params::{logit, values, zeros};
use crate::ops::{GateWeights, SiteWeights};

/// One gate: `sigmoid(scale * (norm(x) W) + bias)`.
///
/// Equations 14 and 16 have no `scale`. The paper's parameter tables count 8 scalars a site, which five biases and one
/// learnable scale a gate give, as in mHC; at its initial 1 the equations hold as printed.
#[derive(Module, Debug)]
pub struct Gate {
    /// `[2 * d_model, outputs]`, starts at zero.
    pub weight: Param<Tensor<2>>,
    /// `[outputs]`
    pub bias: Param<Tensor<1>>,
    /// `[1]`, starts at one.
    pub scale: Param<Tensor<1>>,
}

impl Gate {
    /// A gate whose value is `start` for every token.
    fn new(d_model: usize, start: &[f64], device: &Device) -> Self {
        let outputs = start.len();
        Self {
            weight: zeros([2 * d_model, outputs], device),
            bias: values([outputs], start.iter().copied().map(logit).collect(), device),
            scale: values([1], vec![1.0], device),
        }
    }

    fn weights(&self) -> GateWeights {
        GateWeights { weight: self.weight.val(), bias: self.bias.val(), scale: self.scale.val() }
    }
}

/// The residual parameters of one site: `12 d_model + 8`, less `2 d_model` where there is no query.
#[derive(Module, Debug)]
pub struct DarSite {
    /// One query a stream (11), starts at zero. `[2, d_model]`
    pub query: Option<Param<Tensor<2>>>,
    /// Mixes the retrieved streams (14, 15).
    pub alpha: Gate,
    /// Scales the writes (14, 17); the gate is twice its sigmoid.
    pub beta: Gate,
    /// Keeps or exchanges the partial streams (16). A block's first branch has none to keep: where a site serves no other
    /// branch, this gate is unused and has no gradient. It is there because the paper's tables count it.
    pub rho: Gate,
}

impl DarSite {
    /// A site that writes `1 + gap` to stream 0 and `1 - gap` to stream 1 and keeps `keep` of the partial streams.
    pub(super) fn new(d_model: usize, has_query: bool, gap: f64, keep: f64, device: &Device) -> Self {
        Self {
            query: has_query.then(|| zeros([2, d_model], device)),
            alpha: Gate::new(d_model, &[0.5, 0.5], device),
            beta: Gate::new(d_model, &[(1.0 + gap) / 2.0, (1.0 - gap) / 2.0], device),
            rho: Gate::new(d_model, &[keep], device),
        }
    }

    pub(super) fn weights(&self) -> SiteWeights {
        SiteWeights { alpha: self.alpha.weights(), beta: self.beta.weights(), rho: self.rho.weights() }
    }

    /// The query, zero where the site has none. `[2, d_model]`
    pub(super) fn query(&self, d_model: usize) -> Tensor<2> {
        match &self.query {
            Some(query) => query.val(),
            None => {
                let weight = self.alpha.weight.val();
                Tensor::zeros([2, d_model], (&weight.device(), weight.dtype()))
            }
        }
    }
}
