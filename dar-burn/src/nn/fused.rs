//! What the schemes that keep a history share: the choice between a fused pass and the graph of the equations.
//!
//! A write of a fused pass only records the branch output, which the next read writes.

use burn::tensor::Tensor;

use super::observer::Observer;
use crate::ops::numeric::{require_device, require_dtype, require_shape};
use crate::ops::pass::Pass;
use crate::ops::{BranchNorm, Implementation, SiteWeights, accumulator};

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

/// Where a fused pass stands between two branches.
#[derive(Debug, Clone)]
pub(super) struct FusedState {
    pass: Pass,
    written: Written,
}

impl FusedState {
    /// The input of the next branch, normalised with `norm`, and the pass behind that read.
    #[track_caller]
    fn read(self, site: Option<&SiteWeights>, norm: Option<&BranchNorm>) -> (Tensor<2>, Pass) {
        match self.written {
            Written::Nothing => self.pass.read::<2>(None, site, norm),
            Written::Output(output) => self.pass.read(Some(output), site, norm),
            Written::Entry(entry) => self.pass.read(Some(entry), site, norm),
        }
    }
}

/// Between two branches: in a fused pass, or in the graph of the equations.
#[derive(Debug, Clone)]
#[expect(clippy::large_enum_variant, reason = "one a pass, and a box would be one more indirection a branch")]
pub(super) enum HistoryState<S> {
    Fused(FusedState),
    Composed(S),
}

/// Between a read and its write.
#[derive(Debug, Clone)]
#[expect(clippy::large_enum_variant, reason = "one a pass, and a box would be one more indirection a branch")]
pub(super) enum HistoryPending<P> {
    Fused(Pass),
    Composed(P),
}

/// What the graph of the equations carries between a read and its write.
pub(super) trait ComposedPending {
    /// A tensor of the element type and on the device of the states.
    fn carried(&self) -> Tensor<3>;
}

impl<P: ComposedPending> HistoryPending<P> {
    /// Panics unless `output` has the element type and the device of what is carried.
    #[track_caller]
    pub(super) fn check<const D: usize>(&self, output: &Tensor<D>) {
        match self {
            Self::Fused(pass) => check_output(pass.carried(), output),
            Self::Composed(pending) => check_output(&pending.carried(), output),
        }
    }
}

/// A scheme that keeps a history: its parts in a fused pass, the equations as they are written, and the choice between the
/// two.
pub(super) trait HistoryScheme {
    type State: Clone;
    type Pending: ComposedPending;

    fn implementation(&self) -> Implementation;

    /// Begins a fused pass with the embedding.
    #[track_caller]
    fn start_fused(&self, x: Tensor<2>) -> Pass;

    /// The gates of a branch, if there are gates.
    fn site_weights(&self, branch: usize) -> Option<SiteWeights>;

    /// What the output of a branch is to a fused pass.
    fn written(&self, branch: usize, output: Tensor<2>) -> Written;

    fn start_composed(&self, x: Tensor<2>) -> Self::State;

    fn read_composed(
        &self,
        branch: usize,
        state: Self::State,
        observer: Option<&dyn Observer>,
    ) -> (Tensor<2>, Self::Pending);

    fn write_composed(
        &self,
        branch: usize,
        pending: Self::Pending,
        output: Tensor<2>,
        observer: Option<&dyn Observer>,
    ) -> Self::State;

    fn finish_composed(&self, state: Self::State, observer: Option<&dyn Observer>) -> Tensor<2>;

    /// A fused pass has no place for an observer.
    #[track_caller]
    fn start(&self, x: Tensor<2>, observed: bool) -> HistoryState<Self::State> {
        // Nothing to fuse without tokens.
        if observed || self.implementation() == Implementation::Composed || x.dims()[0] == 0 {
            return HistoryState::Composed(self.start_composed(x));
        }
        HistoryState::Fused(FusedState { pass: self.start_fused(x), written: Written::Nothing })
    }

    /// The input of a branch, normalised with `norm`.
    #[track_caller]
    fn read(
        &self,
        branch: usize,
        state: HistoryState<Self::State>,
        norm: Option<&BranchNorm>,
        observer: Option<&dyn Observer>,
    ) -> (Tensor<2>, HistoryPending<Self::Pending>) {
        match state {
            HistoryState::Fused(state) => {
                let (input, pass) = state.read(self.site_weights(branch).as_ref(), norm);
                (input, HistoryPending::Fused(pass))
            }
            HistoryState::Composed(state) => {
                let (input, pending) = self.read_composed(branch, state, observer);
                (normed(input, norm), HistoryPending::Composed(pending))
            }
        }
    }

    fn write(
        &self,
        branch: usize,
        pending: HistoryPending<Self::Pending>,
        output: Tensor<2>,
        observer: Option<&dyn Observer>,
    ) -> HistoryState<Self::State> {
        match pending {
            HistoryPending::Fused(pass) => {
                HistoryState::Fused(FusedState { pass, written: self.written(branch, output) })
            }
            HistoryPending::Composed(pending) => {
                HistoryState::Composed(self.write_composed(branch, pending, output, observer))
            }
        }
    }

    fn finish(&self, state: HistoryState<Self::State>, observer: Option<&dyn Observer>) -> Tensor<2> {
        match state {
            HistoryState::Fused(state) => state.read(None, None).0,
            HistoryState::Composed(state) => self.finish_composed(state, observer),
        }
    }

    /// The hidden state if the pass ended here; `None` for a fused pass, whose next read is planned.
    fn exit(&self, state: &HistoryState<Self::State>) -> Option<Tensor<2>> {
        match state {
            HistoryState::Fused(_) => None,
            HistoryState::Composed(state) => Some(self.finish_composed(state.clone(), None)),
        }
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
