//! A small model around a residual: branches `f_l(h) = tanh(rmsnorm(h) W_l)`.

use burn::module::{Module, Param};
use burn::tensor::{DType, Device, Tensor, TensorData};
use dar_burn::nn::{AttnResConfig, DarConfig, HyperConfig, MhcConfig, SeparateValues, Tying};
use dar_burn::ops::{SinkhornOrder, accumulator, rms_norm};
use dar_burn::{BranchLayout, Residual, ResidualConfig, Routing};

use crate::support::host::values;

pub const EPS: f64 = 1e-6;

#[derive(Module, Debug)]
pub struct Toy {
    pub residual: Residual,
    pub weights: Vec<Param<Tensor<2>>>,
    /// Of the branches' norms.
    pub eps: f64,
}

impl Toy {
    pub fn new(config: &ResidualConfig, layout: &BranchLayout, device: &Device) -> Self {
        let d_model = layout.d_model;
        let weight = |branch: usize| {
            let scale = 1.7 / (d_model as f64).sqrt();
            Param::from_tensor(tensor(100 + branch as u64, [d_model, d_model], scale, device))
        };
        Self { residual: config.init(layout, device), weights: (0..layout.branches).map(weight).collect(), eps: EPS }
    }

    /// Output of branch `l`, in the type of `h`.
    pub fn branch<const D: usize>(&self, l: usize, h: Tensor<D>) -> Tensor<D> {
        let (shape, dtype) = (h.dims(), h.dtype());
        let h = h.reshape([shape[..D - 1].iter().product::<usize>(), shape[D - 1]]);
        let weight = self.weights[l].val().cast(accumulator(dtype));
        rms_norm(h, self.eps).matmul(weight).tanh().cast(dtype).reshape(shape)
    }

    /// The hidden state before a final norm.
    pub fn forward<const D: usize>(&self, x: Tensor<D>) -> Tensor<D> {
        let branches = 0..self.weights.len();
        let state =
            branches.fold(self.residual.start(x), |state, l| self.residual.branch(state, |h| self.branch(l, h)));
        self.residual.finish(state)
    }
}

/// Seeded values on `device`, in f32 and exact in every element type.
pub fn tensor<const D: usize>(seed: u64, shape: [usize; D], scale: f64, device: &Device) -> Tensor<D> {
    let values = values(seed, shape.iter().product(), scale);
    Tensor::from_data(TensorData::new(values, shape), (device, DType::F32))
}

pub fn vec<const D: usize>(tensor: Tensor<D>) -> Vec<f64> {
    tensor.try_into_vec_as::<f64>().unwrap()
}

/// Every scheme, with each of its forms; all serve an even number of alternating branches.
pub fn schemes() -> Vec<(String, ResidualConfig)> {
    let mut all = vec![
        ("standard".to_owned(), ResidualConfig::Standard),
        ("cascade".to_owned(), ResidualConfig::Cascade),
        ("AttnRes full".to_owned(), ResidualConfig::attnres_full()),
        ("hyper-connections 1".to_owned(), ResidualConfig::hyper_connections(1)),
        ("hyper-connections 4".to_owned(), ResidualConfig::Hyper(HyperConfig::new())),
        ("mHC 2".to_owned(), ResidualConfig::mhc(2)),
        ("mHC 4".to_owned(), ResidualConfig::Mhc(MhcConfig::new().with_order(SinkhornOrder::SoftmaxFirst))),
    ];
    for values in [SeparateValues::PerSource, SeparateValues::Maps(3)] {
        let config = AttnResConfig::full().with_separate_values(values);
        all.push((format!("AttnRes full, {values:?}"), ResidualConfig::AttnRes(config)));
    }
    for tying in [Tying::PerBranch, Tying::PerBlock] {
        for layers in [1, 2, 3] {
            let attn_res = AttnResConfig::block(layers).with_tying(tying);
            all.push((format!("AttnRes K = {layers}, {tying:?}"), ResidualConfig::AttnRes(attn_res)));
            let dar = DarConfig::block(layers).with_tying(tying);
            all.push((format!("DAR K = {layers}, {tying:?}"), ResidualConfig::Dar(dar)));
        }
        for routing in [Routing::SelfKeyValue, Routing::CrossValue, Routing::FixedKeyValue] {
            let dar = DarConfig::block(2).with_tying(tying).with_routing(routing);
            all.push((format!("DAR {routing:?}, {tying:?}"), ResidualConfig::Dar(dar)));
        }
    }
    all
}

/// Moves every residual parameter away from where it starts, so that all of them matter.
pub struct Stir {
    seed: u64,
}

impl Stir {
    pub fn new() -> Self {
        Self { seed: 500 }
    }
}

impl burn::module::ModuleMapper for Stir {
    fn map_float<const D: usize>(&mut self, param: Param<Tensor<D>>) -> Param<Tensor<D>> {
        self.seed += 1;
        let seed = self.seed;
        param.map(|value| {
            let noise = tensor(seed, value.dims(), 0.4, &value.device());
            (value.clone().detach() + noise.cast(value.dtype())).detach().set_require_grad(value.is_require_grad())
        })
    }
}
