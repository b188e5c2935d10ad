use dar_burn::diagnostics::ndarray::{Array3, Axis, array, concatenate};
use dar_burn::diagnostics::retrieval_maps;

use super::assert_refused;

/// Weights of the first candidates of a softmax, from probabilities `[candidates]` per token of both streams.
fn branch(tokens: &[[&[f64]; 2]]) -> Array3<f64> {
    let token = |streams: &[&[f64]; 2]| Array3::from_shape_fn((streams[0].len(), 1, 2), |(r, _, j)| streams[j][r]);
    let tokens: Vec<_> = tokens.iter().map(token).collect();
    concatenate(Axis(1), &tokens.iter().map(|token| token.view()).collect::<Vec<_>>()).unwrap()
}

#[test]
fn rows_are_layers_columns_entries_and_the_rest_is_blank() {
    // One layer a block: attention retrieves completed entries, the feed-forward branch the partial state too.
    let branches = [
        branch(&[[&[1.0], &[1.0]], [&[1.0], &[1.0]]]),
        branch(&[[&[0.25, 0.75], &[1.0, 0.0]], [&[0.75, 0.25], &[0.5, 0.5]]]),
        branch(&[[&[0.5, 0.5], &[0.25, 0.75]], [&[1.0, 0.0], &[0.25, 0.75]]]),
        branch(&[[&[0.5, 0.25, 0.25], &[0.0, 0.0, 1.0]], [&[0.5, 0.5, 0.0], &[0.0, 1.0, 0.0]]]),
    ];
    let maps = retrieval_maps(&branches.each_ref().map(|branch| branch.view())).unwrap();
    let nan = f64::NAN;
    let cells = |map: &dar_burn::diagnostics::ndarray::Array2<f64>| format!("{map:?}");
    let attention = [array![[1.0, nan, nan], [0.75, 0.25, nan]], array![[1.0, nan, nan], [0.25, 0.75, nan]]];
    let feed_forward = [array![[0.5, 0.5, nan], [0.5, 0.375, 0.125]], array![[0.75, 0.25, nan], [0.0, 0.5, 0.5]]];
    assert_eq!(maps.attention.iter().map(cells).collect::<Vec<_>>(), attention.each_ref().map(cells));
    assert_eq!(maps.feed_forward.iter().map(cells).collect::<Vec<_>>(), feed_forward.each_ref().map(cells));
}

#[test]
fn what_is_no_softmax_is_refused() {
    let even = branch(&[[&[0.5, 0.5], &[0.5, 0.5]]]);
    assert_refused(retrieval_maps(&[]), "retrieval_maps: `branches` has shape [0], expected two branches a layer");
    assert_refused(
        retrieval_maps(&[even.view()]),
        "retrieval_maps: `branches` has shape [1], expected two branches a layer",
    );
    assert_refused(
        retrieval_maps(&[even.view(), (&even + 1.0).view()]),
        "retrieval_maps: `branches` is 3, expected weights that sum to 1 over candidates",
    );
    let signed = branch(&[[&[1.5, -0.5], &[0.5, 0.5]]]);
    assert_refused(
        retrieval_maps(&[even.view(), signed.view()]),
        "retrieval_maps: `branches` is -0.5 at [1, 0, 0], expected weights ≥ 0",
    );
    assert_refused(
        retrieval_maps(&[even.view(), Array3::zeros((2, 1, 3)).view()]),
        "retrieval_maps: `branches` has shape [2, 1, 3], expected [candidates, tokens, streams] with streams = 2, the \
         same for all",
    );
    assert_refused(
        retrieval_maps(&[even.view(), (&even * f64::NAN).view()]),
        "retrieval_maps: `branches` is NaN at [0, 0, 0], expected finite numbers",
    );
}
