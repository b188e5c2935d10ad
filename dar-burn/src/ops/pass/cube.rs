use burn::backend::tensor::FloatTensor;
use burn::tensor::{DType, Shape};
use burn_cubecl::CubeBackend;
use dar_kernels::Routing;

use super::kernels::*;

impl PassKernels for CubeBackend {
    fn pass_arena(_like: FloatTensor<Self>, _shape: Shape, _dtype: DType) -> FloatTensor<Self> { unimplemented!() }
    fn pass_copy(_x: FloatTensor<Self>) -> FloatTensor<Self> { unimplemented!() }
    fn pass_pack_site(_site: Site<Self>, _storage: DType) -> FloatTensor<Self> { unimplemented!() }
    fn pass_pack(
        _state: FloatTensor<Self>,
        _value: FloatTensor<Self>,
        _inv_rms: FloatTensor<Self>,
        _entry: usize,
        _eps: f64,
    ) -> (FloatTensor<Self>, FloatTensor<Self>) { unimplemented!() }
    fn pass_close(
        _write: Write<Self>,
        _value: FloatTensor<Self>,
        _inv_rms: FloatTensor<Self>,
        _branch: usize,
        _entry: usize,
        _eps: f64,
    ) -> (FloatTensor<Self>, FloatTensor<Self>) { unimplemented!() }
    fn pass_write(_write: Write<Self>, _branch: usize, _streams: usize) -> FloatTensor<Self> { unimplemented!() }
    fn pass_prefix(
        _prefix: Prefix<Self>,
        _entries: usize,
        _first: usize,
        _count: usize,
        _slot: usize,
        _routing: Routing,
    ) -> (FloatTensor<Self>, FloatTensor<Self>, FloatTensor<Self>) { unimplemented!() }
    fn pass_merge(
        _read: Read<Self>,
        _index: usize,
        _slot: usize,
        _routing: Routing,
        _eps: f64,
    ) -> ReadOutput<Self> { unimplemented!() }
    fn pass_merge_backward(
        _read: ReadBackward<Self>,
        _index: usize,
        _slot: usize,
        _routing: Routing,
        _eps: f64,
        _parameters: bool,
    ) -> ReadGradients<Self> { unimplemented!() }
    fn pass_write_backward(
        _d_state: FloatTensor<Self>,
        _output: FloatTensor<Self>,
        _gate: FloatTensor<Self>,
        _d_token: FloatTensor<Self>,
        _branch: usize,
    ) -> (FloatTensor<Self>, FloatTensor<Self>) { unimplemented!() }
    fn pass_entry_backward(
        _prefix: Prefix<Self>,
        _d_token: FloatTensor<Self>,
        _entry: usize,
        _first: usize,
        _last: usize,
        _routing: Routing,
        _sum: bool,
    ) -> (FloatTensor<Self>, FloatTensor<Self>) { unimplemented!() }
    fn pass_query_backward(
        _value: FloatTensor<Self>,
        _inv_rms: FloatTensor<Self>,
        _d_logit: FloatTensor<Self>,
        _d_query: FloatTensor<Self>,
        _first: usize,
        _last: usize,
        _branches_per_block: usize,
        _routing: Routing,
    ) -> FloatTensor<Self> { unimplemented!() }
}
