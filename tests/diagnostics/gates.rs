use dar_burn::diagnostics::ndarray::{Array2, array};
use dar_burn::diagnostics::{GateRescue, Line, write_gate_gap};

use super::{assert_close, assert_refused};

#[test]
fn the_gap_is_positive_where_stream_1_is_written_more() {
    let beta = array![[0.5, 1.0], [1.0, 1.25], [0.25, 1.5]];
    assert_close(write_gate_gap(beta.view()).unwrap(), (0.5 + 0.25 + 1.25) / 3.0, 1e-15);
}

#[test]
fn points_on_a_line_are_found_exactly() {
    let x = [-1.0, 0.0, 2.0, 5.0];
    let line = Line::fit(&x, &x.map(|x| 3.0 - 0.5 * x)).unwrap();
    assert_close(line.slope, -0.5, 1e-15);
    assert_close(line.intercept, 3.0, 1e-15);
    assert_close(line.correlation, -1.0, 1e-15);
}

#[test]
fn scattered_points_by_hand() {
    // Means 2 and 2; xx = 2, yy = 2, xy = 1.
    let line = Line::fit(&[1.0, 2.0, 3.0], &[1.0, 3.0, 2.0]).unwrap();
    assert_close(line.slope, 0.5, 1e-15);
    assert_close(line.intercept, 1.0, 1e-15);
    assert_close(line.correlation, 0.5, 1e-15);
}

#[test]
fn what_points_leave_open_is_nan() {
    for (x, y) in [(vec![0.1; 3], vec![1.0, 2.0, 4.0]), (vec![2.0], vec![3.0])] {
        let line = Line::fit(&x, &y).unwrap();
        assert!(line.slope.is_nan() && line.intercept.is_nan() && line.correlation.is_nan(), "{line:?}");
    }
    let flat = Line::fit(&[1.0, 2.0, 4.0], &[0.1; 3]).unwrap();
    assert_close(flat.slope, 0.0, 1e-15);
    assert_close(flat.intercept, 0.1, 1e-15);
    assert!(flat.correlation.is_nan());
}

#[test]
fn a_figure_of_three_layers() {
    let figure = GateRescue::measure(&[-0.5, 0.0, 0.25], &[[0.75, 0.25], [0.5, 0.5], [0.25, 0.5]]).unwrap();
    assert_eq!(figure.points, [(-0.5, -0.5), (0.0, 0.0), (0.25, 0.25)]);
    assert_close(figure.mean_absolute_gate_gap, 0.25, 1e-15);
    assert_close(figure.line.slope, 1.0, 1e-15);
    assert_close(figure.line.correlation, 1.0, 1e-15);
}

#[test]
fn what_has_no_gap_is_refused() {
    assert_refused(
        write_gate_gap(Array2::zeros((4, 3)).view()),
        "write_gate_gap: `beta` has shape [4, 3], expected [tokens, 2]",
    );
    assert_refused(
        write_gate_gap(Array2::zeros((0, 2)).view()),
        "write_gate_gap: `beta` has shape [0, 2], expected at least one element an axis",
    );
    assert_refused(
        write_gate_gap(array![[1.0, f64::NAN]].view()),
        "write_gate_gap: `beta` is NaN at [0, 1], expected finite numbers",
    );
    assert_refused(
        GateRescue::measure(&[0.0, 1.0], &[[0.0, 1.0]]),
        "GateRescue::measure: `rescue_gains` has shape [1, 2], expected one pair a layer, 2 as of `gate_gaps`",
    );
    assert_refused(Line::fit(&[], &[]), "Line::fit: `x` has shape [0], expected at least one element an axis");
    assert_refused(Line::fit(&[1.0], &[1.0, 2.0]), "Line::fit: `y` has shape [2], expected [1] as of `x`");
}
