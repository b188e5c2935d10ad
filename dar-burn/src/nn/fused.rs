//! The state of a scheme whose pass is fused: a write only records the branch output, which the next read writes.

use burn::tensor::Tensor;

use crate::ops::numeric::{require_device, require_dtype, require_shape};
use crate::ops::pass::Pass;
use crate::ops::{BranchNorm, SiteWeights, accumulator};

/// What a branch left.
#[derive(Debug, Clone)]
pub(super) enum Written {
    /// Nothing, before the first branch.
    Nothing,
    /// `[tokens, d_model]`
    Output(Tensor<2>),
    /// An entry of the history. `[tokens, streams, d_model]`
    Entry(Tensor<3>),
}

#[derive(Debug, Clone)]
pub(super) struct FusedState {
    pub(super) pass: Pass,
    pub(super) written: Written,
}

impl FusedState {
    /// The input of the next branch, normalised with `norm`, and the pass behind that read.
    #[track_caller]
    pub(super) fn read(self, site: Option<&SiteWeights>, norm: Option<&BranchNorm>) -> (Tensor<2>, Pass) {
        match self.written {
            Written::Nothing => self.pass.read::<2>(None, site, norm),
            Written::Output(output) => self.pass.read(Some(output), site, norm),
            Written::Entry(entry) => self.pass.read(Some(entry), site, norm),
        }
    }

    pub(super) fn finish(self) -> Tensor<2> {
        self.read(None, None).0
    }
}

/// Queries of all reads of a pass, in the accumulator type of `x`. `[reads, outputs, d_model]`
///
/// # Panics
/// If a query is not `[outputs, d_model]`, or on another device than `x`.
#[track_caller]
pub(super) fn stack_queries(queries: Vec<Tensor<2>>, outputs: usize, x: &Tensor<2>) -> Tensor<3> {
    for query in &queries {
        require_shape("Residual::start", "query", "[streams, d_model]", [outputs, x.dims()[1]], query);
        require_device("Residual::start", "query", x, query);
    }
    Tensor::stack::<3>(queries, 0).cast(accumulator(x.dtype()))
}

/// Panics unless the output of a branch has the element type and the device of what is carried.
#[track_caller]
pub(super) fn check_output<const C: usize, const D: usize>(carried: &Tensor<C>, output: &Tensor<D>) {
    require_dtype("Residual::write", "output", carried, output);
    require_device("Residual::write", "output", carried, output);
}

/// The input of a branch behind its norm, where no kernel has folded that in.
#[track_caller]
pub(super) fn normed(input: Tensor<2>, norm: Option<&BranchNorm>) -> Tensor<2> {
    match norm {
        Some(norm) => {
            require_device("Residual::read_normed", "norm.gain", &input, &norm.gain);
            norm.apply(input)
        }
        None => input,
    }
}
