//! The second stage of a parameter gradient.
//!
//! ```text
//! stage one: every cube walks its share of the tokens and writes one row      (no atomics)
//! stage two: sum[k] = row_0[k] + row_1[k] + …                                 one unit a column, in the order of rows
//! ```

use std::ops::Range;

use cubecl::prelude::*;
use cubecl::server::Handle;

use crate::KernelError;
use crate::launch::{element_index, elements};
use crate::operand::{Check, F32, Operand};

/// Cubes of a first stage at most: two on each multiprocessor of a large GPU. Every row is written and read once more.
const MOST_ROWS: usize = 256;

/// Items of a row at least, so that the rows stay small beside what the first stage reads.
const LEAST_ITEMS: usize = 8;

/// Bytes of all rows at most: half of the smallest limit of a buffer among devices (128 MiB).
const MOST_BYTES: usize = 64 << 20;

/// Units of a cube of the second stage: its columns are independent, and few enough for many cubes.
pub(crate) const SUM_UNITS: usize = 64;

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

    /// Sums `columns` of the rows into `sum` from element `offset` on, or adds the sum to what is there.
    pub(crate) fn sum(
        &self,
        client: &Client,
        columns: Range<usize>,
        sum: &Operand,
        offset: usize,
        add: bool,
        address: AddressType,
    ) {
        let [rows, length] = self.shape;
        let (count, dim) = elements(client, columns.len(), SUM_UNITS);
        let (row, sum) = (self.operand().argument(1), sum.argument(1));
        let Range { start, end } = columns;
        sum_rows_kernel::launch(client, count, dim, address, row, sum, start, end, offset, rows, length, add);
    }

    /// Counts the rows among what the index type has to reach.
    pub(crate) fn check(&self, check: &mut Check) -> Result<(), KernelError> {
        check.shape("rows of the first stage", &self.operand(), "[rows, length]", &self.shape).map(|_| ())
    }
}

#[cube(launch, address_type = "dynamic")]
#[expect(clippy::too_many_arguments, reason = "one argument a tensor and size")]
fn sum_rows_kernel(
    row: &[f32],     // [rows, length]
    sum: &mut [f32], // `end - start` from `offset` on
    start: usize,
    end: usize,
    offset: usize,
    rows: usize,
    length: usize,
    #[comptime] add: bool,
) {
    let own = element_index();
    if own >= end - start {
        terminate!();
    }
    let mut total = sum_of_column(row, start + own, rows, length);
    if comptime!(add) {
        total += sum[offset + own];
    }
    sum[offset + own] = total;
}

/// The sum of a column of `[rows, length]`, in the order of the rows.
#[cube]
pub(crate) fn sum_of_column(row: &[f32], column: usize, rows: usize, length: usize) -> f32 {
    let mut total = row[column];
    for r in 1..rows {
        total += row[r * length + column];
    }
    total
}
