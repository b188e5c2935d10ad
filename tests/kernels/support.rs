//! Buffers of a CubeCL client from and to float64.

use std::path::Path;
use std::sync::Once;

use burn::backend::DispatchDevice;
use burn::tensor::{Gradients, Tensor, TensorData};
use cubecl::ir::FloatKind;
use cubecl::prelude::*;
use cubecl::server::Handle;
use dar_burn::Routing;
use dar_burn::ops::History;
use dar_kernels::site::{GateOperands, SiteOperands};
use dar_kernels::{Operand, Reduction, Tuning};

use crate::cuda;
use crate::support::devices::{Request, devices, flex, request, say, write_line};
use crate::support::golden::{Case, case_files};
use crate::support::golden_folder;
use crate::support::host::relative_error;

pub const EPS: f64 = 1e-6;
pub const F32: ElemType = ElemType::Float(FloatKind::F32);
pub const F16: ElemType = ElemType::Float(FloatKind::F16);
pub const BF16: ElemType = ElemType::Float(FloatKind::BF16);
/// All types that kernels store.
pub const STORAGE: [ElemType; 3] = [F32, F16, BF16];

/// A client of every CubeCL device that the tests run on, with the device's name; the last one runs CUDA source here.
pub fn clients() -> Vec<(Client, &'static str)> {
    let cube = devices().into_iter().filter_map(|opened| match opened.device.as_dispatch() {
        DispatchDevice::Cube(device) => Some((device.client(), opened.name.as_str())),
        _ => None,
    });
    cube.chain(cuda_source()).collect()
}

fn cuda_source() -> Option<(Client, &'static str)> {
    static SAID: Once = Once::new();
    let request = request();
    if request == Request::No {
        return None;
    }
    let client = cuda::client();
    SAID.call_once(|| match &client {
        Ok(_) => write_line(&format!("tests of the kernels run on {}", cuda::NAME)),
        Err(reason) => say(&format!("{}, the only run in bf16 without a GPU: {reason}", cuda::NAME)),
    });
    match client {
        Ok(client) => Some((client, cuda::NAME)),
        Err(reason) if request == Request::Required => panic!("{} is required: {reason}", cuda::NAME),
        Err(_) => None,
    }
}

/// The ways to add in a cube that a test goes through: both, but on [CUDA source](cuda) that of the device alone, as
/// each is a kernel more to compile there.
pub fn reductions(client: &Client) -> Vec<Tuning> {
    if client.name() == cuda::NAME { vec![Tuning::default()] } else { all_reductions(client) }
}

/// So many tokens, or as many as make several rounds of a few cubes on [CUDA source](cuda), where a thread is a fibre.
pub fn few(client: &Client, tokens: usize) -> usize {
    if client.name() == cuda::NAME { tokens.min(17) } else { tokens }
}

/// Both ways to add in a cube; the plane path where the device's planes have one size.
pub fn all_reductions(client: &Client) -> Vec<Tuning> {
    let planes = Reduction::forced_planes(client).map_err(|error| say(&error.to_string())).ok();
    let all = [Some(Reduction::Shared), planes].into_iter().flatten();
    all.map(|reduction| Tuning { reduction: Some(reduction) }).collect()
}

/// Whether `client` stores `dtype`; says so where it does not.
pub fn stores(client: &Client, dtype: ElemType) -> bool {
    let stores = client.properties().supports_type(dtype);
    if !stores {
        say(&format!("kernels in {dtype} on {}: not a type of the device", client.name()));
    }
    stores
}

/// The bound of a relative RMS error: f32's, or two units in the last place of what a half type rounds to.
pub fn bound(dtype: ElemType) -> f64 {
    match dtype {
        F16 => 2.0 * f64::from(half::f16::EPSILON),
        BF16 => 2.0 * f64::from(half::bf16::EPSILON),
        _ => 1e-5,
    }
}

/// A tensor on a device.
pub struct Buffer {
    client: Client,
    handle: Handle,
    shape: Vec<usize>,
    dtype: ElemType,
}

impl Buffer {
    /// `values` in `dtype`.
    pub fn new(client: &Client, shape: &[usize], dtype: ElemType, values: &[f64]) -> Self {
        assert_eq!(values.len(), shape.iter().product::<usize>());
        let mut bytes: Vec<u8> = match dtype {
            F16 => values.iter().flat_map(|&x| half::f16::from_f64(x).to_le_bytes()).collect(),
            BF16 => values.iter().flat_map(|&x| half::bf16::from_f64(x).to_le_bytes()).collect(),
            _ => values.iter().flat_map(|&x| (x as f32).to_le_bytes()).collect(),
        };
        bytes.resize(bytes.len().max(16), 0); // no device allocates nothing
        Self { client: client.clone(), handle: client.create_from_slice(&bytes), shape: shape.to_vec(), dtype }
    }

    /// An output: what a kernel leaves out stays NaN.
    pub fn output(client: &Client, shape: &[usize], dtype: ElemType) -> Self {
        Self::new(client, shape, dtype, &vec![f64::NAN; shape.iter().product()])
    }

    /// A tensor of `rows` rows, those from `first` on holding `values`, the others NaN. `shape`: of a row.
    pub fn arena(client: &Client, [rows, first]: [usize; 2], shape: &[usize], dtype: ElemType, values: &[f64]) -> Self {
        let length = shape.iter().product::<usize>();
        let mut all = vec![f64::NAN; rows * length];
        all[first * length..][..values.len()].copy_from_slice(values);
        Self::new(client, &[&[rows], shape].concat(), dtype, &all)
    }

    /// Rows `first..first + count`; the others are NaN still.
    #[track_caller]
    pub fn rows(&self, first: usize, count: usize) -> Vec<f64> {
        let length = self.shape[1..].iter().product::<usize>();
        let mut all = self.read();
        let mut others = all.split_off((first + count) * length);
        let own = all.split_off(first * length);
        others.extend(all);
        assert!(others.iter().all(|x| x.is_nan()), "a row of no concern changed");
        own
    }

    pub fn operand(&self) -> Operand<'_> {
        Operand::new(&self.handle, &self.shape, self.dtype)
    }

    pub fn read(&self) -> Vec<f64> {
        let bytes = self.client.read_one(self.handle.clone()).expect("the kernels of the test ran");
        let length = self.shape.iter().product();
        let values: Vec<f64> = match self.dtype {
            F16 => bytes.chunks_exact(2).map(|x| half::f16::from_le_bytes([x[0], x[1]]).to_f64()).collect(),
            BF16 => bytes.chunks_exact(2).map(|x| half::bf16::from_le_bytes([x[0], x[1]]).to_f64()).collect(),
            _ => bytes.chunks_exact(4).map(|x| f32::from_le_bytes(x.try_into().unwrap()).into()).collect(),
        };
        values[..length].to_vec()
    }
}

/// The nine parameters of a site, or room for their gradients.
pub struct SiteBuffers([[Buffer; 3]; 3]);

impl SiteBuffers {
    /// `values`: weight `[2 * d_model, outputs]`, bias `[outputs]` and scale `[1]` of alpha, beta and rho; NaN without.
    pub fn new(client: &Client, d_model: usize, dtype: ElemType, values: Option<&[[Vec<f64>; 3]; 3]>) -> Self {
        let gate = |gate: usize, outputs: usize| {
            let shapes = [&[2 * d_model, outputs][..], &[outputs], &[1]];
            std::array::from_fn(|k| match values {
                Some(values) => Buffer::new(client, shapes[k], dtype, &values[gate][k]),
                None => Buffer::output(client, shapes[k], dtype),
            })
        };
        Self([gate(0, 2), gate(1, 2), gate(2, 1)])
    }

    pub fn operands(&self) -> SiteOperands<'_> {
        let [alpha, beta, rho] = self.0.each_ref().map(|[weight, bias, scale]| GateOperands {
            weight: weight.operand(),
            bias: bias.operand(),
            scale: scale.operand(),
        });
        SiteOperands { alpha, beta, rho }
    }

    pub fn read(&self) -> Vec<Vec<f64>> {
        self.0.iter().flatten().map(Buffer::read).collect()
    }
}

/// A float64 tensor on Flex.
pub fn truth<const D: usize>(values: &[f64], shape: [usize; D]) -> Tensor<D> {
    Tensor::from_data(TensorData::new(values.to_vec(), shape), (&flex(), burn::tensor::DType::F64))
}

/// A float64 tensor on Flex whose gradient is asked for.
pub fn leaf<const D: usize>(values: &[f64], shape: [usize; D]) -> Tensor<D> {
    let device = flex().autodiff();
    Tensor::from_data(TensorData::new(values.to_vec(), shape), (&device, burn::tensor::DType::F64)).require_grad()
}

/// The gradient of `leaf`, zero where nothing reached it.
pub fn gradient<const D: usize>(leaf: &Tensor<D>, gradients: &Gradients) -> Vec<f64> {
    leaf.grad(gradients).map_or_else(|| vec![0.0; leaf.shape().num_elements()], host)
}

pub fn host<const D: usize>(tensor: Tensor<D>) -> Vec<f64> {
    tensor.try_into_vec_as::<f64>().expect("a float64 tensor")
}

/// A history on Flex and its entries. `states`: `[entries, tokens, streams, d_model]`
pub fn history(
    states: &[f64],
    [entries, tokens, streams, d_model]: [usize; 4],
    eps: f64,
    tensor: fn(&[f64], [usize; 3]) -> Tensor<3>,
) -> (History, Vec<Tensor<3>>) {
    let length = tokens * streams * d_model;
    let entry = |r: usize| tensor(&states[r * length..][..length], [tokens, streams, d_model]);
    let all: Vec<_> = (0..entries).map(entry).collect();
    let first = History::new(all[0].clone(), eps);
    (all[1..].iter().cloned().fold(first, History::append), all)
}

/// Inverse RMS of every row of `d_model`.
pub fn inverse_rms(states: &[f64], d_model: usize, eps: f64) -> Vec<f64> {
    let mean_square = |row: &[f64]| row.iter().map(|x| x * x).sum::<f64>() / d_model as f64;
    states.chunks(d_model).map(|row| 1.0 / (mean_square(row) + eps).sqrt()).collect()
}

/// The normalised keys of all outputs. `states`: `[rows, streams, d_model]`
pub fn keys(states: &[f64], [streams, outputs, d_model]: [usize; 3], routing: Routing, eps: f64) -> Vec<f64> {
    let inv_rms = inverse_rms(states, d_model, eps);
    let rows = inv_rms.len() / streams;
    let heads = (0..rows).flat_map(|row| (0..outputs).map(move |j| row * streams + routing.key_stream(j)));
    heads
        .flat_map(|row| states[row * d_model..][..d_model].iter().map(|x| x * inv_rms[row]).collect::<Vec<_>>())
        .collect()
}

/// The routing of a golden case.
pub fn routing(case: &Case) -> Routing {
    match case.text("routing").unwrap() {
        "cross_key" => Routing::CrossKey,
        "self" => Routing::SelfKeyValue,
        "cross_value" => Routing::CrossValue,
        "fixed" => Routing::FixedKeyValue,
        other => panic!("routing `{other}`"),
    }
}

/// The golden cases whose names start with `prefix`.
pub fn golden_cases(prefix: &str) -> Vec<Case> {
    let files = case_files(&golden_folder()).unwrap();
    let named = |file: &Path| file.file_name().unwrap().to_string_lossy().starts_with(prefix);
    let cases: Vec<Case> = files.iter().filter(|file| named(file)).map(|file| Case::read(file).unwrap()).collect();
    assert!(!cases.is_empty());
    cases
}

/// Every pair of `pairs` (name, got, truth, bound) is within its bound.
#[track_caller]
pub fn assert_close(about: &str, pairs: &[(&str, &[f64], &[f64], f64)]) {
    for (name, got, truth, bound) in pairs {
        let error = relative_error(got, truth, 1e-6);
        assert!(error <= *bound, "{about}: `{name}` is off by {error:.1e}, bound {bound:.1e}");
    }
}

/// Every `width`-th row of `token` in `got` (rows of `width`, tokens cycling with period `tokens`) is not finite somewhere,
/// and every other row equals `clean` bit for bit.
#[track_caller]
pub fn assert_only_token(about: &str, got: &[f64], clean: &[f64], [tokens, token, width]: [usize; 3]) {
    for (row, (got, clean)) in got.chunks(width).zip(clean.chunks(width)).enumerate() {
        assert!(row % tokens == token || got == clean, "{about}: token {token} leaked into row {row}");
    }
    let mut own = got.chunks(width).skip(token).step_by(tokens).flatten();
    assert!(own.any(|x| !x.is_finite()), "{about}: what is not finite vanished");
}
