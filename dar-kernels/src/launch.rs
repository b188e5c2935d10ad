//! What the launch choices of all kernels share.

use cubecl::prelude::*;

use crate::reduce::Reduction;

/// The most units of a row kernel unless registers run out: 256 leave room for several cubes on a multiprocessor, whose
/// loads overlap one cube's barriers.
const USUAL_UNITS: usize = 256;

/// Overrides of launch choices; the default leaves them to the device.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub struct Tuning {
    /// How cubes add.
    pub reduction: Option<Reduction>,
}

impl Tuning {
    pub(crate) fn reduction(&self, client: &Client) -> Reduction {
        self.reduction.unwrap_or_else(|| Reduction::of_device(client))
    }
}

/// Elements a vector: as wide as one load may be (16 bytes on most devices) and divides `d_model`.
pub(crate) fn lanes(client: &Client, dtype: ElemType, d_model: usize) -> usize {
    client.io_optimized_vector_sizes(dtype.size()).filter(|lanes| d_model.is_multiple_of(*lanes)).max().unwrap_or(1)
}

/// One cube a row of `vectors`: how many units walk it, and how many vectors each unit keeps in registers.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub(crate) struct Row {
    /// A power of two.
    pub(crate) units: usize,
    /// Vectors a unit, `units` apart.
    pub(crate) columns: usize,
}

impl Row {
    /// For a kernel that keeps no column in registers.
    pub(crate) const ANY_COLUMNS: usize = usize::MAX;

    /// The smallest cube that covers `vectors`, up to [`USUAL_UNITS`], past them only while a unit would hold more than
    /// `most_columns`.
    pub(crate) fn choose(client: &Client, vectors: usize, most_columns: usize, reduction: Reduction) -> Self {
        let hardware = &client.properties().hardware;
        let limit = hardware.max_units_per_cube.min(hardware.max_cube_dim.0).max(1).ilog2();
        let limit = 1usize << limit;
        let mut units = vectors.next_power_of_two().clamp(reduction.least_units(), USUAL_UNITS.min(limit));
        while units < limit && vectors.div_ceil(units) > most_columns {
            units *= 2;
        }
        Self { units, columns: vectors.div_ceil(units) }
    }

    /// The same row with half the units.
    pub(crate) fn halved(self) -> Self {
        Self { units: self.units / 2, columns: self.columns * 2 }
    }

    pub(crate) fn cube_dim(self) -> CubeDim {
        CubeDim::new_1d(self.units as u32)
    }
}

/// `count` cubes over x and y, past the limit of one axis, and `groups` over z. Kernels find theirs with
/// [`cube_index`] and stop past `count`.
pub(crate) fn cube_count(client: &Client, count: usize, groups: usize) -> CubeCount {
    let x = count.min(client.properties().hardware.max_cube_count.0 as usize);
    CubeCount::Static(x as u32, count.div_ceil(x) as u32, groups as u32)
}

/// The index of this cube over x and y.
#[cube]
pub(crate) fn cube_index() -> usize {
    CUBE_POS_Y as usize * CUBE_COUNT_X as usize + CUBE_POS_X as usize
}
