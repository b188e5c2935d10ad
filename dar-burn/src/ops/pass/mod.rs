//! One pass through the depth of a model, fused: what the schemes that keep a history run.
//!
//! A pass reads once for every branch and once for its output. Between two branches lies one operation:
//!
//! ```text
//! read i:    write the output of branch i - 1, close the block if it ends there, read the input of branch i
//! ```
//!
//! with one hand-written backward, which is the read backward of i and the write backward of i - 1 together. What the
//! operations share lives in *arenas*, buffers with a row for every entry or read of the pass, which are written in place:
//!
//! ```text
//! forward    start:  entry 0 of the history is the embedding
//!            read i: close:  entry i / S = write(partial, output of branch i - 1)                       (17, 18, A.1)
//!                    prefix: what the queries of a whole block find in the history, at its first read   (A.2–A.5)
//!                    read:   partial = write(partial, output of i - 1); merge, gates, branch input      (A.6–A.10, 13–17)
//! backward   read i: the retrieved state of read i becomes its own gradient; with it, the gradients of the site, of the
//!                    partial state and of the output of branch i - 1
//!                    close:  the gradient of the entry, formed once from the gradients that all later reads left (pull)
//!            start:  the gradient of the embedding, likewise, then that of all queries
//! ```
//!
//! The reads of a pass form a chain, so that one autodiff node a read suffices. A state may go on in two ways: the second
//! one copies the arenas ([`tape`]).

mod autodiff;
#[cfg(feature = "cube")]
mod cube;
#[cfg(feature = "flex")]
mod flex;
mod kernels;
mod tape;

use burn::backend::{Dispatch, DispatchDevice};
use burn::tensor::{DType, Device, Tensor};
use dar_kernels::{KernelError, Routing};
use serde::{Deserialize, Deserializer, Serialize};

use self::autodiff::PassOps;
use self::kernels::{OptionalSite, OptionalTensor, Site};
use self::tape::Link;
use super::numeric::{BranchNorm, require, require_device};
use super::read::{GateWeights, SiteWeights, check_site};

/// What a pass keeps for its backward. The gradients are the same.
///
/// A configuration that was saved before there was a choice loads with the default.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default, Serialize)]
pub enum Memory {
    /// Retrieved and partial states, besides what exists anyway: 5 `[tokens, d_model]` a branch and two streams.
    #[default]
    Fastest,
    /// Branch outputs only; states are computed again, block by block: 1 `[tokens, d_model]` a branch, and 2 while
    /// the backward runs.
    Leanest,
}

/// How a scheme that keeps a history computes.
///
/// A configuration that was saved before there was a choice loads with the default.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default, Serialize)]
pub enum Implementation {
    /// Kernels with a hand-written backward on CubeCL devices, operations with a hand-written backward on Flex.
    #[default]
    Fused,
    /// The graph of the operations of [`ops`](crate::ops) as they are written, differentiated by Burn: the reference.
    Composed,
}

// Serde asks the type of a missing field for an `Option`, and Burn's Config derive takes no attribute that would say
// what is missing then: so both read themselves as one.
impl<'de> Deserialize<'de> for Memory {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        #[derive(Deserialize)]
        #[serde(rename = "Memory")]
        enum Named {
            Fastest,
            Leanest,
        }
        Ok(match Option::deserialize(deserializer)? {
            None => Self::default(),
            Some(Named::Fastest) => Self::Fastest,
            Some(Named::Leanest) => Self::Leanest,
        })
    }
}

impl<'de> Deserialize<'de> for Implementation {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        #[derive(Deserialize)]
        #[serde(rename = "Implementation")]
        enum Named {
            Fused,
            Composed,
        }
        Ok(match Option::deserialize(deserializer)? {
            None => Self::default(),
            Some(Named::Fused) => Self::Fused,
            Some(Named::Composed) => Self::Composed,
        })
    }
}

/// The sizes and the form of a pass.
#[derive(Debug, Clone, Copy, PartialEq)]
pub(crate) struct Plan {
    /// Streams of the history.
    pub(crate) streams: usize,
    /// Streams that are retrieved: `streams`, but 1 where stream 1 of the history holds projected values (21).
    pub(crate) outputs: usize,
    pub(crate) d_model: usize,
    pub(crate) branches: usize,
    pub(crate) branches_per_block: usize,
    pub(crate) routing: Routing,
    /// Gated reads and writes (13–17); else the branch output is added, and the branch input is what was retrieved.
    pub(crate) gated: bool,
    pub(crate) eps: f64,
    pub(crate) memory: Memory,
}

impl Plan {
    /// One for every branch, and the output read.
    pub(crate) fn reads(&self) -> usize {
        self.branches + 1
    }

    /// Entries that the history will have: the embedding and every block that closes.
    pub(crate) fn entries(&self) -> usize {
        self.branches / self.branches_per_block + 1
    }

    /// Whether `read` has no partial state: it is the first of a block, or the output read behind a closed one.
    pub(crate) fn opens(&self, read: usize) -> bool {
        read.is_multiple_of(self.branches_per_block)
    }

    /// Reads that the prefix at `read` serves.
    pub(crate) fn prefix_reads(&self, read: usize) -> usize {
        if read == self.branches { 1 } else { self.branches_per_block.min(self.branches - read) }
    }
}

/// A pass between two branches. A value: going on from a clone is another pass.
#[derive(Debug, Clone)]
pub(crate) struct Pass {
    plan: Plan,
    link: Link,
    /// The edge to the read before in the autodiff graph; one element of the storage type.
    chain: Tensor<1>,
    /// Reads so far.
    next: usize,
}

impl Pass {
    /// Begins a pass.
    ///
    /// # Shapes
    /// - `embedding`: `[tokens, d_model]`, or an entry `[tokens, streams, d_model]`
    /// - `queries`: `[reads, outputs, d_model]`, in the accumulator type
    ///
    /// # Panics
    /// If the device does not compute in the element type of `embedding`.
    #[track_caller]
    pub(crate) fn start<const D: usize>(plan: Plan, embedding: Tensor<D>, queries: Tensor<3>) -> Self {
        check_dtype(&embedding.device(), embedding.dtype());
        let link = Link::default();
        let chain = Dispatch::pass_start(embedding.into_dispatch(), queries.into_dispatch(), plan, link.clone());
        Self { plan, link, chain: Tensor::from_dispatch(chain), next: 0 }
    }

    /// Writes `output` of the branch before, if there is one, and reads the input of the next branch, normalised with
    /// `norm`.
    ///
    /// # Shapes
    /// - `output`: `[tokens, d_model]`, or an entry `[tokens, streams, d_model]`
    /// - returned input: `[tokens, d_model]`
    #[track_caller]
    pub(crate) fn read<const D: usize>(
        self,
        output: Option<Tensor<D>>,
        site: Option<&SiteWeights>,
        norm: Option<&BranchNorm>,
    ) -> (Tensor<2>, Self) {
        let Self { plan, link, chain, next } = self;
        if let Some(site) = site {
            check_site("Residual::read", site, plan.d_model, &chain);
        }
        if let Some(norm) = norm {
            require_device("Residual::read_normed", "norm.gain", &chain, &norm.gain);
        }
        let output = match output {
            Some(output) => OptionalTensor::Given(output.into_dispatch()),
            None => OptionalTensor::Absent,
        };
        let site = match site {
            Some(site) => OptionalSite::Given(dispatch(site)),
            None => OptionalSite::Absent,
        };
        let (gain, eps) = match norm {
            Some(norm) => (OptionalTensor::Given(norm.gain.clone().into_dispatch()), Some(norm.eps)),
            None => (OptionalTensor::Absent, None),
        };
        let forward = Link::default();
        let chain = chain.into_dispatch();
        let (input, chain) = Dispatch::pass_read(chain, output, site, gain, eps, next, link, forward.clone());
        let pass = Self { plan, link: forward, chain: Tensor::from_dispatch(chain), next: next + 1 };
        (Tensor::from_dispatch(input), pass)
    }

    /// A tensor of the element type and on the device of the states.
    pub(crate) fn carried(&self) -> &Tensor<1> {
        &self.chain
    }
}

/// Panics unless `device` computes in `dtype`: a launch could only fail, and later.
#[track_caller]
fn check_dtype(device: &Device, dtype: DType) {
    let inner = device.clone().inner();
    let (fits, expected) = match inner.as_dispatch() {
        #[cfg(feature = "cube")]
        DispatchDevice::Cube(_) => {
            let stored = [DType::F32, DType::F16, DType::BF16];
            let computed: Vec<_> = stored.into_iter().filter(|&dtype| inner.supports_dtype(dtype)).collect();
            (computed.contains(&dtype), format!("one that kernels store and the device computes in: {computed:?}"))
        }
        _ => (dtype.is_float(), "a float".to_owned()),
    };
    if !fits {
        let (operation, argument, got) = ("Residual::start", "embedding", format!("{dtype:?}"));
        require::<()>(Err(KernelError::ElementType { operation, argument, expected, got }));
    }
}

fn dispatch(site: &SiteWeights) -> Site<Dispatch> {
    let weight = |gate: &GateWeights| gate.weight.clone().into_dispatch();
    let bias = |gate: &GateWeights| gate.bias.clone().into_dispatch();
    let scale = |gate: &GateWeights| gate.scale.clone().into_dispatch();
    let SiteWeights { alpha, beta, rho } = site;
    Site {
        alpha_weight: weight(alpha),
        alpha_bias: bias(alpha),
        alpha_scale: scale(alpha),
        beta_weight: weight(beta),
        beta_bias: bias(beta),
        beta_scale: scale(beta),
        rho_weight: weight(rho),
        rho_bias: bias(rho),
        rho_scale: scale(rho),
    }
}

/// The type of the parameters inside a pass.
fn parameter_dtype(storage: DType) -> DType {
    super::accumulator(storage)
}
