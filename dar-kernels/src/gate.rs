//! The gates of a site: how its parameters and its per-token results are packed.

/// Gates a token: alpha of both streams, beta of both streams, rho.
pub(crate) const GATES: usize = 5;
/// The first of the two mixing gates.
pub(crate) const ALPHA: usize = 0;
/// The first of the two write gates.
pub(crate) const BETA: usize = 2;
/// The transport gate.
pub(crate) const RHO: usize = 4;
/// The query's row of a site's weights, behind those of the gates.
pub(crate) const QUERY: usize = 5;
/// Rows of a site's weights, each for stream 0, then stream 1.
pub(crate) const ROWS: usize = 6;
/// Biases of all gates, then the scales of alpha, beta and rho.
pub(crate) const SCALARS: usize = GATES + 3;
