//! The columns of a row that a unit has in registers: of the vectors of the row those `units` apart, its own first.
//!
//! All loads come before what is made of them, so that they are in flight together.

use cubecl::ir::FloatKind;
use cubecl::prelude::*;

use crate::launch::{MOST_LANES, Row};

/// Whether a column of the unit is one of the row. All but a unit's last are.
#[cube]
pub(crate) fn inside(#[comptime] c: usize, vectors: usize, #[comptime] config: Row) -> bool {
    comptime!(c + 1 < config.columns) || c * comptime!(config.units) + (UNIT_POS_X as usize) < vectors
}

/// A column of the unit, or the last of the row, to load without asking.
#[cube]
pub(crate) fn clamped(#[comptime] c: usize, vectors: usize, #[comptime] config: Row) -> usize {
    let column = c * comptime!(config.units) + UNIT_POS_X as usize;
    if comptime!(c + 1 < config.columns) { column } else { min(column, vectors - 1) }
}

/// The columns of `rows` rows from `row` on, as they are stored: `[rows, columns]`. What is not [`inside`] holds the last
/// column of the row; it must not be summed, and is not stored.
#[cube]
pub(crate) fn load<E: Float, N: Size>(
    from: &[Vector<E, N>],
    row: usize,
    vectors: usize,
    #[comptime] rows: usize,
    #[comptime] config: Row,
) -> Array<Vector<E, N>> {
    let columns = comptime!(config.columns);
    let mut loaded = Array::<Vector<E, N>>::new(comptime!(rows * columns));
    #[unroll]
    for j in 0..rows {
        #[unroll]
        for c in 0..columns {
            loaded[comptime!(j * columns + c)] = from[(row + j) * vectors + clamped(c, vectors, config)];
        }
    }
    loaded
}

/// What was loaded before, from the cache, in the type of arithmetic: over the sums between it would take registers that
/// others then lack. Its guards keep a compiler from taking it for the same. Zero past the end.
#[cube]
pub(crate) fn reload<E: Float, N: Size>(
    from: &[Vector<E, N>],
    row: usize,
    vectors: usize,
    #[comptime] rows: usize,
    #[comptime] config: Row,
) -> Array<Vector<f32, N>> {
    let columns = comptime!(config.columns);
    let mut loaded = Array::<Vector<f32, N>>::new(comptime!(rows * columns));
    #[unroll]
    for j in 0..rows {
        #[unroll]
        for c in 0..columns {
            let column = c * comptime!(config.units) + UNIT_POS_X as usize;
            let k = comptime!(j * columns + c);
            loaded[k] = Vector::new(0.0f32);
            if column < vectors {
                loaded[k] = widen(from[(row + j) * vectors + column]);
            }
        }
    }
    loaded
}

/// Stores what [`load`] would load.
#[cube]
pub(crate) fn store<E: Float, N: Size>(
    values: &Array<Vector<E, N>>,
    to: &mut [Vector<E, N>],
    row: usize,
    vectors: usize,
    #[comptime] rows: usize,
    #[comptime] config: Row,
) {
    let columns = comptime!(config.columns);
    #[unroll]
    for c in 0..columns {
        #[unroll]
        for j in 0..rows {
            let column = c * comptime!(config.units) + UNIT_POS_X as usize;
            if inside(c, vectors, config) {
                to[(row + j) * vectors + column] = values[comptime!(j * columns + c)];
            }
        }
    }
}

/// From the type of storage to that of arithmetic. What only lies in wait stays as it is: in a half type it takes half of
/// the registers.
#[cube]
pub(crate) fn widened<E: Float, N: Size>(stored: &Array<Vector<E, N>>) -> Array<Vector<f32, N>> {
    let mut widened = Array::<Vector<f32, N>>::new(stored.len());
    #[unroll]
    for k in 0..stored.len() {
        widened[k] = widen(stored[k]);
    }
    widened
}

/// [`widened`] by [`widen_again`].
#[cube]
pub(crate) fn widened_again<E: Float, N: Size>(stored: &Array<Vector<E, N>>, zero: u32) -> Array<Vector<f32, N>> {
    let mut widened = Array::<Vector<f32, N>>::new(stored.len());
    #[unroll]
    for k in 0..stored.len() {
        widened[k] = widen_again(stored[k], zero);
    }
    widened
}

/// One vector of [`widened`]. A bf16 is the upper half of its f32: a shift and a mask make two of a word. A compiler's own
/// conversion first moves the upper one to another register, and keeps it there. Only where a vector is one load of 16
/// bytes, which a runtime with fewer lanes would have to take apart.
#[cube]
pub(crate) fn widen<E: Float, N: Size>(stored: Vector<E, N>) -> Vector<f32, N> {
    let lanes = N::value().comptime();
    let bf16 = is_bf16(stored);
    if comptime!(bf16 && lanes == MOST_LANES) { halves::<E, N>(stored, 0u32) } else { Vector::cast_from(stored) }
}

/// [`widen`] of what was widened before the last barrier. A compiler that knew it to be the same would keep it in f32 over
/// the barrier, in twice the registers. `zero`: see [`unknown_zero`].
#[cube]
pub(crate) fn widen_again<E: Float, N: Size>(stored: Vector<E, N>, zero: u32) -> Vector<f32, N> {
    let lanes = N::value().comptime();
    let (bits, bf16) = (E::size_bits().comptime(), is_bf16(stored));
    if comptime!(bits == 16 && lanes == MOST_LANES) {
        if comptime!(bf16) {
            halves::<E, N>(stored, zero)
        } else {
            let size!(Words) = comptime!(lanes / 2);
            let words = Vector::<u32, Words>::reinterpret(stored) ^ Vector::new(zero);
            Vector::cast_from(Vector::<E, N>::reinterpret(words))
        }
    } else {
        Vector::cast_from(stored)
    }
}

/// Zero, of which a compiler knows neither that nor that it is the same for every `step` of a loop: rows have less than
/// 2^31 `vectors`. What depends on it is made where it stands, and not moved out of a loop or taken from before a barrier.
#[cube]
pub(crate) fn unknown_zero(vectors: usize, step: usize) -> u32 {
    (u32::cast_from(vectors) & u32::cast_from(step)) >> 31
}

/// The f32 of bf16, two in a word. `zero` is zero.
#[cube]
fn halves<E: Float, N: Size>(stored: Vector<E, N>, zero: u32) -> Vector<f32, N> {
    let lanes = N::value().comptime();
    let size!(Words) = comptime!(lanes / 2);
    let words = Vector::<u32, Words>::reinterpret(stored);
    let mut wide = Vector::<f32, N>::new(0.0f32);
    #[unroll]
    for k in 0..comptime!(lanes / 2) {
        let word = words.extract(k);
        wide.insert(comptime!(2 * k), f32::reinterpret(word << (16u32 + zero)));
        wide.insert(comptime!(2 * k + 1), f32::reinterpret(word & (0xffff_0000u32 + zero)));
    }
    wide
}

/// Whether the type of storage is bf16.
#[cube]
fn is_bf16<E: Float, N: Size>(_stored: Vector<E, N>) -> comptime_type!(bool) {
    intrinsic!(|scope| E::elem_type(scope) == ElemType::Float(FloatKind::BF16))
}

/// From the type of arithmetic to that of storage.
#[cube]
pub(crate) fn narrowed<E: Float, N: Size>(values: &Array<Vector<f32, N>>) -> Array<Vector<E, N>> {
    let mut narrowed = Array::<Vector<E, N>>::new(values.len());
    #[unroll]
    for k in 0..values.len() {
        narrowed[k] = Vector::cast_from(values[k]);
    }
    narrowed
}
