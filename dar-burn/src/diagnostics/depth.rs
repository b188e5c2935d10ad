//! Early against late layers (mHC stream analysis, 4 and A.1).

use dar_kernels::KernelError;
use ndarray::ArrayView1;

use super::check::{require_finite, require_shape, require_value};

/// A value for the early layers and one for the late.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct EarlyLate<T> {
    /// Of the layers before the split.
    pub early: T,
    /// Of the split and the layers after it.
    pub late: T,
}

/// Where the late layers begin.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct DepthSplit {
    layers: usize,
    late_from: usize,
}

impl DepthSplit {
    /// Half the layers are early, the middle one of an odd number with them: of 43 layers 0 to 21, which is the paper's
    /// split.
    ///
    /// # Errors
    /// If there are fewer than two layers.
    pub fn half(layers: usize) -> Result<Self, KernelError> {
        require_value(layers >= 2, "DepthSplit::half", "layers", "at least 2", layers)?;
        Self::at(layers, layers.div_ceil(2))
    }

    /// Layer `late_from` is the first late one.
    ///
    /// # Errors
    /// If either part would be empty.
    pub fn at(layers: usize, late_from: usize) -> Result<Self, KernelError> {
        let expected = format!("1 to below layers = {layers}");
        require_value(late_from > 0 && late_from < layers, "DepthSplit::at", "late_from", &expected, late_from)?;
        Ok(Self { layers, late_from })
    }

    /// The first late layer.
    pub fn late_from(&self) -> usize {
        self.late_from
    }

    /// Splits values in order of depth, one a layer or the same number for each, such as one a branch.
    ///
    /// # Errors
    /// If the number of values is no multiple of the number of layers.
    pub fn split<'a, T>(&self, values: &'a [T]) -> Result<EarlyLate<&'a [T]>, KernelError> {
        let fits = !values.is_empty() && values.len().is_multiple_of(self.layers);
        let expected = format!("a multiple of layers = {}", self.layers);
        require_shape(fits, "DepthSplit::split", "values", expected, &[values.len()])?;
        let (early, late) = values.split_at(values.len() / self.layers * self.late_from);
        Ok(EarlyLate { early, late })
    }

    /// Means of values in order of depth.
    ///
    /// # Errors
    /// As of [`split`](Self::split), or if a value is not finite.
    pub fn means(&self, values: &[f64]) -> Result<EarlyLate<f64>, KernelError> {
        let EarlyLate { early, late } = self.split(values)?;
        require_finite("DepthSplit::means", "values", ArrayView1::from(values))?;
        let mean = |values: &[f64]| values.iter().sum::<f64>() / values.len() as f64;
        Ok(EarlyLate { early: mean(early), late: mean(late) })
    }

    /// At how many sites each stream dominates, from the dominant stream of each site in order of depth.
    ///
    /// # Errors
    /// As of [`split`](Self::split), or if there is no such stream.
    pub fn dominated(&self, dominant: &[usize], streams: usize) -> Result<EarlyLate<Vec<usize>>, KernelError> {
        let EarlyLate { early, late } = self.split(dominant)?;
        let expected = format!("below streams = {streams}");
        for &stream in dominant {
            require_value(stream < streams, "DepthSplit::dominated", "dominant", &expected, stream)?;
        }
        let count = |sites: &[usize]| {
            let mut count = vec![0; streams];
            sites.iter().for_each(|&stream| count[stream] += 1);
            count
        };
        Ok(EarlyLate { early: count(early), late: count(late) })
    }
}
