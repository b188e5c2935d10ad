//! The launches of a pass on CubeCL devices: allocate what is new, launch, return the arenas.

use burn::backend::TensorMetadata;
use burn::backend::cubecl::dtype_to_elem_type;
use burn::backend::ops::FloatTensorOps;
use burn::backend::tensor::FloatTensor;
use burn::tensor::{DType, Shape};
use burn_cubecl::CubeBackend;
use burn_cubecl::kernel::into_contiguous;
use burn_cubecl::ops::numeric::empty_device_contiguous_dtype;
use burn_cubecl::tensor::CubeTensor;
use dar_kernels::pack::{PackFwd, pack_fwd};
use dar_kernels::prefix::{
    Mix, PrefixBwdHistory, PrefixBwdQuery, PrefixFwd, prefix_bwd_history, prefix_bwd_query, prefix_fwd,
};
use dar_kernels::read::{Open, OpenBwd, ReadBwd, ReadFwd, read_bwd, read_fwd};
use dar_kernels::site::{GateOperands, PackSite, SiteOperands, pack_site, packed_length};
use dar_kernels::write::{CloseFwd, WriteBwd, WriteFwd, close_fwd, write_bwd, write_fwd};
use dar_kernels::{KernelError, Operand, Routing, Tuning};

use super::kernels::{
    Norms, OpenOutput, OptionalSite, OptionalTensor, PassKernels, Prefix, QueryBackward, Read, ReadBackward,
    ReadGradients, ReadOutput, Site, Wanted, Write,
};
use super::parameter_dtype;
use crate::ops::numeric::require;

/// A tensor that kernels can index: row-major and contiguous.
struct Rows(CubeTensor);

impl Rows {
    fn new(tensor: CubeTensor) -> Self {
        Self(into_contiguous(tensor))
    }

    fn optional(tensor: OptionalTensor<CubeBackend>) -> Option<Self> {
        tensor.into_option().map(Self::new)
    }

    /// A new tensor on the device of `self`.
    fn empty(&self, shape: impl Into<Shape>, dtype: DType) -> Self {
        let CubeTensor { client, device, .. } = &self.0;
        Self(empty_device_contiguous_dtype(client.clone(), device.clone(), shape.into(), dtype))
    }

    /// The same memory in another shape.
    fn as_shape(&self, shape: impl Into<Shape>) -> Self {
        let CubeTensor { client, device, handle, dtype, .. } = self.0.clone();
        Self(CubeTensor::new_contiguous(client, device, shape.into(), handle, dtype))
    }

    fn operand(&self) -> Operand<'_> {
        Operand::new(&self.0.handle, self.0.meta.shape(), dtype_to_elem_type(self.0.dtype))
    }

    fn shape<const D: usize>(&self) -> [usize; D] {
        self.0.meta.shape().dims()
    }
}

fn given(rows: Option<Rows>) -> OptionalTensor<CubeBackend> {
    rows.map(|rows| rows.0).into()
}

/// Panics with the message of a refused launch.
#[track_caller]
fn launched(result: Result<(), KernelError>) {
    require(result);
}

fn site_operands(site: &[Rows; 9]) -> SiteOperands<'_> {
    let gate = |first: usize| GateOperands {
        weight: site[first].operand(),
        bias: site[first + 1].operand(),
        scale: site[first + 2].operand(),
    };
    SiteOperands { alpha: gate(0), beta: gate(3), rho: gate(6) }
}

impl PassKernels for CubeBackend {
    fn pass_arena(like: FloatTensor<Self>, shape: Shape, dtype: DType) -> FloatTensor<Self> {
        Rows(like).empty(shape, dtype).0
    }

    fn pass_copy(x: FloatTensor<Self>) -> FloatTensor<Self> {
        x.copy()
    }

    fn pass_pack_site(site: OptionalSite<Self>, gain: OptionalTensor<Self>, storage: DType) -> FloatTensor<Self> {
        let (dtype, gain) = (parameter_dtype(storage), gain.into_option());
        let cast = |parameter: CubeTensor| {
            if parameter.dtype == dtype { parameter } else { Self::float_cast(parameter, dtype.into()) }
        };
        let Some(site) = site.into_option() else {
            return cast(gain.expect("a read whose parameters are packed has some"));
        };
        let parameters = site.into_array();
        let own = parameters[0].dtype;
        let same = parameters.iter().chain(&gain).all(|parameter| parameter.dtype == own);
        let rows = |parameter| Rows::new(if same { parameter } else { cast(parameter) });
        let (parameters, gain) = (parameters.map(rows), gain.map(rows));
        let d_model = parameters[0].shape::<2>()[0] / 2;
        let site = parameters[0].empty([packed_length(d_model, true, gain.is_some())], dtype);
        let operands = PackSite {
            parameters: site_operands(&parameters),
            gain: gain.as_ref().map(Rows::operand),
            site: site.operand(),
        };
        launched(pack_site(&site.0.client, operands));
        site.0
    }

    fn pass_pack(
        state: FloatTensor<Self>,
        value: FloatTensor<Self>,
        inv_rms: FloatTensor<Self>,
        entry: usize,
        eps: f64,
    ) -> (FloatTensor<Self>, FloatTensor<Self>) {
        let [state, value, inv_rms] = [state, value, inv_rms].map(Rows::new);
        let operands = PackFwd {
            state: state.operand(),
            value: value.operand(),
            inv_rms: inv_rms.operand(),
            key: None,
            entry,
            eps,
        };
        launched(pack_fwd(&value.0.client, operands, Tuning::default()));
        (value.0, inv_rms.0)
    }

    fn pass_close(
        write: Write<Self>,
        value: FloatTensor<Self>,
        inv_rms: FloatTensor<Self>,
        branch: usize,
        entry: usize,
        eps: f64,
    ) -> (FloatTensor<Self>, FloatTensor<Self>) {
        let [output, value, inv_rms] = [write.output, value, inv_rms].map(Rows::new);
        let [before, gate] = [write.before, write.gate].map(Rows::optional);
        let operands = CloseFwd {
            before: before.as_ref().map(Rows::operand),
            output: output.operand(),
            gate: gate.as_ref().map(Rows::operand),
            read: branch,
            value: value.operand(),
            inv_rms: inv_rms.operand(),
            key: None,
            entry,
            eps,
        };
        launched(close_fwd(&value.0.client, operands, Tuning::default()));
        (value.0, inv_rms.0)
    }

    fn pass_write(write: Write<Self>, branch: usize, streams: usize) -> FloatTensor<Self> {
        let output = Rows::new(write.output);
        let [before, gate] = [write.before, write.gate].map(Rows::optional);
        let [tokens, d_model] = output.shape();
        let state = output.empty([tokens, streams, d_model], output.0.dtype);
        let operands = WriteFwd {
            before: before.as_ref().map(Rows::operand),
            output: output.operand(),
            gate: gate.as_ref().map(Rows::operand),
            read: branch,
            state: state.operand(),
        };
        launched(write_fwd(&output.0.client, operands));
        state.0
    }

    fn pass_prefix(
        prefix: Prefix<Self>,
        entries: usize,
        first: usize,
        count: usize,
        slot: usize,
        routing: Routing,
    ) -> (FloatTensor<Self>, FloatTensor<Self>, FloatTensor<Self>) {
        let Prefix { value, inv_rms, query, lse, logit, state } = prefix;
        let [value, inv_rms, query, lse, logit, state] = [value, inv_rms, query, lse, logit, state].map(Rows::new);
        let operands = PrefixFwd {
            value: value.operand(),
            inv_rms: inv_rms.operand(),
            key: None,
            query: query.operand(),
            lse: lse.operand(),
            logit: logit.operand(),
            state: state.operand(),
            mix: None,
            entries,
            first,
            count,
            slot,
        };
        launched(prefix_fwd(&value.0.client, operands, routing, Tuning::default()));
        (lse.0, logit.0, state.0)
    }

    fn pass_open(
        prefix: Prefix<Self>,
        site: OptionalTensor<Self>,
        gate: OptionalTensor<Self>,
        entries: usize,
        first: usize,
        count: usize,
        slot: usize,
        routing: Routing,
        norms: Norms,
        keep: bool,
    ) -> OpenOutput<Self> {
        let Prefix { value, inv_rms, query, lse, logit, state } = prefix;
        let [value, inv_rms, query, lse, logit, state] = [value, inv_rms, query, lse, logit, state].map(Rows::new);
        let [site, gate] = [site, gate].map(Rows::optional);
        let [_, tokens, _, d_model] = value.shape();
        let input = value.empty([tokens, d_model], value.0.dtype);
        let mix = Mix {
            site: site.as_ref().map(Rows::operand),
            // The output read of a gated pass has no gates of its own.
            gate: gate.as_ref().filter(|_| site.is_some()).map(Rows::operand),
            input: input.operand(),
            keep_first: keep,
            eps: norms.eps,
            norm: norms.branch,
        };
        let operands = PrefixFwd {
            value: value.operand(),
            inv_rms: inv_rms.operand(),
            key: None,
            query: query.operand(),
            lse: lse.operand(),
            logit: logit.operand(),
            state: state.operand(),
            mix: Some(mix),
            entries,
            first,
            count,
            slot,
        };
        launched(prefix_fwd(&value.0.client, operands, routing, Tuning::default()));
        OpenOutput { input: input.0, lse: lse.0, logit: logit.0, state: state.0, gate: given(gate) }
    }

    fn pass_merge(read: Read<Self>, index: usize, slot: usize, routing: Routing, norms: Norms) -> ReadOutput<Self> {
        let [state, query, lse] = [read.state, read.query, read.lse].map(Rows::new);
        let [before, output, site, gate] = [read.before, read.output, read.site, read.gate].map(Rows::optional);
        let [_, tokens, streams, d_model] = state.shape();
        let dtype = state.0.dtype;
        let input = state.empty([tokens, d_model], dtype);
        let partial = output.as_ref().map(|_| state.empty([tokens, streams, d_model], dtype));
        let open = output.as_ref().zip(partial.as_ref()).map(|(output, partial)| Open {
            before: before.as_ref().map(Rows::operand),
            output: output.operand(),
            partial: partial.operand(),
        });
        let operands = ReadFwd {
            state: state.operand(),
            slot,
            open,
            query: query.operand(),
            lse: lse.operand(),
            site: site.as_ref().map(Rows::operand),
            gate: gate.as_ref().map(Rows::operand),
            input: input.operand(),
            read: index,
            eps: norms.eps,
            norm: norms.branch,
        };
        launched(read_fwd(&state.0.client, operands, routing, Tuning::default()));
        ReadOutput { input: input.0, partial: given(partial), gate: given(gate) }
    }

    fn pass_merge_backward(
        read: ReadBackward<Self>,
        index: usize,
        slot: usize,
        routing: Routing,
        norms: Norms,
        wanted: Wanted,
    ) -> ReadGradients<Self> {
        let [state, query, lse, d_token, d_query] =
            [read.state, read.query, read.lse, read.d_token, read.d_query].map(Rows::new);
        let d_input = Rows::new(read.d_input);
        let [partial, output, site, gate] = [read.partial, read.output, read.site, read.gate].map(Rows::optional);
        let [_, tokens, streams, d_model] = state.shape();
        let dtype = state.0.dtype;
        let written = matches!(read.d_written, OptionalTensor::Given(_));
        // The gradient of the state before takes the place of the one after, unless somebody else has that, too.
        let d_partial = partial.as_ref().map(|_| match read.d_written.into_option() {
            Some(d_written) if d_written.can_mut() => Rows::new(d_written),
            Some(d_written) => Rows::new(d_written.copy()),
            None => state.empty([tokens, streams, d_model], dtype),
        });
        // Without gates it is the gradient of the state before.
        let d_output = output.as_ref().zip(gate.as_ref()).map(|_| state.empty([tokens, d_model], dtype));
        let d_site = site
            .as_ref()
            .filter(|_| wanted.site)
            .map(|site| Site::<Self>::shapes(d_model).map(|shape| site.empty(shape, site.0.dtype)));
        let d_gain = site.as_ref().filter(|_| wanted.gain).map(|site| site.empty([d_model], site.0.dtype));
        let open = partial.as_ref().zip(d_partial.as_ref()).map(|(partial, d_partial)| OpenBwd {
            partial: partial.operand(),
            d_partial: d_partial.operand(),
            output: output.as_ref().filter(|_| gate.is_some()).map(Rows::operand),
            d_output: d_output.as_ref().map(Rows::operand),
        });
        let operands = ReadBwd {
            state: state.operand(),
            slot,
            lse: lse.operand(),
            query: query.operand(),
            site: site.as_ref().map(Rows::operand),
            gate: gate.as_ref().map(Rows::operand),
            d_input: d_input.operand(),
            written,
            open,
            d_token: d_token.operand(),
            d_site: d_site.as_ref().map(site_operands),
            d_gain: d_gain.as_ref().map(Rows::operand),
            d_query: d_query.operand(),
            read: index,
            eps: norms.eps,
            norm: norms.branch,
        };
        launched(read_bwd(&state.0.client, operands, routing, Tuning::default()));
        let d_output = match (&d_partial, &gate) {
            (Some(d_partial), None) => Some(d_partial.as_shape([tokens, d_model])),
            _ => d_output,
        };
        let d_site = d_site.map(|d_site| Site::from_array(d_site.map(|rows| rows.0))).into();
        ReadGradients {
            state: state.0,
            d_partial: given(d_partial),
            d_output: given(d_output),
            d_site,
            d_gain: given(d_gain),
            d_token: d_token.0,
            d_query: d_query.0,
        }
    }

    fn pass_write_backward(
        d_state: FloatTensor<Self>,
        output: FloatTensor<Self>,
        gate: FloatTensor<Self>,
        d_token: FloatTensor<Self>,
        branch: usize,
    ) -> (FloatTensor<Self>, FloatTensor<Self>) {
        let [d_state, output, gate, d_token] = [d_state, output, gate, d_token].map(Rows::new);
        let d_output = output.empty(output.0.shape(), output.0.dtype);
        let operands = WriteBwd {
            d_state: d_state.operand(),
            output: output.operand(),
            gate: gate.operand(),
            read: branch,
            d_output: d_output.operand(),
            d_token: d_token.operand(),
        };
        launched(write_bwd(&output.0.client, operands, Tuning::default()));
        (d_output.0, d_token.0)
    }

    fn pass_entry_backward(
        prefix: Prefix<Self>,
        d_token: FloatTensor<Self>,
        d_logit: FloatTensor<Self>,
        entry: usize,
        first: usize,
        last: usize,
        routing: Routing,
        sum: bool,
    ) -> (FloatTensor<Self>, FloatTensor<Self>) {
        let Prefix { value, inv_rms, query, lse, logit, state } = prefix;
        let [value, inv_rms, query, lse, logit, state] = [value, inv_rms, query, lse, logit, state].map(Rows::new);
        let [d_token, d_logit] = [d_token, d_logit].map(Rows::new);
        let [_, tokens, streams, d_model] = value.shape();
        let shape = if sum { Shape::new([tokens, d_model]) } else { Shape::new([tokens, streams, d_model]) };
        let d_value = value.empty(shape, value.0.dtype);
        let operands = PrefixBwdHistory {
            value: value.operand(),
            inv_rms: inv_rms.operand(),
            query: query.operand(),
            lse: lse.operand(),
            logit: logit.operand(),
            d_state: state.operand(),
            d_token: d_token.operand(),
            d_logit: d_logit.operand(),
            d_value: d_value.operand(),
            entry,
            first,
            last,
        };
        launched(prefix_bwd_history(&value.0.client, operands, routing, Tuning::default()));
        (d_value.0, d_logit.0)
    }

    fn pass_query_backward(
        queries: QueryBackward<Self>,
        first: usize,
        last: usize,
        branches_per_block: usize,
        routing: Routing,
    ) -> FloatTensor<Self> {
        let QueryBackward { value, inv_rms, lse, logit, d_logit, d_token, d_query } = queries;
        let [value, inv_rms, lse, logit] = [value, inv_rms, lse, logit].map(Rows::new);
        let [d_logit, d_token, d_query] = [d_logit, d_token, d_query].map(Rows::new);
        let operands = PrefixBwdQuery {
            value: value.operand(),
            inv_rms: inv_rms.operand(),
            lse: lse.operand(),
            logit: logit.operand(),
            d_logit: d_logit.operand(),
            d_token: d_token.operand(),
            d_query: d_query.operand(),
            entries: value.shape::<4>()[0],
            first,
            reads: last,
            branches_per_block,
        };
        launched(prefix_bwd_query(&value.0.client, operands, routing));
        d_query.0
    }
}
