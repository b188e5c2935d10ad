//! What the papers measure on trained streams: a [`Recorder`] that captures a pass of any model around a
//! [`Residual`](crate::Residual), arithmetic in `f64` on the captured arrays, and [`Intervention`]s for a pass that shows
//! what the model needs.
//!
//! ```
//! use dar_burn::diagnostics::ndarray::array;
//! use dar_burn::diagnostics::{RouteUse, rescue_gain};
//!
//! // Four tokens of one sequence over two streams: all read stream 1.
//! let read = RouteUse::measure(array![[[0.0, 1.0], [0.0, 0.5], [0.0, 1.0], [0.0, 1.0]]].view())?;
//! assert_eq!((read.effective_streams, read.winner_consistency, read.dominant()), (1.0, 1.0, 1));
//!
//! // Zeroing both streams moves the output by 2 nats, keeping one of them by half a nat.
//! assert_eq!(rescue_gain(0.5, 2.0)?, 0.75);
//! # Ok::<(), dar_burn::KernelError>(())
//! ```
//!
//! A pass is captured or changed by starting it with
//! [`Residual::start_observed`](crate::Residual::start_observed), or a decoder's with
//! [`Decoder::forward_observed`](crate::model::Decoder::forward_observed).
//!
//! | question | function | source |
//! |---|---|---|
//! | which entries does each stream retrieve? | [`retrieval_maps`] | DAR paper, Figures 3 and A.3 |
//! | do the streams hold the same at other depths? | [`last_tokens`], [`cka_matrix`] | DAR paper, Figure 5 |
//! | does one stream suffice for the output? | [`keep_stream`], [`rescue_gains`] | DAR paper, Figure 6 |
//! | is the stream that is written more the useful one? | [`write_gate_gap`], [`GateRescue`] | DAR paper, Figure A.4 |
//! | do the experts share the work? | [`moving_average`] of the model's balance loss | DAR paper, Figure A.2 |
//! | how many streams does a branch read and write? | [`RouteUse`], [`differing_winners`] | mHC stream analysis, 3 and A.2 |
//! | do the mixers mix? | [`identity_deviation`], [`MixerMean`], [`MixerPairs`] | mHC stream analysis, 3 and B |
//! | are the streams apart? | [`stream_cosines`] | mHC stream analysis, 3 |
//! | do early and late layers differ? | [`DepthSplit`] | mHC stream analysis, 4 and A.1 |
//! | does the model need what it does? | [`Intervention`], [`perplexity_change`] | mHC stream analysis, Figure 3 |
//! | is the softmax geometry well conditioned? | [`SoftmaxCovariance`], [`Spectrum`] | Stream separation, Tables 1 and 2, Figure 2 |
//! | does linear steering work at this layer? | [`concept_direction`], [`LayerGeometry`] | Stream separation, Table 4 |
//! | what does steering disturb? | [`steer`], [`first_reach`] | Stream separation, Table 3 |
//! | is steering linear and of the right sign at every layer? | [`steering_sweep`] | Stream separation, 5 |
//! | how are layers supervised? | [`layer_loss_weights`] | Stream separation, B.3 |
//!
//! # Conventions
//!
//! Arrays are those of [`ndarray`], row-major like the data of a tensor, so a captured tensor becomes an argument by
//! `Array3::from_shape_vec(shape, data)`. Every argument must be finite. What a number leaves undefined (the CKA of a
//! constant state, the slope over one point) is `NaN`, as are the blank cells of maps.
//!
//! # Errors
//!
//! Every function refuses what it is not defined for with a [`KernelError`](crate::KernelError), which names the function,
//! the argument, what was expected and what came: wrong or empty shapes, values that are not finite, probabilities that
//! are none.

mod change;
mod check;
mod cka;
mod concept;
mod covariance;
mod curve;
mod depth;
mod distribution;
mod gates;
mod intervention;
mod mixers;
mod recorder;
mod rescue;
mod retrieval;
mod routes;
mod spectrum;
mod steering;
mod streams;
mod supervision;
mod sweep;

pub use change::Intervention;
pub use cka::{LAST_TOKENS, SEQUENCES, cka_matrix, last_tokens, linear_cka};
pub use concept::{
    DAMPING, LayerGeometry, LinearSteering, RELIABLE_COSINE, UNRELIABLE_COSINE, concept_direction, dual_direction,
};
pub use covariance::{SoftmaxCovariance, TOP_TOKENS, softmax_covariance};
pub use curve::{MOVING_AVERAGE_STEPS, moving_average};
pub use depth::{DepthSplit, EarlyLate};
pub use distribution::mean_kl;
pub use gates::{GateRescue, Line, write_gate_gap};
pub use intervention::{fixed_mixers, identity_mixers, keep_largest, perplexity_change};
pub use mixers::{MixerMean, MixerPairs, identity_deviation};
pub use ndarray;
pub use recorder::{Record, RecordedGates, RecordedMaps, Recorder};
pub use rescue::{KL_FLOOR, keep_stream, rescue_gain, rescue_gains};
pub use retrieval::{RetrievalMaps, retrieval_maps};
pub use routes::{RouteUse, differing_winners};
pub use spectrum::Spectrum;
pub use steering::{
    BinaryConcept, Reach, STEERING_STEPS, Steering, SteeringMethod, TARGET_PROBABILITY, first_reach, steer,
    steering_step,
};
pub use streams::{mean_pair_cosine, stream_cosines};
pub use supervision::{LAYER_LOSS_WEIGHT, layer_loss_weights};
pub use sweep::{SteeringPrompt, SteeringSites, SteeringSweep, SweptLayer, steering_sweep};
