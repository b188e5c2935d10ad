mod devices;
mod layout;
mod params;
mod residual;
mod start;
mod store;
pub mod toy;
mod training;
