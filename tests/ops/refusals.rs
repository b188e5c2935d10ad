//! What an operation does not fit it refuses, naming itself, the argument, what it expected and what came.

use burn::tensor::{DType, Device, Tensor};
use dar_burn::Routing;
use dar_burn::device::DeviceChoice;
use dar_burn::ops::{
    GateWeights, History, HyperWeights, MhcWeights, Retrieved, SinkhornOrder, SiteWeights, StreamMaps, attnres_read,
    hyper_maps, merge, mhc_maps, output_read, pack, prefix, residual_read, residual_read_first, sinkhorn, streams_read,
    streams_write, write, write_first,
};

use super::operations::EPS;
use crate::support::devices::{device, flex, say};
use crate::support::panic_message;

fn zeros<const D: usize>(shape: [usize; D]) -> Tensor<D> {
    Tensor::zeros(shape, &flex())
}

fn history(streams: usize) -> History {
    History::new(zeros([3, streams, 4]), EPS)
}

fn retrieved() -> Retrieved {
    Retrieved { lse: zeros([3, 2]), state: zeros([3, 2, 4]) }
}

fn gate(outputs: usize) -> GateWeights {
    GateWeights { weight: zeros([8, outputs]), bias: zeros([outputs]), scale: zeros([1]) }
}

fn site() -> SiteWeights {
    SiteWeights { alpha: gate(2), beta: gate(2), rho: gate(1) }
}

const CROSS: Routing = Routing::CrossKey;
const ORDER: SinkhornOrder = SinkhornOrder::ColumnsThenRows;

#[track_caller]
fn refuses<R>(expected: &str, run: impl FnOnce() -> R) {
    assert_eq!(panic_message(run), expected);
}

#[test]
fn shapes() {
    refuses(
        "History::new: `embedding` has shape [3, 0, 4], expected [tokens, streams, d_model] with streams ≥ 1 and \
         d_model ≥ 1",
        || History::new(zeros([3, 0, 4]), EPS),
    );
    refuses("History::append: `state` has shape [2, 2, 4], expected [tokens, streams, d_model] = [3, 2, 4]", || {
        history(2).append(zeros([2, 2, 4]))
    });
    refuses(
        "History::append_with_value: `value` has shape [3, 2, 5], expected [tokens, streams, d_model] = [3, 2, 4]",
        || history(2).append_with_value(zeros([3, 2, 4]), zeros([3, 2, 5])),
    );
    refuses("prefix: `queries` has shape [5, 2, 3], expected [branches, streams, d_model] = [5, 2, 4]", || {
        prefix(&history(2), zeros([5, 2, 3]), CROSS)
    });
    refuses("merge: `retrieved.lse` has shape [3, 1], expected [tokens, streams] = [3, 2]", || {
        merge(Retrieved { lse: zeros([3, 1]), ..retrieved() }, zeros([3, 2, 4]), zeros([2, 4]), CROSS, EPS)
    });
    refuses("merge: `retrieved.state` has shape [3, 2, 4], expected [tokens, streams, d_model] = [3, 2, 5]", || {
        merge(retrieved(), zeros([3, 2, 5]), zeros([2, 5]), CROSS, EPS)
    });
    refuses("residual_read: `query` has shape [1, 4], expected [streams, d_model] = [2, 4]", || {
        residual_read(retrieved(), zeros([3, 2, 4]), zeros([1, 4]), &site(), CROSS, EPS)
    });
    refuses("residual_read: `site.rho.weight` has shape [8, 2], expected [2 * d_model, outputs] = [8, 1]", || {
        let site = SiteWeights { rho: gate(2), ..site() };
        residual_read(retrieved(), zeros([3, 2, 4]), zeros([2, 4]), &site, CROSS, EPS)
    });
    refuses("residual_read_first: `site.alpha.bias` has shape [3], expected [outputs] = [2]", || {
        let alpha = GateWeights { bias: zeros([3]), ..gate(2) };
        residual_read_first(zeros([3, 2, 4]), &SiteWeights { alpha, ..site() }, EPS)
    });
    refuses("write: `rho` has shape [3, 2], expected [tokens, 1] = [3, 1]", || {
        write(zeros([3, 2, 4]), zeros([3, 4]), zeros([3, 2]), zeros([3, 2]))
    });
    refuses("write: `output` has shape [3, 5], expected [tokens, d_model] = [3, 4]", || {
        write(zeros([3, 2, 4]), zeros([3, 5]), zeros([3, 2]), zeros([3, 1]))
    });
    refuses("write_first: `beta` has shape [2, 2], expected [tokens, 2] = [3, 2]", || {
        write_first(zeros([3, 4]), zeros([2, 2]))
    });
    refuses("sinkhorn: `logits` has shape [2, 3, 4], expected [tokens, n, n] = [2, 3, 3]", || {
        sinkhorn(zeros([2, 3, 4]), 1, ORDER)
    });
    refuses("mhc_maps: `weights.bias` has shape [7], expected [2n + n²] = [8]", || {
        let weights = MhcWeights { phi: zeros([8, 8]), bias: zeros([7]), scale: zeros([3]) };
        mhc_maps(zeros([3, 2, 4]), &weights, 1, ORDER, EPS)
    });
    refuses("hyper_maps: `weights.w_res` has shape [4, 3], expected [d_model, n] = [4, 2]", || {
        let weights = HyperWeights {
            static_pre: zeros([2]),
            static_post: zeros([2]),
            static_res: zeros([2, 2]),
            w_pre: zeros([4]),
            w_post: zeros([4]),
            w_res: zeros([4, 3]),
            scale: zeros([3]),
        };
        hyper_maps(zeros([3, 2, 4]), &weights, EPS)
    });
    refuses("streams_read: `pre` has shape [3, 3], expected [tokens, n] = [3, 2]", || {
        streams_read(zeros([3, 2, 4]), zeros([3, 3]))
    });
    refuses("streams_write: `maps.res` has shape [3, 2, 1], expected [tokens, n, n] = [3, 2, 2]", || {
        let maps = StreamMaps { pre: zeros([3, 2]), post: zeros([3, 2]), res: zeros([3, 2, 1]) };
        streams_write(zeros([3, 2, 4]), zeros([3, 4]), &maps)
    });
}

#[test]
fn numbers() {
    refuses("History::new: `eps` is -1, expected a finite number ≥ 0", || History::new(zeros([3, 2, 4]), -1.0));
    refuses("History::new: `eps` is NaN, expected a finite number ≥ 0", || History::new(zeros([3, 2, 4]), f64::NAN));
    refuses("sinkhorn: `iterations` is 0, expected at least 1", || sinkhorn(zeros([2, 3, 3]), 0, ORDER));
}

/// One stream has no other stream to route to.
#[test]
fn routings() {
    let refusal = |operation| {
        format!("{operation}: `routing` is CrossKey, expected one that exists for 1 stream(s): SelfKeyValue")
    };
    refuses(&refusal("pack"), || pack(&history(1), CROSS));
    refuses(&refusal("prefix"), || prefix(&history(1), zeros([1, 1, 4]), CROSS));
    refuses(&refusal("merge"), || {
        let retrieved = Retrieved { lse: zeros([3, 1]), state: zeros([3, 1, 4]) };
        merge(retrieved, zeros([3, 1, 4]), zeros([1, 4]), CROSS, EPS)
    });
}

#[test]
fn element_types() {
    let f64 = |shape| Tensor::<3>::zeros(shape, (&flex(), DType::F64));
    refuses("History::append: `state` has element type F64, expected F32", || history(2).append(f64([3, 2, 4])));
    refuses("merge: `retrieved.state` has element type F64, expected F32", || {
        let retrieved = Retrieved { state: f64([3, 2, 4]), ..retrieved() };
        merge(retrieved, zeros([3, 2, 4]), zeros([2, 4]), CROSS, EPS)
    });
    refuses("output_read: `partial` has element type F64, expected F32", || {
        output_read(&history(2), Some(f64([3, 2, 4])), zeros([2, 4]), CROSS)
    });
    refuses("write: `output` has element type F64, expected F32", || {
        let output = f64([3, 1, 4]).squeeze_dim(1);
        write(zeros([3, 2, 4]), output, zeros([3, 2]), zeros([3, 1]))
    });
    refuses("streams_write: `output` has element type F64, expected F32", || {
        let maps = StreamMaps { pre: zeros([3, 2]), post: zeros([3, 2]), res: zeros([3, 2, 2]) };
        streams_write(zeros([3, 2, 4]), f64([3, 1, 4]).squeeze_dim(1), &maps)
    });
}

#[test]
fn devices() {
    let Some(other) = device(DeviceChoice::Wgpu, DType::F32) else {
        return say("operands on two devices: no second device here");
    };
    let (here, there) = (flex(), other.device.clone());
    let refusal = |operation: &str, argument: &str, expected: &Device, got: &Device| {
        format!("{operation}: `{argument}` is on device {got:?}, expected {expected:?}")
    };
    refuses(&refusal("History::append", "state", &here, &there), || {
        history(2).append(Tensor::zeros([3, 2, 4], &there))
    });
    refuses(&refusal("prefix", "queries", &here, &there), || {
        prefix(&history(2), Tensor::zeros([1, 2, 4], &there), CROSS)
    });
    refuses(&refusal("attnres_read", "partial", &here, &there), || {
        attnres_read(&history(1), Some(Tensor::zeros([3, 1, 4], &there)), zeros([4]))
    });
}
