use dar_burn::diagnostics::mean_kl;
use dar_burn::diagnostics::ndarray::{Array2, array};

use super::{assert_close, assert_refused, noise};

#[test]
fn two_coins_by_hand() {
    // Token 0: (1/2, 1/2) against (1/4, 3/4); token 1: the same distribution, whose logits differ by a constant.
    let clean = array![[0.0, 0.0], [3.0, 4.0]];
    let changed = array![[7.0, 7.0 + 3_f64.ln()], [-1.0, 0.0]];
    let first = 0.5 * 2_f64.ln() + 0.5 * (2.0_f64 / 3.0).ln();
    assert_close(mean_kl(clean.view(), changed.view()).unwrap(), first / 2.0, 1e-15);
}

#[test]
fn it_is_zero_for_itself_and_else_positive() {
    let clean = noise(1, (6, 9)) * 5.0;
    assert_eq!(mean_kl(clean.view(), clean.view()).unwrap(), 0.0);
    assert!(mean_kl(clean.view(), noise(2, (6, 9)).view()).unwrap() > 0.0);
}

#[test]
fn rounding_makes_no_divergence_negative() {
    for seed in 0..50 {
        let clean = noise(seed, (1, 9)) * 5.0;
        let kl = mean_kl(clean.view(), (&clean + 0.1).view()).unwrap();
        assert!((0.0..1e-14).contains(&kl), "{kl:e}");
    }
}

#[test]
fn unlikely_tokens_do_not_overflow() {
    let (sure, other) = (array![[1e4, 0.0]], array![[0.0, 1e4]]);
    assert_close(mean_kl(sure.view(), other.view()).unwrap(), 1e4, 1e-8);
}

#[test]
fn what_is_no_pair_of_runs_is_refused() {
    let clean = noise(1, (2, 3));
    assert_refused(
        mean_kl(clean.view(), noise(2, (2, 4)).view()),
        "mean_kl: `changed` has shape [2, 4], expected [tokens, vocab] = [2, 3] as of `clean`",
    );
    assert_refused(
        mean_kl(Array2::zeros((0, 3)).view(), Array2::zeros((0, 3)).view()),
        "mean_kl: `clean` has shape [0, 3], expected at least one element an axis",
    );
    let mut broken = clean.clone();
    broken[[1, 2]] = f64::INFINITY;
    assert_refused(
        mean_kl(clean.view(), broken.view()),
        "mean_kl: `changed` is inf at [1, 2], expected finite numbers",
    );
}
