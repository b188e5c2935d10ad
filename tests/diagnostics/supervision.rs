use dar_burn::diagnostics::{LAYER_LOSS_WEIGHT, layer_loss_weights};

use super::assert_close;

#[test]
fn six_layers_of_the_paper() {
    let weights = layer_loss_weights(6, LAYER_LOSS_WEIGHT);
    assert_eq!(weights.len(), 5);
    for (layer, weight) in weights.into_iter().enumerate() {
        assert_close(weight, 0.1 * (layer as f64 + 1.0) / 6.0, 1e-16);
    }
}

#[test]
fn one_layer_has_the_final_loss_alone() {
    assert!(layer_loss_weights(1, LAYER_LOSS_WEIGHT).is_empty());
    assert!(layer_loss_weights(0, LAYER_LOSS_WEIGHT).is_empty());
}
