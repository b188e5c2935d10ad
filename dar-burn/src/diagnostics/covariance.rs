//! The metric of the softmax: the covariance of the unembedding under the predicted distribution (Stream separation,
//! equation 1).
//!
//! ```text
//! p_c   = softmax of context c's logits over its K likeliest tokens, zero elsewhere
//! mu_c  = sum_y p_{c,y} gamma_y
//! H_c   = sum_y p_{c,y} (gamma_y - mu_c)(gamma_y - mu_c)^T           gamma_y: row y of the unembedding
//! H     = mean over contexts of H_c
//! ```
//!
//! The paper extracts logits at the last token of 480 contexts at every layer and reports one `d_model × d_model`
//! covariance a layer. It does not say how contexts enter. Taken here is the mean of the contexts' covariances, the mean
//! of the metric that equation 1 defines; the covariance of mean predictions across contexts would be no Hessian of any
//! log-normaliser. The approximation renormalises the K likeliest tokens of each context, as in the published code of
//! Park et al., whose metric this is.
//!
//! H is computed by the law of total variance, `mean covariance = total covariance - covariance of the means`: one product
//! over the vocabulary instead of one a context.

use dar_kernels::KernelError;
use ndarray::{Array1, Array2, ArrayView1, ArrayView2, Axis};

use super::check::{require_finite, require_shape, require_value};
use super::distribution::log_softmax;

/// Tokens of a context that the paper takes into account.
pub const TOP_TOKENS: usize = 20_000;

/// Rows of the unembedding that are weighted at a time.
const ROWS: usize = 1024;

/// Collects contexts and returns the mean covariance of the unembedding under their predictions.
#[derive(Debug, Clone)]
pub struct SoftmaxCovariance<'a> {
    unembedding: ArrayView2<'a, f64>,
    top: usize,
    /// Sum over contexts of their probabilities. `[vocab]`
    probability: Array1<f64>,
    /// Mean unembedding of each context, `[d_model]`.
    means: Vec<Array1<f64>>,
}

impl<'a> SoftmaxCovariance<'a> {
    /// No contexts yet; `top` likeliest tokens of each will count ([`TOP_TOKENS`] in the paper), all where the vocabulary
    /// is not larger.
    ///
    /// # Shapes
    /// - `unembedding`: `[vocab, d_model]`
    ///
    /// # Errors
    /// If the unembedding is empty or not finite, or `top` is zero.
    pub fn new(unembedding: ArrayView2<'a, f64>, top: usize) -> Result<Self, KernelError> {
        require_finite("SoftmaxCovariance::new", "unembedding", unembedding)?;
        require_value(top > 0, "SoftmaxCovariance::new", "top", "at least 1", top)?;
        Ok(Self { unembedding, top, probability: Array1::zeros(unembedding.nrows()), means: Vec::new() })
    }

    /// Adds one context.
    ///
    /// # Shapes
    /// - `logits`: `[vocab]`
    ///
    /// # Errors
    /// If there is not one logit a token, or one is not finite.
    pub fn push(&mut self, logits: ArrayView1<'_, f64>) -> Result<(), KernelError> {
        let vocab = self.unembedding.nrows();
        let expected = || format!("[vocab] = [{vocab}]");
        require_shape(logits.len() == vocab, "SoftmaxCovariance::push", "logits", expected(), logits.shape())?;
        require_finite("SoftmaxCovariance::push", "logits", logits)?;
        let top = likeliest(logits, self.top);
        let probability = log_softmax(top.iter().map(|&token| logits[token]).collect::<Array1<f64>>().view()).exp();
        let mut mean = Array1::zeros(self.unembedding.ncols());
        for (&token, &probability) in top.iter().zip(&probability) {
            self.probability[token] += probability;
            mean.scaled_add(probability, &self.unembedding.row(token));
        }
        self.means.push(mean);
        Ok(())
    }

    /// Contexts so far.
    pub fn contexts(&self) -> usize {
        self.means.len()
    }

    /// The mean covariance H, symmetric, `[d_model, d_model]`.
    ///
    /// # Errors
    /// If there are no contexts.
    pub fn finish(&self) -> Result<Array2<f64>, KernelError> {
        let contexts = self.contexts() as f64;
        require_value(contexts > 0.0, "SoftmaxCovariance::finish", "contexts", "at least 1", contexts)?;
        let d_model = self.unembedding.ncols();
        let mut mean = Array1::zeros(d_model);
        self.means.iter().for_each(|context| mean.scaled_add(1.0 / contexts, context));

        let mut covariance = Array2::zeros((d_model, d_model));
        let used: Vec<usize> = (0..self.probability.len()).filter(|&token| self.probability[token] > 0.0).collect();
        for tokens in used.chunks(ROWS) {
            let mut rows = self.unembedding.select(Axis(0), tokens) - &mean;
            for (mut row, &token) in rows.rows_mut().into_iter().zip(tokens) {
                row *= (self.probability[token] / contexts).sqrt();
            }
            covariance += &rows.t().dot(&rows);
        }
        for contexts_means in self.means.chunks(ROWS) {
            let mut rows = Array2::zeros((contexts_means.len(), d_model));
            for (mut row, context) in rows.rows_mut().into_iter().zip(contexts_means) {
                row.assign(&((context - &mean) / contexts.sqrt()));
            }
            covariance -= &rows.t().dot(&rows);
        }
        Ok((&covariance + &covariance.t()) / 2.0)
    }
}

/// The covariance H of the unembedding under one prediction.
///
/// # Shapes
/// - `logits`: `[vocab]`
/// - `unembedding`: `[vocab, d_model]`
/// - output: `[d_model, d_model]`
///
/// # Errors
/// As of [`SoftmaxCovariance`].
pub fn softmax_covariance(
    logits: ArrayView1<'_, f64>,
    unembedding: ArrayView2<'_, f64>,
    top: usize,
) -> Result<Array2<f64>, KernelError> {
    let mut covariance = SoftmaxCovariance::new(unembedding, top)?;
    covariance.push(logits)?;
    covariance.finish()
}

/// The `top` tokens of largest logit in order of their ids; the lower id wins a tie.
fn likeliest(logits: ArrayView1<'_, f64>, top: usize) -> Vec<usize> {
    let mut order: Vec<usize> = (0..logits.len()).collect();
    if top < order.len() {
        order.select_nth_unstable_by(top - 1, |&a, &b| logits[b].total_cmp(&logits[a]).then(a.cmp(&b)));
        order.truncate(top);
        order.sort_unstable();
    }
    order
}
