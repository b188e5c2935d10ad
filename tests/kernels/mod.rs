//! The kernels on every CubeCL device, against the golden cases and the composed operations in f64 on Flex.

mod prefix;
mod support;
