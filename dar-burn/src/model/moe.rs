use burn::module::{Module, Param};
use burn::tensor::activation::{silu, softmax};
use burn::tensor::{Device, Int, Tensor, TensorData};

use super::config::MoeConfig;
use super::feed_forward::normal;
use crate::ops::accumulator;

/// Sparse mixture of SwiGLU experts (Shazeer et al.): each token goes to its k likeliest experts, and no token is
/// dropped.
///
/// ```text
/// P       = softmax(x W_router)                                  (accumulator type)
/// chosen  = the k experts of largest P; the lower index wins a tie
/// output  = sum over chosen e of P_e / (sum over chosen P) * expert_e(x)
/// balance = experts * sum over e of share_e * mean over tokens of P_e
/// ```
///
/// `share_e` is expert e's share of all routed slots, so uniform routing has a balance of exactly 1 (DAR paper,
/// Figure A.2). The coefficient of the balance in a training loss belongs to the [`Recipe`](super::Recipe).
///
/// The probabilities are read to the host, which packs the tokens of each expert into rows; rows are filled up to the
/// busiest expert, and the experts in use run as one batched matrix product. So work and memory are those of the routed
/// slots under even routing, and at worst (all tokens to the same experts) those of all experts on all tokens.
///
/// Parameters: `experts (d_model + 3 d_model d_expert)`.
#[derive(Module, Debug)]
pub struct MixtureOfExperts {
    /// `[d_model, experts]`
    pub router: Param<Tensor<2>>,
    /// `[experts, d_model, d_expert]`
    pub gate: Param<Tensor<3>>,
    /// `[experts, d_model, d_expert]`
    pub up: Param<Tensor<3>>,
    /// `[experts, d_expert, d_model]`
    pub down: Param<Tensor<3>>,
    experts_per_token: usize,
}

impl MixtureOfExperts {
    /// `output_scale` shrinks the initial output projections.
    pub(super) fn new(config: &MoeConfig, d_model: usize, output_scale: f64, device: &Device) -> Self {
        let MoeConfig { experts, experts_per_token, d_expert } = *config;
        Self {
            router: normal(d_model, 1.0).init([d_model, experts], device),
            gate: normal(d_model, 1.0).init([experts, d_model, d_expert], device),
            up: normal(d_model, 1.0).init([experts, d_model, d_expert], device),
            down: normal(d_expert, output_scale).init([experts, d_expert, d_model], device),
            experts_per_token,
        }
    }

    /// Parameters of the experts that a token is not routed to.
    pub(super) fn idle_params(&self) -> usize {
        let [experts, d_model, d_expert] = self.gate.lazy_shape().dims();
        3 * d_model * d_expert * (experts - self.experts_per_token)
    }

    /// The branch output and the balance loss, which is in the accumulator type.
    ///
    /// # Shapes
    /// - `x`, output: `[batch, sequence, d_model]`
    /// - balance loss: `[1]`
    pub fn forward(&self, x: Tensor<3>) -> (Tensor<3>, Tensor<1>) {
        let (shape, dtype, device) = (x.dims(), x.dtype(), x.device());
        let [batch, sequence, d_model] = shape;
        let (tokens, slots) = (batch * sequence, self.experts_per_token);
        let wide = accumulator(dtype);
        let x = x.reshape([tokens, d_model]);

        let probability = softmax(x.clone().cast(wide).matmul(self.router.val().cast(wide)), 1); // [tokens, experts]
        let experts = probability.dims()[1];
        let routes = Routes::new(&probability.to_data().iter::<f64>().collect::<Vec<_>>(), experts, slots);
        let index = |values: &[i64]| Tensor::<1, Int>::from_data(TensorData::from(values), &device);

        // [used, d_model, d_expert]; a copy only where some experts rest
        let all_used = routes.used.len() == experts;
        let of_used = |weights: &Param<Tensor<3>>| {
            if all_used { weights.val() } else { weights.val().select(0, index(&routes.used)) }
        };
        let packed = x.select(0, index(&routes.token)).reshape([routes.used.len(), routes.rows, d_model]);
        let hidden = silu(packed.clone().matmul(of_used(&self.gate))) * packed.matmul(of_used(&self.up));
        let output = hidden.matmul(of_used(&self.down)).reshape([routes.token.len(), d_model]);
        let output = output.select(0, index(&routes.row)).reshape([tokens, slots, d_model]);

        let chosen = index(&routes.expert).reshape([tokens, slots]);
        let weight = probability.clone().gather(1, chosen);
        let weight = weight.clone() / weight.sum_dim(1);
        let mixed = (output.cast(wide) * weight.unsqueeze_dim::<3>(2)).sum_dim(1).cast(dtype);

        let share = Tensor::<2>::from_data(TensorData::new(routes.share, [1, experts]), (&device, wide));
        let balance = (probability.mean_dim(0) * share).sum() * experts as f64;
        (mixed.reshape(shape), balance)
    }
}

/// Where the slots (token by token, the likeliest expert first) of one batch go.
struct Routes {
    /// Expert of each slot.
    expert: Vec<i64>,
    /// Share of the slots that each expert gets.
    share: Vec<f64>,
    /// Experts with at least one slot, in order.
    used: Vec<i64>,
    /// Rows of each used expert: the slots of the busiest.
    rows: usize,
    /// Token that each of the `used * rows` rows computes; token 0 in a row that no slot reads.
    token: Vec<i64>,
    /// Row of each slot.
    row: Vec<i64>,
}

impl Routes {
    /// `probability`: `[tokens, experts]`, row-major.
    fn new(probability: &[f64], experts: usize, slots: usize) -> Self {
        let mut expert = Vec::with_capacity(probability.len() / experts * slots);
        let mut order: Vec<usize> = Vec::with_capacity(experts);
        for probability in probability.chunks_exact(experts) {
            let likelier = |&a: &usize, &b: &usize| probability[b].total_cmp(&probability[a]).then(a.cmp(&b));
            order.clear();
            order.extend(0..experts);
            if slots < experts {
                order.select_nth_unstable_by(slots - 1, likelier);
            }
            order[..slots].sort_unstable_by(likelier);
            expert.extend(order[..slots].iter().map(|&e| e as i64));
        }

        let mut count = vec![0usize; experts];
        expert.iter().for_each(|&e| count[e as usize] += 1);
        let used: Vec<i64> = (0..experts).filter(|&e| count[e] > 0).map(|e| e as i64).collect();
        let rows = count.iter().copied().max().unwrap_or(0);
        let mut next = vec![0; experts];
        used.iter().enumerate().for_each(|(place, &e)| next[e as usize] = place * rows);
        let mut token = vec![0; used.len() * rows];
        let mut row = Vec::with_capacity(expert.len());
        for (slot, &e) in expert.iter().enumerate() {
            let next = &mut next[e as usize];
            token[*next] = (slot / slots) as i64;
            row.push(*next as i64);
            *next += 1;
        }
        let share = count.iter().map(|&count| count as f64 / expert.len() as f64).collect();
        Self { expert, share, used, rows, token, row }
    }
}
