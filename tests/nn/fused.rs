//! Fused passes against the graph of the equations in float64: outputs and every gradient, however a pass is used.

use burn::module::{Module, ModuleMapper, ModuleVisitor, Param};
use burn::tensor::{DType, Device, Gradients, Tensor};
use dar_burn::device::OpenDevice;
use dar_burn::nn::{AttnResConfig, DarConfig, SeparateValues, Tying};
use dar_burn::ops::{BranchNorm, Implementation, Memory};
use dar_burn::{BranchLayout, ResidualConfig, ResidualState, Routing};

use super::toy::{Stir, Toy, tensor, vec};
use crate::support::devices::{devices, flex};
use crate::support::host::{relative_error, values};

const TOKENS: usize = 3;
const D_MODEL: usize = 6;
/// Ragged for blocks of two and three layers.
const BRANCHES: usize = 10;
const SIZES: Sizes = Sizes { tokens: TOKENS, d_model: D_MODEL, branches: BRANCHES };

/// Uses that differ from others in the order of the same launches only.
const SLOW_IN_SOFTWARE: [&str; 7] =
    ["both from 0", "both from 1", "both from 9", "both from 10", "the input of 0", "the input of 1", "the input of 6"];

/// Of a model and its input.
#[derive(Debug, Clone, Copy)]
pub(super) struct Sizes {
    pub(super) tokens: usize,
    pub(super) d_model: usize,
    pub(super) branches: usize,
}

/// Every form that has a history.
fn schemes() -> Vec<(String, ResidualConfig)> {
    let mut all = vec![
        ("AttnRes full".to_owned(), ResidualConfig::attnres_full()),
        (
            "AttnRes full, maps".to_owned(),
            ResidualConfig::AttnRes(AttnResConfig::full().with_separate_values(SeparateValues::Maps(3))),
        ),
        ("AttnRes K = 2".to_owned(), ResidualConfig::attnres_block(2)),
        ("DAR K = 3".to_owned(), ResidualConfig::dar_block(3)),
        ("DAR K = 2, tied".to_owned(), ResidualConfig::Dar(DarConfig::block(2).with_tying(Tying::PerBlock))),
        ("DAR K = 5, one block".to_owned(), ResidualConfig::dar_block(5)),
    ];
    for routing in Routing::ALL {
        all.push((format!("DAR K = 1, {routing:?}"), ResidualConfig::dar_routed(1, routing)));
        all.push((format!("DAR K = 2, {routing:?}"), ResidualConfig::dar_routed(2, routing)));
    }
    all
}

/// A model whose residual parameters all matter, in `dtype`: gradients are rounded to the type of their parameter. Its
/// branches are weak: rounding must not grow from branch to branch, or nothing would tell it from a fault.
fn toy(config: &ResidualConfig, sizes: Sizes, device: &Device, dtype: DType) -> Toy {
    let toy = Toy::new(config, &BranchLayout::new(sizes.d_model, sizes.branches), device);
    let weak = |weight: Param<Tensor<2>>| weight.map(|weight| (weight * 0.3).detach().require_grad());
    let weights = toy.weights.into_iter().map(weak).collect();
    Toy { residual: toy.residual.map(&mut Stir::new()), weights, ..toy }.map(&mut Cast(dtype))
}

struct Cast(DType);

impl ModuleMapper for Cast {
    fn map_float<const D: usize>(&mut self, param: Param<Tensor<D>>) -> Param<Tensor<D>> {
        param.map(|value| value.clone().cast(self.0).detach().set_require_grad(value.is_require_grad()))
    }
}

/// How a pass is used: the tensors that enter the loss.
pub(super) type Use = dyn Fn(&Toy, Tensor<2>) -> Vec<Tensor<2>>;

/// What enters the loss, then the gradients of the embedding and of all parameters.
pub(super) fn run(config: &ResidualConfig, sizes: Sizes, device: &Device, dtype: DType, usage: &Use) -> Vec<Vec<f64>> {
    let toy = toy(config, sizes, device, dtype);
    let x = tensor(1, [sizes.tokens, sizes.d_model], 1.0, device).cast(dtype).detach().require_grad();
    let outputs = usage(&toy, x.clone());
    let weighted = outputs.iter().enumerate().map(|(index, output)| {
        let [rows, columns] = output.dims();
        let weights = values(70 + index as u64, rows * columns, 1.0);
        let data = burn::tensor::TensorData::new(weights, [rows, columns]);
        (output.clone() * Tensor::from_data(data, (device, dtype))).sum()
    });
    let loss = weighted.reduce(|sum, term| sum + term).expect("a use gives a tensor");
    let gradients = loss.backward();
    let mut all: Vec<Vec<f64>> = outputs.into_iter().map(vec).collect();
    all.push(gradient(&x, &gradients));
    let mut parameters = ParameterGradients { gradients: &gradients, scalars: Vec::new(), all };
    toy.visit(&mut parameters);
    let ParameterGradients { scalars, mut all, .. } = parameters;
    all.push(scalars);
    all
}

/// Zeros where there is none.
fn gradient<const D: usize>(leaf: &Tensor<D>, gradients: &Gradients) -> Vec<f64> {
    leaf.grad(gradients).map_or_else(|| vec![0.0; leaf.shape().num_elements()], vec)
}

/// Every gradient; those of biases and scales are one vector, as each is a sum that may cancel.
struct ParameterGradients<'a> {
    gradients: &'a Gradients,
    scalars: Vec<f64>,
    all: Vec<Vec<f64>>,
}

impl ModuleVisitor for ParameterGradients<'_> {
    fn visit_float<const D: usize>(&mut self, param: &Param<Tensor<D>>) {
        let gradient = gradient(&param.val(), self.gradients);
        if gradient.len() <= 2 {
            self.scalars.extend(gradient);
        } else {
            self.all.push(gradient);
        }
    }
}

/// Both implementations agree: on Flex in f64, on other devices in f32 with f64 on Flex, where a pass may lose what the
/// composed one loses on Flex.
#[track_caller]
fn agree(about: &str, config: &ResidualConfig, device: &dyn Fn(Device) -> Device, usage: &Use) {
    for opened in devices() {
        // There the composed graph compiles a shader for every new sum.
        if opened.software && SLOW_IN_SOFTWARE.iter().any(|slow| about.contains(slow)) {
            continue;
        }
        agree_on(opened, about, config, SIZES, device, usage);
    }
}

#[track_caller]
pub(super) fn agree_on(
    opened: &OpenDevice,
    about: &str,
    config: &ResidualConfig,
    sizes: Sizes,
    device: &dyn Fn(Device) -> Device,
    usage: &Use,
) {
    let composed = config.clone().with_implementation(Implementation::Composed);
    let truth = run(&composed, sizes, &device(flex()), DType::F64, usage);
    let (dtype, bound) = if opened.device == flex() {
        (DType::F64, 1e-10)
    } else {
        // Some gradients are small sums of large terms; a wrong kernel is off by its whole result.
        let lost = errors(&run(&composed, sizes, &device(flex()), DType::F32, usage), &truth);
        let lost = lost.into_iter().fold(1e-6, f64::max);
        assert!(lost <= 1e-3, "{about}: {lost:.1e} on the CPU");
        (DType::F32, 10.0 * lost)
    };
    let [fastest, leanest] = [Memory::Fastest, Memory::Leanest]
        .map(|memory| run(&config.clone().with_memory(memory), sizes, &device(opened.device.clone()), dtype, usage));
    assert!(dtype == DType::F32 || fastest == leanest, "{about}: what is computed again is not the same");
    for (memory, got) in [(Memory::Fastest, fastest), (Memory::Leanest, leanest)] {
        let got = errors(&got, &truth);
        for (index, error) in got.into_iter().enumerate() {
            let about = format!("{about}, {memory:?}, {}, tensor {index}", opened.name);
            assert!(error <= bound, "{about}: {error:.1e} > {bound:.1e}");
        }
    }
}

/// Of every tensor.
fn errors(got: &[Vec<f64>], truth: &[Vec<f64>]) -> Vec<f64> {
    assert_eq!(got.len(), truth.len());
    got.iter().zip(truth).map(|(got, truth)| relative_error(got, truth, 1e-3)).collect()
}

fn step(toy: &Toy, state: ResidualState<2>, branch: usize, sign: f64) -> ResidualState<2> {
    toy.residual.branch(state, |h| toy.branch(branch, h) * sign)
}

fn advance(toy: &Toy, state: ResidualState<2>, branches: std::ops::Range<usize>, sign: f64) -> ResidualState<2> {
    branches.fold(state, |state, branch| step(toy, state, branch, sign))
}

pub(super) fn whole(toy: &Toy, x: Tensor<2>) -> Vec<Tensor<2>> {
    vec![toy.forward(x)]
}

#[test]
fn whole_passes_agree() {
    for (name, config) in schemes() {
        agree(&name, &config, &|device| device.autodiff(), &whole);
    }
}

/// Few forms are enough for what the tape does, whatever the kernels.
fn few() -> Vec<(String, ResidualConfig)> {
    let names = ["AttnRes full, maps", "AttnRes K = 2", "DAR K = 1, CrossKey", "DAR K = 2, CrossKey"];
    schemes().into_iter().filter(|(name, _)| names.contains(&name.as_str())).collect()
}

#[test]
fn gradient_checkpointing_changes_nothing() {
    for (name, config) in few() {
        agree(&name, &config, &|device| device.autodiff().gradient_checkpointing(), &whole);
    }
}

/// Forks at the start, within a block, at its end, and of a fork; with the loss on all, on some, on the fork alone.
#[test]
fn continuations_of_one_state_add_their_gradients() {
    for (name, config) in few() {
        for fork in [0, 1, 3, 4, 9, 10] {
            let both = move |toy: &Toy, x: Tensor<2>| {
                let shared = advance(toy, toy.residual.start(x), 0..fork, 1.0);
                let [first, second] = [1.0, -0.7].map(|sign| advance(toy, shared.clone(), fork..BRANCHES, sign));
                vec![toy.residual.finish(first), toy.residual.finish(second)]
            };
            agree(&format!("{name}, both from {fork}"), &config, &|device| device.autodiff(), &both);
        }
        let second_only = |toy: &Toy, x: Tensor<2>| {
            let shared = advance(toy, toy.residual.start(x), 0..5, 1.0);
            let _ = toy.residual.finish(advance(toy, shared.clone(), 5..BRANCHES, 1.0));
            vec![toy.residual.finish(advance(toy, shared, 5..BRANCHES, -0.7))]
        };
        agree(&format!("{name}, the second only"), &config, &|device| device.autodiff(), &second_only);
        let nested = |toy: &Toy, x: Tensor<2>| {
            let shared = advance(toy, toy.residual.start(x), 0..2, 1.0);
            let first = advance(toy, shared.clone(), 2..BRANCHES, 1.0);
            let second = advance(toy, shared, 2..7, -0.7);
            let third = advance(toy, second.clone(), 7..BRANCHES, 0.4);
            let fourth = advance(toy, second, 7..BRANCHES, 1.3);
            [first, fourth, third].map(|state| toy.residual.finish(state)).to_vec()
        };
        agree(&format!("{name}, a fork of a fork"), &config, &|device| device.autodiff(), &nested);
    }
}

/// Reads that enter the loss by themselves, and passes that stop early.
#[test]
fn branch_inputs_may_enter_the_loss() {
    for (name, config) in few() {
        for last in [0, 1, 3, 4, 6] {
            let early = move |toy: &Toy, x: Tensor<2>| {
                let state = advance(toy, toy.residual.start(x), 0..last, 1.0);
                vec![toy.residual.read(state).0]
            };
            agree(&format!("{name}, the input of {last}"), &config, &|device| device.autodiff(), &early);
        }
        let inputs = |toy: &Toy, x: Tensor<2>| {
            let mut state = toy.residual.start(x);
            let mut inputs = Vec::new();
            for branch in 0..BRANCHES {
                let (input, pending) = toy.residual.read(state);
                inputs.push(input.clone());
                state = toy.residual.write(pending, toy.branch(branch, input));
            }
            inputs.push(toy.residual.finish(state));
            inputs
        };
        agree(&format!("{name}, all inputs"), &config, &|device| device.autodiff(), &inputs);
        let unread = |toy: &Toy, x: Tensor<2>| {
            // Branch 3 ignores its input, branch 5 is written as a constant.
            let state = advance(toy, toy.residual.start(x.clone()), 0..3, 1.0);
            let state = toy.residual.branch(state, |_| toy.branch(3, x.clone()));
            let state = step(toy, state, 4, 1.0);
            let state = toy.residual.branch(state, |h| h.detach());
            vec![toy.residual.finish(advance(toy, state, 6..BRANCHES, 1.0))]
        };
        agree(&format!("{name}, an input that nobody reads"), &config, &|device| device.autodiff(), &unread);
    }
}

/// The norm of a branch within its read. The gain is made of the embedding, whose gradient then holds its own.
#[test]
fn folded_norms_agree() {
    for (name, config) in few() {
        for (what, frozen_gain, frozen_residual) in
            [("", false, false), (", frozen gain", true, false), (", frozen residual", false, true)]
        {
            let normed = move |toy: &Toy, x: Tensor<2>| {
                let residual = toy.residual.clone();
                let residual = if frozen_residual { residual.no_grad() } else { residual };
                let gain = x.clone().mean_dim(0).squeeze_dim::<1>(0) + 1.0;
                let gain = if frozen_gain { gain.detach() } else { gain };
                let state = (0..BRANCHES).fold(residual.start(x), |state, branch| {
                    let norm = BranchNorm { gain: gain.clone() * (1.0 + 0.1 * branch as f64), eps: 1e-3 };
                    residual.branch_normed(state, norm, |h| h.matmul(toy.weights[branch].val()).tanh())
                });
                vec![residual.finish(state)]
            };
            agree(&format!("{name}, normed{what}"), &config, &|device| device.autodiff(), &normed);
        }
    }
}

/// Only what is tracked has a gradient, and it is the same.
#[test]
fn frozen_parts() {
    for (name, config) in few() {
        let frozen_embedding = |toy: &Toy, x: Tensor<2>| vec![toy.forward(x.detach())];
        agree(&format!("{name}, frozen embedding"), &config, &|device| device.autodiff(), &frozen_embedding);
        let frozen_residual = |toy: &Toy, x: Tensor<2>| {
            let toy = Toy { residual: toy.residual.clone().no_grad(), ..toy.clone() };
            vec![toy.forward(x)]
        };
        agree(&format!("{name}, frozen residual"), &config, &|device| device.autodiff(), &frozen_residual);
        let only_late = |toy: &Toy, x: Tensor<2>| {
            let residual = toy.residual.clone().no_grad();
            let state = (0..BRANCHES).fold(residual.start(x.detach()), |state, branch| {
                residual.branch(state, |h| {
                    let output = toy.branch(branch, h);
                    if branch < 6 { output.detach() } else { output }
                })
            });
            vec![residual.finish(state)]
        };
        agree(&format!("{name}, late branches only"), &config, &|device| device.autodiff(), &only_late);
    }
}

/// Central differences of the fused forward, which knows nothing of the composed graph.
#[test]
fn gradients_are_the_slopes_of_the_forward() {
    let device = flex().autodiff();
    for (name, config) in few() {
        let toy = toy(&config, SIZES, &device, DType::F64);
        let x = tensor(1, [TOKENS, D_MODEL], 1.0, &device).cast(DType::F64).detach().require_grad();
        let loss = |x: Tensor<2>| toy.forward(x).square().sum();
        let gradient = vec(x.grad(&loss(x.clone()).backward()).expect("the embedding is tracked"));
        let direction = tensor(2, [TOKENS, D_MODEL], 1.0, &device).cast(DType::F64);
        let at = |step: f64| vec(loss((x.clone() + direction.clone() * step).detach()))[0];
        let step = 1e-5;
        let slope = (at(step) - at(-step)) / (2.0 * step);
        let along: f64 = gradient.iter().zip(vec(direction.clone())).map(|(g, d)| g * d).sum();
        assert!((slope - along).abs() <= 1e-7 * along.abs(), "{name}: {slope} against {along}");
    }
}

/// The kernels ran, and nothing else in their place. Launches are counted by process: the test runs itself alone.
#[test]
fn passes_launch_kernels() {
    const ALONE: &str = "DAR_TEST_ALONE";
    if std::env::var_os(ALONE).is_none() {
        let program = std::env::current_exe().expect("a test has a path");
        let arguments = ["--exact", "nn::fused::passes_launch_kernels", "--nocapture"];
        let output = std::process::Command::new(program).args(arguments).env(ALONE, "1").output();
        let output = output.expect("the test starts");
        assert!(output.status.success(), "{}", String::from_utf8_lossy(&output.stderr));
        return;
    }
    for opened in devices() {
        let device = opened.device.clone().autodiff();
        for (name, config) in few() {
            let launched = |implementation| {
                let before = dar_kernels::launches();
                let config = config.clone().with_implementation(implementation);
                run(&config, SIZES, &device, DType::F32, &whole);
                dar_kernels::launches() - before
            };
            let name = format!("{name} on {}", opened.name);
            assert_eq!(launched(Implementation::Composed), 0, "{name}");
            let fused = launched(Implementation::Fused);
            if opened.device == flex() {
                assert_eq!(fused, 0, "{name}");
            } else {
                // A prefix or a read at least for every read, and its backward.
                assert!(fused >= 2 * (BRANCHES as u64 + 1), "{name}: {fused} kernels");
            }
        }
    }
}

/// Equal passes give equal bits: no sum depends on chance.
#[test]
fn passes_repeat_bit_for_bit() {
    for opened in devices() {
        let device = opened.device.clone().autodiff();
        for (name, config) in few() {
            // Branches of one multiplication, which no backend computes in two ways.
            let scaled = |toy: &Toy, x: Tensor<2>| {
                let start = toy.residual.start(x);
                let state = (0..BRANCHES).fold(start, |state, _| toy.residual.branch(state, |h| h * 0.5));
                vec![toy.residual.finish(state)]
            };
            let again = || run(&config, SIZES, &device, DType::F32, &scaled);
            assert_eq!(again(), again(), "{name} on {}", opened.name);
        }
    }
}

/// What is not finite in one token stays in it.
#[test]
fn tokens_do_not_leak() {
    for opened in devices() {
        let device = opened.device.clone().autodiff();
        for (name, config) in few() {
            for poison in [f64::NAN, f64::INFINITY] {
                let usage = move |toy: &Toy, x: Tensor<2>| {
                    let mut values = vec![0.0; TOKENS * D_MODEL];
                    values[D_MODEL + 2] = poison;
                    let data = burn::tensor::TensorData::new(values, [TOKENS, D_MODEL]);
                    let poison = Tensor::<2>::from_data(data, (&x.device(), x.dtype()));
                    vec![toy.forward(x + poison)]
                };
                let clean = run(&config, SIZES, &device, DType::F32, &whole);
                let got = run(&config, SIZES, &device, DType::F32, &usage);
                for index in [0, 1] {
                    // The hidden state, and the gradient of the embedding.
                    for token in [0, 2] {
                        let row = token * D_MODEL..(token + 1) * D_MODEL;
                        let (got, clean) = (&got[index][row.clone()], &clean[index][row]);
                        let error = relative_error(got, clean, 1e-3);
                        assert!(error <= 1e-5, "{name} on {}: token {token}, {poison}: {error:.1e}", opened.name);
                    }
                    let own = &got[index][D_MODEL..2 * D_MODEL];
                    assert!(own.iter().any(|x| !x.is_finite()), "{name}: what is not finite vanished");
                }
            }
        }
    }
}
