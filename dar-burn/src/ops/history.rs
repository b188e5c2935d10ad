//! Packed completed history (DAR paper, A.1).
//!
//! A packed entry is its values and one inverse RMS per token and stream. The normalised key of the paper is
//! `inv_rms * state`, so a logit is `inv_rms * <query, state>` and no second buffer of keys exists:
//!
//! ```text
//! append(state):  inv_rms = 1 / sqrt(mean(state²) + eps);  entries.push((state, inv_rms))
//! ```

use burn::tensor::Tensor;
use dar_kernels::{Dims, KernelError, Routing};

use super::numeric::{exchange, inverse_rms, require, require_device, require_dtype, require_shape, stack_first};

/// One packed entry: a completed state, or the embedding.
#[derive(Debug, Clone)]
pub(crate) struct Entry {
    /// The state that keys come from. `[tokens, streams, d_model]`
    pub(crate) key: Tensor<3>,
    /// Inverse RMS of `key`, in the accumulator type. `[tokens, streams]`
    pub(crate) inv_rms: Tensor<2>,
    /// The state that is retrieved: `key` itself, but for projected values (equation 21). `[tokens, streams, d_model]`
    pub(crate) value: Tensor<3>,
}

impl Entry {
    /// Packs `state`, which is key and value at once.
    pub(crate) fn new(state: Tensor<3>, eps: f64) -> Self {
        Self { inv_rms: inverse_rms(state.clone(), eps).squeeze_dim(2), value: state.clone(), key: state }
    }
}

/// The completed states so far, oldest first. Entry 0 is the embedding.
///
/// A history is a value: cloning shares the entries, appending never changes a clone.
#[derive(Debug, Clone)]
pub struct History {
    entries: Vec<Entry>,
    dims: Dims,
    eps: f64,
}

impl History {
    /// A history whose entry 0 is `embedding`.
    ///
    /// # Shapes
    /// - `embedding`: `[tokens, streams, d_model]`
    ///
    /// # Panics
    /// If `streams` or `d_model` is zero, or `eps` is negative or not finite.
    #[track_caller]
    pub fn new(embedding: Tensor<3>, eps: f64) -> Self {
        let dims = Dims::of_state(embedding.dims());
        if dims.streams == 0 || dims.d_model == 0 {
            require::<()>(Err(KernelError::Shape {
                operation: "History::new",
                argument: "embedding",
                expected: "[tokens, streams, d_model] with streams ≥ 1 and d_model ≥ 1".into(),
                got: embedding.dims().to_vec(),
            }));
        }
        if !(eps.is_finite() && eps >= 0.0) {
            require::<()>(Err(KernelError::value("History::new", "eps", "a finite number ≥ 0", eps)));
        }
        Self { entries: vec![Entry::new(embedding, eps)], dims, eps }
    }

    /// This history with `state` as its newest entry.
    ///
    /// # Shapes
    /// - `state`: `[tokens, streams, d_model]`
    ///
    /// # Panics
    /// If shape, element type or device differ from the entries.
    #[track_caller]
    pub fn append(self, state: Tensor<3>) -> Self {
        self.check("History::append", "state", &state);
        let eps = self.eps;
        self.push(Entry::new(state, eps))
    }

    /// This history with a newest entry whose keys come from `state` and whose values are `value`
    /// (a projection of `state`, equation 21).
    ///
    /// # Shapes
    /// - `state`, `value`: `[tokens, streams, d_model]`
    ///
    /// # Panics
    /// As [`History::append`].
    #[track_caller]
    pub fn append_with_value(self, state: Tensor<3>, value: Tensor<3>) -> Self {
        self.check("History::append_with_value", "state", &state);
        self.check("History::append_with_value", "value", &value);
        let eps = self.eps;
        self.push(Entry { value, ..Entry::new(state, eps) })
    }

    /// The same history with other values for entry 0.
    pub(crate) fn with_first_value(mut self, value: Tensor<3>) -> Self {
        self.check("History::with_first_value", "value", &value);
        self.entries[0].value = value;
        self
    }

    fn push(mut self, entry: Entry) -> Self {
        self.entries.push(entry);
        self
    }

    /// Number of entries, at least one.
    #[expect(clippy::len_without_is_empty, reason = "a history always holds the embedding")]
    pub fn len(&self) -> usize {
        self.entries.len()
    }

    /// Sizes of every entry.
    pub fn dims(&self) -> Dims {
        self.dims
    }

    /// Epsilon of the key norm.
    pub fn eps(&self) -> f64 {
        self.eps
    }

    /// The values of entry `index`. `[tokens, streams, d_model]`
    pub fn value(&self, index: usize) -> Tensor<3> {
        self.entries[index].value.clone()
    }

    /// Inverse RMS of entry `index`, in the accumulator type. `[tokens, streams]`
    pub fn inv_rms(&self, index: usize) -> Tensor<2> {
        self.entries[index].inv_rms.clone()
    }

    pub(crate) fn entries(&self) -> &[Entry] {
        &self.entries
    }

    pub(crate) fn check(&self, operation: &'static str, argument: &'static str, state: &Tensor<3>) {
        require_shape(operation, argument, "[tokens, streams, d_model]", self.dims.state(), state);
        require_dtype(operation, argument, &self.entries[0].key, state);
        require_device(operation, argument, &self.entries[0].key, state);
    }
}

/// The paper's packing of a history: normalised keys and unprojected values per output stream (equation 10).
///
/// # Shapes
/// - output: keys and values, both `[entries, tokens, streams, d_model]`, in the storage type
///
/// # Panics
/// If `routing` does not fit the number of streams.
#[track_caller]
pub fn pack(history: &History, routing: Routing) -> (Tensor<4>, Tensor<4>) {
    check_routing("pack", routing, history.dims().streams);
    let pack_entry = |entry: &Entry| {
        let dtype = entry.key.dtype();
        let inv_rms = entry.inv_rms.clone().unsqueeze_dim::<3>(2);
        let key = (entry.key.clone().cast(inv_rms.dtype()) * inv_rms).cast(dtype);
        (pick_streams(key, |j| routing.key_stream(j)), pick_streams(entry.value.clone(), |j| routing.value_stream(j)))
    };
    let (keys, values) = history.entries().iter().map(pack_entry).unzip();
    (stack_first(keys), stack_first(values))
}

/// `out[:, j] = x[:, source(j)]` for one or two streams. `[tokens, streams, d_model]`
pub(crate) fn pick_streams(x: Tensor<3>, source: impl Fn(usize) -> usize) -> Tensor<3> {
    let streams = x.dims()[1];
    let sources: Vec<usize> = (0..streams).map(source).collect();
    if sources.iter().enumerate().all(|(j, &from)| j == from) {
        x
    } else if sources == [1, 0] {
        exchange(x, 1)
    } else {
        let parts = sources.into_iter().map(|from| x.clone().narrow(1, from, 1)).collect();
        Tensor::cat(parts, 1)
    }
}

/// Panics unless `routing` exists for `streams` streams.
#[track_caller]
pub(crate) fn check_routing(operation: &'static str, routing: Routing, streams: usize) {
    if !routing.fits(streams) {
        require::<()>(Err(KernelError::value(
            operation,
            "routing",
            format!("one that exists for {streams} stream(s): SelfKeyValue"),
            format!("{routing:?}"),
        )));
    }
}
