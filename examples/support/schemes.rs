use std::str::FromStr;

use dar_burn::nn::{AttnResConfig, SeparateValues};
use dar_burn::{ResidualConfig, Routing};

/// A residual scheme by its name on the command line.
#[derive(Debug, Clone, Copy)]
pub struct Scheme {
    pub name: &'static str,
    /// The configuration, with so many layers a block where the scheme has blocks.
    pub residual: fn(usize) -> ResidualConfig,
}

/// All of them.
pub const SCHEMES: [Scheme; 12] = [
    Scheme { name: "standard", residual: |_| ResidualConfig::Standard },
    Scheme { name: "attnres_block", residual: ResidualConfig::attnres_block },
    Scheme { name: "attnres_full", residual: |_| ResidualConfig::attnres_full() },
    Scheme { name: "attnres_sepv", residual: |_| separate_values() },
    Scheme { name: "dar_block", residual: ResidualConfig::dar_block },
    Scheme { name: "dar_full", residual: |_| ResidualConfig::dar_full() },
    Scheme { name: "dar_self", residual: |block| ResidualConfig::dar_routed(block, Routing::SelfKeyValue) },
    Scheme { name: "dar_cross_value", residual: |block| ResidualConfig::dar_routed(block, Routing::CrossValue) },
    Scheme { name: "dar_fixed", residual: |block| ResidualConfig::dar_routed(block, Routing::FixedKeyValue) },
    Scheme { name: "mhc", residual: |_| ResidualConfig::mhc(STREAMS) },
    Scheme { name: "hc", residual: |_| ResidualConfig::hyper_connections(STREAMS) },
    Scheme { name: "cascade", residual: |_| ResidualConfig::Cascade },
];

/// Streams of the hyper-connections.
const STREAMS: usize = 4;

fn separate_values() -> ResidualConfig {
    ResidualConfig::AttnRes(AttnResConfig::full().with_separate_values(SeparateValues::PerSource))
}

/// The names, as messages list them.
pub fn names() -> String {
    SCHEMES.map(|scheme| scheme.name).join(", ")
}

impl FromStr for Scheme {
    type Err = String;

    fn from_str(name: &str) -> Result<Self, String> {
        let found = SCHEMES.into_iter().find(|scheme| scheme.name == name);
        found.ok_or_else(|| format!("unknown scheme `{name}`: expected one of {}", names()))
    }
}
