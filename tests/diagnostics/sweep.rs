use burn::module::Param;
use burn::tensor::{Int, Tensor, TensorData};
use dar_burn::diagnostics::ndarray::{Array1, Array2, Array3, array, s};
use dar_burn::diagnostics::{SteeringPrompt, SteeringSites, SteeringSweep, steering_sweep};
use dar_burn::model::{DecoderConfig, FeedForwardConfig};
use dar_burn::nn::{AttnResConfig, SeparateValues};
use dar_burn::{BranchLayout, KernelError, Residual, ResidualConfig};

use super::{assert_all_close, assert_close, assert_refused, noise};
use crate::nn::toy::tensor;
use crate::support::devices::flex;

const VOCAB: usize = 11;
const D_MODEL: usize = 6;
const LAYERS: usize = 3;

/// A model that is linear from the embedding to the logits: branches `h W_l`, a head without a norm.
struct Linear {
    residual: Residual,
    /// `[vocab, d_model]`, `[d_model, d_model]` each, `[vocab, d_model]`
    embedding: Tensor<2>,
    branches: Vec<Tensor<2>>,
    head: Tensor<2>,
}

impl Linear {
    fn new(config: &ResidualConfig) -> Self {
        let layout = BranchLayout::new(D_MODEL, 2 * LAYERS);
        let branch = |l: usize| tensor(10 + l as u64, [D_MODEL, D_MODEL], 0.4, &flex());
        Self {
            residual: config.init(&layout, &flex()),
            embedding: tensor(1, [VOCAB, D_MODEL], 1.0, &flex()),
            branches: (0..2 * LAYERS).map(branch).collect(),
            head: tensor(2, [VOCAB, D_MODEL], 1.0, &flex()),
        }
    }

    fn sites(&self) -> SteeringSites {
        SteeringSites::layer_ends(&self.residual)
    }

    fn sweep(&self, prompts: &[SteeringPrompt], directions: &Array3<f64>) -> Result<SteeringSweep, KernelError> {
        self.scaled(prompts, directions, &[0.5, 1.0, -2.0])
    }

    fn scaled(
        &self,
        prompts: &[SteeringPrompt],
        directions: &Array3<f64>,
        scales: &[f64],
    ) -> Result<SteeringSweep, KernelError> {
        let pass = |tokens: Tensor<2, Int>, observer| {
            let [rows, length] = tokens.dims();
            let embedded = self.embedding.clone().select(0, tokens.flatten(0, 1)).reshape([rows, length, D_MODEL]);
            let state = self.residual.start_observed(embedded, observer);
            let state = self
                .branches
                .iter()
                .fold(state, |state, weight| self.residual.branch(state, |h| h.matmul(weight.clone().unsqueeze())));
            self.residual.finish(state).matmul(self.head.clone().transpose().unsqueeze())
        };
        steering_sweep(prompts, &self.sites(), directions.view(), scales, &flex(), pass)
    }

    /// What the rest of the model makes of one unit of `direction` after `layer`.
    fn slope(&self, layer: usize, direction: &Array1<f64>, prompt: &SteeringPrompt, parallel: bool) -> f64 {
        let matrix = |tensor: &Tensor<2>| {
            let [rows, columns] = tensor.dims();
            let values = tensor.clone().try_into_vec_as::<f64>().unwrap();
            Array2::from_shape_vec((rows, columns), values).unwrap()
        };
        let mut moved = direction.clone();
        for later in layer + 1..LAYERS {
            let [attention, feed_forward] = [2 * later, 2 * later + 1].map(|l| matrix(&self.branches[l]));
            moved = if parallel {
                &moved + &moved.dot(&attention) + moved.dot(&feed_forward)
            } else {
                let moved = &moved + &moved.dot(&attention);
                &moved + &moved.dot(&feed_forward)
            };
        }
        let head = matrix(&self.head);
        moved.dot(&(&head.row(prompt.target) - &head.row(prompt.alternative)))
    }
}

fn prompts() -> [SteeringPrompt; 2] {
    [
        SteeringPrompt { tokens: vec![3, 1, 4, 1], target: 5, alternative: 9 },
        SteeringPrompt { tokens: vec![2], target: 0, alternative: 10 },
    ]
}

#[test]
fn a_linear_model_answers_in_closed_form() {
    for (config, parallel) in [(ResidualConfig::Standard, false), (ResidualConfig::Cascade, true)] {
        let model = Linear::new(&config);
        let (prompts, directions) = (prompts(), noise(5, (LAYERS, 2, D_MODEL)));
        let sweep = model.sweep(&prompts, &directions).unwrap();
        let slopes = Array2::from_shape_fn((LAYERS, 2), |(layer, prompt)| {
            let direction = directions.slice(s![layer, prompt, ..]).to_owned();
            model.slope(layer, &direction, &prompts[prompt], parallel)
        });
        let truth = Array3::from_shape_fn((LAYERS, 3, 2), |(layer, scale, prompt)| {
            slopes[[layer, prompt]] * sweep.scales()[scale]
        });
        assert_all_close(sweep.effects(), &truth, 1e-5);
        for (layer, swept) in sweep.layers().iter().enumerate() {
            let slope = slopes.row(layer).mean().unwrap();
            assert_close(swept.line.slope, slope, 1e-5);
            assert_close(swept.line.intercept, 0.0, 1e-5);
            assert_close(swept.line.correlation, slope.signum(), 1e-6);
            assert_eq!(swept.sign_correct, f64::from(slope > 0.0));
            let right = slopes.row(layer).iter().filter(|&&slope| slope > 0.0).count();
            assert_eq!(swept.prompts_sign_correct, right as f64 / 2.0);
        }
    }
}

#[test]
fn the_gradient_is_the_right_direction_and_its_opposite_the_wrong_one() {
    let model = Linear::new(&ResidualConfig::Standard);
    let prompts = prompts();
    // The slope is linear in the direction, so its values at the unit vectors are the direction of steepest ascent.
    let right = Array3::from_shape_fn((LAYERS, 2, D_MODEL), |(layer, prompt, feature)| {
        let unit = Array1::from_shape_fn(D_MODEL, |i| f64::from(i == feature));
        model.slope(layer, &unit, &prompts[prompt], false)
    });
    let sweep = model.sweep(&prompts, &right).unwrap();
    assert_eq!((sweep.sign_correct(), sweep.prompts_sign_correct().sum()), (1.0, 9.0));
    for (layer, swept) in sweep.layers().iter().enumerate() {
        let squares = right.slice(s![layer, .., ..]).mapv(|x| x * x).sum() / 2.0;
        assert_close(swept.line.slope, squares, 1e-4 * squares);
    }
    let wrong = model.sweep(&prompts, &(right * -1.0)).unwrap();
    assert_eq!((wrong.sign_correct(), wrong.prompts_sign_correct().sum()), (0.0, 0.0));
    assert_eq!(wrong.clean(), sweep.clean());
}

#[test]
fn other_tokens_of_the_prompt_stay() {
    // Branches act on each token, so only the last token's state reaches its prediction.
    let model = Linear::new(&ResidualConfig::Standard);
    let long = prompts()[0].clone();
    let short = SteeringPrompt { tokens: vec![1], ..long.clone() };
    let direction = noise(5, (LAYERS, 1, D_MODEL));
    let [long, short] = [long, short].map(|prompt| model.sweep(&[prompt], &direction).unwrap());
    assert_all_close(long.effects(), short.effects(), 1e-6);
}

#[test]
fn decoders_of_every_scheme_are_swept() {
    let separate = AttnResConfig::full().with_separate_values(SeparateValues::PerSource);
    for residual in [
        ResidualConfig::Standard,
        ResidualConfig::Cascade,
        ResidualConfig::hyper_connections(3),
        ResidualConfig::mhc(2),
        ResidualConfig::attnres_block(1),
        ResidualConfig::AttnRes(separate),
        ResidualConfig::dar_block(1),
    ] {
        let feed_forward = FeedForwardConfig::Dense { d_ff: 16 };
        let mut model = DecoderConfig::new(VOCAB, 8, 2, 2, 2, feed_forward, residual.clone()).init(&flex());
        model.embedding = Param::from_tensor(tensor(3, [VOCAB, 8], 1.0, &flex()));
        let rows: Vec<f64> = model.embedding.val().into_data().iter::<f64>().collect();
        let rows = Array2::from_shape_vec((VOCAB, 8), rows).unwrap();
        let prompts = prompts().map(|prompt| SteeringPrompt { target: 5, alternative: 9, ..prompt });
        let direction = &rows.row(5) - &rows.row(9);
        let sites = SteeringSites::layer_ends(&model.residual);
        let directions = direction.broadcast((2, 2, 8)).unwrap();
        let pass = |tokens, observer| model.forward_observed(tokens, observer).output.logits;
        let sweep = steering_sweep(&prompts, &sites, directions, &[-0.2, 0.1, 0.2], &flex(), pass).unwrap();
        for (index, prompt) in prompts.iter().enumerate() {
            let ids: Vec<i64> = prompt.tokens.iter().map(|&token| token as i64).collect();
            let tokens = Tensor::<2, Int>::from_data(TensorData::new(ids, [1, prompt.tokens.len()]), &flex());
            let logits: Vec<f64> = model.forward(tokens).logits.into_data().iter::<f64>().collect();
            let last = &logits[logits.len() - VOCAB..];
            assert_close(sweep.clean()[index], last[5] - last[9], 1e-4);
        }
        // After the last layer a read whose query is still zero and the norm follow: neither turns a step around.
        let last = sweep.layers()[1];
        assert_eq!((last.sign_correct, last.prompts_sign_correct), (1.0, 1.0), "{residual:?}: {sweep:?}");
        assert!(last.line.slope > 0.0, "{residual:?}: {sweep:?}");
    }
}

#[test]
fn shares_and_lines_by_hand() {
    let effects = array![
        [[1.0, 3.0], [-1.0, 3.0], [-2.0, -4.0]], // means 2, 1 and -3
        [[0.0, 0.0], [1.0, -3.0], [2.0, 2.0]],   // means 0, -1 and 2
    ];
    let sweep = SteeringSweep::new(&[1.0, 2.0, -3.0], array![0.5, -0.5], effects).unwrap();
    assert_eq!(sweep.mean_effects(), array![[2.0, 1.0, -3.0], [0.0, -1.0, 2.0]]);
    assert_eq!(sweep.prompts_sign_correct(), array![[1.0, 0.5, 1.0], [0.0, 0.5, 0.0]]);
    assert_eq!(sweep.sign_correct(), 0.5);
    let [first, second] = sweep.layers().try_into().unwrap();
    assert_eq!((first.sign_correct, second.sign_correct), (1.0, 0.0));
    assert_close(first.prompts_sign_correct, 2.5 / 3.0, 1e-15);
    // Points (0, 0), (1, 2), (2, 1), (-3, -3): means 0 and 0, so the slope is (2 + 2 + 9) / (1 + 4 + 9).
    assert_close(first.line.slope, 13.0 / 14.0, 1e-15);
    assert_close(first.line.correlation, 13.0 / 14.0, 1e-15);
}

#[test]
fn the_moved_streams_are_those_of_the_scheme() {
    let sites =
        |config: ResidualConfig| SteeringSites::layer_ends(&config.init(&BranchLayout::new(D_MODEL, 4), &flex()));
    let state = array![[3.0, 0.0], [0.0, 4.0]];
    let cascade = sites(ResidualConfig::Cascade);
    assert_eq!(cascade, SteeringSites { branches: vec![1, 3], stream: Some(1) });
    assert_eq!(cascade.length(state.view()).unwrap(), 5.0);
    let mhc = sites(ResidualConfig::mhc(2));
    assert_eq!(mhc, SteeringSites { branches: vec![1, 3], stream: None });
    assert_eq!(mhc.length(state.view()).unwrap(), 2.5);
    assert_refused(
        mhc.length(Array2::zeros((0, 2)).view()),
        "SteeringSites::length: `state` has shape [0, 2], expected at least one element an axis",
    );
}

#[test]
fn what_cannot_be_swept_is_refused() {
    let model = Linear::new(&ResidualConfig::Standard);
    let direction = noise(5, (LAYERS, 1, D_MODEL));
    let one = |tokens: &[usize], target, alternative| {
        model.sweep(&[SteeringPrompt { tokens: tokens.to_vec(), target, alternative }], &direction)
    };
    assert_refused(one(&[], 1, 2), "steering_sweep: `prompts` has shape [0], expected at least one token a prompt");
    assert_refused(one(&[1], 2, 2), "steering_sweep: `prompts` is 2, expected a target that is not the alternative");
    assert_refused(one(&[1], 2, 11), "steering_sweep: `prompts` is 11, expected ids below vocab = 11");
    assert_refused(
        model.sweep(&prompts(), &direction),
        "steering_sweep: `directions` has shape [3, 1, 6], expected [layers, prompts, d_model] with [3, 2] layers and \
         prompts",
    );
    assert_refused(
        model.scaled(&prompts()[..1], &direction, &[1.0, 0.0]),
        "steering_sweep: `scales` is 0 at [1], expected scales that are not 0",
    );
    assert_refused(
        model.scaled(&prompts()[..1], &direction, &[]),
        "steering_sweep: `scales` has shape [0], expected at least one element an axis",
    );
    assert_refused(
        model.sweep(&prompts()[..1], &(direction * f64::NAN)),
        "steering_sweep: `directions` is NaN at [0, 0, 0], expected finite numbers",
    );
    assert_refused(
        SteeringSweep::new(&[1.0], array![0.0], Array3::zeros((2, 2, 1))),
        "SteeringSweep::new: `effects` has shape [2, 2, 1], expected [layers, scales, prompts] with [1, 1] scales and \
         prompts",
    );
    assert_refused(
        SteeringSweep::new(&[1.0], array![f64::INFINITY], Array3::zeros((2, 1, 1))),
        "SteeringSweep::new: `clean` is inf at [0], expected finite numbers",
    );
}
