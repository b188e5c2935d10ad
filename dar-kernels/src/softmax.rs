//! The online-softmax states of a kernel: the only copy.
//!
//! ```text
//! empty:          m = FLOOR, Z = 0
//! raise(top):     m' = max(m, top);  scale = exp(m - m');  Z = Z scale;  m = m'   (what was accumulated is scaled too)
//! push(a <= m):   w = exp(a - m);  Z = Z + w                                      (A.3)
//! lse:            m + ln Z                                                        (A.5)
//! merge of a finished softmax with one candidate: resume, raise, push             (A.9)
//! ```
//!
//! A chunk of candidates raises once and pushes each. Raising an empty state scales nothing by one, so merging with an
//! empty state changes no bit.

use cubecl::prelude::*;

use crate::numeric::reciprocal_to_two;

/// The maximum of no logit. Finite, as shading languages may assume that nothing is infinite, and half of the least
/// f32, so that its distance to any maximum is finite as well.
pub(crate) const FLOOR: f32 = -1.7e38;

/// Online-softmax states side by side in registers.
#[derive(CubeType)]
pub(crate) struct OnlineSoftmax {
    max: Array<f32>,
    partition: Array<f32>,
}

#[cube]
impl OnlineSoftmax {
    /// `states` empty states.
    pub(crate) fn empty(#[comptime] states: usize) -> Self {
        let mut max = Array::<f32>::new(states);
        let mut partition = Array::<f32>::new(states);
        #[unroll]
        for k in 0..states {
            max[k] = f32::new(FLOOR);
            partition[k] = f32::new(0.0);
        }
        OnlineSoftmax { max, partition }
    }

    /// State `k` goes on from a finished softmax: what was accumulated is already divided by its partition.
    pub(crate) fn resume(&mut self, #[comptime] k: usize, lse: f32) {
        self.max[k] = lse;
        self.partition[k] = f32::new(1.0);
    }

    /// Makes room for logits up to `top` and returns the factor for everything accumulated so far.
    pub(crate) fn raise(&mut self, #[comptime] k: usize, top: f32) -> f32 {
        let max = max(self.max[k], top);
        let scale = (self.max[k] - max).exp();
        self.max[k] = max;
        self.partition[k] *= scale;
        scale
    }

    /// Takes in `logit`, which is not above the last `raise`, and returns the weight of its value.
    pub(crate) fn push(&mut self, #[comptime] k: usize, logit: f32) -> f32 {
        let weight = (logit - self.max[k]).exp();
        self.partition[k] += weight;
        weight
    }

    /// Natural-log partition of state `k`, which is not empty.
    pub(crate) fn lse(&self, #[comptime] k: usize) -> f32 {
        self.max[k] + self.partition[k].ln()
    }

    /// The factor that turns what state `k` accumulated into a mean.
    pub(crate) fn normaliser(&self, #[comptime] k: usize) -> f32 {
        1.0f32 / self.partition[k]
    }

    /// The same where one candidate was merged with a finished softmax: one of the two has the weight 1.
    pub(crate) fn normaliser_of_two(&self, #[comptime] k: usize) -> f32 {
        reciprocal_to_two(self.partition[k])
    }
}
