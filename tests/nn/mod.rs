mod layout;
mod params;
mod residual;
mod start;
mod store;
mod toy;
mod training;
