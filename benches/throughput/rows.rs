//! The rows of the table: a residual method, and how it computes.

use std::str::FromStr;

use dar_burn::ResidualConfig;
use dar_burn::model::{Method, Preset};
use dar_burn::nn::{AttnResConfig, DarConfig};
use dar_burn::ops::{Implementation, Memory};

use crate::support::report::Paper;

/// One row. Written `METHOD` or `METHOD:VARIANT`.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Row {
    method: Method,
    variant: Variant,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Variant {
    Fused,
    Leanest,
    Composed,
}

impl Variant {
    const ALL: [(&str, Self); 3] = [("fused", Self::Fused), ("leanest", Self::Leanest), ("composed", Self::Composed)];
}

impl Row {
    const fn new(method: Method, variant: Variant) -> Self {
        Self { method, variant }
    }

    /// What the others are compared with.
    pub const fn standard() -> Self {
        Self::new(Method::Residual, Variant::Fused)
    }

    /// The whole table.
    pub fn all() -> Vec<Self> {
        use Method::*;
        let fused = [Residual, AttnResBlock, AttnResFull, DarBlock, DarFull, Mhc, HyperConnections];
        let ablations = [DarSelfKv, DarCrossV, DarFixedKv];
        let fused = fused.into_iter().chain(ablations).map(|method| Self::new(method, Variant::Fused));
        let others = [Variant::Leanest, Variant::Composed].into_iter().flat_map(|variant| {
            let methods = if variant == Variant::Leanest { &[DarBlock][..] } else { &[AttnResBlock, DarBlock] };
            methods.iter().map(move |&method| Self::new(method, variant))
        });
        fused.chain(others).collect()
    }

    /// What quick mode measures.
    pub fn few() -> Vec<Self> {
        use Method::*;
        [Residual, AttnResBlock, DarBlock].map(|method| Self::new(method, Variant::Fused)).to_vec()
    }

    pub fn name(&self) -> String {
        match self.variant {
            Variant::Fused => self.method.to_string(),
            variant => {
                let (name, _) = Variant::ALL.into_iter().find(|(_, known)| *known == variant).expect("all have names");
                format!("{}:{name}", self.method)
            }
        }
    }

    /// The residual as the paper's tables count it, with `layers` layers a block in the block forms. (The ablations are
    /// of DAR's full form.)
    pub fn residual(&self, layers: usize) -> ResidualConfig {
        let residual = match Preset::Dense1B.residual(self.method) {
            ResidualConfig::AttnRes(config) if self.method == Method::AttnResBlock => {
                ResidualConfig::AttnRes(AttnResConfig { branches_per_block: 2 * layers, ..config })
            }
            ResidualConfig::Dar(config) if self.method == Method::DarBlock => {
                ResidualConfig::Dar(DarConfig { branches_per_block: 2 * layers, ..config })
            }
            residual => residual,
        };
        match self.variant {
            Variant::Fused => residual.with_implementation(Implementation::Fused).with_memory(Memory::Fastest),
            Variant::Leanest => residual.with_implementation(Implementation::Fused).with_memory(Memory::Leanest),
            Variant::Composed => residual.with_implementation(Implementation::Composed),
        }
    }

    /// What the paper measured of this row (Table 3): its 7B mixture of experts with blocks of three layers.
    pub fn paper(&self) -> Option<Paper> {
        const STANDARD: f64 = 114.0;
        match (self.method, self.variant) {
            (Method::Residual, Variant::Fused) => Some(Paper { ratio: 1.0, more_gib: 0.0 }),
            (Method::AttnResBlock, Variant::Fused) => Some(Paper { ratio: 104.0 / STANDARD, more_gib: 7.7 }),
            (Method::DarBlock, Variant::Fused) => Some(Paper { ratio: 94.0 / STANDARD, more_gib: 10.7 }),
            _ => None,
        }
    }
}

impl FromStr for Row {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, String> {
        let (method, variant) = text.trim().split_once(':').unwrap_or((text, "fused"));
        let method = method.parse().map_err(|error: dar_burn::model::UnknownName| error.to_string())?;
        let found = Variant::ALL.into_iter().find(|(name, _)| *name == variant);
        let (_, variant) = found
            .ok_or_else(|| format!("`{text}` names the variant `{variant}`: expected fused, leanest or composed"))?;
        Ok(Self { method, variant })
    }
}
