use burn::config::Config;
use burn::module::{Module, Param};
use burn::tensor::{Device, Tensor};

use super::hyper::{HyperPending, finish_streams, read_streams, start_streams};
use super::layout::{BranchLayout, ResidualConfigError, refuse_unless, refuse_unless_eps, refuse_unless_f32};
use super::observer::Observer;
use super::params::{logit, values, zeros};
use crate::ops::{MhcWeights, SinkhornOrder, mhc_maps};

/// Manifold-constrained hyper-connections (Xie et al.): n streams whose residual mixers are doubly stochastic.
///
/// Parameters a branch: `(2n + n²)(n d_model + 1) + 3`.
///
/// # Start
///
/// Branch `l` reads mostly stream `l mod n` with weights that sum to 1, writes 1 to every stream, and its mixer is close
/// to the identity: all streams stay equal to the plain residual, and reading different streams parts them under
/// training. A uniform start would keep them equal for ever.
#[derive(Config, Debug, PartialEq)]
pub struct MhcConfig {
    /// Number of streams n.
    #[config(default = 4)]
    pub streams: usize,
    /// Sinkhorn iterations.
    #[config(default = 20)]
    pub iterations: usize,
    /// Order of the Sinkhorn iteration.
    #[config(default = "SinkhornOrder::ColumnsThenRows")]
    pub order: SinkhornOrder,
    /// Initial read weight of the favoured stream; the others share the rest.
    #[config(default = 0.7)]
    pub favour: f64,
    /// Initial mixer logit of a stream's own weight; the other logits are 0.
    #[config(default = 5.0)]
    pub own_logit: f64,
    /// Epsilon of the norm over all streams.
    #[config(default = 1e-6)]
    pub eps: f64,
}

impl MhcConfig {
    /// Refuses a configuration that no model can use, with the reason.
    pub fn validate(&self) -> Result<(), ResidualConfigError> {
        refuse_unless(
            self.streams >= 2,
            "Mhc",
            "streams",
            self.streams,
            "at least 2: a doubly stochastic mixer of one stream is the number 1",
        )?;
        refuse_unless(self.iterations > 0, "Mhc", "iterations", self.iterations, "at least 1")?;
        refuse_unless(self.favour > 0.0 && self.favour < 1.0, "Mhc", "favour", self.favour, "a number in (0, 1)")?;
        refuse_unless_f32("Mhc", "own_logit", self.own_logit)?;
        refuse_unless_eps("Mhc", self.eps)
    }

    /// The scheme for a model with this layout.
    ///
    /// # Panics
    /// If [`validate`](Self::validate) refuses, with its message.
    #[track_caller]
    pub fn init(&self, layout: &BranchLayout, device: &Device) -> Mhc {
        if let Err(error) = self.validate() {
            panic!("{error}");
        }
        let (n, d_model) = (self.streams, layout.d_model);
        let columns = 2 * n + n * n;
        let rest = (1.0 - self.favour) / (n - 1) as f64;
        let bias = |branch: usize| {
            let pre = (0..n).map(move |i| logit(if i == branch % n { self.favour } else { rest }));
            let post = std::iter::repeat_n(0.0, n);
            let res = (0..n * n).map(|k| if k / n == k % n { self.own_logit } else { 0.0 });
            pre.chain(post).chain(res).collect::<Vec<f64>>()
        };
        let branch = |branch: usize| MhcBranch {
            phi: zeros([n * d_model, columns], device),
            bias: values([columns], bias(branch), device),
            scale: values([3], vec![1.0; 3], device),
        };
        Mhc {
            sites: (0..layout.branches).map(branch).collect(),
            streams: n,
            iterations: self.iterations,
            order: self.order,
            eps: self.eps,
        }
    }
}

/// Parameters of one branch's maps; see [`MhcWeights`](crate::ops::MhcWeights).
#[derive(Module, Debug)]
pub struct MhcBranch {
    /// `[n * d_model, 2n + n²]`
    pub phi: Param<Tensor<2>>,
    /// `[2n + n²]`
    pub bias: Param<Tensor<1>>,
    /// `[3]`
    pub scale: Param<Tensor<1>>,
}

/// Manifold-constrained hyper-connections. Made by [`MhcConfig::init`].
#[derive(Module, Debug)]
pub struct Mhc {
    /// Maps of the branches.
    pub sites: Vec<MhcBranch>,
    streams: usize,
    iterations: usize,
    #[module(skip)]
    order: SinkhornOrder,
    eps: f64,
}

impl Mhc {
    pub(super) fn start(&self, x: Tensor<2>) -> Tensor<3> {
        start_streams(x, self.streams)
    }

    pub(super) fn read(
        &self,
        branch: usize,
        streams: Tensor<3>,
        observer: Option<&dyn Observer>,
    ) -> (Tensor<2>, HyperPending) {
        let site = &self.sites[branch];
        let weights = MhcWeights { phi: site.phi.val(), bias: site.bias.val(), scale: site.scale.val() };
        let maps = mhc_maps(streams.clone(), &weights, self.iterations, self.order, self.eps);
        read_streams(branch, maps, streams, observer)
    }

    pub(super) fn finish(&self, streams: Tensor<3>) -> Tensor<2> {
        finish_streams(streams)
    }
}
