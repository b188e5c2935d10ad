use std::process::Command;
use std::sync::Arc;

use burn::module::{Module, ModuleMapper, ModuleVisitor, Param};
use burn::optim::GradientsParams;
use burn::tensor::{DType, Tensor};
use dar_burn::ResidualConfig;
use dar_burn::model::{Decoder, FeedForward};
use dar_burn::nn::Unobserved;

use super::{LAYERS, VOCAB_SIZE, config, decoder, dense, host, mixture, residuals, tokens};
use crate::support::devices::flex;
use crate::support::host::relative_error;
use crate::support::panic_message;

#[test]
fn a_later_token_never_changes_earlier_logits() {
    let device = flex();
    for (name, residual) in residuals() {
        for feed_forward in [dense(), mixture()] {
            let decoder = decoder(&config(feed_forward, residual.clone()), &device);
            let (a, b) = (tokens(5, [1, 7], &device), tokens(6, [1, 7], &device));
            let b = Tensor::cat(vec![a.clone().narrow(1, 0, 4), b.narrow(1, 4, 3)], 1);
            let [a, b] = [a, b].map(|tokens| decoder.forward(tokens).logits);
            let early = |logits: &Tensor<3>| host(logits.clone().narrow(1, 0, 4));
            // Not bit for bit: other experts' rows may share a matrix product of another size.
            assert!(relative_error(&early(&a), &early(&b), 0.0) < 1e-6, "{name}");
            let late = |logits: &Tensor<3>| host(logits.clone().narrow(1, 4, 3));
            assert!(relative_error(&late(&a), &late(&b), 0.0) > 1e-2, "{name}: the later token does not count");
        }
    }
}

/// RoPE, grouped heads, SwiGLU and the tied embedding in plain loops, f64.
#[test]
fn a_dense_decoder_is_what_it_says() {
    let device = flex();
    let mut config = config(dense(), ResidualConfig::Standard);
    config.layers = 2;
    let decoder = decoder(&config, &device);
    let ids = tokens(9, [1, 5], &device);
    let got = host(decoder.forward(ids.clone()).logits);
    let ids: Vec<usize> = ids.try_into_vec_as::<i64>().unwrap().into_iter().map(|id| id as usize).collect();

    let (d, heads, kv_heads) = (16, 4, 2);
    let d_head = d / heads;
    let table = host(decoder.embedding.val());
    let norm = |x: &[f64], gain: &[f64]| -> Vec<f64> {
        let rms = (x.iter().map(|x| x * x).sum::<f64>() / d as f64 + 1e-6).sqrt();
        x.iter().zip(gain).map(|(x, gain)| x / rms * gain).collect()
    };
    let project = |x: &[f64], weight: &[f64]| -> Vec<f64> {
        let outputs = weight.len() / x.len();
        (0..outputs).map(|o| x.iter().enumerate().map(|(i, x)| x * weight[i * outputs + o]).sum()).collect()
    };
    let rotate = |x: &[f64], position: usize| -> Vec<f64> {
        let mut y = x.to_vec();
        for head in 0..x.len() / d_head {
            for i in 0..d_head / 2 {
                let (sin, cos) = (position as f64 / 1e4_f64.powf(2.0 * i as f64 / d_head as f64)).sin_cos();
                let (first, second) = (head * d_head + i, head * d_head + i + d_head / 2);
                y[first] = x[first] * cos - x[second] * sin;
                y[second] = x[first] * sin + x[second] * cos;
            }
        }
        y
    };
    let scale = (d as f64).sqrt();
    let mut states: Vec<Vec<f64>> =
        ids.iter().map(|id| table[id * d..][..d].iter().map(|x| x * scale).collect()).collect();
    for layer in &decoder.layers {
        let gain = host(layer.attention_norm.gain.val());
        let [q, k, v, o] =
            [&layer.attention.query, &layer.attention.key, &layer.attention.value, &layer.attention.output]
                .map(|linear| host(linear.weight.val()));
        let normed: Vec<_> = states.iter().map(|x| norm(x, &gain)).collect();
        let queries: Vec<_> = normed.iter().enumerate().map(|(t, x)| rotate(&project(x, &q), t)).collect();
        let keys: Vec<_> = normed.iter().enumerate().map(|(t, x)| rotate(&project(x, &k), t)).collect();
        let values: Vec<_> = normed.iter().map(|x| project(x, &v)).collect();
        for (t, state) in states.iter_mut().enumerate() {
            let mut mixed = vec![0.0; d];
            for head in 0..heads {
                let from = head / (heads / kv_heads) * d_head;
                let score = |s: usize| {
                    let dot: f64 = (0..d_head).map(|i| queries[t][head * d_head + i] * keys[s][from + i]).sum();
                    (dot / (d_head as f64).sqrt()).exp()
                };
                let total: f64 = (0..=t).map(score).sum();
                for (s, value) in values.iter().enumerate().take(t + 1) {
                    (0..d_head).for_each(|i| mixed[head * d_head + i] += score(s) / total * value[from + i]);
                }
            }
            state.iter_mut().zip(project(&mixed, &o)).for_each(|(state, y)| *state += y);
        }
        let gain = host(layer.feed_forward_norm.gain.val());
        let FeedForward::Dense(network) = &layer.feed_forward else { panic!("a dense layer") };
        let [gate, up, down] = [&network.gate, &network.up, &network.down].map(|linear| host(linear.weight.val()));
        for state in &mut states {
            let x = norm(state, &gain);
            let hidden: Vec<f64> = project(&x, &gate)
                .into_iter()
                .zip(project(&x, &up))
                .map(|(gate, up)| gate / (1.0 + (-gate).exp()) * up)
                .collect();
            state.iter_mut().zip(project(&hidden, &down)).for_each(|(state, y)| *state += y);
        }
    }
    let gain = host(decoder.final_norm.gain.val());
    let truth: Vec<f64> = states
        .iter()
        .flat_map(|state| {
            let x = norm(state, &gain);
            table
                .chunks_exact(d)
                .map(move |row| row.iter().zip(&x).map(|(e, x)| e * x).sum::<f64>())
                .collect::<Vec<_>>()
        })
        .collect();
    assert!(relative_error(&got, &truth, 0.0) < 1e-5);

    // The loss is the mean of -log softmax at the target.
    let targets = tokens(10, [1, 5], &device);
    let target_ids = targets.clone().try_into_vec_as::<i64>().unwrap();
    let mean = truth
        .chunks_exact(VOCAB_SIZE)
        .zip(target_ids)
        .map(|(logits, target)| logits.iter().map(|logit| logit.exp()).sum::<f64>().ln() - logits[target as usize]);
    let mean = mean.sum::<f64>() / 5.0;
    let loss = host(decoder.loss(tokens(9, [1, 5], &device), targets))[0];
    assert!((loss - mean).abs() < 1e-5 * mean, "{loss} {mean}");
}

#[test]
fn every_parameter_gets_a_gradient() {
    struct Missing<'a>(&'a GradientsParams, Vec<String>, Vec<String>);
    impl ModuleVisitor for Missing<'_> {
        fn visit_float<const D: usize>(&mut self, param: &Param<Tensor<D>>) {
            let gradient = self.0.get::<D>(param.id).map(|gradient| host(gradient.abs().max())[0]);
            if gradient.is_none_or(|largest| !(largest > 0.0 && largest.is_finite())) {
                self.1.push(format!("{} {:?} {gradient:?}", self.2.join("."), param.dims()));
            }
        }
        fn enter_module(&mut self, name: &str, _: &str) {
            self.2.push(name.to_owned());
        }
        fn exit_module(&mut self, _: &str, _: &str) {
            self.2.pop();
        }
    }
    let device = flex().autodiff();
    for (name, residual) in residuals() {
        for feed_forward in [dense(), mixture()] {
            let decoder = decoder(&config(feed_forward, residual.clone()), &device);
            let output = decoder.forward(tokens(5, [2, 9], &device));
            let mut loss = output.cross_entropy(tokens(6, [2, 9], &device));
            if let Some(balance) = output.balance_loss {
                loss = loss + balance * 0.01;
            }
            let gradients = GradientsParams::from_grads(loss.backward(), &decoder);
            let mut missing = Missing(&gradients, Vec::new(), Vec::new());
            decoder.visit(&mut missing);
            missing.1.retain(|path| !counted_only(&name, path));
            assert!(missing.1.is_empty(), "{name}: {:#?}", missing.1);
        }
    }
}

/// Whether a parameter belongs to a rho gate that is in the count but never opens: that of a block's first branch, which
/// has no partial state, where later branches do not share the site.
fn counted_only(name: &str, path: &str) -> bool {
    let first_sites: &[&str] = match name {
        "DAR-Full" | "DAR-SelfKV" | "DAR-CrossV" | "DAR-FixedKV" => &["0", "2", "4", "6"],
        "DAR, a site a branch" => &["0", "6"],
        _ => &[],
    };
    first_sites.iter().any(|site| path.contains(&format!(".sites.{site}.rho.")))
}

#[test]
fn half_precision_follows_f32() {
    struct Cast(DType);
    impl ModuleMapper for Cast {
        fn map_float<const D: usize>(&mut self, param: Param<Tensor<D>>) -> Param<Tensor<D>> {
            param.map(|value| value.cast(self.0))
        }
    }
    let device = flex();
    for (name, residual) in residuals() {
        for feed_forward in [dense(), mixture()] {
            let config = config(feed_forward, residual.clone());
            let (ids, targets) = (tokens(5, [2, 8], &device), tokens(6, [2, 8], &device));
            let whole: Decoder = decoder(&config, &device);
            let truth = host(whole.loss(ids.clone(), targets.clone()))[0];
            for (dtype, tolerance) in [(DType::BF16, 0.03), (DType::F16, 0.003)] {
                let half = whole.clone().map(&mut Cast(dtype));
                let output = half.forward(ids.clone());
                assert_eq!(output.logits.dtype(), dtype);
                let loss = output.cross_entropy(targets.clone());
                assert_eq!(loss.dtype(), DType::F32);
                let loss = host(loss)[0];
                assert!((loss - truth).abs() < tolerance * truth, "{name}, {dtype:?}: {loss}, {truth} in f32");
            }
        }
    }
}

#[test]
fn logits_start_with_unit_variance_and_all_schemes_start_alike() {
    // Alone in a process of its own: the CPU's random numbers are one sequence for all threads.
    const ALONE: &str = "DAR_TEST_ALONE";
    const NAME: &str = "model::decoder::logits_start_with_unit_variance_and_all_schemes_start_alike";
    if std::env::var_os(ALONE).is_some() {
        return check_draws();
    }
    let test = std::env::current_exe().expect("a test has a path");
    let output = Command::new(test).args(["--exact", NAME]).env(ALONE, "1").output().unwrap();
    let stdout = String::from_utf8_lossy(&output.stdout);
    assert!(output.status.success() && stdout.contains("1 passed"), "{stdout}");
}

fn check_draws() {
    let device = flex();
    let ids = tokens(5, [2, 16], &device);
    for feed_forward in [dense(), mixture()] {
        let logits = |residual: ResidualConfig| {
            device.seed(7);
            let mut config = config(feed_forward.clone(), residual);
            config.d_model = 64;
            let decoder = config.init(&device);
            decoder.initialize();
            host(decoder.forward(ids.clone()).logits)
        };
        let plain = logits(ResidualConfig::Standard);
        // The tied embedding knows the current token by itself.
        let current = ids.clone().try_into_vec_as::<i64>().unwrap();
        let others: Vec<f64> = (0..plain.len())
            .filter(|i| (i % VOCAB_SIZE) as i64 != current[i / VOCAB_SIZE])
            .map(|i| plain[i] * plain[i])
            .collect();
        let variance = others.iter().sum::<f64>() / others.len() as f64;
        assert!((0.8..1.25).contains(&variance), "{variance}");
        for (name, residual) in residuals() {
            let error = relative_error(&logits(residual.clone()), &plain, 0.0);
            if residual == ResidualConfig::Cascade {
                assert!(error > 1e-3, "CASCADE runs the branches of a layer in parallel: {error}");
            } else {
                assert!(error < 1e-4, "{name}: {error}");
            }
        }
    }
}

#[test]
fn no_tokens_and_wrong_targets_are_refused() {
    let device = flex();
    let decoder = decoder(&config(dense(), ResidualConfig::Standard), &device);
    let message = panic_message(|| decoder.forward(tokens(1, [2, 0], &device)));
    assert_eq!(message, "Decoder::forward: `tokens` is [2, 0], expected [batch, sequence] of at least [1, 1]");
    let message = panic_message(|| decoder.loss(tokens(1, [2, 3], &device), tokens(1, [2, 2], &device)));
    assert_eq!(
        message,
        "DecoderOutput::cross_entropy: `targets` has shape [2, 2], expected [batch, sequence] = [2, 3]"
    );
}

#[test]
fn an_observed_pass_is_the_pass_and_its_last_exit_the_hidden_state() {
    let device = flex();
    let ids = tokens(31, [2, 5], &device);
    for (name, residual) in residuals() {
        for feed_forward in [dense(), mixture()] {
            let decoder = decoder(&config(feed_forward, residual.clone()), &device);
            let truth = decoder.forward(ids.clone());
            let observed = decoder.forward_observed(ids.clone(), Arc::new(Unobserved));
            // Fused and composed operations round differently.
            assert!(relative_error(&host(observed.output.logits.clone()), &host(truth.logits), 0.0) < 1e-5, "{name}");
            assert_eq!(observed.exits.len(), LAYERS);
            let last = decoder.logits(observed.exits[LAYERS - 1].clone());
            assert_eq!(host(last), host(observed.output.logits), "{name}");
            let layers = observed.balance.iter().map(|balance| host(balance.clone())[0]);
            match truth.balance_loss {
                Some(mean) => assert!((layers.sum::<f64>() / LAYERS as f64 - host(mean)[0]).abs() < 1e-5, "{name}"),
                None => assert_eq!(layers.count(), 0, "{name}"),
            }
        }
    }
}

#[test]
fn gated_attention_scales_every_head() {
    let device = flex();
    let gated = decoder(&config(dense(), ResidualConfig::Standard).with_gated_attention(true), &device);
    let ids = tokens(32, [1, 6], &device);
    // A gate of 1/2 everywhere is half the output projection.
    let mut half = gated.clone();
    for layer in &mut half.layers {
        let gate = layer.attention.gate.as_mut().unwrap();
        gate.weight = Param::from_tensor(gate.weight.val().zeros_like());
    }
    let mut plain = half.clone();
    for layer in &mut plain.layers {
        layer.attention.gate = None;
        let output = &mut layer.attention.output;
        output.weight = Param::from_tensor(output.weight.val() * 0.5);
    }
    let logits = |decoder: &Decoder| host(decoder.forward(ids.clone()).logits);
    assert!(relative_error(&logits(&half), &logits(&plain), 0.0) < 1e-5);
    assert!(relative_error(&logits(&gated), &logits(&plain), 0.0) > 1e-2, "the gates of a token count");
}
