use burn::tensor::{DType, Device, Tensor, TensorData};
use dar_burn::Routing;
use dar_burn::ops::{History, Retrieved, merge, output_read, prefix};

use super::operations::EPS;
use crate::support::devices::{devices, flex};
use crate::support::host::{relative_error, retrieve, values};

struct Candidates {
    history: Vec<Vec<f64>>,
    partial: Vec<f64>,
    query: Vec<f64>,
    tokens: usize,
    d_model: usize,
}

impl Candidates {
    fn new(tokens: usize, entries: usize, d_model: usize, logits: f64) -> Self {
        let state = |seed| values(seed, tokens * 2 * d_model, 1.5);
        Self {
            history: (0..entries as u64).map(state).collect(),
            partial: state(1000),
            query: values(2000, 2 * d_model, logits / (d_model as f64).sqrt()),
            tokens,
            d_model,
        }
    }

    fn tensor(&self, values: &[f64], device: &Device, dtype: DType) -> Tensor<3> {
        let shape = [self.tokens, 2, self.d_model];
        Tensor::from_data(TensorData::new(values.to_vec(), shape), (device, dtype))
    }

    /// Prefix over the history and its merge with the partial state: lse of the history, merged state.
    fn prefix_and_merge(&self, routing: Routing, device: &Device, dtype: DType) -> (Vec<f64>, Vec<f64>) {
        let tensor = |values: &[f64]| self.tensor(values, device, dtype);
        let entries = self.history.iter().map(|entry| tensor(entry));
        let history = entries.skip(1).fold(History::new(tensor(&self.history[0]), EPS), History::append);
        let query = TensorData::new(self.query.clone(), [2, self.d_model]);
        let query = Tensor::<2>::from_data(query, (device, dtype));
        let found = prefix(&history, query.clone().unsqueeze_dim(0), routing).remove(0);
        let lse = found.lse.clone().try_into_vec_as::<f64>().unwrap();
        let merged = merge(found, tensor(&self.partial), query, routing, EPS);
        (lse, merged.try_into_vec_as::<f64>().unwrap())
    }

    fn direct(&self, routing: Routing) -> (Vec<f64>, Vec<f64>) {
        let (_, lse) = retrieve(&self.history, &self.query, self.d_model, routing, EPS);
        let mut all = self.history.clone();
        all.push(self.partial.clone());
        let (merged, _) = retrieve(&all, &self.query, self.d_model, routing, EPS);
        (lse, merged)
    }
}

/// In f64 the two phases are the softmax over everything to rounding, in f32 to its own rounding times the logits.
#[test]
fn prefix_and_merge_are_the_softmax_over_all_candidates() {
    let host = flex();
    for (tokens, entries, d_model) in [(1, 1, 1), (4, 1, 37), (5, 64, 3), (3, 7, 130)] {
        for logits in [1.0, 30.0] {
            let candidates = Candidates::new(tokens, entries, d_model, logits);
            for routing in Routing::ALL {
                let (lse, merged) = candidates.direct(routing);
                let (got_lse, got) = candidates.prefix_and_merge(routing, &host, DType::F64);
                let errors = (relative_error(&got_lse, &lse, 1e-3), relative_error(&got, &merged, 1e-3));
                assert!(errors.0.max(errors.1) <= 1e-12, "{routing:?}, {tokens} × {entries} × {d_model}: {errors:?}");
            }
        }
    }
    for opened in devices() {
        let candidates = Candidates::new(3, 5, 37, 30.0);
        for routing in Routing::ALL {
            let (lse, merged) = candidates.direct(routing);
            let (got_lse, got) = candidates.prefix_and_merge(routing, &opened.device, DType::F32);
            let errors = (relative_error(&got_lse, &lse, 1e-3), relative_error(&got, &merged, 1e-3));
            assert!(errors.0.max(errors.1) <= 1e-5, "{routing:?} on {}: {errors:?}", opened.name);
        }
    }
}

/// Key r points at angle r π / 4 from the query, so logits run from 1e4 down to -1e4 in steps of thousands.
#[test]
fn logits_of_ten_thousand_pick_the_winner() {
    const ENTRIES: usize = 5;
    for opened in devices() {
        let device = opened.device.clone().autodiff();
        let entry = |r: usize| {
            let (sin, cos) = (r as f64 * std::f64::consts::FRAC_PI_4).sin_cos();
            let state = TensorData::new(vec![cos, sin, -cos, sin], [1, 2, 2]);
            Tensor::<3>::from_data(state, (&device, DType::F32)).require_grad()
        };
        let entries: Vec<Tensor<3>> = (0..ENTRIES).map(entry).collect();
        let appended = entries[1..].iter().cloned();
        let history = appended.fold(History::new(entries[0].clone(), EPS), History::append);
        // Keys have the norm √2.
        let query = vec![1e4 / 2f64.sqrt(), 0.0, 1e4 / 2f64.sqrt(), 0.0];
        let query = Tensor::<2>::from_data(TensorData::new(query, [2, 2]), (&device, DType::F32)).require_grad();
        let Retrieved { lse, state } =
            prefix(&history, query.clone().unsqueeze_dim(0), Routing::SelfKeyValue).remove(0);

        let lse_values = lse.clone().try_into_vec_as::<f64>().unwrap();
        assert!(lse_values.iter().all(|lse| (lse - 1e4).abs() <= 0.1), "{}: {lse_values:?}", opened.name);
        // Stream 0 finds the first entry, stream 1 the last, whose mirrored key points along the query.
        let found = state.clone().try_into_vec_as::<f64>().unwrap();
        let error = relative_error(&found, &[1.0, 0.0, 1.0, 0.0], 1e-3);
        assert!(error <= 1e-6, "{}: {found:?}", opened.name);

        let loss = output_read(&history, Some(entries[2].clone()), query.clone(), Routing::CrossKey);
        let gradients = (loss.sum() + state.sum() + lse.sum()).backward();
        for leaf in entries {
            let gradient = leaf.grad(&gradients).unwrap().try_into_vec_as::<f64>().unwrap();
            assert!(gradient.iter().all(|value| value.is_finite()), "{}: {gradient:?}", opened.name);
        }
        let gradient = query.grad(&gradients).unwrap().try_into_vec_as::<f64>().unwrap();
        assert!(gradient.iter().all(|value| value.is_finite()), "{}: {gradient:?}", opened.name);
    }
}

/// A state of zeros has the key zero, not NaN.
#[test]
fn a_zero_state_is_an_ordinary_candidate() {
    for opened in devices() {
        let device = opened.device.clone().autodiff();
        let embedding = Tensor::<3>::zeros([2, 2, 3], &device).require_grad();
        let history = History::new(embedding.clone(), EPS).append(Tensor::ones([2, 2, 3], &device));
        let query = Tensor::<2>::ones([2, 3], &device).require_grad();
        let read = output_read(&history, None, query.clone(), Routing::CrossKey);
        let gradients = read.clone().sum().backward();
        let gradient = embedding.grad(&gradients).unwrap();
        for values in [read.try_into_vec_as::<f64>().unwrap(), gradient.try_into_vec_as::<f64>().unwrap()] {
            assert!(values.iter().all(|value| value.is_finite()), "{}: {values:?}", opened.name);
        }
    }
}
