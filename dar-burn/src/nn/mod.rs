//! Residual schemes as Burn modules, behind one interface: [`ResidualConfig`] → [`Residual`].

mod attn_res;
mod cascade;
mod dar;
mod fused;
mod hyper;
mod layout;
mod mhc;
mod observer;
mod params;
mod residual;
mod site;
mod standard;

pub use attn_res::{AttnRes, AttnResConfig, SeparateValues};
pub use cascade::Cascade;
pub use dar::{Dar, DarConfig};
pub use hyper::{HyperBranch, HyperConfig, HyperConnections};
pub use layout::{BranchLayout, ResidualConfigError, Tying};
pub use mhc::{Mhc, MhcBranch, MhcConfig};
pub use observer::{Observer, Unobserved};
pub use residual::{Pending, Residual, ResidualConfig, ResidualState, Scheme};
pub use site::{DarSite, Gate};
pub use standard::Standard;
