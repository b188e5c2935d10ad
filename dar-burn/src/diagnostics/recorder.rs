//! Captures what a pass computes: an [`Observer`] that copies to the host and changes nothing.

use std::collections::{BTreeMap, BTreeSet};
use std::sync::{Mutex, MutexGuard, PoisonError};

use burn::tensor::{DType, Int, Tensor, TensorData};
use ndarray::{Array2, Array3};

use crate::nn::Observer;
use crate::ops::{Gates, StreamMaps};

/// Records one pass for chosen branches and tokens. After the pass, [`records`](Self::records) has the arrays.
///
/// ```
/// use std::sync::Arc;
///
/// use burn::tensor::{Device, Distribution, Tensor};
/// use dar_burn::diagnostics::Recorder;
/// use dar_burn::{BranchLayout, ResidualConfig};
///
/// let residual = ResidualConfig::dar_block(1).init(&BranchLayout::new(16, 4), &Device::flex());
/// let recorder = Arc::new(Recorder::new().branches([1, 3]).tokens([5, 6, 7]));
/// let embedding = Tensor::<2>::random([8, 16], Distribution::Default, &Device::flex());
/// let mut state = residual.start_observed(embedding, recorder.clone()); // `start` of an unrecorded pass
/// for _ in 0..4 {
///     state = residual.branch(state, |x| x.tanh());
/// }
/// residual.finish(state);
///
/// let feed_forward = &recorder.records()[&3];
/// assert_eq!(feed_forward.retrieval.as_ref().unwrap().dim(), (3, 3, 2)); // two entries and the partial state
/// assert_eq!(feed_forward.gates.as_ref().unwrap().beta.dim(), (3, 2));
/// assert_eq!(feed_forward.state.as_ref().unwrap().dim(), (3, 2, 16));
/// ```
///
/// A second pass with the same recorder replaces the records of the first.
#[derive(Debug, Default)]
pub struct Recorder {
    branches: Option<BTreeSet<usize>>,
    tokens: Option<Vec<usize>>,
    records: Mutex<BTreeMap<usize, Record>>,
}

/// What one branch did. Absent is what its scheme does not have.
#[derive(Debug, Clone, Default, PartialEq)]
pub struct Record {
    /// Over the entries of the history and then, where there is one, the partial state. `[candidates, tokens, streams]`
    pub retrieval: Option<Array3<f64>>,
    /// Of DAR.
    pub gates: Option<RecordedGates>,
    /// Of hyper-connections.
    pub maps: Option<RecordedMaps>,
    /// After the write; streams as [`Observer`] lists them. None after the first branch of a layer of CASCADE, whose
    /// two branches are written together. `[tokens, streams, d_model]`
    pub state: Option<Array3<f64>>,
}

/// Gates of DAR; see [`Gates`].
#[derive(Debug, Clone, PartialEq)]
pub struct RecordedGates {
    /// `[tokens, 2]`
    pub alpha: Array2<f64>,
    /// `[tokens, 2]`
    pub beta: Array2<f64>,
    /// None for a block's first branch. `[tokens, 1]`
    pub rho: Option<Array2<f64>>,
}

/// Maps of hyper-connections; see [`StreamMaps`].
#[derive(Debug, Clone, PartialEq)]
pub struct RecordedMaps {
    /// `[tokens, n]`
    pub pre: Array2<f64>,
    /// `[tokens, n]`
    pub post: Array2<f64>,
    /// `[tokens, n, n]`
    pub res: Array3<f64>,
}

impl Record {
    /// How the branch reads the streams: alpha of DAR, `pre` of hyper-connections. `[tokens, streams]`
    pub fn reads(&self) -> Option<&Array2<f64>> {
        let of_maps = self.maps.as_ref().map(|maps| &maps.pre);
        self.gates.as_ref().map(|gates| &gates.alpha).or(of_maps)
    }

    /// How the branch writes the streams: beta of DAR, `post` of hyper-connections. `[tokens, streams]`
    pub fn writes(&self) -> Option<&Array2<f64>> {
        let of_maps = self.maps.as_ref().map(|maps| &maps.post);
        self.gates.as_ref().map(|gates| &gates.beta).or(of_maps)
    }

    /// How the branch mixes the streams that it writes to: `M(rho)` of DAR (17), `res` of hyper-connections; none where
    /// there is nothing to mix, at the first branch of a block of DAR. `[tokens, streams, streams]`
    pub fn mixers(&self) -> Option<Array3<f64>> {
        if let Some(maps) = &self.maps {
            return Some(maps.res.clone());
        }
        let rho = self.gates.as_ref()?.rho.as_ref()?;
        Some(Array3::from_shape_fn(
            (rho.nrows(), 2, 2),
            |(token, i, j)| {
                if i == j { rho[[token, 0]] } else { 1.0 - rho[[token, 0]] }
            },
        ))
    }
}

impl Recorder {
    /// Records all branches and tokens.
    pub fn new() -> Self {
        Self::default()
    }

    /// Records these branches only. The read that ends a pass counts as the branch after the last.
    pub fn branches(self, branches: impl IntoIterator<Item = usize>) -> Self {
        Self { branches: Some(branches.into_iter().collect()), ..self }
    }

    /// Records these tokens only, in this order: places in the flattened `[batch, sequence]`.
    pub fn tokens(self, tokens: impl IntoIterator<Item = usize>) -> Self {
        Self { tokens: Some(tokens.into_iter().collect()), ..self }
    }

    /// What was recorded, by branch.
    pub fn records(&self) -> MutexGuard<'_, BTreeMap<usize, Record>> {
        // A panic between two writes of a record leaves a complete map.
        self.records.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn wants(&self, branch: usize) -> bool {
        self.branches.as_ref().is_none_or(|branches| branches.contains(&branch))
    }

    fn keep(&self, branch: usize, write: impl FnOnce(&mut Record)) {
        write(self.records().entry(branch).or_default());
    }

    /// The chosen tokens, on the host.
    fn copy<const D: usize>(&self, tensor: Tensor<D>, axis: usize) -> (Vec<usize>, Vec<f64>) {
        let tensor = match &self.tokens {
            None => tensor,
            Some(tokens) => {
                let ids: Vec<i64> = tokens.iter().map(|&token| token as i64).collect();
                let ids = Tensor::<1, Int>::from_data(TensorData::new(ids, [tokens.len()]), &tensor.device());
                tensor.select(axis, ids)
            }
        };
        let shape = tensor.dims().to_vec();
        (shape, tensor.into_data().convert_dtype(DType::F64).iter::<f64>().collect())
    }

    fn two(&self, tensor: Tensor<2>) -> Array2<f64> {
        let (shape, values) = self.copy(tensor, 0);
        Array2::from_shape_vec((shape[0], shape[1]), values).expect("as many values as the shape says")
    }

    fn three(&self, tensor: Tensor<3>, axis: usize) -> Array3<f64> {
        let (shape, values) = self.copy(tensor, axis);
        Array3::from_shape_vec((shape[0], shape[1], shape[2]), values).expect("as many values as the shape says")
    }
}

impl Observer for Recorder {
    fn retrieval(&self, branch: usize, weights: &dyn Fn() -> Tensor<3>) {
        if self.wants(branch) {
            let weights = self.three(weights(), 1);
            self.keep(branch, |record| record.retrieval = Some(weights));
        }
    }

    fn gates(&self, branch: usize, gates: Gates) -> Gates {
        if self.wants(branch) {
            let Gates { alpha, beta, rho } = gates.clone();
            let recorded =
                RecordedGates { alpha: self.two(alpha), beta: self.two(beta), rho: rho.map(|rho| self.two(rho)) };
            self.keep(branch, |record| record.gates = Some(recorded));
        }
        gates
    }

    fn maps(&self, branch: usize, maps: StreamMaps) -> StreamMaps {
        if self.wants(branch) {
            let StreamMaps { pre, post, res } = maps.clone();
            let recorded = RecordedMaps { pre: self.two(pre), post: self.two(post), res: self.three(res, 0) };
            self.keep(branch, |record| record.maps = Some(recorded));
        }
        maps
    }

    fn state(&self, branch: usize, state: Tensor<3>) -> Tensor<3> {
        if self.wants(branch) {
            let recorded = self.three(state.clone(), 0);
            self.keep(branch, |record| record.state = Some(recorded));
        }
        state
    }
}
