use std::path::Path;
use std::str::FromStr;

use burn::config::Config as _;
use dar_burn::nn::{AttnResConfig, SeparateValues};
use dar_burn::{ResidualConfig, Routing};

/// A residual scheme of the command line.
#[derive(Debug, Clone)]
pub struct Scheme {
    /// What the command line said: a name of [`SCHEMES`], or a file.
    pub argument: String,
    /// What the scheme is called: the name, or the file's without its ending.
    pub name: String,
    config: Config,
}

#[derive(Debug, Clone)]
enum Config {
    Named(OfBlock),
    File(ResidualConfig),
}

impl Scheme {
    /// The configuration, with `layers` layers a block where a named scheme has blocks.
    pub fn residual(&self, layers: usize) -> ResidualConfig {
        match &self.config {
            Config::Named(config) => config(layers),
            Config::File(config) => config.clone(),
        }
    }
}

/// A configuration as a function of the layers a block.
type OfBlock = fn(usize) -> ResidualConfig;

/// The schemes with a name.
const SCHEMES: [(&str, OfBlock); 13] = [
    ("standard", |_| ResidualConfig::Standard),
    ("attnres_block", ResidualConfig::attnres_block),
    ("attnres_full", |_| ResidualConfig::attnres_full()),
    ("attnres_sepv", |_| separate_values()),
    ("dar_block", ResidualConfig::dar_block),
    ("dar_full", |_| ResidualConfig::dar_full()),
    ("dar_self", |block| ResidualConfig::dar_routed(block, Routing::SelfKeyValue)),
    ("dar_cross_value", |block| ResidualConfig::dar_routed(block, Routing::CrossValue)),
    ("dar_fixed", |block| ResidualConfig::dar_routed(block, Routing::FixedKeyValue)),
    ("mhc", |_| ResidualConfig::mhc(STREAMS)),
    ("mhc_2", |_| ResidualConfig::mhc(2)),
    ("hc", |_| ResidualConfig::hyper_connections(STREAMS)),
    ("cascade", |_| ResidualConfig::Cascade),
];

/// Streams of the hyper-connections.
const STREAMS: usize = 4;

fn separate_values() -> ResidualConfig {
    ResidualConfig::AttnRes(AttnResConfig::full().with_separate_values(SeparateValues::PerSource))
}

/// The names, as messages list them.
fn names() -> String {
    SCHEMES.map(|(name, _)| name).join(", ")
}

impl FromStr for Scheme {
    type Err = String;

    fn from_str(argument: &str) -> Result<Self, String> {
        let path = Path::new(argument);
        if path.extension().is_some_and(|extension| extension == "json") {
            let name = path.file_stem().map_or_else(String::new, |stem| stem.to_string_lossy().into_owned());
            let config = ResidualConfig::load(path).map_err(|error| {
                format!("`{argument}` is not a residual configuration that `ResidualConfig::save` wrote: {error}")
            })?;
            let absolute = std::path::absolute(path).unwrap_or_else(|_| path.to_owned());
            let argument = absolute.to_string_lossy().into_owned();
            return Ok(Self { argument, name, config: Config::File(config) });
        }
        let found = SCHEMES.into_iter().find(|(name, _)| *name == argument);
        let (name, config) = found.ok_or_else(|| {
            format!("unknown scheme `{argument}`: expected one of {}, or a file of a configuration (.json)", names())
        })?;
        Ok(Self { argument: name.into(), name: name.into(), config: Config::Named(config) })
    }
}
