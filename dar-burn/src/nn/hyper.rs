use burn::config::Config;
use burn::module::{Module, Param};
use burn::tensor::{Device, Tensor};

use super::layout::{BranchLayout, ResidualConfigError, refuse_unless, refuse_unless_eps, refuse_unless_f32};
use super::observer::Observer;
use super::params::{values, zeros};
use crate::ops::{HyperWeights, StreamMaps, accumulator, hyper_maps, streams_read, streams_write};

/// Dynamic hyper-connections (Zhu et al.): n streams with learned static maps and bounded dynamic ones around them.
///
/// Parameters a branch: `(2 + n) d_model + 2n + n² + 3`.
///
/// # Start
///
/// Branch `l` reads stream `l mod n` and writes to all, mixers are the identity and dynamic weights zero: all streams
/// stay equal to the plain residual, and reading different streams parts them under training.
#[derive(Config, Debug, PartialEq)]
pub struct HyperConfig {
    /// Number of streams n.
    #[config(default = 4)]
    pub streams: usize,
    /// Initial scale of the dynamic maps.
    #[config(default = 0.01)]
    pub dynamic_scale: f64,
    /// Epsilon of the stream norm.
    #[config(default = 1e-6)]
    pub eps: f64,
}

impl HyperConfig {
    /// Refuses a configuration that no model can use, with the reason.
    pub fn validate(&self) -> Result<(), ResidualConfigError> {
        refuse_unless(self.streams > 0, "Hyper", "streams", self.streams, "at least 1")?;
        refuse_unless_f32("Hyper", "dynamic_scale", self.dynamic_scale)?;
        refuse_unless_eps("Hyper", self.eps)
    }

    /// The scheme for a model with this layout.
    ///
    /// # Panics
    /// If [`validate`](Self::validate) refuses, with its message.
    #[track_caller]
    pub fn init(&self, layout: &BranchLayout, device: &Device) -> HyperConnections {
        if let Err(error) = self.validate() {
            panic!("{error}");
        }
        let (n, d_model) = (self.streams, layout.d_model);
        let branch = |branch: usize| HyperBranch {
            static_pre: values([n], (0..n).map(|i| f64::from(i == branch % n)).collect(), device),
            static_post: values([n], vec![1.0; n], device),
            static_res: values([n, n], (0..n * n).map(|k| f64::from(k / n == k % n)).collect(), device),
            w_pre: zeros([d_model], device),
            w_post: zeros([d_model], device),
            w_res: zeros([d_model, n], device),
            scale: values([3], vec![self.dynamic_scale; 3], device),
        };
        HyperConnections { sites: (0..layout.branches).map(branch).collect(), streams: n, eps: self.eps }
    }
}

/// Parameters of one branch's maps; see [`HyperWeights`](crate::ops::HyperWeights).
#[derive(Module, Debug)]
pub struct HyperBranch {
    /// `[n]`
    pub static_pre: Param<Tensor<1>>,
    /// `[n]`
    pub static_post: Param<Tensor<1>>,
    /// From stream i to stream j. `[n, n]`
    pub static_res: Param<Tensor<2>>,
    /// `[d_model]`
    pub w_pre: Param<Tensor<1>>,
    /// `[d_model]`
    pub w_post: Param<Tensor<1>>,
    /// `[d_model, n]`
    pub w_res: Param<Tensor<2>>,
    /// `[3]`
    pub scale: Param<Tensor<1>>,
}

/// Dynamic hyper-connections. Made by [`HyperConfig::init`].
#[derive(Module, Debug)]
pub struct HyperConnections {
    /// Maps of the branches.
    pub sites: Vec<HyperBranch>,
    streams: usize,
    eps: f64,
}

/// The streams before a branch, and the maps that its write applies.
#[derive(Debug, Clone)]
pub(super) struct HyperPending {
    pub(super) streams: Tensor<3>,
    pub(super) maps: StreamMaps,
}

impl HyperPending {
    pub(super) fn carried(&self) -> &Tensor<3> {
        &self.streams
    }

    pub(super) fn write(self, branch: usize, output: Tensor<2>, observer: Option<&dyn Observer>) -> Tensor<3> {
        let streams = streams_write(self.streams, output, &self.maps);
        match observer {
            Some(observer) => observer.state(branch, streams),
            None => streams,
        }
    }
}

impl HyperConnections {
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
        let weights = HyperWeights {
            static_pre: site.static_pre.val(),
            static_post: site.static_post.val(),
            static_res: site.static_res.val(),
            w_pre: site.w_pre.val(),
            w_post: site.w_post.val(),
            w_res: site.w_res.val(),
            scale: site.scale.val(),
        };
        read_streams(branch, hyper_maps(streams.clone(), &weights, self.eps), streams, observer)
    }

    pub(super) fn finish(&self, streams: Tensor<3>) -> Tensor<2> {
        finish_streams(streams)
    }
}

/// Every stream starts as the embedding. `[tokens, n, d_model]`
pub(super) fn start_streams(x: Tensor<2>, n: usize) -> Tensor<3> {
    x.unsqueeze_dim::<3>(1).repeat_dim(1, n)
}

pub(super) fn read_streams(
    branch: usize,
    maps: StreamMaps,
    streams: Tensor<3>,
    observer: Option<&dyn Observer>,
) -> (Tensor<2>, HyperPending) {
    let maps = match observer {
        Some(observer) => observer.maps(branch, maps),
        None => maps,
    };
    let input = streams_read(streams.clone(), maps.pre.clone());
    (input, HyperPending { streams, maps })
}

/// The hidden state is the sum of the streams. `[tokens, d_model]`
pub(super) fn finish_streams(streams: Tensor<3>) -> Tensor<2> {
    let dtype = streams.dtype();
    streams.cast(accumulator(dtype)).sum_dim(1).squeeze_dim::<2>(1).cast(dtype)
}
