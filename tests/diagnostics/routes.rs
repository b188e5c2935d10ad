use dar_burn::diagnostics::ndarray::{Array3, array};
use dar_burn::diagnostics::{RouteUse, differing_winners};

use super::{assert_all_close, assert_close, assert_refused};

#[test]
fn uniform_weights_use_all_streams_and_one_hot_weights_one() {
    for streams in 1..6 {
        let uniform = RouteUse::measure(Array3::from_elem((2, 3, streams), 0.7).view()).unwrap();
        assert_close(uniform.effective_streams, streams as f64, 1e-14);
        assert_eq!((uniform.winner_consistency, uniform.dominant(), uniform.lowest()), (1.0, 0, 0));
        let one_hot = Array3::from_shape_fn((2, 3, streams), |(_, _, i)| f64::from(i == streams - 1));
        let one_hot = RouteUse::measure(one_hot.view()).unwrap();
        assert_eq!((one_hot.effective_streams, one_hot.winner_consistency), (1.0, 1.0));
        assert_eq!(one_hot.dominant(), streams - 1);
    }
}

#[test]
fn two_sequences_by_hand() {
    // Shares: (3/4, 1/4), (1/2, 1/2), (1/4, 3/4) and three times (1, 0).
    let weights = array![[[3.0, 1.0], [0.1, 0.1], [0.5, 1.5]], [[2.0, 0.0], [1e-3, 0.0], [9.0, 0.0]]];
    let route = RouteUse::measure(weights.view()).unwrap();
    assert_all_close(&route.load, &array![0.75, 0.25], 1e-15);
    assert_close(route.effective_streams, (2.0 + 1.0) / 2.0, 1e-14);
    // Winners 0, 0 (tie), 1 and 0, 0, 0.
    assert_close(route.winner_consistency, (2.0 / 3.0 + 1.0) / 2.0, 1e-15);
    assert_eq!((route.dominant(), route.lowest()), (0, 1));
}

#[test]
fn the_lower_stream_wins_a_tie() {
    let route = RouteUse::measure(array![[[1.0, 1.0], [2.0, 1.0], [3.0, 1.0]]].view()).unwrap();
    assert_eq!(route.winner_consistency, 1.0);
}

#[test]
fn tokens_that_take_turns_use_all_streams_without_agreeing() {
    let turns = Array3::from_shape_fn((1, 8, 4), |(_, t, i)| f64::from(t % 4 == i));
    let route = RouteUse::measure(turns.view()).unwrap();
    assert_close(route.effective_streams, 4.0, 1e-14);
    assert_eq!(route.winner_consistency, 0.25);
}

#[test]
fn negative_weights_count_by_magnitude() {
    let route = RouteUse::measure(array![[[-3.0, 1.0]]].view()).unwrap();
    assert_all_close(&route.load, &array![0.75, 0.25], 1e-15);
    assert_eq!((route.dominant(), route.winner_consistency), (0, 1.0));
}

#[test]
fn large_weights_do_not_overflow() {
    let route = RouteUse::measure(array![[[1.5e308, 1.5e308]]].view()).unwrap();
    assert_all_close(&route.load, &array![0.5, 0.5], 1e-15);
}

#[test]
fn winners_are_compared_site_by_site() {
    let site = |[a, b, c]: [f64; 3]| RouteUse::measure(array![[[a, b, c]]].view()).unwrap();
    let first = || site([3.0, 2.0, 1.0]);
    let last = || site([0.0, 2.0, 3.0]);
    assert_eq!(first().lowest(), 2);
    assert_eq!(last().lowest(), 0);
    let reads = [first(), first(), last(), last()];
    assert_eq!(differing_winners(&reads, &[first(), last(), last(), last()]).unwrap(), 0.25);
    assert_refused(
        differing_winners(&reads, &[first()]),
        "differing_winners: `writes` has shape [1], expected one a site, 4 as of `reads`",
    );
    assert_refused(differing_winners(&[], &[]), "differing_winners: `reads` has shape [0], expected at least one site");
}

#[test]
fn what_routes_nothing_is_refused() {
    assert_refused(
        RouteUse::measure(array![[[1.0, 0.0], [0.0, 0.0]]].view()),
        "RouteUse::measure: `weights` is all zero at [0, 1], expected a weight that is not zero for every token",
    );
    assert_refused(
        RouteUse::measure(array![[[1.0, f64::NAN]]].view()),
        "RouteUse::measure: `weights` is NaN at [0, 0, 1], expected finite numbers",
    );
    assert_refused(
        RouteUse::measure(Array3::zeros((1, 0, 2)).view()),
        "RouteUse::measure: `weights` has shape [1, 0, 2], expected at least one element an axis",
    );
}
