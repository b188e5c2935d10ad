//! Steering a state towards a concept, and what else it disturbs (Stream separation, 3 and Table 3).
//!
//! ```text
//! Euclidean: state <- state + size * primal
//! dual:      state <- state + size * dual(state)          the metric is taken anew at every state
//! target     = P(target words) / (P(base words) + P(target words))
//! off-target = KL(clean || steered) over the words that are neither, renormalised
//! ```
//!
//! The off-target divergence is read at the first step at which the target reaches [`TARGET_PROBABILITY`]. The paper
//! leaves both quantities open. The target is a share of the concept's own probability, as in the published code of Park
//! et al., so that a context in which neither word is likely can be steered; the divergence runs from the clean to the
//! steered distribution, as in the rescue gain, and leaves out the concept's words, whose change is wanted. Directions
//! have length 1 in both methods, which are compared at equal target and not at equal step.
//!
//! [`steer`] reads logits as `unembedding · state`, where `state` is what the head multiplies (after the final norm).
//! [`first_reach`] takes logits from anywhere, such as the remaining layers of a model.

use dar_kernels::KernelError;
use ndarray::{Array1, ArrayView1, ArrayView2};

use super::check::{require_finite, require_shape, require_value};
use super::concept::{dual_direction, unit};
use super::covariance::softmax_covariance;
use super::distribution::{kl_of_logs, log_softmax};

/// Target probability at which the off-target divergence is read.
pub const TARGET_PROBABILITY: f64 = 0.8;

/// Steps after which the published code of Park et al. gives up.
pub const STEERING_STEPS: usize = 200;

/// A concept of two sides, each a set of tokens.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct BinaryConcept {
    side: Vec<Side>,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Side {
    Base,
    Target,
    Neither,
}

impl BinaryConcept {
    /// From the token ids of both sides. An id that is named twice counts once.
    ///
    /// # Errors
    /// If a side is empty, an id is on both sides or not below `vocab`, or no token is left that is on neither.
    pub fn new(base: &[usize], target: &[usize], vocab: usize) -> Result<Self, KernelError> {
        let operation = "BinaryConcept::new";
        let mut side = vec![Side::Neither; vocab];
        for (argument, tokens, mark) in [("base", base, Side::Base), ("target", target, Side::Target)] {
            require_shape(!tokens.is_empty(), operation, argument, "at least one token", &[0])?;
            for &token in tokens {
                require_value(token < vocab, operation, argument, &format!("ids below vocab = {vocab}"), token)?;
                let fits = side[token] == Side::Neither || side[token] == mark;
                require_value(fits, operation, argument, "ids that are not on the other side", token)?;
                side[token] = mark;
            }
        }
        let expected = "larger than the concept's words";
        require_value(side.contains(&Side::Neither), operation, "vocab", expected, vocab)?;
        Ok(Self { side })
    }

    /// The target's share of the concept's probability, 0 to 1.
    ///
    /// # Shapes
    /// - `logits`: `[vocab]`
    ///
    /// # Errors
    /// If there is not one logit a token, or one is not finite.
    pub fn target_probability(&self, logits: ArrayView1<'_, f64>) -> Result<f64, KernelError> {
        self.check("BinaryConcept::target_probability", "logits", logits)?;
        // Normalised over the concept's words alone: under the whole vocabulary both sides may vanish.
        let words = self.pick(logits, |side| side != Side::Neither);
        let marks = self.side.iter().filter(|&&side| side != Side::Neither);
        let probabilities = log_softmax(words.view()).exp();
        Ok(marks
            .zip(&probabilities)
            .filter(|(side, _)| **side == Side::Target)
            .map(|(_, probability)| probability)
            .sum())
    }

    /// `KL(clean || steered)` in nats over the tokens that are on neither side.
    ///
    /// # Shapes
    /// - `clean`, `steered`: logits, `[vocab]`
    ///
    /// # Errors
    /// If there is not one logit a token, or one is not finite.
    pub fn off_target_kl(&self, clean: ArrayView1<'_, f64>, steered: ArrayView1<'_, f64>) -> Result<f64, KernelError> {
        self.check("BinaryConcept::off_target_kl", "clean", clean)?;
        self.check("BinaryConcept::off_target_kl", "steered", steered)?;
        let logs = |logits: ArrayView1<'_, f64>| log_softmax(self.pick(logits, |side| side == Side::Neither).view());
        Ok(kl_of_logs(logs(clean).view(), logs(steered).view()))
    }

    fn pick(&self, logits: ArrayView1<'_, f64>, wanted: impl Fn(Side) -> bool) -> Array1<f64> {
        logits.iter().zip(&self.side).filter(|(_, side)| wanted(**side)).map(|(&logit, _)| logit).collect()
    }

    fn check(
        &self,
        operation: &'static str,
        argument: &'static str,
        logits: ArrayView1<'_, f64>,
    ) -> Result<(), KernelError> {
        let expected = || format!("[vocab] = [{}]", self.side.len());
        require_shape(logits.len() == self.side.len(), operation, argument, expected(), logits.shape())?;
        require_finite(operation, argument, logits)
    }
}

/// The step at which steering reached its target.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct Reach {
    /// Steps taken; 0 where the clean prediction is there already.
    pub steps: usize,
    /// The target's share of the concept's probability.
    pub target_probability: f64,
    /// Divergence of the other tokens in nats.
    pub off_target_kl: f64,
}

/// The first of `steered` at which the target has at least `threshold`, or `None` where none has. Logits after that one
/// are not asked for.
///
/// # Shapes
/// - `clean`, each of `steered`: logits, `[vocab]`
///
/// # Errors
/// If the threshold is not in (0, 1], logits do not fit, or `steered` yields an error.
pub fn first_reach(
    concept: &BinaryConcept,
    threshold: f64,
    clean: ArrayView1<'_, f64>,
    steered: impl IntoIterator<Item = Result<Array1<f64>, KernelError>>,
) -> Result<Option<Reach>, KernelError> {
    let fits = threshold > 0.0 && threshold <= 1.0;
    require_value(fits, "first_reach", "threshold", "a number in (0, 1]", threshold)?;
    let reached = |steps, logits: ArrayView1<'_, f64>| {
        let target_probability = concept.target_probability(logits)?;
        if target_probability < threshold {
            return Ok(None);
        }
        Ok(Some(Reach { steps, target_probability, off_target_kl: concept.off_target_kl(clean, logits)? }))
    };
    if let Some(reach) = reached(0, clean)? {
        return Ok(Some(reach));
    }
    for (step, logits) in steered.into_iter().enumerate() {
        if let Some(reach) = reached(step + 1, logits?.view())? {
            return Ok(Some(reach));
        }
    }
    Ok(None)
}

/// How a state is moved.
#[derive(Debug, Clone, Copy, PartialEq)]
pub enum SteeringMethod {
    /// Along the primal direction.
    Euclidean,
    /// Along the natural gradient of the softmax at the state.
    Dual {
        /// Likeliest tokens that the metric takes into account; [`TOP_TOKENS`](super::TOP_TOKENS) in the paper.
        top: usize,
        /// Added to the diagonal of the metric; [`DAMPING`](super::DAMPING) in the code of Park et al.
        damping: f64,
    },
}

/// One step of length `size`.
///
/// A dual step costs one product over the `top` tokens and one Cholesky factorisation.
///
/// # Shapes
/// - `state`, `primal`, output: `[d_model]`
/// - `unembedding`: `[vocab, d_model]`; only the dual method reads it
///
/// # Errors
/// If shapes do not fit, a value is not finite, the direction is zero, or as of [`dual_direction`].
pub fn steering_step(
    state: ArrayView1<'_, f64>,
    primal: ArrayView1<'_, f64>,
    size: f64,
    method: SteeringMethod,
    unembedding: ArrayView2<'_, f64>,
) -> Result<Array1<f64>, KernelError> {
    let operation = "steering_step";
    require_finite(operation, "state", state)?;
    let expected = || format!("[d_model] = [{}] as of `state`", state.len());
    require_shape(primal.len() == state.len(), operation, "primal", expected(), primal.shape())?;
    require_finite(operation, "primal", primal)?;
    require_value(size.is_finite(), operation, "size", "a finite number", size)?;
    let direction = match method {
        SteeringMethod::Euclidean => unit(operation, "primal", primal.to_owned())?,
        SteeringMethod::Dual { top, damping } => {
            check_unembedding(operation, unembedding, state.len())?;
            let covariance = softmax_covariance(unembedding.dot(&state).view(), unembedding, top)?;
            dual_direction(covariance.view(), primal, damping)?
        }
    };
    Ok(&state + &(direction * size))
}

/// How far to steer.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct Steering {
    /// How a state is moved.
    pub method: SteeringMethod,
    /// Length of a step.
    pub step_size: f64,
    /// Steps after which to give up; [`STEERING_STEPS`] in the code of Park et al.
    pub max_steps: usize,
    /// Target probability to reach; [`TARGET_PROBABILITY`] in the paper.
    pub threshold: f64,
}

/// Steers a state under the softmax `unembedding · state` until the target is reached; `None` where it is not within
/// `max_steps`.
///
/// # Shapes
/// - `state`, `primal`: `[d_model]`
/// - `unembedding`: `[vocab, d_model]`
///
/// # Errors
/// As of [`steering_step`] and [`first_reach`].
pub fn steer(
    state: ArrayView1<'_, f64>,
    primal: ArrayView1<'_, f64>,
    unembedding: ArrayView2<'_, f64>,
    concept: &BinaryConcept,
    steering: &Steering,
) -> Result<Option<Reach>, KernelError> {
    require_finite("steer", "state", state)?;
    check_unembedding("steer", unembedding, state.len())?;
    let mut moved = state.to_owned();
    let steered = (0..steering.max_steps).map(|_| {
        moved = steering_step(moved.view(), primal, steering.step_size, steering.method, unembedding)?;
        Ok(unembedding.dot(&moved))
    });
    first_reach(concept, steering.threshold, unembedding.dot(&state).view(), steered)
}

fn check_unembedding(
    operation: &'static str,
    unembedding: ArrayView2<'_, f64>,
    d_model: usize,
) -> Result<(), KernelError> {
    let expected = format!("[vocab, d_model] with d_model = {d_model} as of `state`");
    require_shape(unembedding.ncols() == d_model, operation, "unembedding", expected, unembedding.shape())
}
