//! Whether the [host](crate::cuda) notices what a kernel must not do: faults are put into the source of a correct one.

use dar_kernels::pack::{Key, PackFwd, pack_fwd};
use dar_kernels::{Operand, Routing, Tuning};

use super::support::{EPS, F32, inverse_rms, keys};
use crate::cuda;
use crate::support::devices::{Request, request, say};
use crate::support::host::{relative_error, values};

/// Ten rows of two vectors a unit and a tail, over four planes.
const SHAPE: [usize; 3] = [5, 2, 1300];

/// Of a source.
type Edit = fn(&str) -> String;

const BARRIER: &str = "__syncthreads();";

/// How far off the history is that a kernel packs whose source was edited; what the host says against it.
fn pack(edit: Edit) -> Result<f64, String> {
    let client = cuda::edited_client(edit)?;
    let [tokens, streams, d_model] = SHAPE;
    let states = values(1, tokens * streams * d_model, 1.0);
    let bytes: Vec<u8> = states.iter().flat_map(|&x| (x as f32).to_le_bytes()).collect();
    let state = client.create_from_slice(&bytes);
    let [value, key] = [(); 2].map(|()| client.empty(bytes.len()));
    let inv_rms = client.empty(tokens * streams * size_of::<f32>());
    let history = [1, tokens, streams, d_model];
    let routing = Routing::SelfKeyValue;
    let operands = PackFwd {
        state: Operand::new(&state, &SHAPE, F32),
        value: Operand::new(&value, &history, F32),
        inv_rms: Operand::new(&inv_rms, &history[..3], F32),
        key: Some(Key { key: Operand::new(&key, &history, F32), routing }),
        entry: 0,
        eps: EPS,
    };
    pack_fwd(&client, operands, Tuning::default()).map_err(|error| error.to_string())?;
    let truths = [
        (value, states.clone()),
        (inv_rms, inverse_rms(&states, d_model, EPS)),
        (key, keys(&states, [streams, streams, d_model], routing, EPS)),
    ];
    let errors = truths.into_iter().map(|(handle, truth)| {
        let bytes = client.read_one(handle).map_err(|error| error.to_string())?;
        let found = bytes.chunks_exact(4).map(|x| f32::from_le_bytes(x.try_into().unwrap()).into());
        Ok(relative_error(&found.collect::<Vec<f64>>(), &truth, 1e-6))
    });
    errors.sum() // infinite if a value is not finite
}

#[test]
fn the_host_notices_faults() {
    let correct = match pack(str::to_owned) {
        Err(reason) if request() != Request::Required => return say(&format!("faults of CUDA source: {reason}")),
        correct => correct.unwrap(),
    };
    assert!(correct < 1e-5, "{correct:e}");

    let wrong: [(&str, Edit); 4] = [
        ("no barrier before the partials are read", |source| source.replacen(BARRIER, "", 1)),
        ("no barrier before the total is read", |source| {
            let (before, last) = source.rsplit_once(BARRIER).unwrap();
            format!("{before}{last}")
        }),
        ("a shuffle from another lane", |source| source.replacen("__shfl_xor_sync", "__shfl_up_sync", 1)),
        ("a plane that is left out", |source| source.replacen("+= v", "+= 2 * v", 1)),
    ];
    for (fault, edit) in wrong {
        let error = pack(edit).unwrap_or_else(|reason| panic!("{fault}: {reason}"));
        assert!(error > 1e-3, "{fault}: {error:e}");
    }

    let refused: [(&str, &str, Edit); 4] = [
        ("a column past the end", "past the end of buffer", |source| {
            let (_, after) = source.split_once(" < ").unwrap();
            let (vectors, _) = after.split_once(';').unwrap();
            source.replace(&format!(" < {vectors};"), &format!(" <= {vectors};"))
        }),
        ("a stray pointer", "memory of nobody", |source| source.replacen("&v1[", "&v1[(1u << 31) + ", 1)),
        ("a barrier for some", "different barriers", |source| {
            source.replacen(BARRIER, "if (threadIdx.x < 100) { __syncthreads(); }", 1)
        }),
        ("a shuffle of half a warp", "different places", |source| {
            source.replacen("__shfl_xor_sync(", "threadIdx.x % 32 < 16 ? 0.0f : __shfl_xor_sync(", 1)
        }),
    ];
    for (fault, message, edit) in refused {
        let error = pack(edit).expect_err(fault);
        assert!(error.contains(message), "{fault}: {error}");
    }
}
