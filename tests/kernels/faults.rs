//! Whether the [host](crate::cuda) notices what a kernel must not do: faults are put into the source of a correct one.

use cubecl::prelude::*;
use dar_kernels::pack::{PackFwd, pack_fwd};
use dar_kernels::{Operand, Tuning};

use super::support::{EPS, F32, inverse_rms};
use crate::cuda;
use crate::support::devices::{Request, request, say};
use crate::support::host::{relative_error, values};

/// Ten rows of two vectors a unit and a tail, over eight planes.
const SHAPE: [usize; 3] = [5, 2, 1300];

/// Inverse RMS of some states by a kernel whose source was edited; the error of CubeCL, or what a GPU would not say.
fn pack(edit: fn(&str) -> String) -> Result<f64, String> {
    let client = cuda::edited_client(edit)?;
    let states = values(1, SHAPE.iter().product(), 1.0);
    let bytes: Vec<u8> = states.iter().flat_map(|&x| (x as f32).to_le_bytes()).collect();
    let state = client.create_from_slice(&bytes);
    let (value, inv_rms) = (client.empty(bytes.len()), client.empty(SHAPE[0] * SHAPE[1] * 4));
    let [tokens, streams, d_model] = SHAPE;
    let operands = PackFwd {
        state: Operand::new(&state, &SHAPE, F32),
        value: Operand::new(&value, &[1, tokens, streams, d_model], F32),
        inv_rms: Operand::new(&inv_rms, &[1, tokens, streams], F32),
        key: None,
        entry: 0,
        eps: EPS,
    };
    pack_fwd(&client, operands, Tuning::default()).map_err(|error| error.to_string())?;
    let read = |handle| client.read_one(handle).map_err(|error| error.to_string());
    let (value, inv_rms) = (read(value)?, read(inv_rms)?);
    let inv_rms: Vec<f64> = inv_rms.chunks_exact(4).map(|x| f32::from_le_bytes(x.try_into().unwrap()).into()).collect();
    assert_eq!(*value, *bytes);
    Ok(relative_error(&inv_rms, &inverse_rms(&states, d_model, EPS), 1e-6))
}

#[test]
fn the_host_notices_faults() {
    let correct = match pack(str::to_owned) {
        Err(reason) if request() != Request::Required => return say(&format!("faults of CUDA source: {reason}")),
        correct => correct.unwrap(),
    };
    assert!(correct < 1e-5, "{correct:e}");

    // Each leaves the value NaN or another one.
    let wrong: [(&str, fn(&str) -> String); 4] = [
        ("no barrier before the partials are read", |source| source.replacen("__syncthreads();", "", 1)),
        ("no barrier before the total is read", |source| {
            let (before, last) = source.rsplit_once("__syncthreads();").unwrap();
            format!("{before}{last}")
        }),
        ("a shuffle from another lane", |source| source.replacen("__shfl_xor_sync", "__shfl_up_sync", 1)),
        ("a column that is left out", |source| source.replacen("+= v", "+= 2 * v", 1)),
    ];
    for (fault, edit) in wrong {
        let error = pack(edit).unwrap();
        assert!(!(error < 1e-3), "{fault}: {error:e}");
    }

    // Each is an error.
    let errors: [(&str, &str, fn(&str) -> String); 4] = [
        ("a column past the end", "past the end", |source| {
            let (before, after) = source.split_once("for(").unwrap();
            format!("{before}for({}", after.replacen(" < ", " <= ", 1))
        }),
        ("a stray pointer", "memory of nobody", |source| source.replacen("blockIdx.x", "(blockIdx.x + 1000000)", 1)),
        ("a barrier of some", "never come", |source| {
            source.replacen("__syncthreads();", "if (threadIdx.x < 100) __syncthreads();", 1)
        }),
        ("two barriers of some each", "different barriers", |source| {
            let some = "if (threadIdx.x < 100) { __syncthreads(); } else { __syncthreads(); }";
            source.replacen("__syncthreads();", some, 1)
        }),
    ];
    for (fault, message, edit) in errors {
        let error = pack(edit).expect_err(fault);
        assert!(error.contains(message), "{fault}: {error}");
    }
}
