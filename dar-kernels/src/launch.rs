//! What the launch choices of all kernels share.

use std::sync::atomic::{AtomicU64, Ordering};

use cubecl::prelude::*;

use crate::reduce::Reduction;

/// The most units of a row kernel on a GPU unless registers run out: 256 leave room for several cubes on a
/// multiprocessor, whose loads overlap one cube's barriers.
const USUAL_UNITS: usize = 256;

/// Units and columns of a row kernel where units are lanes of a CPU: a core runs the units of a cube in turn between
/// two barriers, so that few units with some columns each are better. Measured on software Vulkan at d_model 256 and
/// 1024: nearly three times as fast as one column a unit in the read's forward, 1.3 to 1.8 times in its backward and
/// the prefix; more columns lose that again.
const CPU_UNITS: usize = 16;
const CPU_COLUMNS: usize = 4;

/// Loads of a unit before it waits for the first. More of them take registers, and leave room for fewer units.
const IN_FLIGHT: usize = 4;

/// The widest vector: the eight scalars of a site are whole vectors.
pub(crate) const MOST_LANES: usize = 8;

static LAUNCHES: AtomicU64 = AtomicU64::new(0);

/// How many kernels this crate has launched in this process, on all devices and threads. A test or a benchmark that
/// asks before and after knows that kernels ran, and not something else that gives the same numbers.
pub fn launches() -> u64 {
    LAUNCHES.load(Ordering::Relaxed)
}

/// Overrides of launch choices; the default leaves them to the device.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub struct Tuning {
    /// How cubes add.
    pub reduction: Option<Reduction>,
}

/// What a kernel holds of a row.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Held {
    /// Operands of which it loads a column at once.
    pub(crate) loads: usize,
    /// Values of every element that it keeps in registers.
    pub(crate) arrays: usize,
    /// f32 registers that a unit has for them.
    pub(crate) registers: usize,
}

/// One cube a row of a state: how its units share the columns, and how they add. A column is a vector of `lanes`
/// elements.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub(crate) struct Row {
    /// Elements a vector.
    pub(crate) lanes: usize,
    /// A power of two.
    pub(crate) units: usize,
    /// Columns that each unit has in registers, `units` apart: as few as cover the row, so that only the last can be past
    /// its end.
    pub(crate) columns: usize,
    pub(crate) reduction: Reduction,
}

impl Row {
    /// The smallest cube that covers the row with as many columns a unit as it takes for [`IN_FLIGHT`] loads, up to the
    /// usual units, past them only while a unit would hold more than its registers allow.
    pub(crate) fn choose(client: &Client, dtype: ElemType, d_model: usize, held: Held, tuning: Tuning) -> Self {
        let lanes = lanes(client, dtype, d_model);
        let vectors = d_model / lanes;
        let reduction = tuning.reduction.unwrap_or_else(|| Reduction::of_device(client));
        let hardware = &client.properties().hardware;
        let limit = 1usize << hardware.max_units_per_cube.min(hardware.max_cube_dim.0).max(1).ilog2();
        let on_cpu = runs_on_cpu(client);
        let most_columns =
            (held.registers / (held.arrays * lanes)).clamp(1, if on_cpu { CPU_COLUMNS } else { usize::MAX });
        let columns = IN_FLIGHT.div_ceil(held.loads).min(most_columns);
        let usual = if on_cpu { CPU_UNITS } else { USUAL_UNITS };
        let least = reduction.least_units();
        let mut units = vectors.div_ceil(columns).next_power_of_two().clamp(least, usual.min(limit).max(least));
        while units < limit && vectors.div_ceil(units) > most_columns {
            units *= 2;
        }
        Self { lanes, units, columns: vectors.div_ceil(units), reduction }
    }

    /// The same row, of `d_model`, in as few units as it takes for `sums` sums at a time, and `published` values, to fit
    /// into shared memory.
    pub(crate) fn fit(mut self, client: &Client, d_model: usize, sums: usize, published: usize) -> Self {
        while self.units > self.reduction.least_units() && !self.fits(client, sums, published) {
            self.units /= 2;
        }
        self.columns = (d_model / self.lanes).div_ceil(self.units);
        self
    }

    /// Whether shared memory has room for `sums` sums at a time, and `published` values.
    pub(crate) fn fits(self, client: &Client, sums: usize, published: usize) -> bool {
        self.reduction.shared_bytes(sums, published, self.units) <= client.properties().hardware.max_shared_memory_size
    }

    pub(crate) fn cube_dim(self) -> CubeDim {
        CubeDim::new_1d(self.units as u32)
    }
}

/// Elements a vector: as wide as one load may be (16 bytes on most devices) and divides `d_model`.
pub(crate) fn lanes(client: &Client, dtype: ElemType, d_model: usize) -> usize {
    let widths = client.io_optimized_vector_sizes(dtype.size());
    widths.filter(|&lanes| lanes <= MOST_LANES && d_model.is_multiple_of(lanes)).max().unwrap_or(1)
}

/// Whether units are lanes of a CPU's vectors. No property says so of a software adapter, but two together do: CubeCL
/// hides plane operations there, and planes have one size, that of a vector register. A GPU without plane operations
/// reports a range of sizes or none.
fn runs_on_cpu(client: &Client) -> bool {
    const MOST_CPU_LANES: u32 = 16;
    let properties = client.properties();
    let hardware = &properties.hardware;
    let hidden = !properties.features.plane.contains(cubecl::features::Plane::Ops);
    let one_size = hardware.plane_size_min == hardware.plane_size_max && hardware.plane_size_max > 1;
    hardware.num_cpu_cores.is_some() || (hidden && one_size && hardware.plane_size_max <= MOST_CPU_LANES)
}

/// The cubes of one launch, which is counted by asking for them: `count` over x, and past the limit of that axis over y.
/// Kernels find theirs with [`cube_index`] and stop past `count`.
pub(crate) fn cubes(client: &Client, count: usize) -> CubeCount {
    LAUNCHES.fetch_add(1, Ordering::Relaxed);
    let x = count.min(client.properties().hardware.max_cube_count.0 as usize);
    CubeCount::Static(x as u32, count.div_ceil(x) as u32, 1)
}

/// The cubes of one launch with a unit for each of `count` elements, and their size, which is `units` where the device
/// has so many. Kernels find theirs with [`element_index`] and stop past `count`.
pub(crate) fn elements(client: &Client, count: usize, units: usize) -> (CubeCount, CubeDim) {
    let units = units.min(client.properties().hardware.max_units_per_cube as usize);
    (cubes(client, count.div_ceil(units)), CubeDim::new_1d(units as u32))
}

/// The index of this cube over x and y.
#[cube]
pub(crate) fn cube_index() -> usize {
    CUBE_POS_Y as usize * CUBE_COUNT_X as usize + CUBE_POS_X as usize
}

/// The index of this unit over all cubes.
#[cube]
pub(crate) fn element_index() -> usize {
    cube_index() * CUBE_DIM_X as usize + UNIT_POS_X as usize
}
