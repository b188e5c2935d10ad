use std::ops::Range;

use burn::config::Config;
use thiserror::Error;

/// What a residual scheme has to know of the model that it serves.
#[derive(Config, Debug, PartialEq, Eq)]
pub struct BranchLayout {
    /// Width of the model.
    pub d_model: usize,
    /// Residual branches of the whole model: two a Transformer layer, attention and feed-forward.
    pub branches: usize,
    /// The model normalises what [`Residual::finish`](super::Residual::finish) returns.
    #[config(default = true)]
    pub final_norm: bool,
    /// Branches alternate attention, feed-forward, attention, …
    #[config(default = true)]
    pub alternating: bool,
}

/// Why a residual configuration was refused.
#[derive(Debug, Clone, PartialEq, Eq, Error)]
#[error("{scheme}: `{field}` is {got}, expected {expected}")]
pub struct ResidualConfigError {
    scheme: &'static str,
    field: &'static str,
    got: String,
    expected: String,
}

impl ResidualConfigError {
    pub(super) fn new(
        scheme: &'static str,
        field: &'static str,
        got: impl ToString,
        expected: impl Into<String>,
    ) -> Self {
        Self { scheme, field, got: got.to_string(), expected: expected.into() }
    }
}

/// `Err` with the reason unless `fits`.
pub(super) fn refuse_unless(
    fits: bool,
    scheme: &'static str,
    field: &'static str,
    got: impl ToString,
    expected: &str,
) -> Result<(), ResidualConfigError> {
    if fits { Ok(()) } else { Err(ResidualConfigError::new(scheme, field, got, expected)) }
}

/// Refuses a number that is not one in f32.
pub(super) fn refuse_unless_f32(
    scheme: &'static str,
    field: &'static str,
    got: f64,
) -> Result<(), ResidualConfigError> {
    let holds = got.abs() <= f64::from(f32::MAX);
    refuse_unless(holds, scheme, field, got, "a finite number that f32 holds")
}

/// Refuses an epsilon of a norm.
pub(super) fn refuse_unless_eps(scheme: &'static str, eps: f64) -> Result<(), ResidualConfigError> {
    let fits = eps >= 0.0 && eps <= f64::from(f32::MAX);
    refuse_unless(fits, scheme, "eps", eps, "a finite number ≥ 0 that f32 holds")
}

/// Which branches share the parameters of one residual site.
#[derive(Config, Debug, Copy, PartialEq, Eq)]
pub enum Tying {
    /// Every branch has a site of its own, as the equations are written.
    PerBranch,
    /// One attention site and one feed-forward site a block, shared by its layers, as the papers' parameter tables count.
    PerBlock,
}

/// Maps branches to the sites whose parameters they use.
#[derive(Debug, Clone, Copy)]
pub(super) struct Sites {
    pub(super) branches: usize,
    pub(super) branches_per_block: usize,
    pub(super) tying: Tying,
}

impl Sites {
    /// Sites of one whole block.
    fn per_block(self) -> usize {
        match self.tying {
            Tying::PerBranch => self.branches_per_block,
            Tying::PerBlock => self.branches_per_block.min(2),
        }
    }

    /// Number of sites.
    pub(super) fn count(self) -> usize {
        let rest = self.branches % self.branches_per_block;
        self.branches / self.branches_per_block * self.per_block() + rest.min(self.per_block())
    }

    /// The site of `branch`.
    pub(super) fn of(self, branch: usize) -> usize {
        let (block, position) = (branch / self.branches_per_block, branch % self.branches_per_block);
        block * self.per_block() + position % self.per_block()
    }

    /// The sites that the block of `branch` uses; the last block may use fewer than a whole one.
    pub(super) fn of_block(self, branch: usize) -> Range<usize> {
        let first = branch - branch % self.branches_per_block;
        let used = (self.branches - first).min(self.per_block());
        self.of(first)..self.of(first) + used
    }

    /// A site that only ever sees the embedding has nothing to choose from, hence no query: the first site, unless later
    /// branches share it.
    pub(super) fn has_query(self, site: usize) -> bool {
        site > 0 || (1..self.branches).any(|branch| self.of(branch) == 0)
    }
}
