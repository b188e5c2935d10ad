//! Weights of per-layer losses (Stream separation, B.3).

/// Factor lambda of all per-layer losses.
pub const LAYER_LOSS_WEIGHT: f64 = 0.1;

/// Weight of the cross entropy at the end of each layer in the training loss.
///
/// ```text
/// loss = CE(last layer) + sum over layers l < L - 1 of lambda w_l CE(layer l);    w_l = (l + 1) / L
/// ```
///
/// This is the formula of B.3 with `lambda` = [`LAYER_LOSS_WEIGHT`] in the paper. Section 3 of the paper describes weights
/// from 0.1 at the first layer to 0.8 at the last instead, which no factor makes of this formula; both let weights grow
/// with depth.
///
/// The output holds `lambda w_l` of every layer but the last, whose loss has weight 1; it is empty for fewer than two
/// layers.
pub fn layer_loss_weights(layers: usize, lambda: f64) -> Vec<f64> {
    (0..layers.saturating_sub(1)).map(|layer| lambda * (layer + 1) as f64 / layers as f64).collect()
}
