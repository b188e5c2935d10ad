use dar_burn::diagnostics::{DepthSplit, EarlyLate};

use super::assert_refused;

#[test]
fn forty_three_layers_split_as_in_the_paper() {
    let split = DepthSplit::half(43).unwrap();
    assert_eq!(split.late_from(), 22);
    let EarlyLate { early, late } = split.split(&[(); 86]).unwrap();
    assert_eq!((early.len(), late.len()), (44, 42)); // sites
}

#[test]
fn values_a_layer_or_a_branch() {
    let split = DepthSplit::at(3, 1).unwrap();
    assert_eq!(split.split(&['a', 'b', 'c']).unwrap(), EarlyLate { early: &['a'][..], late: &['b', 'c'][..] });
    let means = split.means(&[1.0, 3.0, 0.0, 1.0, 2.0, 5.0]).unwrap();
    assert_eq!(means, EarlyLate { early: 2.0, late: 2.0 });
    let dominated = split.dominated(&[0, 0, 2, 1, 2, 2], 4).unwrap();
    assert_eq!(dominated, EarlyLate { early: vec![2, 0, 0, 0], late: vec![0, 1, 3, 0] });
}

#[test]
fn what_cannot_be_split_is_refused() {
    assert_refused(DepthSplit::half(1), "DepthSplit::half: `layers` is 1, expected at least 2");
    for late_from in [0, 3] {
        let message = format!("DepthSplit::at: `late_from` is {late_from}, expected 1 to below layers = 3");
        assert_refused(DepthSplit::at(3, late_from), &message);
    }
    let split = DepthSplit::half(2).unwrap();
    assert_refused(
        split.split(&[1, 2, 3]),
        "DepthSplit::split: `values` has shape [3], expected a multiple of layers = 2",
    );
    assert_refused(
        split.split::<f64>(&[]),
        "DepthSplit::split: `values` has shape [0], expected a multiple of layers = 2",
    );
    assert_refused(split.means(&[1.0, f64::NAN]), "DepthSplit::means: `values` is NaN at [1], expected finite numbers");
    assert_refused(split.dominated(&[0, 2], 2), "DepthSplit::dominated: `dominant` is 2, expected below streams = 2");
}
