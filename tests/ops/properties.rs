//! What holds for every operation.

use burn::tensor::{DType, Device, Tensor, TensorData};

use super::operations::{Operand, Operation, Sizes, operations};
use crate::support::devices::{devices, flex, say};
use crate::support::golden::computes;
use crate::support::host::{relative_error, values};

/// Operands, outputs and gradients of one evaluation, in float64 on the host.
struct Evaluated {
    outputs: Vec<Vec<f64>>,
    /// One an operand; zeros where the loss does not depend on it.
    gradients: Vec<Vec<f64>>,
}

/// How the operands lie in memory.
#[derive(Clone, Copy)]
enum Memory {
    Contiguous,
    /// Axes stored in the reverse order.
    Permuted,
    /// A window of a larger tensor.
    Sliced,
}

fn operand_values(operands: &[Operand], seed: u64) -> Vec<Vec<f64>> {
    let draw = |(index, operand): (usize, &Operand)| {
        values(seed + index as u64, operand.shape.iter().product(), operand.scale)
    };
    operands.iter().enumerate().map(draw).collect()
}

fn leaf(shape: [usize; 3], values: &[f64], memory: Memory, device: &Device, dtype: DType) -> (Tensor<3>, Tensor<3>) {
    let [a, b, c] = shape;
    let tensor = |values: Vec<f64>, shape: [usize; 3]| {
        Tensor::<3>::from_data(TensorData::new(values, shape), (device, dtype)).require_grad()
    };
    match memory {
        Memory::Contiguous => {
            let leaf = tensor(values.to_vec(), shape);
            (leaf.clone(), leaf)
        }
        Memory::Permuted => {
            let mut reversed = Vec::with_capacity(values.len());
            for k in 0..c {
                for j in 0..b {
                    reversed.extend((0..a).map(|i| values[(i * b + j) * c + k]));
                }
            }
            let leaf = tensor(reversed, [c, b, a]);
            (leaf.clone(), leaf.permute([2, 1, 0]))
        }
        Memory::Sliced => {
            // One row and one column more on the far side, filled with what must not be read.
            let mut wide = Vec::with_capacity(a * (b + 1) * (c + 1));
            for i in 0..a {
                for j in 0..=b {
                    wide.extend((0..=c).map(|k| if j < b && k < c { values[(i * b + j) * c + k] } else { f64::NAN }));
                }
            }
            let leaf = tensor(wide, [a, b + 1, c + 1]);
            (leaf.clone(), leaf.slice([0..a, 0..b, 0..c]))
        }
    }
}

/// Fixed weights for the loss, so that no gradient is trivial.
fn weights(count: usize, output: usize) -> Vec<f64> {
    (0..count).map(|index| (1.7 * index as f64 + output as f64).sin()).collect()
}

fn evaluate(
    operation: &Operation,
    operands: &[Operand],
    values: &[Vec<f64>],
    device: &Device,
    dtype: DType,
) -> Evaluated {
    evaluate_in(operation, operands, values, Memory::Contiguous, device, dtype)
}

fn evaluate_in(
    operation: &Operation,
    operands: &[Operand],
    values: &[Vec<f64>],
    memory: Memory,
    device: &Device,
    dtype: DType,
) -> Evaluated {
    let device = device.clone().autodiff();
    let leaves = operands.iter().zip(values);
    let (leaves, views): (Vec<_>, Vec<_>) =
        leaves.map(|(operand, values)| leaf(operand.shape, values, memory, &device, dtype)).unzip();
    let outputs = operation.run(&views);
    let terms = outputs.iter().enumerate().map(|(index, output)| {
        assert_eq!(output.dtype(), operation.output_dtype(index, dtype), "{}, output {index}", operation.name);
        let acc = dar_burn::ops::accumulator(dtype);
        let weights = weights(output.shape().num_elements(), index);
        let weights = Tensor::<3>::from_data(TensorData::new(weights, output.dims()), (&device, acc));
        (output.clone().cast(acc) * weights).sum()
    });
    let loss = terms.reduce(|sum, term| sum + term).unwrap();
    // Without tokens Burn's slices leave the graph.
    let has_tokens = outputs.iter().all(|output| output.dims()[0] > 0);
    assert!(loss.is_tracked() || !has_tokens, "{}: the outputs do not depend on the operands", operation.name);
    let gradients = loss.is_tracked().then(|| loss.backward());
    let gradient = |(leaf, operand): (&Tensor<3>, &Operand)| {
        let Some(gradient) = gradients.as_ref().and_then(|gradients| leaf.grad(gradients)) else {
            return vec![0.0; operand.shape.iter().product()];
        };
        assert_eq!(gradient.dims(), leaf.dims(), "{}, gradient of {}", operation.name, operand.name);
        let [a, b, c] = operand.shape;
        let gradient = match memory {
            Memory::Contiguous => gradient,
            Memory::Permuted => gradient.permute([2, 1, 0]),
            Memory::Sliced => gradient.slice([0..a, 0..b, 0..c]),
        };
        to_vec(gradient)
    };
    Evaluated {
        gradients: leaves.iter().zip(operands).map(gradient).collect(),
        outputs: outputs.into_iter().map(to_vec).collect(),
    }
}

fn to_vec(tensor: Tensor<3>) -> Vec<f64> {
    tensor.try_into_vec_as::<f64>().unwrap()
}

/// Bits, so that equal means equal and NaN equals itself.
fn bits(values: &[f64]) -> Vec<u64> {
    values.iter().map(|value| value.to_bits()).collect()
}

/// The loss of [`evaluate`] without a graph.
fn loss(operation: &Operation, operands: &[Operand], values: &[Vec<f64>], device: &Device) -> f64 {
    let tensor = |(operand, values): (&Operand, &Vec<f64>)| {
        Tensor::<3>::from_data(TensorData::new(values.clone(), operand.shape), (device, DType::F64))
    };
    let tensors: Vec<_> = operands.iter().zip(values).map(tensor).collect();
    let outputs = operation.run(&tensors).into_iter().enumerate();
    outputs
        .map(|(index, output)| {
            let output = to_vec(output);
            output.iter().zip(weights(output.len(), index)).map(|(x, w)| x * w).sum::<f64>()
        })
        .sum()
}

/// Central differences in f64: truncation and rounding both stay near 1e-10.
#[test]
fn gradients_are_the_derivatives() {
    const STEP: f64 = 1e-5;
    let device = flex();
    for sizes in [
        Sizes { tokens: 2, entries: 3, d_model: 4 },
        Sizes { tokens: 1, entries: 1, d_model: 1 }, // one candidate, one feature
    ] {
        for operation in operations() {
            let operands = operation.operands(sizes);
            let mut values = operand_values(&operands, 7);
            let Evaluated { gradients, .. } = evaluate(&operation, &operands, &values, &device, DType::F64);
            for (index, operand) in operands.iter().enumerate() {
                for element in 0..values[index].len() {
                    let at = values[index][element];
                    let mut shifted = |step: f64| {
                        values[index][element] = at + step;
                        loss(&operation, &operands, &values, &device)
                    };
                    let difference = (shifted(STEP) - shifted(-STEP)) / (2.0 * STEP);
                    values[index][element] = at;
                    let gradient = gradients[index][element];
                    assert!(
                        (gradient - difference).abs() <= 1e-7 * gradient.abs().max(1.0),
                        "{}: d {}[{element}] is {gradient}, the difference gives {difference}, {sizes:?}",
                        operation.name,
                        operand.name
                    );
                }
            }
        }
    }
}

/// Each size hits another path of vector loads and of reductions over tokens and entries.
#[test]
fn odd_sizes_agree_with_float64() {
    let sizes = [
        Sizes { tokens: 1, entries: 1, d_model: 1 },    // nothing to reduce
        Sizes { tokens: 5, entries: 2, d_model: 3 },    // scalar loads
        Sizes { tokens: 67, entries: 1, d_model: 37 },  // odd width, many tokens
        Sizes { tokens: 3, entries: 64, d_model: 130 }, // a long history, pairs
        Sizes { tokens: 2, entries: 5, d_model: 257 },  // one past a power of two
        Sizes { tokens: 8, entries: 5, d_model: 12 },   // what loads and reductions vectorise
    ];
    // Shaders compile slowly in software: the two sizes that differ most.
    let few = [sizes[1], sizes[5]];
    let host = flex();
    for opened in devices() {
        let sizes = if opened.software { &few[..] } else { &sizes[..] };
        for operation in operations() {
            for &sizes in sizes {
                let operands = operation.operands(sizes);
                let values = operand_values(&operands, 11);
                let truth = evaluate(&operation, &operands, &values, &host, DType::F64);
                let got = evaluate(&operation, &operands, &values, &opened.device, DType::F32);
                let name = format!("{} on {}, {sizes:?}", operation.name, opened.name);
                for (index, (got, truth)) in got.outputs.iter().zip(&truth.outputs).enumerate() {
                    let error = relative_error(got, truth, 1e-3);
                    assert!(error <= 1e-5, "{name}: output {index} is off by {error:.1e}");
                }
                // Biases and scales together: each gradient is a sum over tokens, and may cancel.
                let [mut scalars, mut scalars_truth] = [Vec::new(), Vec::new()];
                for ((got, truth), operand) in got.gradients.iter().zip(&truth.gradients).zip(&operands) {
                    if truth.len() <= 2 {
                        scalars.extend_from_slice(got);
                        scalars_truth.extend_from_slice(truth);
                        continue;
                    }
                    let error = relative_error(got, truth, 0.1);
                    assert!(error <= 1e-5, "{name}: gradient of {} is off by {error:.1e}", operand.name);
                }
                let error = relative_error(&scalars, &scalars_truth, 0.1);
                assert!(error <= 1e-5, "{name}: gradients of biases and scales are off by {error:.1e}");
            }
        }
    }
}

#[test]
fn half_types_agree_with_float64() {
    let sizes = Sizes { tokens: 4, entries: 3, d_model: 16 };
    let host = flex();
    for opened in devices() {
        for (dtype, epsilon) in [(DType::F16, half::f16::EPSILON.to_f64()), (DType::BF16, half::bf16::EPSILON.to_f64())]
        {
            if let Err(reason) = computes(opened, dtype) {
                say(&reason);
                continue;
            }
            for operation in operations() {
                let operands = operation.operands(sizes);
                let values = operand_values(&operands, 13);
                let truth = evaluate(&operation, &operands, &values, &host, DType::F64);
                let got = evaluate(&operation, &operands, &values, &opened.device, dtype);
                let name = format!("{} on {} in {dtype:?}", operation.name, opened.name);
                for (index, (got, truth)) in got.outputs.iter().zip(&truth.outputs).enumerate() {
                    // Everything between is in f32, so an output is rounded once, or twice for a read of a read.
                    let error = relative_error(got, truth, 1e-3);
                    assert!(error <= epsilon, "{name}: output {index} is off by {error:.1e}");
                }
                for ((got, truth), operand) in got.gradients.iter().zip(&truth.gradients).zip(&operands) {
                    let error = relative_error(got, truth, 0.1);
                    assert!(error <= 4.0 * epsilon, "{name}: gradient of {} is off by {error:.1e}", operand.name);
                }
            }
        }
    }
}

#[test]
fn reruns_are_bit_identical() {
    let sizes = Sizes { tokens: 5, entries: 2, d_model: 3 };
    for opened in devices() {
        for operation in operations() {
            let operands = operation.operands(sizes);
            let values = operand_values(&operands, 17);
            let run = || {
                let Evaluated { outputs, gradients } =
                    evaluate(&operation, &operands, &values, &opened.device, DType::F32);
                outputs.iter().chain(&gradients).map(|values| bits(values)).collect::<Vec<_>>()
            };
            assert_eq!(run(), run(), "{} on {}", operation.name, opened.name);
        }
    }
}

#[test]
fn operands_may_lie_anywhere() {
    let sizes = Sizes { tokens: 5, entries: 2, d_model: 3 };
    for opened in devices() {
        for operation in operations() {
            let operands = operation.operands(sizes);
            let values = operand_values(&operands, 19);
            let run = |memory| evaluate_in(&operation, &operands, &values, memory, &opened.device, DType::F32);
            let truth = run(Memory::Contiguous);
            for (memory, how) in [(Memory::Permuted, "permuted"), (Memory::Sliced, "sliced")] {
                let got = run(memory);
                let pairs = got.outputs.iter().zip(&truth.outputs).chain(got.gradients.iter().zip(&truth.gradients));
                for (index, (got, truth)) in pairs.enumerate() {
                    let error = relative_error(got, truth, 1e-3);
                    assert!(error <= 1e-6, "{} on {}, {how}: {error:.1e} in {index}", operation.name, opened.name);
                }
            }
        }
    }
}

/// Token 1 of 3 is spoilt, in one operand after the other.
#[test]
fn nan_and_infinity_stay_in_their_token() {
    const TOKENS: usize = 3;
    const SPOILT: usize = 1;
    let sizes = Sizes { tokens: TOKENS, entries: 2, d_model: 3 };
    for opened in devices() {
        for operation in operations() {
            let operands = operation.operands(sizes);
            let values = operand_values(&operands, 23);
            let clean = evaluate(&operation, &operands, &values, &opened.device, DType::F32);
            for spoil in [f64::NAN, f64::INFINITY] {
                for (index, operand) in operands.iter().enumerate().filter(|(_, operand)| operand.per_token) {
                    let mut values = values.clone();
                    let width = values[index].len() / TOKENS;
                    values[index][SPOILT * width..][..width].fill(spoil);
                    let got = evaluate(&operation, &operands, &values, &opened.device, DType::F32);
                    let others = |values: &[f64]| {
                        let width = values.len() / TOKENS;
                        let rows = values.chunks(width).enumerate().filter(|(token, _)| *token != SPOILT);
                        bits(&rows.flat_map(|(_, row)| row.iter().copied()).collect::<Vec<_>>())
                    };
                    let name = format!("{} on {}, {spoil} in {}", operation.name, opened.name, operand.name);
                    for (got, clean) in got.outputs.iter().zip(&clean.outputs) {
                        assert_eq!(others(got), others(clean), "{name}: outputs of other tokens changed");
                    }
                    let gradients = got.gradients.iter().zip(&clean.gradients).zip(&operands);
                    for ((got, clean), of) in gradients.filter(|(_, operand)| operand.per_token) {
                        assert_eq!(others(got), others(clean), "{name}: gradients of {} changed", of.name);
                    }
                }
            }
        }
    }
}

#[test]
fn no_tokens_give_no_outputs_and_zero_gradients() {
    let sizes = Sizes { tokens: 0, entries: 2, d_model: 3 };
    for opened in devices() {
        for operation in operations() {
            let operands = operation.operands(sizes);
            let values = operand_values(&operands, 29);
            let Evaluated { outputs, gradients } = evaluate(&operation, &operands, &values, &opened.device, DType::F32);
            assert!(outputs.iter().all(Vec::is_empty), "{} on {}", operation.name, opened.name);
            for (gradient, operand) in gradients.iter().zip(&operands) {
                let zero = gradient.iter().all(|value| *value == 0.0);
                assert!(zero, "{} on {}: gradient of {}", operation.name, opened.name, operand.name);
            }
        }
    }
}

/// One tensor in two places: its gradient is the sum of both.
#[test]
fn one_tensor_may_be_two_operands() {
    let sizes = Sizes { tokens: 4, entries: 1, d_model: 3 };
    for opened in devices() {
        let device = opened.device.clone().autodiff();
        for operation in operations() {
            let operands = operation.operands(sizes);
            let position = |name| operands.iter().position(|operand| operand.name == name);
            let (Some(first), Some(second)) = (position("retrieved"), position("partial")) else {
                continue;
            };
            let mut values = operand_values(&operands, 31);
            values[second] = values[first].clone();
            let apart = evaluate(&operation, &operands, &values, &opened.device, DType::F32);

            let mut leaves: Vec<Tensor<3>> = operands
                .iter()
                .zip(&values)
                .map(|(operand, values)| leaf(operand.shape, values, Memory::Contiguous, &device, DType::F32).0)
                .collect();
            leaves[second] = leaves[first].clone();
            let outputs = operation.run(&leaves);
            let weights = weights(outputs[0].shape().num_elements(), 0);
            let weights = Tensor::<3>::from_data(TensorData::new(weights, outputs[0].dims()), &device);
            // Fused kernels may round the two cases differently.
            let error = relative_error(&to_vec(outputs[0].clone()), &apart.outputs[0], 1e-3);
            assert!(error <= 1e-6, "{} on {}: {error:.1e}", operation.name, opened.name);
            if outputs.len() == 1 {
                let gradients = (outputs[0].clone() * weights).sum().backward();
                let both = to_vec(leaves[first].grad(&gradients).unwrap());
                let pairs = apart.gradients[first].iter().zip(&apart.gradients[second]);
                let sum: Vec<f64> = pairs.map(|(a, b)| a + b).collect();
                let error = relative_error(&both, &sum, 1e-3);
                assert!(error <= 1e-6, "{} on {}: {error:.1e}", operation.name, opened.name);
            }
        }
    }
}
