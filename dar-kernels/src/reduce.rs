//! Sums over all units of a cube, several at a time.
//!
//! ```text
//! plane path:   exchanges inside each plane (a lane ends with one of the sums of its plane, or a few);
//!               one partial a sum and plane in shared memory; sync; one unit adds a row; sync; all read
//! shared path:  every unit stores its values; sync; units fold each row to FOLD partials; sync;
//!               one unit adds the partials of a row; sync; all read
//! ```
//!
//! Both orders of addition are fixed, so that equal operands give equal bits. The last barrier separates one sum from the
//! next: a [`CubeSum`] may be used again at once.
//!
//! What all units would make of the sums alike, one unit can make between the last two barriers, where it saves the others
//! their instructions and registers: `gather`, a `total`, `publish` instead of it, sync, all read what is `published`.

use cubecl::features::Plane;
use cubecl::prelude::*;

use crate::KernelError;
use crate::launch::Row;
use crate::numeric::inverse_rms;

/// Partials to which the shared path folds a row: adding 16 in one unit costs less than the barriers of more folds.
const FOLD: usize = 16;

/// How the units of a cube add.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum Reduction {
    /// Shuffles inside planes of this many units, which is a power of two, then shared memory between planes.
    Planes(u32),
    /// Shared memory only: runs everywhere.
    Shared,
}

impl Reduction {
    /// What suits the device: planes where it has them in one known size.
    pub fn of_device(client: &Client) -> Self {
        let has_planes = client.features().plane.contains(Plane::Ops);
        match plane_size(client) {
            Some(size) if has_planes => Self::Planes(size),
            _ => Self::Shared,
        }
    }

    /// Planes also where CubeCL hides them (software adapters), so that this path can be tested there. An error where
    /// planes have no one size.
    pub fn forced_planes(client: &Client) -> Result<Self, KernelError> {
        let hardware = &client.properties().hardware;
        plane_size(client).map(Self::Planes).ok_or_else(|| {
            KernelError::value(
                "Reduction::forced_planes",
                "plane size",
                "one power of two from 2 on",
                format!("{} to {}", hardware.plane_size_min, hardware.plane_size_max),
            )
        })
    }

    /// Bytes of shared memory that `count` sums at a time take in a cube of `units`, with as many `published` values.
    pub(crate) fn shared_bytes(self, count: usize, published: usize, units: usize) -> usize {
        (count * self.partials(units) + published) * size_of::<f32>()
    }

    /// What is left of a sum in shared memory when the units of a cube come together.
    const fn partials(self, units: usize) -> usize {
        match self {
            Self::Planes(size) => units / size as usize,
            Self::Shared => units,
        }
    }

    /// The fewest units that a cube needs.
    pub(crate) fn least_units(self) -> usize {
        match self {
            Self::Planes(size) => size as usize,
            Self::Shared => 1,
        }
    }
}

/// The size of every plane of the device, if there is one.
fn plane_size(client: &Client) -> Option<u32> {
    let hardware = &client.properties().hardware;
    let size = hardware.plane_size_max;
    (size == hardware.plane_size_min && size.is_power_of_two() && size > 1).then_some(size)
}

/// Shared memory for up to `count` sums at a time over the units of a row's cube.
#[derive(CubeType)]
pub(crate) struct CubeSum {
    partial: Shared<[f32]>,
    published: Shared<[f32]>,
    #[cube(comptime)]
    units: usize,
    #[cube(comptime)]
    reduction: Reduction,
}

#[cube]
impl CubeSum {
    pub(crate) fn new(#[comptime] count: usize, #[comptime] row: Row) -> Self {
        CubeSum::publishing(count, count, row)
    }

    /// With room for `published` values that one unit tells the others, at least `count` if whole sums are taken too.
    pub(crate) fn publishing(#[comptime] count: usize, #[comptime] published: usize, #[comptime] row: Row) -> Self {
        let units = comptime!(row.units);
        let reduction = comptime!(row.reduction);
        let partials = comptime!(reduction.partials(units));
        CubeSum {
            partial: Shared::new_slice(comptime!(count * partials)),
            published: Shared::new_slice(published),
            units,
            reduction,
        }
    }

    /// Replaces every value by its sum over the cube: as many as there is room for, or fewer.
    pub(crate) fn sum(&mut self, values: &mut Array<f32>) {
        let count = values.len();
        self.gather(values);
        self.publish_totals(count);
        sync_cube();
        #[unroll]
        for k in 0..count {
            values[k] = self.published(k);
        }
    }

    /// Replaces the squares of every row by the inverse RMS of the row, of which one unit takes the root.
    pub(crate) fn inverse_rms(&mut self, squares: &mut Array<f32>, inv_length: f32, eps: f32) {
        let count = squares.len();
        let units = comptime!(self.units);
        self.gather(squares);
        #[unroll]
        for round in 0..comptime!(count.div_ceil(units)) {
            let k = round * units + UNIT_POS_X as usize;
            if k < count {
                let norm = inverse_rms(self.total(k), inv_length, eps);
                self.publish(k, norm);
            }
        }
        sync_cube();
        #[unroll]
        for k in 0..count {
            squares[k] = self.published(k);
        }
    }

    /// Brings the values of all units together, as many as there is room for, or fewer. Then any unit may ask for a
    /// [`total`](Self::total) until a barrier, which must come before the next values.
    pub(crate) fn gather(&mut self, values: &mut Array<f32>) {
        let count = values.len();
        let units = comptime!(self.units);
        match comptime!(self.reduction) {
            Reduction::Planes(size) => {
                let planes = comptime!(units / size as usize);
                let plane = (UNIT_POS_X / size) as usize;
                let lane = (UNIT_POS_X % size) as usize;
                let (spread, own) = comptime!(shares(count, size as usize));
                plane_sums(values, lane, count, size);
                #[unroll]
                for i in 0..own {
                    let k = lane * own + i;
                    if lane < spread && k < count {
                        self.partial[k * planes + plane] = values[i];
                    }
                }
            }
            Reduction::Shared => {
                let unit = UNIT_POS_X as usize;
                #[unroll]
                for k in 0..count {
                    self.partial[k * units + unit] = values[k];
                }
                let folds = comptime!(if units > FOLD { FOLD } else { units });
                if comptime!(folds < units) {
                    sync_cube();
                    let partials = comptime!(count * folds);
                    #[unroll]
                    for round in 0..comptime!(partials.div_ceil(units)) {
                        let index = round * units + unit;
                        if index < partials {
                            // Only this unit touches this partial: the others of a row differ modulo `folds`.
                            let first = index / folds * units + index % folds;
                            let mut sum = self.partial[first];
                            for i in 1..comptime!(units / folds) {
                                sum += self.partial[first + i * folds];
                            }
                            self.partial[first] = sum;
                        }
                    }
                }
            }
        }
        sync_cube();
    }

    /// Sum `k` of what was gathered: one unit adds what the others left.
    pub(crate) fn total(&self, k: usize) -> f32 {
        let partials = comptime!(self.reduction.partials(self.units));
        let length = comptime!(match self.reduction {
            Reduction::Shared if partials > FOLD => FOLD,
            _ => partials,
        });
        let mut sum = self.partial[k * partials];
        for i in 1..length {
            sum += self.partial[k * partials + i];
        }
        sum
    }

    /// Publishes the first `count` sums.
    pub(crate) fn publish_totals(&mut self, #[comptime] count: usize) {
        let units = comptime!(self.units);
        #[unroll]
        for round in 0..comptime!(count.div_ceil(units)) {
            let k = round * units + UNIT_POS_X as usize;
            if k < count {
                let total = self.total(k);
                self.publish(k, total);
            }
        }
    }

    /// Tells a value to all units, which see it after the next barrier.
    pub(crate) fn publish(&mut self, k: usize, value: f32) {
        self.published[k] = value;
    }

    /// Value `k` of those that were told before the last barrier.
    pub(crate) fn published(&self, k: usize) -> f32 {
        self.published[k]
    }
}

/// Over how many lanes the sums of a plane are spread, and how many are of one lane.
const fn shares(count: usize, size: usize) -> (usize, usize) {
    let padded = count.next_power_of_two(); // a half of which is less than `count`
    let spread = if padded < size { padded } else { size };
    (spread, padded / spread)
}

/// Sums over the plane, of which lane `l` has the first `own` values: sums `l * own ..` (see [`shares`]), and the lanes
/// past those over which they are spread have the same once more.
///
/// In every step a lane gives one half of its values to a lane that gives it the other half: 31 shuffles for 32 sums,
/// where a butterfly of each takes 160.
#[cube]
fn plane_sums(values: &mut Array<f32>, lane: usize, #[comptime] count: usize, #[comptime] size: u32) {
    let (spread, own) = comptime!(shares(count, size as usize));
    #[unroll]
    for step in 0..comptime!(spread.ilog2()) {
        let mask = comptime!(spread >> (step + 1));
        let half = comptime!(mask * own);
        let upper = lane & mask != 0;
        #[unroll]
        for k in 0..half {
            let mut other = f32::new(0.0); // past the last sum
            if comptime!(half + k < count) {
                other = values[half + k];
            }
            let given = select(upper, values[k], other);
            let kept = select(upper, other, values[k]);
            values[k] = kept + plane_shuffle_xor(given, comptime!(mask as u32));
        }
    }
    // Fewer sums than lanes, of which one is left.
    #[unroll]
    for step in 0..comptime!((size as usize / spread).ilog2()) {
        values[0] += plane_shuffle_xor(values[0], comptime!((spread << step) as u32));
    }
}
