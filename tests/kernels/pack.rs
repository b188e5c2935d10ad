use cubecl::prelude::*;
use dar_burn::Routing;
use dar_kernels::Tuning;
use dar_kernels::pack::{Key, PackFwd, pack_fwd};

use super::support::{
    Buffer, EPS, F16, F32, STORAGE, all_reductions, assert_close, assert_only_token, bound, clients, few, golden_cases,
    inverse_rms, keys, routing, stores,
};
use crate::support::host::values;

/// Values and inverse RMS of a history of `capacity` entries that starts as NaN, after packing `states` in turn.
fn run(
    client: &Client,
    dtype: ElemType,
    tuning: Tuning,
    [tokens, streams, d_model]: [usize; 3],
    states: &[(usize, &[f64])], // entry, [tokens, streams, d_model] or [tokens, d_model]
    capacity: usize,
    eps: f64,
) -> [Vec<f64>; 2] {
    let value = Buffer::output(client, &[capacity, tokens, streams, d_model], dtype);
    let inv_rms = Buffer::output(client, &[capacity, tokens, streams], F32);
    for &(entry, state) in states {
        let shared = state.len() < tokens * streams * d_model;
        let shape: &[usize] = if shared { &[tokens, d_model] } else { &[tokens, streams, d_model] };
        let state = Buffer::new(client, shape, dtype, state);
        let operands = PackFwd {
            state: state.operand(),
            value: value.operand(),
            inv_rms: inv_rms.operand(),
            key: None,
            entry,
            eps,
        };
        pack_fwd(client, operands, tuning).unwrap();
    }
    [value.read(), inv_rms.read()]
}

/// The normalised keys of the golden cases are `inv_rms * value`.
#[test]
fn golden() {
    for (client, device) in clients() {
        for case in golden_cases("pack_") {
            let history = case.tensor("H").unwrap().swap_axes(1); // [R, N, 2, D]
            let keys = case.tensor("out.K").unwrap().swap_axes(1).values;
            let &[entries, tokens, 2, d_model] = history.shape.as_slice() else { panic!("two streams") };
            let length = tokens * 2 * d_model;
            let states: Vec<_> = history.values.chunks(length).enumerate().collect();
            let (eps, routing) = (case.eps().unwrap(), routing(&case));
            let dims = [tokens, 2, d_model];
            let [value, inv_rms] = run(&client, F32, Tuning::default(), dims, &states, entries, eps);
            let got: Vec<f64> = (0..entries * tokens * 2 * d_model)
                .map(|k| {
                    let (row, column) = (k / d_model, k % d_model);
                    let key = row / 2 * 2 + routing.key_stream(row % 2);
                    inv_rms[key] * value[key * d_model + column]
                })
                .collect();
            assert_close(&format!("{} on {device}", case.name), &[("keys", &got, &keys, 1e-5)]);
        }
    }
}

/// Any width, no token, one; only the packed entry changes.
#[test]
fn any_size() {
    for (client, device) in clients() {
        for dtype in STORAGE.into_iter().filter(|&dtype| stores(&client, dtype)) {
            for tuning in all_reductions(&client) {
                for [tokens, streams, d_model] in
                    [[257, 2, 1], [130, 2, 3], [1, 1, 37], [37, 2, 130], [3, 2, 257], [2, 1, 5000], [0, 2, 8]]
                {
                    let tokens = few(&client, tokens);
                    let state = values(1, tokens * streams * d_model, 2.0);
                    let dims = [tokens, streams, d_model];
                    let [value, inv_rms] = run(&client, dtype, tuning, dims, &[(1, &state)], 3, EPS);
                    let about = format!("{dims:?} in {dtype} on {device}, {tuning:?}");
                    let (length, rows) = (tokens * streams * d_model, tokens * streams);
                    assert_eq!(value[length..2 * length], state, "{about}");
                    let truth = inverse_rms(&state, d_model, EPS);
                    assert_close(&about, &[("inv_rms", &inv_rms[rows..2 * rows], &truth, 1e-5)]);
                    let others = value[..length].iter().chain(&value[2 * length..]);
                    let others = others.chain(&inv_rms[..rows]).chain(&inv_rms[2 * rows..]);
                    assert!({ others }.all(|x| x.is_nan()), "{about}: another entry changed");
                }
            }
        }
    }
}

/// The paper's packing of the golden cases: keys in a buffer of their own, next to the same values.
#[test]
fn golden_keys() {
    for (client, device) in clients() {
        for case in golden_cases("pack_") {
            let history = case.tensor("H").unwrap().swap_axes(1); // [R, N, 2, D]
            let truth = case.tensor("out.K").unwrap().swap_axes(1).values;
            let &[entries, tokens, 2, d_model] = history.shape.as_slice() else { panic!("two streams") };
            let (eps, routing) = (case.eps().unwrap(), routing(&case));
            for dtype in STORAGE.into_iter().filter(|&dtype| stores(&client, dtype)) {
                let found = run_keyed(
                    &client,
                    dtype,
                    Tuning::default(),
                    [entries, tokens, 2, 2, d_model],
                    &history.values,
                    routing,
                    eps,
                );
                let about = format!("{} in {dtype} on {device}", case.name);
                assert_close(&about, &[("key", &found, &truth, bound(dtype))]);
            }
        }
    }
}

/// Any width and number of streams, one output of two streams, an embedding that the streams share.
#[test]
fn keys_of_any_size() {
    for (client, device) in clients() {
        for dtype in STORAGE.into_iter().filter(|&dtype| stores(&client, dtype)) {
            for tuning in all_reductions(&client) {
                for ([tokens, streams, outputs, d_model], routing) in [
                    ([5, 2, 2, 1], Routing::CrossKey),
                    ([5, 2, 2, 3], Routing::CrossValue),
                    ([3, 2, 2, 257], Routing::CrossKey),
                    ([3, 2, 2, 24], Routing::FixedKeyValue),
                    ([3, 2, 1, 130], Routing::FixedKeyValue),
                    ([1, 1, 1, 37], Routing::SelfKeyValue),
                    ([5, 4, 4, 24], Routing::SelfKeyValue),
                    ([0, 2, 2, 8], Routing::CrossKey),
                ] {
                    let about = format!("{tokens} × {streams} × {d_model}, {routing:?} in {dtype} on {device}");
                    let dims = [2, tokens, streams, outputs, d_model];
                    let embedding = values(1, tokens * d_model, 2.0);
                    let all: Vec<f64> = embedding.chunks(d_model).flat_map(|row| row.repeat(streams)).collect();
                    let states = [all, values(2, tokens * streams * d_model, 2.0)].concat();
                    let truth = keys(&states, [streams, outputs, d_model], routing, EPS);
                    let found = run_keyed(&client, dtype, tuning, dims, &states, routing, EPS);
                    assert_close(&about, &[("key", &found, &truth, bound(dtype))]);
                    if tokens == 0 {
                        continue;
                    }
                    let shared = [embedding, states[tokens * streams * d_model..].to_vec()].concat();
                    assert_eq!(run_keyed(&client, dtype, tuning, dims, &shared, routing, EPS), found, "{about}");
                }
            }
        }
    }
}

/// The keys of entries that are packed in turn, next to values and inverse RMS that do not depend on them. The first
/// entry of `states` is `[tokens, d_model]` where the rest has no room for all of its streams.
fn run_keyed(
    client: &Client,
    dtype: ElemType,
    tuning: Tuning,
    [entries, tokens, streams, outputs, d_model]: [usize; 5],
    states: &[f64],
    routing: Routing,
    eps: f64,
) -> Vec<f64> {
    let length = tokens * streams * d_model;
    let (first, others) = states.split_at(states.len() - (entries - 1) * length);
    let others = others.chunks(length.max(1)).chain(std::iter::repeat(&[][..]));
    let states: Vec<_> = std::iter::once(first).chain(others).take(entries).enumerate().collect();

    let value = Buffer::output(client, &[entries, tokens, streams, d_model], dtype);
    let inv_rms = Buffer::output(client, &[entries, tokens, streams], F32);
    let key = Buffer::output(client, &[entries, tokens, outputs, d_model], dtype);
    for &(entry, state) in &states {
        let shape: &[usize] = if state.len() < length { &[tokens, d_model] } else { &[tokens, streams, d_model] };
        let state = Buffer::new(client, shape, dtype, state);
        let operands = PackFwd {
            state: state.operand(),
            value: value.operand(),
            inv_rms: inv_rms.operand(),
            key: Some(Key { key: key.operand(), routing }),
            entry,
            eps,
        };
        pack_fwd(client, operands, tuning).unwrap();
    }
    let apart = run(client, dtype, tuning, [tokens, streams, d_model], &states, entries, eps);
    assert_eq!([value.read(), inv_rms.read()], apart, "keys changed what is packed beside them");
    key.read()
}

/// An embedding is what every stream starts with.
#[test]
fn all_streams_from_one_state() {
    for (client, device) in clients() {
        for dtype in STORAGE.into_iter().filter(|&dtype| stores(&client, dtype)) {
            for [tokens, streams, d_model] in [[5, 2, 3], [3, 2, 130], [1, 4, 37]] {
                let embedding = values(1, tokens * d_model, 2.0);
                let all: Vec<f64> = embedding.chunks(d_model).flat_map(|row| row.repeat(streams)).collect();
                let run = |state: &[f64]| {
                    run(&client, dtype, Tuning::default(), [tokens, streams, d_model], &[(0, state)], 1, EPS)
                };
                let found = run(&embedding);
                assert_eq!(found[0], all, "{device}");
                assert_eq!(found, run(&all), "{tokens} × {streams} × {d_model} in {dtype} on {device}");
            }
        }
    }
}

#[test]
fn one_token_never_leaks_into_another() {
    for (client, device) in clients() {
        let mut state = values(2, 4 * 2 * 24, 1.0);
        let run = |state: &[f64]| run(&client, F32, Tuning::default(), [4, 2, 24], &[(0, state)], 1, EPS);
        let [_, clean] = run(&state);
        state[2 * 24] = f64::NAN; // token 1
        let [_, inv_rms] = run(&state);
        assert_only_token(device, &inv_rms, &clean, [4, 1, 2]);
    }
}

#[test]
fn refusals_name_operation_argument_expected_and_got() {
    for (client, _) in clients() {
        let buffer = |shape: &[usize], dtype| Buffer::new(&client, shape, dtype, &vec![1.0; shape.iter().product()]);
        let (state, value, inv_rms) = (buffer(&[5, 2, 8], F32), buffer(&[3, 5, 2, 8], F32), buffer(&[3, 5, 2], F32));
        let half = buffer(&[3, 5, 2, 8], F16);
        let right = PackFwd {
            state: state.operand(),
            value: value.operand(),
            inv_rms: inv_rms.operand(),
            key: None,
            entry: 2,
            eps: EPS,
        };
        let run = |operands| pack_fwd(&client, operands, Tuning::default());
        assert_eq!(run(right), Ok(()));
        let key = |key, routing| Some(Key { key, routing });
        let refused: [(_, &[&str]); 6] = [
            (
                run(PackFwd { key: key(state.operand(), Routing::CrossKey), ..right }),
                &["`key`", "[5, 2, 8]", "[capacity, tokens, outputs, d_model]"],
            ),
            (run(PackFwd { key: key(half.operand(), Routing::CrossKey), ..right }), &["`key`", "f16", "f32"]),
            (run(PackFwd { entry: 3, ..right }), &["`value`", "[3, 5, 2, 8]", "capacity ≥ 4"]),
            (run(PackFwd { eps: f64::NAN, ..right }), &["`eps` is NaN", "finite"]),
            (run(PackFwd { value: half.operand(), ..right }), &["`value`", "f16", "f32"]),
            (run(PackFwd { state: inv_rms.operand(), ..right }), &["`state`", "[3, 5, 2]", "[5, 2, 8]"]),
        ];
        for (result, parts) in refused {
            let message = result.unwrap_err().to_string();
            assert!(message.starts_with("pack_fwd: "), "{message}");
            for part in parts {
                assert!(message.contains(part), "{message} does not name {part}");
            }
        }
    }
}
