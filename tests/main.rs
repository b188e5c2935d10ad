//! The tests of dar-kernels and dar-burn in one binary; folders carry the names of `src`.

mod conformance;
mod examples;
mod model;
mod nn;
mod ops;
mod support;
mod upcycle;
