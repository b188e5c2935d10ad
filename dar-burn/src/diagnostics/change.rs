//! Interventions as [`Observer`]s: one change, made at every token of a pass.

use std::ops::Range;

use burn::tensor::{Tensor, TensorData};
use ndarray::{Array1, Array2, Array3, ArrayD};

use super::check::{require_shape, require_value};
use super::intervention::{fixed_mixers, identity_mixers, keep_largest};
use crate::nn::Observer;
use crate::ops::numeric::require;
use crate::ops::{Gates, StreamMaps};

/// What a pass uses instead of what the model computed.
///
/// Routing weights and mixers are those of hyper-connections, and of DAR alpha (reads), beta (writes) and the constrained
/// transport `M(rho)`; other schemes have none, and pass unchanged.
#[derive(Debug, Clone, PartialEq)]
pub enum Intervention {
    /// The mixers of these branches carry every stream forward on its own (mHC stream analysis, 4).
    IdentityMixers(Range<usize>),
    /// The mixers of these branches are the same for all tokens (mHC stream analysis, 4).
    FixedMixers {
        /// The branches.
        branches: Range<usize>,
        /// The mixer of every branch of the model, none where it has none; those of `branches` are used. `[n, n]`
        mixers: Vec<Option<Array2<f64>>>,
    },
    /// Every branch reads its `n` largest weights of a token, rescaled to the sum of all (mHC stream analysis, Figure 3).
    KeepReads(usize),
    /// Every branch writes its `n` largest weights of a token, rescaled to the sum of all (mHC stream analysis, Figure 3).
    KeepWrites(usize),
    /// After the write of a branch one stream is kept, or none, and the others are zero (DAR paper, Figure 6). Entries
    /// that are stored already stay. The first branch of a layer of CASCADE has no write of its own: name the second.
    KeepStream {
        /// The branch.
        branch: usize,
        /// The stream that stays.
        kept: Option<usize>,
    },
    /// After the write of a branch every token's state is moved by a vector of its own (Stream separation, 5). Entries
    /// that are stored already stay. Of a layer of CASCADE, name the second branch.
    ///
    /// A pass panics if there is not one offset a token, of the state's width, or no such stream.
    Steer {
        /// The branch.
        branch: usize,
        /// The stream that moves; every stream if there is none.
        stream: Option<usize>,
        /// What is added to the state of each token, places in the flattened `[batch, sequence]`. `[tokens, d_model]`
        offsets: Array2<f64>,
    },
}

impl Intervention {
    /// The mixer that takes the place of that of `branch`. `[n, n]`
    fn mixer(&self, branch: usize, streams: usize) -> Option<Array2<f64>> {
        match self {
            Self::IdentityMixers(branches) if branches.contains(&branch) => Some(Array2::eye(streams)),
            Self::FixedMixers { branches, mixers } if branches.contains(&branch) => mixers.get(branch)?.clone(),
            _ => None,
        }
    }

    /// The routing weights that take the place of those of a read or a write.
    fn routes(&self, reads: Tensor<2>, writes: Tensor<2>) -> (Tensor<2>, Tensor<2>) {
        match self {
            Self::KeepReads(kept) => (largest(reads, *kept), writes),
            Self::KeepWrites(kept) => (reads, largest(writes, *kept)),
            _ => (reads, writes),
        }
    }
}

impl Observer for Intervention {
    fn gates(&self, branch: usize, gates: Gates) -> Gates {
        let (alpha, beta) = self.routes(gates.alpha, gates.beta);
        let rho = gates.rho.map(|rho| match self.mixer(branch, 2) {
            // M(rho) has rho on its diagonal (17).
            Some(mixer) => rho.full_like(mixer[[0, 0]]),
            None => rho,
        });
        Gates { alpha, beta, rho }
    }

    fn maps(&self, branch: usize, maps: StreamMaps) -> StreamMaps {
        let [tokens, streams, _] = maps.res.dims();
        let (pre, post) = self.routes(maps.pre, maps.post);
        let res = match (self, self.mixer(branch, streams)) {
            (Self::IdentityMixers(_), Some(_)) => on_device(identity_mixers(tokens, streams).into_dyn(), &maps.res),
            (_, Some(mixer)) => on_device(require(fixed_mixers(mixer.view(), tokens)).into_dyn(), &maps.res),
            (_, None) => maps.res,
        };
        StreamMaps { pre, post, res }
    }

    fn state(&self, branch: usize, state: Tensor<3>) -> Tensor<3> {
        match self {
            Self::KeepStream { branch: at, kept } if *at == branch => {
                let streams = state.dims()[1];
                let mask = Array1::from_shape_fn(streams, |stream| f64::from(Some(stream) == *kept));
                let mask = mask.into_shape_with_order([1, streams, 1]).expect("one mask a stream");
                let mask = on_device(mask.into_dyn(), &state);
                state * mask
            }
            Self::Steer { branch: at, stream, offsets } if *at == branch => {
                let [tokens, streams, d_model] = state.dims();
                let (operation, argument) = ("Intervention::Steer", "offsets");
                let expected = format!("[tokens, d_model] = {:?} as of the state", [tokens, d_model]);
                let fits = offsets.dim() == (tokens, d_model);
                require(require_shape(fits, operation, argument, expected, offsets.shape()));
                let moves = |j: usize| stream.is_none_or(|stream| stream == j);
                let expected = format!("a stream below {streams}");
                require(require_value(
                    (0..streams).any(moves),
                    operation,
                    "stream",
                    &expected,
                    stream.unwrap_or_default(),
                ));
                let moved = Array3::from_shape_fn((tokens, streams, d_model), |(token, j, feature)| {
                    if moves(j) { offsets[[token, feature]] } else { 0.0 }
                });
                let moved = on_device(moved.into_dyn(), &state);
                state + moved
            }
            _ => state,
        }
    }
}

fn largest(weights: Tensor<2>, kept: usize) -> Tensor<2> {
    let [tokens, streams] = weights.dims();
    let values: Vec<f64> = weights.to_data().iter::<f64>().collect();
    let values = Array2::from_shape_vec((tokens, streams), values).expect("as many values as the shape says");
    on_device(require(keep_largest(values.view(), kept)).into_dyn(), &weights)
}

/// `values` on the device of `like`, in its element type.
fn on_device<const D: usize>(values: ArrayD<f64>, like: &Tensor<D>) -> Tensor<D> {
    let shape: Vec<usize> = values.shape().to_vec();
    let data = TensorData::new(values.into_iter().collect::<Vec<f64>>(), shape);
    Tensor::from_data(data, (&like.device(), like.dtype()))
}
