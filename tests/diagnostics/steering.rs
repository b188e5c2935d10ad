use dar_burn::diagnostics::ndarray::{Array1, Array2, Axis, array};
use dar_burn::diagnostics::{
    BinaryConcept, DAMPING, STEERING_STEPS, Steering, SteeringMethod, TARGET_PROBABILITY, TOP_TOKENS,
    concept_direction, first_reach, steer, steering_step,
};

use super::{assert_all_close, assert_close, assert_refused, noise};

const DUAL: SteeringMethod = SteeringMethod::Dual { top: TOP_TOKENS, damping: DAMPING };

fn steering(method: SteeringMethod, step_size: f64) -> Steering {
    Steering { method, step_size, max_steps: STEERING_STEPS, threshold: TARGET_PROBABILITY }
}

#[test]
fn the_target_is_a_share_of_the_concept() {
    let concept = BinaryConcept::new(&[0, 2], &[1, 1], 5).unwrap();
    // 1 and 2 against 6, of which the other tokens' 100 take nothing.
    let logits = array![1.0, 6.0, 2.0, 50.0, 50.0].mapv(f64::ln);
    assert_close(concept.target_probability(logits.view()).unwrap(), 2.0 / 3.0, 1e-15);
    // Where neither word is likely, the share is still one.
    let unlikely = array![0.0, 3_f64.ln(), -1e5, 5000.0, 0.0];
    assert_close(concept.target_probability(unlikely.view()).unwrap(), 0.75, 1e-15);
}

#[test]
fn the_divergence_leaves_the_concept_out() {
    let concept = BinaryConcept::new(&[0], &[1], 4).unwrap();
    let clean = array![0.0, 0.0, 1.0, 1.0];
    let moved = array![-5.0, 9.0, 1.0, 1.0];
    assert_eq!(concept.off_target_kl(clean.view(), moved.view()).unwrap(), 0.0);
    // (1/2, 1/2) against (1/4, 3/4)
    let leaking = array![-5.0, 9.0, 0.0, 3_f64.ln()];
    let truth = 0.5 * 2_f64.ln() + 0.5 * (2.0_f64 / 3.0).ln();
    assert_close(concept.off_target_kl(clean.view(), leaking.view()).unwrap(), truth, 1e-15);
}

#[test]
fn the_first_step_at_the_threshold_is_reported() {
    let concept = BinaryConcept::new(&[0], &[1], 3).unwrap();
    let odds = |odds: f64| array![0.0, odds.ln(), 0.0];
    let mut asked = 0;
    let steered = [2.0, 5.0, 100.0].map(odds).into_iter().inspect(|_| asked += 1).map(Ok);
    let reach = first_reach(&concept, 0.8, odds(1.0).view(), steered).unwrap().unwrap();
    assert_eq!((reach.steps, reach.off_target_kl, asked), (2, 0.0, 2));
    assert_close(reach.target_probability, 5.0 / 6.0, 1e-15);

    assert_eq!(first_reach(&concept, 0.8, odds(1.0).view(), [Ok(odds(2.0))]).unwrap(), None);
    let exactly = concept.target_probability(odds(3.0).view()).unwrap();
    let reach = first_reach(&concept, exactly, odds(1.0).view(), [Ok(odds(3.0))]).unwrap().unwrap();
    assert_eq!((reach.steps, reach.target_probability), (1, exactly));
    let at_once = first_reach(&concept, 0.8, odds(9.0).view(), []).unwrap().unwrap();
    assert_eq!((at_once.steps, at_once.off_target_kl), (0, 0.0));
}

#[test]
fn euclidean_steering_in_closed_form() {
    // Tokens: base, target, and two others, of which the direction also favours one.
    let unembedding = array![[-1.0, 0.0], [1.0, 0.0], [1.0, 1.0], [0.0, 1.0]];
    let concept = BinaryConcept::new(&[0], &[1], 4).unwrap();
    let state = array![0.0, 0.3];
    let reach = steer(
        state.view(),
        array![5.0, 0.0].view(),
        unembedding.view(),
        &concept,
        &steering(SteeringMethod::Euclidean, 0.1),
    );
    // sigmoid(2 t) ≥ 0.8 from t = ln 4 / 2 = 0.693 on; the others go from (1/2, 1/2) to softmax(t, 0).
    let reach = reach.unwrap().unwrap();
    assert_eq!(reach.steps, 7);
    assert_close(reach.target_probability, 1.0 / (1.0 + (-1.4_f64).exp()), 1e-14);
    let truth = (1.0 + 0.7_f64.exp()).ln() - 0.35 - 2_f64.ln();
    assert_close(reach.off_target_kl, truth, 1e-14);
}

#[test]
fn a_dual_step_moves_the_expectation_along_the_direction() {
    let (unembedding, state, primal) = (noise(1, (40, 3)), noise(2, 3), noise(3, 3));
    let expectation = |state: &Array1<f64>| {
        let exp = unembedding.dot(state).mapv(f64::exp);
        (&exp / exp.sum()).dot(&unembedding)
    };
    let method = SteeringMethod::Dual { top: TOP_TOKENS, damping: 0.0 };
    let moved = steering_step(state.view(), primal.view(), 1e-5, method, unembedding.view()).unwrap();
    let step = &moved - &state;
    assert_close(step.dot(&step).sqrt(), 1e-5, 1e-14);
    let change = expectation(&moved) - expectation(&state);
    let cosine = change.dot(&primal) / (change.dot(&change) * primal.dot(&primal)).sqrt();
    assert_close(cosine, 1.0, 1e-8);
}

#[test]
fn dual_steering_disturbs_less_where_the_metric_is_far_from_round() {
    // Park et al. prove the dual direction optimal at the output; here the unembedding is stretched along one axis.
    let mut unembedding = noise(1, (60, 6));
    unembedding.column_mut(0).mapv_inplace(|x| 8.0 * x);
    let pick = |rows: &[usize]| unembedding.select(Axis(0), rows);
    let (base, target) = ([0, 1, 2], [3, 4, 5]);
    let primal = concept_direction(pick(&base).view(), pick(&target).view()).unwrap();
    let concept = BinaryConcept::new(&base, &target, 60).unwrap();
    let state = noise(9, 6) * 0.1;
    let reach = |method| {
        let steering = steering(method, 0.02);
        steer(state.view(), primal.view(), unembedding.view(), &concept, &steering).unwrap().unwrap()
    };
    let (euclidean, dual) = (reach(SteeringMethod::Euclidean), reach(DUAL));
    assert!(euclidean.steps > 0 && dual.steps > 0);
    assert!(dual.off_target_kl < euclidean.off_target_kl, "{dual:?}, {euclidean:?}");
}

#[test]
fn steps_have_their_length() {
    let unembedding = noise(1, (10, 4));
    let (state, primal) = (noise(2, 4), array![0.0, 3.0, 0.0, 4.0]);
    let euclidean = SteeringMethod::Euclidean;
    let moved = steering_step(state.view(), primal.view(), 2.0, euclidean, unembedding.view()).unwrap();
    assert_all_close(&(&moved - &state), &array![0.0, 1.2, 0.0, 1.6], 1e-15);
    let back = steering_step(moved.view(), primal.view(), -2.0, euclidean, unembedding.view()).unwrap();
    assert_all_close(&back, &state, 1e-15);
}

#[test]
fn giving_up_is_no_error() {
    let unembedding = noise(1, (10, 4));
    let concept = BinaryConcept::new(&[0], &[1], 10).unwrap();
    let steering = Steering { max_steps: 0, threshold: 1.0, ..steering(SteeringMethod::Euclidean, 1.0) };
    let reach = steer(noise(2, 4).view(), noise(3, 4).view(), unembedding.view(), &concept, &steering);
    assert_eq!(reach.unwrap(), None);
}

#[test]
fn what_is_no_concept_is_refused() {
    let concept = |base: &[usize], target: &[usize]| BinaryConcept::new(base, target, 3);
    assert_refused(concept(&[], &[1]), "BinaryConcept::new: `base` has shape [0], expected at least one token");
    assert_refused(concept(&[0], &[3]), "BinaryConcept::new: `target` is 3, expected ids below vocab = 3");
    assert_refused(
        concept(&[0, 1], &[1]),
        "BinaryConcept::new: `target` is 1, expected ids that are not on the other side",
    );
    assert_refused(
        concept(&[0, 1], &[2]),
        "BinaryConcept::new: `vocab` is 3, expected larger than the concept's words",
    );
}

#[test]
fn what_cannot_be_steered_is_refused() {
    let concept = BinaryConcept::new(&[0], &[1], 3).unwrap();
    let (unembedding, state) = (noise(1, (3, 2)), array![0.0, 1.0]);
    let step = |state: &Array1<f64>, primal: &Array1<f64>, size, method, unembedding: &Array2<f64>| {
        steering_step(state.view(), primal.view(), size, method, unembedding.view())
    };
    let euclidean = SteeringMethod::Euclidean;
    assert_refused(
        step(&state, &array![1.0], 1.0, euclidean, &unembedding),
        "steering_step: `primal` has shape [1], expected [d_model] = [2] as of `state`",
    );
    assert_refused(
        step(&state, &array![0.0, 0.0], 1.0, euclidean, &unembedding),
        "steering_step: `primal` is a direction of length 0, expected one of finite length > 0",
    );
    assert_refused(
        step(&state, &state, f64::NAN, euclidean, &unembedding),
        "steering_step: `size` is NaN, expected a finite number",
    );
    assert_refused(
        step(&array![f64::NAN, 1.0], &state, 1.0, euclidean, &unembedding),
        "steering_step: `state` is NaN at [0], expected finite numbers",
    );
    assert_refused(
        step(&state, &state, 1.0, DUAL, &noise(1, (3, 4))),
        "steering_step: `unembedding` has shape [3, 4], expected [vocab, d_model] with d_model = 2 as of `state`",
    );
    assert_refused(
        concept.target_probability(array![1.0, 2.0].view()),
        "BinaryConcept::target_probability: `logits` has shape [2], expected [vocab] = [3]",
    );
    assert_refused(
        concept.off_target_kl(array![1.0, 2.0, 3.0].view(), array![1.0, f64::NAN, 3.0].view()),
        "BinaryConcept::off_target_kl: `steered` is NaN at [1], expected finite numbers",
    );
    assert_refused(
        first_reach(&concept, 0.0, array![0.0, 0.0, 0.0].view(), []),
        "first_reach: `threshold` is 0, expected a number in (0, 1]",
    );
}
