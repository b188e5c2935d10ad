//! Steering at every layer by every scale (Stream separation, 5, "Downstream validation").
//!
//! ```text
//! state of the prompt's last token after layer l  <-  state + s * direction(l, prompt)
//! z      = ln P(target) - ln P(alternative) after the prompt      a difference of logits: the normaliser cancels
//! effect(l, s, prompt) = z steered - z clean                                  nats
//! right sign: the effect has the sign of s
//! line   : least squares through (0, 0) and (s, mean over prompts of the effect) of every scale
//! ```
//!
//! The paper sweeps layers and six step sizes on four tasks (coreference resolution, induction, recency,
//! capitalization) and reports effects that are linear and sign-correct, or not. It says neither what an effect is, nor
//! where the state is moved. Taken here is the change of the log odds of two tokens that the prompt leaves open. One
//! token's probability would saturate, and would also move with what happens to every other token; the odds are the
//! coordinate along which the direction `gamma_target - gamma_alternative` points ("direct vocabulary steering"), and
//! under a linear head the effect of a step is exactly linear in it, so that every bend is the model's. The last token
//! is moved because its state is what the prediction, and the paper's metric at each layer, are read from.
//!
//! What such a sweep cannot show: after the last layer only the final norm follows, and a norm without gains never
//! turns a step along `gamma_target - gamma_alternative` around. It is the layers before that are put to the test.

use std::sync::Arc;

use burn::tensor::{DType, Device, Int, Tensor, TensorData};
use dar_kernels::KernelError;
use ndarray::{Array1, Array2, Array3, ArrayView2, ArrayView3, Axis, s};

use super::change::Intervention;
use super::check::{require_each, require_finite, require_shape, require_value};
use super::gates::Line;
use super::streams::norm;
use crate::nn::{Observer, Residual, Scheme};

/// A text that leaves two tokens open.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct SteeringPrompt {
    /// The text before them.
    pub tokens: Vec<usize>,
    /// The token to steer to.
    pub target: usize,
    /// The token to steer from.
    pub alternative: usize,
}

/// Where a sweep moves the state.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct SteeringSites {
    /// The branches after whose write it is moved, one a layer.
    pub branches: Vec<usize>,
    /// The stream that moves; every stream if there is none.
    pub stream: Option<usize>,
}

impl SteeringSites {
    /// The ends of the layers of a model whose branches are attention and feed-forward in turn.
    ///
    /// Every stream moves; of CASCADE only the context, as its token stream is frozen.
    pub fn layer_ends(residual: &Residual) -> Self {
        let stream = matches!(residual.scheme(), Scheme::Cascade(_)).then_some(1);
        Self { branches: (1..residual.branches()).step_by(2).collect(), stream }
    }

    /// Length of what one moved stream stands for: of the sum of all streams, divided by the streams that move. This is
    /// the length of the state itself with one stream, of token and context together in CASCADE, and of the mean stream
    /// of hyper-connections. Directions of this length make scales shares of the state that are alike across layers,
    /// whose states grow, and across schemes.
    ///
    /// # Shapes
    /// - `state`: `[streams, d_model]`
    ///
    /// # Errors
    /// If the state is empty or not finite.
    pub fn length(&self, state: ArrayView2<'_, f64>) -> Result<f64, KernelError> {
        require_finite("SteeringSites::length", "state", state)?;
        let moved = if self.stream.is_some() { 1 } else { state.nrows() };
        Ok(norm(state.sum_axis(Axis(0)).view()) / moved as f64)
    }
}

/// Steers every prompt at every site by every scale.
///
/// `pass` gives the logits of whole sequences under an observer, such as those of
/// [`Decoder::forward_observed`](crate::model::Decoder::forward_observed). It is called once a prompt and site, with
/// the prompt in every row of the batch: unsteered, and steered by each scale.
///
/// ```
/// use burn::tensor::Device;
/// use dar_burn::ResidualConfig;
/// use dar_burn::diagnostics::ndarray::Array2;
/// use dar_burn::diagnostics::{SteeringPrompt, SteeringSites, steering_sweep};
/// use dar_burn::model::{DecoderConfig, FeedForwardConfig};
///
/// let device = Device::flex();
/// let config = DecoderConfig::new(20, 8, 2, 2, 2, FeedForwardConfig::Dense { d_ff: 16 }, ResidualConfig::Cascade);
/// let model = config.init(&device);
/// let prompts = [SteeringPrompt { tokens: vec![3, 1, 4], target: 5, alternative: 9 }];
/// let rows: Vec<f64> = model.embedding.val().into_data().iter::<f64>().collect();
/// let rows = Array2::from_shape_vec((20, 8), rows)?;
/// let direction = &rows.row(5) - &rows.row(9); // of every layer and prompt
///
/// let sites = SteeringSites::layer_ends(&model.residual);
/// let directions = direction.broadcast((2, 1, 8)).unwrap();
/// let sweep = steering_sweep(&prompts, &sites, directions, &[0.1, 0.2], &device, |tokens, observer| {
///     model.forward_observed(tokens, observer).output.logits
/// })?;
/// assert_eq!(sweep.mean_effects().dim(), (2, 2)); // layers and scales
/// assert!((0.0..=1.0).contains(&sweep.sign_correct()));
/// # Ok::<(), Box<dyn std::error::Error>>(())
/// ```
///
/// # Shapes
/// - `directions`: `[layers, prompts, d_model]`; one direction of all layers or prompts broadcasts
/// - `pass`: tokens `[1 + scales, sequence]` to logits `[1 + scales, sequence, vocab]`
///
/// # Errors
/// If there are no prompts, tokens, layers or scales, shapes do not fit, a scale is zero, a value is not finite, an id
/// is not below the vocabulary, or the two tokens of a prompt are one.
///
/// # Panics
/// As `pass`, and as [`Intervention::Steer`].
pub fn steering_sweep(
    prompts: &[SteeringPrompt],
    sites: &SteeringSites,
    directions: ArrayView3<'_, f64>,
    scales: &[f64],
    device: &Device,
    mut pass: impl FnMut(Tensor<2, Int>, Arc<dyn Observer>) -> Tensor<3>,
) -> Result<SteeringSweep, KernelError> {
    let operation = "steering_sweep";
    check_scales(operation, scales)?;
    require_finite(operation, "directions", directions)?;
    let (layers, d_model) = (sites.branches.len(), directions.dim().2);
    let fits = directions.dim() == (layers, prompts.len(), d_model);
    let expected = format!("[layers, prompts, d_model] with {:?} layers and prompts", [layers, prompts.len()]);
    require_shape(fits, operation, "directions", expected, directions.shape())?;

    let mut clean = Array1::zeros(prompts.len());
    let mut effects = Array3::zeros((layers, scales.len(), prompts.len()));
    for (index, prompt) in prompts.iter().enumerate() {
        let length = prompt.tokens.len();
        require_shape(length > 0, operation, "prompts", "at least one token a prompt", &[length])?;
        let differ = prompt.target != prompt.alternative;
        require_value(differ, operation, "prompts", "a target that is not the alternative", prompt.target)?;
        let rows = 1 + scales.len();
        let ids: Vec<i64> = prompt.tokens.iter().map(|&token| token as i64).collect();
        let tokens = Tensor::from_data(TensorData::new(ids.repeat(rows), [rows, length]), device);
        for (layer, &branch) in sites.branches.iter().enumerate() {
            let mut offsets = Array2::zeros((rows * length, d_model));
            for (row, &scale) in scales.iter().enumerate() {
                let last = (row + 2) * length - 1; // row 0 of the batch is not steered
                offsets.row_mut(last).scaled_add(scale, &directions.slice(s![layer, index, ..]));
            }
            let steer = Intervention::Steer { branch, stream: sites.stream, offsets };
            let logits = pass(tokens.clone(), Arc::new(steer));
            let log_odds = last_log_odds(operation, logits, prompt, [rows, length])?;
            clean[index] = log_odds[0];
            for scale in 0..scales.len() {
                effects[[layer, scale, index]] = log_odds[scale + 1] - log_odds[0];
            }
        }
    }
    SteeringSweep::new(scales, clean, effects)
}

/// `ln P(target) - ln P(alternative)` after the last token of every row.
fn last_log_odds(
    operation: &'static str,
    logits: Tensor<3>,
    prompt: &SteeringPrompt,
    [rows, length]: [usize; 2],
) -> Result<Array1<f64>, KernelError> {
    let [got_rows, got_length, vocab] = logits.dims();
    let expected = format!("logits [rows, sequence, vocab] with {:?} rows and sequence", [rows, length]);
    let fits = [got_rows, got_length] == [rows, length];
    require_shape(fits, operation, "pass", expected, &[got_rows, got_length, vocab])?;
    let largest = prompt.tokens.iter().copied().fold(prompt.target.max(prompt.alternative), usize::max);
    require_value(largest < vocab, operation, "prompts", &format!("ids below vocab = {vocab}"), largest)?;

    let last = logits.narrow(1, length - 1, 1).reshape([rows, vocab]);
    let of = |token: usize| last.clone().narrow(1, token, 1).into_data().convert_dtype(DType::F64);
    let (target, alternative) = (of(prompt.target), of(prompt.alternative));
    let log_odds: Array1<f64> = target.iter::<f64>().zip(alternative.iter::<f64>()).map(|(t, a)| t - a).collect();
    require_finite(operation, "pass", log_odds.view())?;
    Ok(log_odds)
}

/// What every scale did at every layer.
#[derive(Debug, Clone, PartialEq)]
pub struct SteeringSweep {
    scales: Vec<f64>,
    clean: Array1<f64>,
    effects: Array3<f64>,
}

/// A layer of a sweep.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct SweptLayer {
    /// Of the mean effect over the scale, with the unsteered pass as a point: the slope is the effect of one unit of
    /// scale in nats, a correlation of 1 or -1 is a straight line.
    pub line: Line,
    /// Share of the scales whose mean effect has the right sign.
    pub sign_correct: f64,
    /// Share of the prompts, over all scales, whose own effect has the right sign.
    pub prompts_sign_correct: f64,
}

impl SteeringSweep {
    /// From log odds that were measured elsewhere.
    ///
    /// # Shapes
    /// - `clean`: log odds of target against alternative of the unsteered passes, `[prompts]`
    /// - `effects`: change of these, `[layers, scales, prompts]`
    ///
    /// # Errors
    /// If shapes do not fit or are empty, a value is not finite, or a scale is zero.
    pub fn new(scales: &[f64], clean: Array1<f64>, effects: Array3<f64>) -> Result<Self, KernelError> {
        let operation = "SteeringSweep::new";
        check_scales(operation, scales)?;
        require_finite(operation, "clean", clean.view())?;
        require_finite(operation, "effects", effects.view())?;
        let (_, of_scales, of_prompts) = effects.dim();
        let expected = format!("[layers, scales, prompts] with {:?} scales and prompts", [scales.len(), clean.len()]);
        let fits = [of_scales, of_prompts] == [scales.len(), clean.len()];
        require_shape(fits, operation, "effects", expected, effects.shape())?;
        Ok(Self { scales: scales.to_vec(), clean, effects })
    }

    /// The scales.
    pub fn scales(&self) -> &[f64] {
        &self.scales
    }

    /// Log odds of target against alternative without steering, in nats. `[prompts]`
    pub fn clean(&self) -> &Array1<f64> {
        &self.clean
    }

    /// Change of the log odds in nats. `[layers, scales, prompts]`
    pub fn effects(&self) -> &Array3<f64> {
        &self.effects
    }

    /// Mean over prompts of the effect. `[layers, scales]`
    pub fn mean_effects(&self) -> Array2<f64> {
        self.effects.mean_axis(Axis(2)).expect("at least one prompt")
    }

    /// Share of the prompts whose effect has the right sign. `[layers, scales]`
    pub fn prompts_sign_correct(&self) -> Array2<f64> {
        let right = |layer: usize, scale: usize| {
            let effects = self.effects.slice(s![layer, scale, ..]);
            self.right(scale, effects.iter().copied())
        };
        let (layers, scales, _) = self.effects.dim();
        Array2::from_shape_fn((layers, scales), |(layer, scale)| right(layer, scale))
    }

    /// Share of (layer, scale) whose mean effect has the right sign.
    pub fn sign_correct(&self) -> f64 {
        let layers = self.layers();
        layers.iter().map(|layer| layer.sign_correct).sum::<f64>() / layers.len() as f64
    }

    /// Slope, linearity and signs of every layer.
    pub fn layers(&self) -> Vec<SweptLayer> {
        let signs = self.prompts_sign_correct();
        let means = self.mean_effects();
        let layer = |(means, signs): (ndarray::ArrayView1<'_, f64>, ndarray::ArrayView1<'_, f64>)| {
            let scales: Vec<f64> = [0.0].into_iter().chain(self.scales.iter().copied()).collect();
            let effects: Vec<f64> = [0.0].into_iter().chain(means.iter().copied()).collect();
            let right = means.iter().enumerate().map(|(scale, &effect)| self.right(scale, [effect]));
            SweptLayer {
                line: Line::fit(&scales, &effects).expect("finite points, as many effects as scales"),
                sign_correct: right.sum::<f64>() / means.len() as f64,
                prompts_sign_correct: signs.mean().expect("at least one scale"),
            }
        };
        means.rows().into_iter().zip(signs.rows()).map(layer).collect()
    }

    /// Share of `effects` that have the sign of the scale; no effect has none.
    fn right(&self, scale: usize, effects: impl IntoIterator<Item = f64>) -> f64 {
        let right: Vec<bool> = effects.into_iter().map(|effect| effect * self.scales[scale].signum() > 0.0).collect();
        right.iter().filter(|&&right| right).count() as f64 / right.len() as f64
    }
}

fn check_scales(operation: &'static str, scales: &[f64]) -> Result<(), KernelError> {
    let scales = ndarray::ArrayView1::from(scales);
    require_finite(operation, "scales", scales)?;
    require_each(operation, "scales", "scales that are not 0", scales, |scale| scale != 0.0)
}
