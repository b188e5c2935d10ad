mod devices;
mod fused;
mod layout;
mod params;
mod residual;
mod start;
mod store;
pub mod toy;
mod training;
