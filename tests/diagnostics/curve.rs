use dar_burn::diagnostics::moving_average;

use super::assert_refused;

#[test]
fn every_full_window_has_its_mean() {
    let curve = [1.0, 3.0, 5.0, -1.0];
    assert_eq!(moving_average(&curve, 1).unwrap(), curve);
    assert_eq!(moving_average(&curve, 2).unwrap(), [2.0, 4.0, 2.0]);
    assert_eq!(moving_average(&curve, 4).unwrap(), [2.0]);
}

#[test]
fn windows_that_do_not_fit_are_refused() {
    let message = |window| format!("moving_average: `window` is {window}, expected 1 to the number of values, 2");
    assert_refused(moving_average(&[1.0, 2.0], 0), &message(0));
    assert_refused(moving_average(&[1.0, 2.0], 3), &message(3));
    assert_refused(
        moving_average(&[1.0, f64::NAN], 1),
        "moving_average: `values` is NaN at [1], expected finite numbers",
    );
}
