//! The second stage of a parameter gradient.
//!
//! ```text
//! stage one: every cube walks its share of the tokens and writes one row      (no atomics)
//! stage two: sum[k] = row_0[k] + row_1[k] + …                                 one unit a column, in the order of rows
//! ```

use cubecl::prelude::*;
use cubecl::server::Handle;

use crate::KernelError;
use crate::launch::{cube_count, cube_index};
use crate::operand::{Check, F32, Operand};

/// Cubes of a first stage at most: two on each multiprocessor of a large GPU. Every row is written and read once more.
const MOST_ROWS: usize = 256;

/// Items of a row at least, so that the rows stay small beside what the first stage reads.
const LEAST_ITEMS: usize = 8;

/// Bytes of all rows at most: half of the smallest limit of a buffer among devices (128 MiB).
const MOST_BYTES: usize = 64 << 20;

/// Units of a cube of the second stage: its columns are independent, and neighbours load neighbours.
const UNITS: usize = 64;

/// Cubes of a first stage over `items` whose rows have `length` elements.
pub(crate) fn rows(items: usize, length: usize) -> usize {
    let most = (MOST_BYTES / (length * F32.size())).clamp(1, MOST_ROWS);
    items.div_ceil(LEAST_ITEMS).clamp(1, most)
}

/// Room for the rows of a first stage.
pub(crate) struct Rows {
    handle: Handle,
    shape: [usize; 2],
}

impl Rows {
    pub(crate) fn new(client: &Client, rows: usize, length: usize) -> Self {
        Self { handle: client.empty(rows * length * F32.size()), shape: [rows, length] }
    }

    pub(crate) fn operand(&self) -> Operand<'_> {
        Operand::new(&self.handle, &self.shape, F32)
    }

    /// Sums the rows into `sum`, which has as many elements as a row.
    pub(crate) fn sum(&self, client: &Client, sum: &Operand, address: AddressType) {
        let [rows, length] = self.shape;
        let units = UNITS.min(client.properties().hardware.max_units_per_cube as usize);
        sum_rows_kernel::launch(
            client,
            cube_count(client, length.div_ceil(units), 1),
            CubeDim::new_1d(units as u32),
            address,
            self.operand().argument(1),
            sum.argument(1),
            rows,
            length,
        );
    }

    /// Counts the rows among what the index type has to reach.
    pub(crate) fn check(&self, check: &mut Check) -> Result<(), KernelError> {
        check.shape("rows of the first stage", &self.operand(), "[rows, length]", &self.shape).map(|_| ())
    }
}

#[cube(launch, address_type = "dynamic")]
fn sum_rows_kernel(
    row: &[f32],     // [rows, length]
    sum: &mut [f32], // [length]
    rows: usize,
    length: usize,
) {
    let column = cube_index() * CUBE_DIM_X as usize + UNIT_POS_X as usize;
    if column >= length {
        terminate!();
    }
    let mut total = row[column];
    for r in 1..rows {
        total += row[r * length + column];
    }
    sum[column] = total;
}
