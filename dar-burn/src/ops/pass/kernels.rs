//! The launches of a pass on a backend: kernels on CubeCL devices, Burn operations on Flex.

#![expect(clippy::large_enum_variant, reason = "one a read, and a box would be one more indirection")]
#![expect(clippy::too_many_arguments, reason = "one argument a tensor and size")]

#[cfg(feature = "cube")]
use burn::backend::fusion::custom::TensorSpec;
use burn::backend::tensor::FloatTensor;
use burn::backend::{Backend, ExtensionType, backend_extension};
use burn::tensor::{DType, Shape};
use dar_kernels::Routing;

#[cfg(feature = "cube")]
use super::parameter_dtype;

/// A tensor that an operation may have.
#[derive(Debug, Clone, ExtensionType)]
#[extension_type(fusion: cfg(feature = "cube"))]
pub(crate) enum OptionalTensor<B: Backend> {
    Given(FloatTensor<B>),
    Absent,
}

impl<B: Backend> OptionalTensor<B> {
    pub(super) fn into_option(self) -> Option<FloatTensor<B>> {
        match self {
            Self::Given(tensor) => Some(tensor),
            Self::Absent => None,
        }
    }
}

impl<B: Backend> From<Option<FloatTensor<B>>> for OptionalTensor<B> {
    fn from(tensor: Option<FloatTensor<B>>) -> Self {
        match tensor {
            Some(tensor) => Self::Given(tensor),
            None => Self::Absent,
        }
    }
}

/// The gate parameters of a site, or their gradients: weights `[2 * d_model, outputs]`, biases `[outputs]`, scales `[1]`.
#[derive(Debug, Clone, ExtensionType)]
#[extension_type(fusion: cfg(feature = "cube"))]
pub(crate) struct Site<B: Backend> {
    pub alpha_weight: FloatTensor<B>,
    pub alpha_bias: FloatTensor<B>,
    pub alpha_scale: FloatTensor<B>,
    pub beta_weight: FloatTensor<B>,
    pub beta_bias: FloatTensor<B>,
    pub beta_scale: FloatTensor<B>,
    pub rho_weight: FloatTensor<B>,
    pub rho_bias: FloatTensor<B>,
    pub rho_scale: FloatTensor<B>,
}

impl<B: Backend> Site<B> {
    /// In the order of the fields.
    pub(super) fn into_array(self) -> [FloatTensor<B>; 9] {
        [
            self.alpha_weight,
            self.alpha_bias,
            self.alpha_scale,
            self.beta_weight,
            self.beta_bias,
            self.beta_scale,
            self.rho_weight,
            self.rho_bias,
            self.rho_scale,
        ]
    }

    /// Of tensors in the order of the fields.
    pub(super) fn from_array(parameters: [FloatTensor<B>; 9]) -> Self {
        let [a, b, c, d, e, f, g, h, i] = parameters;
        Self {
            alpha_weight: a,
            alpha_bias: b,
            alpha_scale: c,
            beta_weight: d,
            beta_bias: e,
            beta_scale: f,
            rho_weight: g,
            rho_bias: h,
            rho_scale: i,
        }
    }

    /// The shapes of the fields, in their order.
    pub(super) fn shapes(d_model: usize) -> [Shape; 9] {
        let gate = |outputs: usize| [Shape::new([2 * d_model, outputs]), Shape::new([outputs]), Shape::new([1])];
        let [[a, b, c], [d, e, f], [g, h, i]] = [gate(2), gate(2), gate(1)];
        [a, b, c, d, e, f, g, h, i]
    }
}

/// Epsilons of the norms of a read.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Norms {
    /// Of keys and gates.
    pub eps: f64,
    /// Of the branch's own norm, if that is folded in.
    pub branch: Option<f64>,
}

/// The parameters of a read whose gradients are wanted, of those that it has.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Wanted {
    /// The gates'.
    pub site: bool,
    /// The gain's of the branch's norm.
    pub gain: bool,
}

/// The gate parameters of a read that may have gates.
#[derive(Debug, Clone, ExtensionType)]
#[extension_type(fusion: cfg(feature = "cube"))]
pub(crate) enum OptionalSite<B: Backend> {
    Given(#[extension_type] Site<B>),
    Absent,
}

impl<B: Backend> From<Option<Site<B>>> for OptionalSite<B> {
    fn from(site: Option<Site<B>>) -> Self {
        match site {
            Some(site) => Self::Given(site),
            None => Self::Absent,
        }
    }
}

impl<B: Backend> OptionalSite<B> {
    pub(super) fn into_option(self) -> Option<Site<B>> {
        match self {
            Self::Given(site) => Some(site),
            Self::Absent => None,
        }
    }
}

/// Operands of [`PassKernels::pass_prefix`].
#[derive(Debug, ExtensionType)]
#[extension_type(fusion: cfg(feature = "cube"))]
pub(crate) struct Prefix<B: Backend> {
    /// `[capacity, tokens, streams, d_model]`
    pub value: FloatTensor<B>,
    /// `[capacity, tokens, streams]`
    pub inv_rms: FloatTensor<B>,
    /// `[reads, outputs, d_model]`
    pub query: FloatTensor<B>,
    /// In place. `[reads, tokens, outputs]`
    pub lse: FloatTensor<B>,
    /// In place. `[capacity, reads, tokens, outputs]`
    pub logit: FloatTensor<B>,
    /// In place. `[slots, tokens, outputs, d_model]`
    pub state: FloatTensor<B>,
}

/// The write of a branch output.
#[derive(Debug, ExtensionType)]
#[extension_type(fusion: cfg(feature = "cube"))]
pub(crate) struct Write<B: Backend> {
    /// The state before; none for a block's first branch. `[tokens, streams, d_model]`
    #[extension_type]
    pub before: OptionalTensor<B>,
    /// `[tokens, d_model]`
    pub output: FloatTensor<B>,
    /// Beta and rho, if the write is gated. `[reads, tokens, 5]`
    #[extension_type]
    pub gate: OptionalTensor<B>,
}

/// Operands of [`PassKernels::pass_merge`].
#[derive(Debug, ExtensionType)]
#[extension_type(fusion: cfg(feature = "cube"))]
pub(crate) struct Read<B: Backend> {
    /// `[slots, tokens, outputs, d_model]`
    pub state: FloatTensor<B>,
    /// The open block before the write, and what is written: both or none.
    #[extension_type]
    pub before: OptionalTensor<B>,
    #[extension_type]
    pub output: OptionalTensor<B>,
    /// `[reads, outputs, d_model]`
    pub query: FloatTensor<B>,
    /// `[reads, tokens, outputs]`
    pub lse: FloatTensor<B>,
    /// Packed.
    #[extension_type]
    pub site: OptionalTensor<B>,
    /// In place. `[reads, tokens, 5]`
    #[extension_type]
    pub gate: OptionalTensor<B>,
}

/// What [`PassKernels::pass_merge`] computes.
#[derive(Debug, ExtensionType)]
#[extension_type(fusion: cfg(feature = "cube"))]
pub(crate) struct ReadOutput<B: Backend> {
    /// `[tokens, d_model]`
    pub input: FloatTensor<B>,
    /// The open block after the write. `[tokens, streams, d_model]`
    #[extension_type]
    pub partial: OptionalTensor<B>,
    /// `[reads, tokens, 5]`
    #[extension_type]
    pub gate: OptionalTensor<B>,
}

/// What [`PassKernels::pass_open`] computes.
#[derive(Debug, ExtensionType)]
#[extension_type(fusion: cfg(feature = "cube"))]
pub(crate) struct OpenOutput<B: Backend> {
    /// `[tokens, d_model]`
    pub input: FloatTensor<B>,
    pub lse: FloatTensor<B>,
    pub logit: FloatTensor<B>,
    pub state: FloatTensor<B>,
    #[extension_type]
    pub gate: OptionalTensor<B>,
}

/// Operands of [`PassKernels::pass_merge_backward`].
#[derive(Debug, ExtensionType)]
#[extension_type(fusion: cfg(feature = "cube"))]
pub(crate) struct ReadBackward<B: Backend> {
    /// In place: the retrieved state becomes its gradient. `[slots, tokens, outputs, d_model]`
    pub state: FloatTensor<B>,
    /// The open block that was read, and the output that was written into it: both or none.
    #[extension_type]
    pub partial: OptionalTensor<B>,
    #[extension_type]
    pub output: OptionalTensor<B>,
    /// Gradient of the state after the branch of this read, if it was written.
    #[extension_type]
    pub d_written: OptionalTensor<B>,
    /// `[tokens, d_model]`
    pub d_input: FloatTensor<B>,
    pub query: FloatTensor<B>,
    pub lse: FloatTensor<B>,
    #[extension_type]
    pub site: OptionalTensor<B>,
    #[extension_type]
    pub gate: OptionalTensor<B>,
    /// In place: d_beta of a read's branch, then the shift of its logits' gradients, then d_lse.
    /// `[reads, tokens, 2 + 2 * outputs]`
    pub d_token: FloatTensor<B>,
    /// In place: a row of the open block's part of the queries' gradient. `[reads, outputs, d_model]`
    pub d_query: FloatTensor<B>,
}

/// What [`PassKernels::pass_merge_backward`] computes.
#[derive(Debug, ExtensionType)]
#[extension_type(fusion: cfg(feature = "cube"))]
pub(crate) struct ReadGradients<B: Backend> {
    pub state: FloatTensor<B>,
    /// Gradient of the open block that was read. `[tokens, streams, d_model]`
    #[extension_type]
    pub d_partial: OptionalTensor<B>,
    /// Gradient of the output that was written into it. `[tokens, d_model]`
    #[extension_type]
    pub d_output: OptionalTensor<B>,
    #[extension_type]
    pub d_site: OptionalSite<B>,
    /// `[d_model]`
    #[extension_type]
    pub d_gain: OptionalTensor<B>,
    pub d_token: FloatTensor<B>,
    pub d_query: FloatTensor<B>,
}

/// Operands of [`PassKernels::pass_query_backward`].
#[derive(Debug, ExtensionType)]
#[extension_type(fusion: cfg(feature = "cube"))]
pub(crate) struct QueryBackward<B: Backend> {
    pub value: FloatTensor<B>,
    pub inv_rms: FloatTensor<B>,
    pub lse: FloatTensor<B>,
    pub logit: FloatTensor<B>,
    pub d_logit: FloatTensor<B>,
    pub d_token: FloatTensor<B>,
    /// In place. `[reads, outputs, d_model]`
    pub d_query: FloatTensor<B>,
}

/// The launches of a pass. Arenas are written in place where the backend can, and returned.
///
/// The rows of `lse`, `logit`, `gate`, `d_token` and `d_query` are reads; `slot` is the row of `state`.
#[backend_extension(Cube: cfg(feature = "cube"), Flex: cfg(feature = "flex"), Fusion: cfg(feature = "cube"))]
pub(crate) trait PassKernels: Backend {
    /// Memory for an arena, not initialised, on the device of `like`.
    #[fusion(meta = |_like, shape, dtype| TensorSpec::new(shape.clone(), *dtype))]
    fn pass_arena(like: FloatTensor<Self>, shape: Shape, dtype: DType) -> FloatTensor<Self>;

    /// A copy in memory of its own.
    #[fusion(meta = |x| x.clone())]
    fn pass_copy(x: FloatTensor<Self>) -> FloatTensor<Self>;

    /// The parameters of a read in one tensor, in the accumulator type of `storage`: of a site's gates the rows alpha0,
    /// alpha1, beta0, beta1, rho, each for stream 0 and stream 1, five biases, three scales; then the gain of the branch's
    /// norm. `[10 * d_model + 8 + d_model]`
    #[fusion(meta = |site, gain, storage| packed_spec(site, gain, *storage))]
    fn pass_pack_site(
        #[extension_type] site: OptionalSite<Self>,
        #[extension_type] gain: OptionalTensor<Self>,
        storage: DType,
    ) -> FloatTensor<Self>;

    /// Writes entry `entry`: `state` is `[tokens, streams, d_model]`, or `[tokens, d_model]` for all streams alike.
    #[fusion(meta = |_state, value, inv_rms, _entry, _eps| (value.clone(), inv_rms.clone()))]
    fn pass_pack(
        state: FloatTensor<Self>,
        value: FloatTensor<Self>,
        inv_rms: FloatTensor<Self>,
        entry: usize,
        eps: f64,
    ) -> (FloatTensor<Self>, FloatTensor<Self>);

    /// The write of the last branch of a block, `branch`, as entry `entry`.
    #[fusion(meta = |_write, value, inv_rms, _branch, _entry, _eps| (value.clone(), inv_rms.clone()))]
    fn pass_close(
        #[extension_type] write: Write<Self>,
        value: FloatTensor<Self>,
        inv_rms: FloatTensor<Self>,
        branch: usize,
        entry: usize,
        eps: f64,
    ) -> (FloatTensor<Self>, FloatTensor<Self>);

    /// The write of branch `branch`: the state after it. `[tokens, streams, d_model]`
    #[fusion(meta = |write, _branch, streams| state_spec(&write.output, *streams))]
    fn pass_write(#[extension_type] write: Write<Self>, branch: usize, streams: usize) -> FloatTensor<Self>;

    /// The prefix of reads `first .. first + count` over `entries` entries; states go to rows from `slot` on. Returns `lse`,
    /// `logit` and `state`.
    #[fusion(meta = |prefix, _entries, _first, _count, _slot, _routing| {
        (prefix.lse.clone(), prefix.logit.clone(), prefix.state.clone())
    })]
    fn pass_prefix(
        #[extension_type] prefix: Prefix<Self>,
        entries: usize,
        first: usize,
        count: usize,
        slot: usize,
        routing: Routing,
    ) -> (FloatTensor<Self>, FloatTensor<Self>, FloatTensor<Self>);

    /// The prefix of reads `first .. first + count`, and read `first`, which has no partial state, in the same pass over the
    /// history; `keep` its retrieved state for the backward.
    #[fusion(meta = |prefix, site, gate, _entries, _first, _count, _slot, _routing, _norms, _keep| {
        let _ = site;
        open_specs(prefix, gate)
    })]
    fn pass_open(
        #[extension_type] prefix: Prefix<Self>,
        #[extension_type] site: OptionalTensor<Self>,
        #[extension_type] gate: OptionalTensor<Self>,
        entries: usize,
        first: usize,
        count: usize,
        slot: usize,
        routing: Routing,
        norms: Norms,
        keep: bool,
    ) -> OpenOutput<Self>;

    /// Write of branch `read - 1`, merge, gates, branch input and its norm of read `read`.
    #[fusion(meta = |read, _index, _slot, _routing, _norms| read_specs(read))]
    fn pass_merge(
        #[extension_type] read: Read<Self>,
        index: usize,
        slot: usize,
        routing: Routing,
        norms: Norms,
    ) -> ReadOutput<Self>;

    /// Backward of [`pass_merge`](Self::pass_merge). `wanted`: which parameters get a gradient.
    #[fusion(meta = |read, _index, _slot, _routing, _norms, wanted| gradient_specs(read, *wanted))]
    fn pass_merge_backward(
        #[extension_type] read: ReadBackward<Self>,
        index: usize,
        slot: usize,
        routing: Routing,
        norms: Norms,
        wanted: Wanted,
    ) -> ReadGradients<Self>;

    /// Backward of the gated write of the last branch of a block: the gradient of its output, and d_beta in `d_token`.
    #[fusion(meta = |_d_state, output, _gate, d_token, _branch| (output.clone(), d_token.clone()))]
    fn pass_write_backward(
        d_state: FloatTensor<Self>,
        output: FloatTensor<Self>,
        gate: FloatTensor<Self>,
        d_token: FloatTensor<Self>,
        branch: usize,
    ) -> (FloatTensor<Self>, FloatTensor<Self>);

    /// The whole gradient of entry `entry` from reads `first .. last`, and those of its logits, in `d_logit`; summed over the
    /// streams if `sum`. `prefix.state` holds the gradients of the retrieved states, `prefix.lse` the log-sum-exp.
    #[fusion(meta = |prefix, _d_token, d_logit, _entry, _first, _last, _routing, sum| {
        (entry_spec(&prefix.value, *sum), d_logit.clone())
    })]
    fn pass_entry_backward(
        #[extension_type] prefix: Prefix<Self>,
        d_token: FloatTensor<Self>,
        d_logit: FloatTensor<Self>,
        entry: usize,
        first: usize,
        last: usize,
        routing: Routing,
        sum: bool,
    ) -> (FloatTensor<Self>, FloatTensor<Self>);

    /// Adds to `d_query` the gradients of the queries of reads `first .. last`. Read i saw entries
    /// `0 ..= i / branches_per_block`. `d_logit` is used up.
    #[fusion(meta = |queries, _first, _last, _branches_per_block, _routing| queries.d_query.clone())]
    fn pass_query_backward(
        #[extension_type] queries: QueryBackward<Self>,
        first: usize,
        last: usize,
        branches_per_block: usize,
        routing: Routing,
    ) -> FloatTensor<Self>;
}

#[cfg(feature = "cube")]
fn packed_spec(site: &OptionalSiteMetadata, gain: &OptionalTensorMetadata, storage: DType) -> TensorSpec {
    let gates = match site {
        OptionalSiteMetadata::Given(site) => 5 * site.alpha_weight.shape[0] + 8,
        OptionalSiteMetadata::Absent => 0,
    };
    let gain = match gain {
        OptionalTensorMetadata::Given(gain) => gain.shape[0],
        OptionalTensorMetadata::Absent => 0,
    };
    TensorSpec::new(Shape::new([gates + gain]), parameter_dtype(storage))
}

/// `[tokens, streams, d_model]` from `[tokens, d_model]`.
#[cfg(feature = "cube")]
fn state_spec(output: &TensorSpec, streams: usize) -> TensorSpec {
    TensorSpec::new(Shape::new([output.shape[0], streams, output.shape[1]]), output.dtype)
}

#[cfg(feature = "cube")]
fn entry_spec(value: &TensorSpec, sum: bool) -> TensorSpec {
    let [tokens, streams, d_model] = [value.shape[1], value.shape[2], value.shape[3]];
    let shape = if sum { Shape::new([tokens, d_model]) } else { Shape::new([tokens, streams, d_model]) };
    TensorSpec::new(shape, value.dtype)
}

/// The state of one read: `[tokens, outputs, d_model]`.
#[cfg(feature = "cube")]
fn slot_spec(state: &TensorSpec) -> TensorSpec {
    TensorSpec::new(Shape::new([state.shape[1], state.shape[2], state.shape[3]]), state.dtype)
}

#[cfg(feature = "cube")]
fn open_specs(prefix: &PrefixMetadata, gate: &OptionalTensorMetadata) -> OpenOutputMetadata {
    let state = slot_spec(&prefix.state);
    OpenOutputMetadata {
        input: TensorSpec::new(Shape::new([state.shape[0], state.shape[2]]), state.dtype),
        lse: prefix.lse.clone(),
        logit: prefix.logit.clone(),
        state: prefix.state.clone(),
        gate: gate.clone(),
    }
}

#[cfg(feature = "cube")]
fn read_specs(read: &ReadMetadata) -> ReadOutputMetadata {
    let state = slot_spec(&read.state);
    let input = TensorSpec::new(Shape::new([state.shape[0], state.shape[2]]), state.dtype);
    let partial = match &read.output {
        OptionalTensorMetadata::Given(_) => OptionalTensorMetadata::Given(state),
        OptionalTensorMetadata::Absent => OptionalTensorMetadata::Absent,
    };
    ReadOutputMetadata { input, partial, gate: read.gate.clone() }
}

#[cfg(feature = "cube")]
fn gradient_specs(read: &ReadBackwardMetadata, wanted: Wanted) -> ReadGradientsMetadata {
    let dtype = parameter_dtype(read.state.dtype);
    let d_model = read.state.shape[3];
    let d_site = match wanted.site {
        true => {
            let [a, b, c, d, e, f, g, h, i] =
                Site::<burn::backend::Cube>::shapes(d_model).map(|shape| TensorSpec::new(shape, dtype));
            OptionalSiteMetadata::Given(SiteMetadata {
                alpha_weight: a,
                alpha_bias: b,
                alpha_scale: c,
                beta_weight: d,
                beta_bias: e,
                beta_scale: f,
                rho_weight: g,
                rho_bias: h,
                rho_scale: i,
            })
        }
        false => OptionalSiteMetadata::Absent,
    };
    let d_gain = match wanted.gain {
        true => OptionalTensorMetadata::Given(TensorSpec::new(Shape::new([d_model]), dtype)),
        false => OptionalTensorMetadata::Absent,
    };
    ReadGradientsMetadata {
        state: read.state.clone(),
        d_partial: read.partial.clone(),
        d_output: read.output.clone(),
        d_site,
        d_gain,
        d_token: read.d_token.clone(),
        d_query: read.d_query.clone(),
    }
}
