use burn::module::Module;
use burn::tensor::activation::{silu, softmax};
use burn::tensor::{DType, Device, Int, Tensor, TensorData};
use dar_burn::ResidualConfig;
use dar_burn::model::{DecoderConfig, FeedForward, FeedForwardConfig, MixtureOfExperts, MoeConfig};

use super::{Noise, host};
use crate::support::devices::flex;
use crate::support::host::{relative_error, values};

const D_MODEL: usize = 8;

fn experts(experts: usize, chosen: usize, device: &Device) -> MixtureOfExperts {
    let feed_forward = FeedForwardConfig::MixtureOfExperts(MoeConfig::new(experts, chosen, 6));
    let mut decoder = DecoderConfig::new(3, D_MODEL, 1, 1, 1, feed_forward, ResidualConfig::Standard).init(device);
    let FeedForward::MixtureOfExperts(experts) = decoder.layers.remove(0).feed_forward else {
        panic!("a mixture of experts")
    };
    experts.map(&mut Noise { seed: 70, scale: 1.0, keep: false })
}

fn input(shape: [usize; 3], device: &Device) -> Tensor<3> {
    let values = values(3, shape.iter().product(), 2.0);
    Tensor::from_data(TensorData::new(values, shape), (device, DType::F32))
}

/// Every expert on every token, masked by the choice.
fn naive(model: &MixtureOfExperts, chosen: usize, x: Tensor<3>) -> (Tensor<3>, Tensor<1>) {
    let [batch, sequence, d_model] = x.dims();
    let [_, experts] = model.router.dims();
    let x = x.reshape([batch * sequence, d_model]);
    let probability = softmax(x.clone().matmul(model.router.val()), 1);
    let rows = host(probability.clone());
    let mut mask = vec![0.0; rows.len()];
    for (row, mask) in rows.chunks(experts).zip(mask.chunks_mut(experts)) {
        for expert in 0..experts {
            let better = (0..experts).filter(|&e| row[e] > row[expert] || (row[e] == row[expert] && e < expert));
            mask[expert] = f64::from(better.count() < chosen);
        }
    }
    let mask = Tensor::<2>::from_data(TensorData::new(mask, [batch * sequence, experts]), (&x.device(), DType::F32));
    let weight = probability.clone() * mask.clone();
    let weight = weight.clone() / weight.sum_dim(1);
    let mut output = x.zeros_like();
    for expert in 0..experts {
        let matrix = |weights: Tensor<3>| weights.narrow(0, expert, 1).squeeze_dim::<2>(0);
        let (gate, up) = (matrix(model.gate.val()), matrix(model.up.val()));
        let hidden = silu(x.clone().matmul(gate)) * x.clone().matmul(up);
        output = output + hidden.matmul(matrix(model.down.val())) * weight.clone().narrow(1, expert, 1);
    }
    let share = mask.mean_dim(0) / chosen as f64;
    let balance = (share * probability.mean_dim(0)).sum() * experts as f64;
    (output.reshape([batch, sequence, d_model]), balance)
}

#[test]
fn outputs_and_gradients_are_those_of_a_loop_over_all_experts() {
    let device = flex().autodiff();
    // Some experts rest (one token), all are used, every expert is chosen, one is.
    for (count, chosen, shape) in [(6, 2, [1, 1, 8]), (6, 2, [2, 9, 8]), (3, 3, [2, 4, 8]), (5, 1, [1, 16, 8])] {
        let model = experts(count, chosen, &device);
        let run = |forward: &dyn Fn(Tensor<3>) -> (Tensor<3>, Tensor<1>)| {
            let x = input(shape, &device).require_grad();
            let (output, balance) = forward(x.clone());
            let gradients = (output.clone().powi_scalar(2).sum() + output.clone().sum() + balance.clone()).backward();
            let gradient = |weights: &Tensor<3>| host(weights.grad(&gradients).expect("a gradient"));
            vec![
                host(output),
                host(balance),
                gradient(&x),
                host(model.router.val().grad(&gradients).expect("a gradient")),
                gradient(&model.gate.val()),
                gradient(&model.up.val()),
                gradient(&model.down.val()),
            ]
        };
        let truth = run(&|x| naive(&model, chosen, x));
        let got = run(&|x| model.forward(x));
        let names = ["output", "balance", "d_x", "d_router", "d_gate", "d_up", "d_down"];
        for ((got, truth), name) in got.iter().zip(&truth).zip(names) {
            let error = relative_error(got, truth, 1e-6);
            assert!(error < 1e-5, "{count} experts, {chosen} a token, {shape:?}: {name} {error}");
        }
    }
}

#[test]
fn the_order_of_tokens_does_not_matter() {
    let device = flex();
    let model = experts(6, 2, &device);
    let x = input([1, 12, D_MODEL], &device);
    let order: Vec<i64> = (0..12).map(|i| (i * 5 + 3) % 12).collect();
    let order = Tensor::<1, Int>::from_data(TensorData::from(order.as_slice()), &device);
    let (straight, balance) = model.forward(x.clone());
    let (shuffled, shuffled_balance) = model.forward(x.select(1, order.clone()));
    let error = relative_error(&host(shuffled), &host(straight.select(1, order)), 0.0);
    assert!(error < 1e-6, "{error}");
    assert!(relative_error(&host(shuffled_balance), &host(balance), 0.0) < 1e-6);
}

#[test]
fn even_routing_has_a_balance_of_one_and_one_expert_for_all_that_of_their_number() {
    let device = flex();
    // Each token prefers another pair of experts, by the same margin.
    let mut model = experts(4, 2, &device);
    let router: Vec<f64> =
        (0..4 * D_MODEL).map(|i| f64::from(i / 4 % 4 == i % 4 || i / 4 % 4 == (i + 1) % 4)).collect();
    let router = Tensor::<2>::from_data(TensorData::new(router, [D_MODEL, 4]), &device);
    model.router = model.router.map(|_| router);
    let x: Vec<f64> = (0..4 * D_MODEL).map(|i| f64::from(i / D_MODEL == i % D_MODEL)).collect();
    let x = Tensor::<3>::from_data(TensorData::new(x, [1, 4, D_MODEL]), &device);
    let balance = host(model.forward(x).1)[0];
    assert!((balance - 1.0).abs() < 1e-6, "{balance}");

    // All tokens to one of four experts, and surely: four times as much as even.
    let mut collapsed = experts(4, 1, &device);
    let router: Vec<f64> = (0..4 * D_MODEL).map(|i| if i % 4 == 2 { 100.0 } else { 0.0 }).collect();
    let router = Tensor::<2>::from_data(TensorData::new(router, [D_MODEL, 4]), &device);
    collapsed.router = collapsed.router.map(|_| router);
    let ones = Tensor::<3>::ones([1, 4, D_MODEL], &device);
    let balance = host(collapsed.forward(ones).1)[0];
    assert!((balance - 4.0).abs() < 1e-6, "{balance}");

    // Equal probabilities: ties go to the first experts, whose share is then half each.
    model.router = model.router.map(|router| router.zeros_like());
    let balance = host(model.forward(input([1, 4, D_MODEL], &device)).1)[0];
    assert!((balance - 1.0).abs() < 1e-6, "{balance}");
}
