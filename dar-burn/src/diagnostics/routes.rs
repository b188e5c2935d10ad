//! How many streams a branch reads and writes, and which (mHC stream analysis, 3, 4 and A.2).
//!
//! ```text
//! share_{t,i} = |w_{t,i}| / sum_k |w_{t,k}|                           of token t
//! load_i      = mean over the tokens of a sequence of share_{t,i}
//! effective   = exp(-sum_i load_i ln load_i)                          mean over sequences
//! winner_t    = the stream of largest |w_{t,i}|
//! consistency = share of a sequence's tokens that have its commonest winner; mean over sequences
//! ```
//!
//! The paper's summary fixes the ends of each measure (1 to n streams; 1 when all tokens agree) and what is averaged over
//! what. Taken here for the rest:
//!
//! * the exponential of the entropy, rather than `1 / sum load²`: the same count that the effective rank of a
//!   [`Spectrum`](super::Spectrum) uses;
//! * each token is normalised before tokens are averaged, so that a token of large weights does not count more;
//! * magnitudes, since plain hyper-connections may have negative weights; those of mHC are positive;
//! * the stream of largest load dominates a site, and the lower stream wins a tie.

use dar_kernels::KernelError;
use ndarray::{Array1, ArrayView1, ArrayView3};

use super::check::{require_finite, require_shape};
use super::distribution::entropy;

/// How one site routes: the read weights of a branch, or its write weights.
#[derive(Debug, Clone, PartialEq)]
pub struct RouteUse {
    /// Mean share of the routing weight that each stream carries; sums to 1. `[streams]`
    pub load: Array1<f64>,
    /// How many streams carry the load, 1 to `streams`.
    pub effective_streams: f64,
    /// Share of tokens that agree with their sequence on the stream of largest weight.
    pub winner_consistency: f64,
}

impl RouteUse {
    /// Measures the routing weights of one site.
    ///
    /// # Shapes
    /// - `weights`: `[sequences, tokens, streams]`
    ///
    /// # Errors
    /// If there are no weights, one is not finite, or all weights of a token are zero.
    pub fn measure(weights: ArrayView3<'_, f64>) -> Result<Self, KernelError> {
        let operation = "RouteUse::measure";
        require_finite(operation, "weights", weights)?;
        let (sequences, tokens, streams) = weights.dim();
        let (mut load, mut effective, mut consistency) = (Array1::zeros(streams), 0.0, 0.0);
        for (index, sequence) in weights.outer_iter().enumerate() {
            let mut sequence_load = Array1::<f64>::zeros(streams);
            let mut wins = vec![0_usize; streams];
            for (place, token) in sequence.outer_iter().enumerate() {
                let size = token.mapv(f64::abs);
                let largest = size[first_largest(size.view())];
                if largest == 0.0 {
                    let got = format!("all zero at {:?}", [index, place]);
                    return Err(KernelError::value(
                        operation,
                        "weights",
                        "a weight that is not zero for every token",
                        got,
                    ));
                }
                let size = size / largest; // a sum of large weights could overflow
                wins[first_largest(size.view())] += 1;
                sequence_load += &(&size / size.sum());
            }
            sequence_load /= tokens as f64;
            effective += entropy(sequence_load.iter().copied()).exp();
            consistency += wins.into_iter().max().expect("at least one stream") as f64 / tokens as f64;
            load += &sequence_load;
        }
        let sequences = sequences as f64;
        Ok(Self {
            load: load / sequences,
            effective_streams: effective / sequences,
            winner_consistency: consistency / sequences,
        })
    }

    /// The stream of largest load.
    pub fn dominant(&self) -> usize {
        first_largest(self.load.view())
    }

    /// The stream of lowest load.
    pub fn lowest(&self) -> usize {
        first_largest((-&self.load).view())
    }
}

/// Share of sites whose reads and writes are dominated by different streams.
///
/// # Errors
/// If there are no sites, or the numbers of sites differ.
pub fn differing_winners(reads: &[RouteUse], writes: &[RouteUse]) -> Result<f64, KernelError> {
    let operation = "differing_winners";
    require_shape(!reads.is_empty(), operation, "reads", "at least one site", &[0])?;
    let expected = format!("one a site, {} as of `reads`", reads.len());
    require_shape(writes.len() == reads.len(), operation, "writes", expected, &[writes.len()])?;
    let differing = reads.iter().zip(writes).filter(|(read, write)| read.dominant() != write.dominant()).count();
    Ok(differing as f64 / reads.len() as f64)
}

/// Index of the largest value; the first of equals.
fn first_largest(values: ArrayView1<'_, f64>) -> usize {
    let larger = |best: usize, (index, &value): (usize, &f64)| if value > values[best] { index } else { best };
    values.iter().enumerate().fold(0, larger)
}
