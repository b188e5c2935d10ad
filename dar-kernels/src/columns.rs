//! The columns of a row that a unit has in registers: of the vectors of the row those `units` apart, its own first.
//!
//! All loads come before what is made of them, so that they are in flight together.

use cubecl::prelude::*;

use crate::launch::Row;

/// The columns of `rows` rows from `row` on, as they are stored; zero past the end: `[rows, columns]`.
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
            let column = c * comptime!(config.units) + UNIT_POS_X as usize;
            let k = comptime!(j * columns + c);
            loaded[k] = Vector::new(E::from_int(0));
            if column < vectors {
                loaded[k] = from[(row + j) * vectors + column];
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
    for j in 0..rows {
        #[unroll]
        for c in 0..columns {
            let column = c * comptime!(config.units) + UNIT_POS_X as usize;
            if column < vectors {
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
        widened[k] = Vector::cast_from(stored[k]);
    }
    widened
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
