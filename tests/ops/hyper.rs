use burn::tensor::{DType, Device, Tensor, TensorData};
use dar_burn::ops::{MhcWeights, SinkhornOrder, StreamMaps, mhc_maps, sinkhorn, streams_read, streams_write};

use super::operations::EPS;
use crate::support::devices::devices;
use crate::support::host::values;

fn tensor<const D: usize>(seed: u64, shape: [usize; D], scale: f64, device: &Device) -> Tensor<D> {
    let values = values(seed, shape.iter().product(), scale);
    Tensor::from_data(TensorData::new(values, shape), (device, DType::F32))
}

/// The largest distance of a row's and of a column's sum from 1.
fn off_one(mixer: Tensor<3>) -> [f64; 2] {
    [2, 1].map(|axis| {
        let sums = mixer.clone().sum_dim(axis).try_into_vec_as::<f64>().unwrap();
        sums.iter().map(|sum| (sum - 1.0).abs()).fold(0.0, f64::max)
    })
}

/// The axis that is divided last is exact, the other converges.
#[test]
fn sinkhorn_is_doubly_stochastic() {
    for opened in devices() {
        for n in [2, 4] {
            let logits = tensor(1, [6, n, n], 3.0, &opened.device);
            for order in [SinkhornOrder::ColumnsThenRows, SinkhornOrder::SoftmaxFirst] {
                let mixer = sinkhorn(logits.clone(), 40, order);
                let least = mixer.clone().min().into_scalar::<f32>();
                assert!(least >= 0.0, "{order:?}");
                let [rows, columns] = off_one(mixer);
                let (exact, converged) = match order {
                    SinkhornOrder::ColumnsThenRows => (rows, columns),
                    SinkhornOrder::SoftmaxFirst => (columns, rows),
                };
                assert!(exact <= 1e-5 && converged <= 1e-3, "{order:?}, {n}: {exact:.1e} and {converged:.1e}");
            }
        }
    }
}

/// Logits far apart leave a permutation, a row of low logits is as good as any other: neither is NaN.
#[test]
fn sinkhorn_of_extreme_logits_is_finite() {
    for opened in devices() {
        let device = opened.device.clone().autodiff();
        let logits = TensorData::new(vec![1e4, -1e4, -1e4, 1e4, 1e4, 1e4, -1e4, -1e4], [2, 2, 2]);
        let logits = Tensor::<3>::from_data(logits, (&device, DType::F32)).require_grad();
        for order in [SinkhornOrder::ColumnsThenRows, SinkhornOrder::SoftmaxFirst] {
            let mixer = sinkhorn(logits.clone(), 20, order);
            let gradients = mixer.clone().sum().backward();
            let mixer = mixer.try_into_vec_as::<f64>().unwrap();
            let close = mixer
                .iter()
                .zip([1.0, 0.0, 0.0, 1.0, 0.5, 0.5, 0.5, 0.5])
                .all(|(got, truth)| (got - truth).abs() <= 1e-4);
            assert!(close, "{order:?} on {}: {mixer:?}", opened.name);
            let gradient = logits.grad(&gradients).unwrap().try_into_vec_as::<f64>().unwrap();
            assert!(gradient.iter().all(|value| value.is_finite()), "{order:?} on {}: {gradient:?}", opened.name);
        }
    }
}

/// Both orders give maps whose rows weigh the old streams with a sum of 1: equal streams stay what they are.
#[test]
fn mixers_keep_equal_streams() {
    let (tokens, n, d_model) = (3, 4, 5);
    for opened in devices() {
        let device = &opened.device;
        let weights = MhcWeights {
            phi: tensor(2, [n * d_model, 2 * n + n * n], 1.0, device),
            bias: tensor(3, [2 * n + n * n], 1.0, device),
            scale: tensor(4, [3], 1.0, device),
        };
        let x = tensor(5, [tokens, d_model], 1.0, device);
        let streams = x.clone().unsqueeze_dim::<3>(1).repeat_dim(1, n);
        for order in [SinkhornOrder::ColumnsThenRows, SinkhornOrder::SoftmaxFirst] {
            let maps = mhc_maps(streams.clone(), &weights, 20, order, EPS);
            let after = streams_write(streams.clone(), x.zeros_like(), &maps);
            let difference = (after - streams.clone()).abs().max().into_scalar::<f32>();
            assert!(difference <= 1e-4, "{order:?} on {}: {difference:.1e}", opened.name);
        }
    }
}

#[test]
fn one_hot_maps_read_and_write_one_stream() {
    for opened in devices() {
        let device = &opened.device;
        let streams = tensor(6, [2, 3, 4], 1.0, device);
        let output = tensor(7, [2, 4], 1.0, device);
        let one_hot = Tensor::<2>::from_data([[0.0, 1.0, 0.0], [0.0, 1.0, 0.0]], device);
        let res = Tensor::<2>::eye(3, device).unsqueeze_dim::<3>(0).repeat_dim(0, 2);
        let maps = StreamMaps { pre: one_hot.clone(), post: one_hot, res };
        let input = streams_read(streams.clone(), maps.pre.clone());
        input.into_data().assert_eq(&streams.clone().narrow(1, 1, 1).squeeze_dim::<2>(1).into_data(), true);
        let after = streams_write(streams.clone(), output.clone(), &maps);
        let untouched = |x: Tensor<3>| [x.clone().narrow(1, 0, 1).into_data(), x.narrow(1, 2, 1).into_data()];
        assert_eq!(untouched(after.clone()), untouched(streams.clone()), "{}", opened.name);
        let written = streams.narrow(1, 1, 1).squeeze_dim::<2>(1) + output;
        after.narrow(1, 1, 1).squeeze_dim::<2>(1).into_data().assert_eq(&written.into_data(), true);
    }
}
