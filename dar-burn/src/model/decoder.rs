use std::sync::Arc;

use burn::module::{Module, ModuleVisitor, Param};
use burn::tensor::activation::log_softmax;
use burn::tensor::{Device, Int, Tensor, module::embedding};
use dar_kernels::KernelError;

use super::attention::Attention;
use super::cache::KvCache;
use super::config::DecoderConfig;
use super::feed_forward::{FeedForward, normal};
use super::norm::RmsNorm;
use super::positions::Positions;
use crate::nn::{Observer, Residual};
use crate::ops::accumulator;
use crate::ops::numeric::require;

/// A decoder-only Transformer whose residual is any scheme. Made by [`DecoderConfig::init`].
///
/// Token ids are not checked against the vocabulary, which would wait for the device.
///
/// # Start
///
/// Projections are normal with standard deviation `1 / sqrt(inputs)`, those that end a branch divided by
/// `sqrt(2 layers)`. The embedding is normal with variance `1 / d_model` and multiplied by `sqrt(d_model)` on its way
/// in, so the residual starts with unit variance. That matters: the schemes that start as the plain residual do so up to
/// a relative error of about `eps / mean square`, which small embeddings would make visible. Logits start with unit
/// variance too, but for that of the current token, which the shared embedding puts near `sqrt(d_model / 2)`; the first
/// steps of training take it down.
#[derive(Module, Debug)]
pub struct Decoder {
    /// Of inputs and outputs alike. `[vocab_size, d_model]`
    pub embedding: Param<Tensor<2>>,
    /// The branches, two a layer.
    pub layers: Vec<DecoderLayer>,
    /// Norm before the logits.
    pub final_norm: RmsNorm,
    /// The residual pathway.
    pub residual: Residual,
    d_head: usize,
    rope_base: f64,
}

/// The two branches of one layer.
#[derive(Module, Debug)]
pub struct DecoderLayer {
    /// Norm of the attention branch's input.
    pub attention_norm: RmsNorm,
    /// The attention branch.
    pub attention: Attention,
    /// Norm of the feed-forward branch's input.
    pub feed_forward_norm: RmsNorm,
    /// The feed-forward branch.
    pub feed_forward: FeedForward,
}

/// What a whole pass computes.
#[derive(Debug, Clone)]
pub struct DecoderOutput {
    /// In the element type of the states. `[batch, sequence, vocab_size]`
    pub logits: Tensor<3>,
    /// Router balance of a sparse mixture of experts, mean over layers, in the accumulator type: 1 when experts are
    /// used evenly. `[1]`
    pub balance_loss: Option<Tensor<1>>,
}

/// What [`Decoder::forward_observed`] computes.
#[derive(Debug, Clone)]
pub struct ObservedOutput {
    /// As of [`Decoder::forward`].
    pub output: DecoderOutput,
    /// For each layer the hidden state if the model ended after it ([`Residual::exit`]), for
    /// [`Decoder::logits`]. `[batch, sequence, d_model]`
    pub exits: Vec<Tensor<3>>,
    /// Router balance of each layer of a sparse mixture of experts, in the accumulator type; none of a dense model. `[1]`
    pub balance: Vec<Tensor<1>>,
}

/// What the residual pathway and its branches leave.
struct Passed {
    /// `[batch, new, d_model]`
    hidden: Tensor<3>,
    /// Of each layer with experts. `[1]`
    balance: Vec<Tensor<1>>,
    /// Of each layer of an observed pass. `[batch, new, d_model]`
    exits: Vec<Tensor<3>>,
}

impl DecoderOutput {
    fn new(logits: Tensor<3>, balance: &[Tensor<1>]) -> Self {
        let layers = balance.len() as f64;
        let sum = balance.iter().cloned().reduce(|sum, loss| sum + loss);
        Self { logits, balance_loss: sum.map(|sum| sum / layers) }
    }

    /// Mean cross entropy (natural logarithm) of the targets, in the accumulator type; no balance loss.
    ///
    /// # Shapes
    /// - `targets`: `[batch, sequence]`
    /// - output: `[1]`
    ///
    /// # Panics
    /// If there is not one target a token.
    pub fn cross_entropy(&self, targets: Tensor<2, Int>) -> Tensor<1> {
        let [batch, sequence, vocab_size] = self.logits.dims();
        if targets.dims() != [batch, sequence] {
            require::<()>(Err(KernelError::Shape {
                operation: "DecoderOutput::cross_entropy",
                argument: "targets",
                expected: format!("[batch, sequence] = {:?}", [batch, sequence]),
                got: targets.dims().to_vec(),
            }));
        }
        let logits = self.logits.clone().reshape([batch * sequence, vocab_size]);
        let log_probability = log_softmax(logits.clone().cast(accumulator(logits.dtype())), 1);
        log_probability.gather(1, targets.reshape([batch * sequence, 1])).mean().neg()
    }
}

impl Decoder {
    pub(super) fn new(config: &DecoderConfig, device: &Device) -> Self {
        let DecoderConfig { vocab_size, d_model, layers, norm_eps, .. } = *config;
        let output_scale = (2.0 * layers as f64).sqrt().recip();
        let norm = || RmsNorm::new(d_model, norm_eps, device);
        let layer = |_| DecoderLayer {
            attention_norm: norm(),
            attention: Attention::new(config, output_scale, device),
            feed_forward_norm: norm(),
            feed_forward: FeedForward::new(&config.feed_forward, d_model, output_scale, device),
        };
        Self {
            embedding: normal(d_model, 1.0).init([vocab_size, d_model], device),
            layers: (0..layers).map(layer).collect(),
            final_norm: norm(),
            residual: config.residual.init(&config.layout(), device),
            d_head: d_model / config.heads,
            rope_base: config.rope_base,
        }
    }

    /// Draws all parameters that are still undrawn, in the order of the fields.
    ///
    /// Parameters are drawn when first used, and another residual scheme, or another pass, may use them in another
    /// order. After this, `device.seed(seed)` before it gives the same backbone whatever the scheme, as no scheme draws
    /// random numbers.
    pub fn initialize(&self) {
        struct Draw;
        impl ModuleVisitor for Draw {
            fn visit_float<const D: usize>(&mut self, param: &Param<Tensor<D>>) {
                let _ = param.val();
            }
        }
        self.visit(&mut Draw);
    }

    /// Parameters that the computation of one token uses: all, less the experts that it is not routed to.
    pub fn active_params(&self) -> usize {
        let idle = |layer: &DecoderLayer| match &layer.feed_forward {
            FeedForward::Dense(_) => 0,
            FeedForward::MixtureOfExperts(experts) => experts.idle_params(),
        };
        self.num_params() - self.layers.iter().map(idle).sum::<usize>()
    }

    /// Logits of the token after each token of whole sequences.
    ///
    /// # Shapes
    /// - `tokens`: `[batch, sequence]`
    ///
    /// # Panics
    /// If there are no tokens.
    pub fn forward(&self, tokens: Tensor<2, Int>) -> DecoderOutput {
        let Passed { hidden, balance, .. } = self.pass("Decoder::forward", tokens, None, None);
        DecoderOutput::new(self.logits(hidden), &balance)
    }

    /// As [`forward`](Self::forward), with an observer of the residual pathway and the hidden state after every layer.
    ///
    /// Runs the residual's composed operations, as [`Residual::start_observed`] says. For the hidden states alone, pass
    /// [`Unobserved`](crate::nn::Unobserved).
    ///
    /// # Shapes
    /// - `tokens`: `[batch, sequence]`
    ///
    /// # Panics
    /// If there are no tokens.
    pub fn forward_observed(&self, tokens: Tensor<2, Int>, observer: Arc<dyn Observer>) -> ObservedOutput {
        let Passed { hidden, balance, exits } = self.pass("Decoder::forward_observed", tokens, None, Some(observer));
        ObservedOutput { output: DecoderOutput::new(self.logits(hidden), &balance), exits, balance }
    }

    /// Mean next-token cross entropy of whole sequences, in the accumulator type.
    ///
    /// The balance loss of a sparse mixture of experts is not in it; to train one, weigh
    /// [`balance_loss`](DecoderOutput::balance_loss) with the recipe's coefficient beside
    /// [`cross_entropy`](DecoderOutput::cross_entropy).
    ///
    /// # Shapes
    /// - `tokens`, `targets`: `[batch, sequence]`, where `targets[.., i]` is the token after `tokens[.., i]`
    /// - output: `[1]`
    ///
    /// # Panics
    /// If there are no tokens, or not one target a token.
    pub fn loss(&self, tokens: Tensor<2, Int>, targets: Tensor<2, Int>) -> Tensor<1> {
        self.forward(tokens).cross_entropy(targets)
    }

    /// An empty cache for [`step`](Self::step).
    pub fn cache(&self) -> KvCache {
        KvCache::new(self.layers.len())
    }

    /// Logits of any number of new tokens after those in `cache`, which then holds the new ones too.
    ///
    /// Equals the positions of a whole pass. Run it on `model.valid()`: with autodiff, the cache would keep the graph of
    /// every step.
    ///
    /// # Shapes
    /// - `tokens`: `[batch, new]`
    /// - output: `[batch, new, vocab_size]`
    ///
    /// # Panics
    /// If there are no tokens, the cache holds another batch size, or it is of a decoder with another number of layers.
    pub fn step(&self, tokens: Tensor<2, Int>, cache: &mut KvCache) -> Tensor<3> {
        cache.check(self.layers.len(), tokens.dims()[0]);
        self.logits(self.pass("Decoder::step", tokens, Some(cache), None).hidden)
    }

    fn pass(
        &self,
        operation: &'static str,
        tokens: Tensor<2, Int>,
        mut cache: Option<&mut KvCache>,
        observer: Option<Arc<dyn Observer>>,
    ) -> Passed {
        let [batch, new] = tokens.dims();
        if batch * new == 0 {
            let got = format!("{:?}", [batch, new]);
            require::<()>(Err(KernelError::value(operation, "tokens", "[batch, sequence] of at least [1, 1]", got)));
        }
        let table = self.embedding.val();
        let embedded = embedding(table.clone(), tokens) * (table.dims()[1] as f64).sqrt();
        let past = cache.as_ref().map_or(0, |cache| cache.len());
        let wide = accumulator(embedded.dtype());
        let positions = Positions::new(past, new, self.d_head, self.rope_base, wide, &embedded.device());

        let (mut balance, mut exits) = (Vec::new(), Vec::new());
        let observed = observer.is_some();
        let mut state = match observer {
            Some(observer) => self.residual.start_observed(embedded, observer),
            None => self.residual.start(embedded),
        };
        for (index, layer) in self.layers.iter().enumerate() {
            let cache = cache.as_deref_mut().map(|cache| cache.layer(index));
            state = self
                .residual
                .branch_normed(state, &layer.attention_norm, |x| layer.attention.forward(x, &positions, cache));
            state = self.residual.branch_normed(state, &layer.feed_forward_norm, |x| {
                let (output, loss) = layer.feed_forward.forward(x);
                balance.extend(loss);
                output
            });
            if observed {
                exits.push(self.residual.exit(&state));
            }
        }
        Passed { hidden: self.residual.finish(state), balance, exits }
    }

    /// `norm(hidden) * embedding^T`: the one head of the model, for the end of any layer.
    ///
    /// # Shapes
    /// - `hidden`: `[batch, new, d_model]`
    /// - output: `[batch, new, vocab_size]`
    pub fn logits(&self, hidden: Tensor<3>) -> Tensor<3> {
        let [batch, new, d_model] = hidden.dims();
        let table = self.embedding.val();
        let normed = self.final_norm.forward(hidden).reshape([batch * new, d_model]);
        let vocab_size = table.dims()[0];
        normed.matmul(table.transpose()).reshape([batch, new, vocab_size])
    }
}
