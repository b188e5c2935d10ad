//! Buffers of a CubeCL device: how they are filled, read back and copied.

use cubecl::prelude::*;
use cubecl::server::Handle;
use dar_kernels::Operand;

use crate::shapes::{BF16, F16};

/// Values repeat after so many tokens.
pub const PERIOD: usize = 8;
/// Units of a cube of the kernels below.
const UNITS: u32 = 256;

/// What a buffer holds: a hash of the position, evenly spread over 512 values from `middle - width` on. With width 1 around
/// 0 every element type represents them exactly.
#[derive(Debug, Clone, Copy)]
pub struct Pattern {
    pub seed: u32,
    pub middle: f32,
    pub width: f32,
}

impl Pattern {
    /// Values of a state.
    pub const fn state(seed: u32) -> Self {
        Self { seed, middle: 0.0, width: 1.0 }
    }

    /// Of a tensor `[outer, tokens, inner]`, for the first tokens up to a period.
    pub fn values(self, outer: usize, inner: usize, tokens: usize) -> Vec<f64> {
        let positions =
            (0..outer).flat_map(|o| (0..tokens * inner).map(move |rest| (o * PERIOD * inner + rest) as u32));
        positions.map(|position| f64::from(self.value(position))).collect()
    }

    fn value(self, position: u32) -> f32 {
        let mut hash = position.wrapping_add(self.seed.wrapping_mul(0x9e37_79b9));
        hash = (hash ^ (hash >> 16)).wrapping_mul(0x7feb_352d);
        hash = (hash ^ (hash >> 15)).wrapping_mul(0x846c_a68b);
        hash ^= hash >> 16;
        self.middle + self.width * (((hash & 511) as f32 - 256.0) / 256.0)
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
    /// A tensor whose values nobody needs.
    pub fn empty(client: &Client, shape: &[usize], dtype: ElemType) -> Self {
        let bytes = (shape.iter().product::<usize>() * dtype.size()).max(16);
        Self { client: client.clone(), handle: client.empty(bytes), shape: shape.to_vec(), dtype }
    }

    /// A tensor of a pattern; `token_axis` says which axis is the tokens, if there is one.
    pub fn filled(
        client: &Client,
        shape: &[usize],
        dtype: ElemType,
        pattern: Pattern,
        token_axis: Option<usize>,
    ) -> Self {
        let buffer = Self::empty(client, shape, dtype);
        buffer.fill(pattern, token_axis);
        buffer
    }

    /// Writes the pattern again.
    pub fn fill(&self, pattern: Pattern, token_axis: Option<usize>) {
        let (tokens, inner) = match token_axis {
            Some(axis) => (self.shape[axis], self.shape[axis + 1..].iter().product()),
            None => (1, self.shape.iter().product()),
        };
        let length: usize = self.shape.iter().product();
        fill_kernel::launch(
            &self.client,
            cubes(&self.client, length),
            CubeDim::new_1d(UNITS),
            self.argument(1),
            length,
            tokens,
            inner,
            pattern.seed,
            pattern.middle,
            pattern.width,
            self.dtype,
        );
    }

    /// A tensor f32 of these values.
    pub fn of(client: &Client, shape: &[usize], values: &[f32]) -> Self {
        let bytes: Vec<u8> = values.iter().flat_map(|x| x.to_le_bytes()).collect();
        Self {
            client: client.clone(),
            handle: client.create_from_slice(&bytes),
            shape: shape.to_vec(),
            dtype: crate::shapes::F32,
        }
    }

    /// Row `row` of the first axis, in the same memory.
    pub fn row(&self, row: usize) -> Self {
        let length = self.shape[1..].iter().product::<usize>() * self.dtype.size();
        let handle = self.handle.clone().offset_start((row * length) as u64);
        Self { client: self.client.clone(), handle, shape: self.shape[1..].to_vec(), dtype: self.dtype }
    }

    /// The same elements on other axes.
    pub fn reshape(&mut self, shape: &[usize]) {
        assert_eq!(shape.iter().product::<usize>(), self.shape.iter().product::<usize>());
        self.shape = shape.to_vec();
    }

    pub fn operand(&self) -> Operand<'_> {
        Operand::new(&self.handle, &self.shape, self.dtype)
    }

    fn argument(&self, lanes: usize) -> BufferArg {
        // SAFETY: the buffer was made for the shape.
        unsafe { BufferArg::from_raw_parts(self.handle.clone(), self.shape.iter().product::<usize>() / lanes) }
    }

    /// `length` elements from `start` on.
    pub fn read(&self, start: usize, length: usize) -> Vec<f64> {
        let size = self.dtype.size() as u64;
        let behind = self.shape.iter().product::<usize>() - start - length;
        // A device may only read from aligned offsets: from there on, then what was asked for.
        let alignment = self.client.properties().memory.alignment.max(size);
        let skipped = (start as u64 * size) % alignment;
        let handle = self.handle.clone().offset_start(start as u64 * size - skipped);
        // The handle may be longer than its elements.
        let tail = self.handle.size() - self.shape.iter().product::<usize>() as u64 * size;
        let handle = handle.offset_end(behind as u64 * size + tail);
        let bytes = self.client.read_one(handle).expect("the kernels of the benchmark ran");
        let bytes = &bytes[skipped as usize..];
        match self.dtype {
            F16 => bytes.chunks_exact(2).map(|x| half::f16::from_le_bytes([x[0], x[1]]).to_f64()).collect(),
            BF16 => bytes.chunks_exact(2).map(|x| half::bf16::from_le_bytes([x[0], x[1]]).to_f64()).collect(),
            _ => bytes.chunks_exact(4).map(|x| f32::from_le_bytes(x.try_into().expect("four bytes")).into()).collect(),
        }
    }
}

/// Reads half of `bytes` and writes as many, `count` times; nothing waits.
pub struct Copy {
    from: Buffer,
    to: Buffer,
    lanes: usize,
}

impl Copy {
    pub fn new(client: &Client, bytes: u64) -> Self {
        let shape = [(bytes / 2) as usize / 4];
        let lanes =
            client.io_optimized_vector_sizes(4).filter(|lanes| shape[0].is_multiple_of(*lanes)).max().unwrap_or(1);
        let buffer = |seed| Buffer::filled(client, &shape, crate::shapes::F32, Pattern::state(seed), None);
        Self { from: buffer(1), to: buffer(2), lanes }
    }

    pub fn launch(&self, client: &Client) {
        let vectors = self.from.shape[0] / self.lanes;
        let (count, dim) = (cubes(client, vectors), CubeDim::new_1d(UNITS));
        copy_kernel::launch(
            client,
            count,
            dim,
            self.lanes,
            self.from.argument(self.lanes),
            self.to.argument(self.lanes),
            vectors,
        );
    }

    /// Whether the last copy is one.
    pub fn is_right(&self) -> bool {
        let length = self.from.shape[0].min(1024);
        let end = self.from.shape[0] - length;
        self.from.read(0, length) == self.to.read(0, length) && self.from.read(end, length) == self.to.read(end, length)
    }
}

fn cubes(client: &Client, units: usize) -> CubeCount {
    let count = units.div_ceil(UNITS as usize);
    let x = count.min(client.properties().hardware.max_cube_count.0 as usize);
    CubeCount::Static(x as u32, count.div_ceil(x) as u32, 1)
}

#[cube]
fn unit_index() -> usize {
    (CUBE_POS_Y as usize * CUBE_COUNT_X as usize + CUBE_POS_X as usize) * CUBE_DIM_X as usize + UNIT_POS_X as usize
}

#[cube(launch)]
fn copy_kernel<N: Size>(from: &[Vector<f32, N>], to: &mut [Vector<f32, N>], vectors: usize) {
    let index = unit_index();
    if index >= vectors {
        terminate!();
    }
    to[index] = from[index];
}

#[cube(launch)]
#[expect(clippy::too_many_arguments, reason = "one argument a size")]
fn fill_kernel<E: Float>(
    out: &mut [E],
    length: usize,
    tokens: usize,
    inner: usize,
    seed: u32,
    middle: f32,
    width: f32,
    #[define(E)] _dtype: ElemType,
) {
    let index = unit_index();
    if index >= length {
        terminate!();
    }
    let token = (index / inner) % tokens;
    let outer = index / (inner * tokens);
    let position = (outer * comptime!(PERIOD) + token % comptime!(PERIOD)) * inner + index % inner;
    let mut hash = position as u32 + seed * 0x9e37_79b9u32;
    hash = (hash ^ (hash >> 16u32)) * 0x7feb_352du32;
    hash = (hash ^ (hash >> 15u32)) * 0x846c_a68bu32;
    hash = hash ^ (hash >> 16u32);
    let value = (f32::cast_from(hash & 511u32) - 256.0f32) / 256.0f32;
    out[index] = E::cast_from(middle + width * value);
}
