use dar_burn::diagnostics::ndarray::{Array2, Array4, Axis, array};
use dar_burn::diagnostics::{LAST_TOKENS, SEQUENCES, cka_matrix, last_tokens, linear_cka};

use super::{assert_close, assert_refused, noise, rotation};

#[test]
fn a_rotated_scaled_and_shifted_copy_is_the_same() {
    let x = noise(1, (40, 6));
    let copy = x.dot(&rotation(2, 6)) * -3.5 + &noise(4, (1, 6));
    assert_close(linear_cka(x.view(), copy.view()).unwrap(), 1.0, 1e-12);
    for scale in [1e-200, 1e200] {
        assert_close(linear_cka(x.view(), (&copy * scale).view()).unwrap(), 1.0, 1e-12);
    }
}

#[test]
fn independent_noise_is_nearly_unrelated() {
    let tokens = SEQUENCES * LAST_TOKENS;
    let (x, y) = (noise(1, (tokens, 8)), noise(2, (tokens, 8)));
    let cka = linear_cka(x.view(), y.view()).unwrap();
    // The biased estimator is of order d / tokens.
    assert!(cka > 0.0 && cka < 3.0 * 8.0 / tokens as f64, "{cka}");
}

#[test]
fn of_one_feature_it_is_the_squared_correlation() {
    let (x, y) = (array![[1.0], [-1.0], [0.0]], array![[5.0], [4.0], [3.0]]); // r = 1 / 2
    assert_close(linear_cka(x.view(), y.view()).unwrap(), 0.25, 1e-15);
}

#[test]
fn features_and_tokens_give_the_same() {
    // |Y^T X|² / (|X^T X| |Y^T Y|), the other form of Kornblith et al.
    let (x, y) = (noise(1, (9, 4)), noise(2, (9, 7)) + 2.0);
    let centred = |a: &Array2<f64>| a - &a.mean_axis(Axis(0)).unwrap();
    let (a, b) = (centred(&x), centred(&y));
    let norm = |m: Array2<f64>| m.iter().map(|v| v * v).sum::<f64>().sqrt();
    let truth = norm(b.t().dot(&a)).powi(2) / (norm(a.t().dot(&a)) * norm(b.t().dot(&b)));
    assert_close(linear_cka(x.view(), y.view()).unwrap(), truth, 1e-14);
    assert_close(linear_cka(y.view(), x.view()).unwrap(), truth, 1e-14);
}

#[test]
fn constant_states_have_no_alignment() {
    let x = noise(1, (7, 3));
    // Means of equal numbers that are off by rounding, and some that are not.
    for constant in [[0.0; 3], [0.1; 3], [-1e30; 3], [0.1, 0.7, -0.3]] {
        let constant = Array2::from_shape_fn((7, 3), |(_, feature)| constant[feature]);
        assert!(linear_cka(x.view(), constant.view()).unwrap().is_nan());
        assert!(linear_cka(constant.view(), x.view()).unwrap().is_nan());
    }
}

#[test]
fn the_matrix_holds_every_pair() {
    let rows = [noise(1, (12, 4)), noise(2, (12, 4)), noise(3, (12, 4))];
    let columns = [rows[1].clone() * 2.0, Array2::from_elem((12, 4), 0.3)];
    let matrix = cka_matrix(&rows, &columns).unwrap();
    assert_eq!(matrix.dim(), (3, 2));
    for (row, state) in rows.iter().enumerate() {
        let truth = linear_cka(state.view(), columns[0].view()).unwrap();
        assert_close(matrix[[row, 0]], truth, 1e-15);
        assert!(matrix[[row, 1]].is_nan());
    }
    assert_close(matrix[[1, 0]], 1.0, 1e-12);
}

#[test]
fn the_last_tokens_come_sequence_by_sequence() {
    // Value: sequence, token, stream, feature as digits.
    let states = Array4::from_shape_fn((2, 4, 2, 2), |(s, t, j, d)| (1000 * s + 100 * t + 10 * j + d) as f64);
    let last = last_tokens(states.view(), 1, 2).unwrap();
    assert_eq!(last, array![[210.0, 211.0], [310.0, 311.0], [1210.0, 1211.0], [1310.0, 1311.0]]);
    assert_refused(last_tokens(states.view(), 2, 2), "last_tokens: `stream` is 2, expected below streams = 2");
    assert_refused(last_tokens(states.view(), 0, 5), "last_tokens: `last` is 5, expected 1 to tokens = 4");
    assert_refused(last_tokens(states.view(), 0, 0), "last_tokens: `last` is 0, expected 1 to tokens = 4");
}

#[test]
fn what_has_no_alignment_is_refused() {
    let x = noise(1, (5, 3));
    let mut broken = x.clone();
    broken[[2, 1]] = f64::NAN;
    let tokens = |n| format!("expected [tokens, d_model] with tokens = {n}, the same for all");
    assert_refused(
        linear_cka(x.view(), noise(2, (4, 3)).view()),
        &format!("linear_cka: `y` has shape [4, 3], {}", tokens(5)),
    );
    let one = noise(2, (1, 3));
    assert_refused(linear_cka(one.view(), one.view()), &format!("linear_cka: `x` has shape [1, 3], {}", tokens(2)));
    assert_refused(linear_cka(x.view(), broken.view()), "linear_cka: `y` is NaN at [2, 1], expected finite numbers");
    assert_refused(
        cka_matrix(&[], std::slice::from_ref(&x)),
        "cka_matrix: `rows` has shape [0], expected at least one state",
    );
    assert_refused(
        cka_matrix(&[x], &[noise(2, (6, 3))]),
        &format!("cka_matrix: `columns` has shape [6, 3], {}", tokens(5)),
    );
}
