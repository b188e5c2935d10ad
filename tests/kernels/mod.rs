//! The kernels on every CubeCL device, against the golden cases and the composed operations in f64 on Flex.

mod faults;
mod pack;
mod pass;
mod prefix;
mod read;
mod site;
mod support;
mod write;
