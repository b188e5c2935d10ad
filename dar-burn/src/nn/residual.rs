use std::hash::{DefaultHasher, Hash, Hasher};
use std::sync::Arc;

use burn::config::Config;
use burn::module::Module;
use burn::tensor::{Device, Shape, Tensor};
use dar_kernels::{KernelError, Routing};

use super::attn_res::{self, AttnRes, AttnResConfig};
use super::cascade::{Cascade, CascadePending, CascadeState};
use super::dar::{self, Dar, DarConfig};
use super::fused::{HistoryPending, HistoryScheme, HistoryState, check_output, normed};
use super::hyper::{HyperConfig, HyperConnections, HyperPending};
use super::layout::{BranchLayout, ResidualConfigError, refuse_unless};
use super::mhc::{Mhc, MhcConfig};
use super::observer::Observer;
use super::standard::Standard;
use crate::ops::numeric::{require, require_shape};
use crate::ops::{BranchNorm, Implementation, Memory};

/// How a model carries its residual: the one line to change.
///
/// | variant | state it carries | source |
/// |---|---|---|
/// | [`Standard`](Self::Standard) | one stream | pre-norm residual (DAR paper, equation 1) |
/// | [`AttnRes`](Self::AttnRes) | a history of one stream | Attention Residuals (equations 2–5) |
/// | [`Dar`](Self::Dar) | a history of two streams | Dual Attention Residuals (equations 6–18) and its ablations (22) |
/// | [`Hyper`](Self::Hyper) | n streams | dynamic hyper-connections |
/// | [`Mhc`](Self::Mhc) | n streams | manifold-constrained hyper-connections |
/// | [`Cascade`](Self::Cascade) | a frozen and a context stream | stream separation (Bregman conditioning paper, equations 2–3) |
#[derive(Config, Debug, PartialEq)]
pub enum ResidualConfig {
    /// `x + f(x)`.
    Standard,
    /// Attention Residuals, full or block, and the separate-value control.
    AttnRes(AttnResConfig),
    /// Dual Attention Residuals, full or block, and the routing ablations.
    Dar(DarConfig),
    /// Dynamic hyper-connections.
    Hyper(HyperConfig),
    /// Manifold-constrained hyper-connections.
    Mhc(MhcConfig),
    /// Frozen token stream beside a context stream.
    Cascade,
}

impl ResidualConfig {
    /// Full Attention Residuals: every branch output is a source.
    pub fn attnres_full() -> Self {
        Self::AttnRes(AttnResConfig::full())
    }

    /// Block Attention Residuals with `layers` Transformer layers (two branches each) a block.
    pub fn attnres_block(layers: usize) -> Self {
        Self::AttnRes(AttnResConfig::block(layers))
    }

    /// Full Dual Attention Residuals: one Transformer layer a block.
    pub fn dar_full() -> Self {
        Self::Dar(DarConfig::block(1))
    }

    /// Block Dual Attention Residuals with `layers` Transformer layers (two branches each) a block.
    pub fn dar_block(layers: usize) -> Self {
        Self::Dar(DarConfig::block(layers))
    }

    /// Block Dual Attention Residuals with another routing (equation 22).
    pub fn dar_routed(layers: usize, routing: Routing) -> Self {
        Self::Dar(DarConfig::block(layers).with_routing(routing))
    }

    /// Dynamic hyper-connections with `streams` streams.
    pub fn hyper_connections(streams: usize) -> Self {
        Self::Hyper(HyperConfig::new().with_streams(streams))
    }

    /// Manifold-constrained hyper-connections with `streams` streams.
    pub fn mhc(streams: usize) -> Self {
        Self::Mhc(MhcConfig::new().with_streams(streams))
    }

    /// The same scheme with another choice of what is kept for the backward; schemes without a history have none.
    pub fn with_memory(self, memory: Memory) -> Self {
        match self {
            Self::AttnRes(config) => Self::AttnRes(config.with_memory(memory)),
            Self::Dar(config) => Self::Dar(config.with_memory(memory)),
            other => other,
        }
    }

    /// The same scheme, fused or composed; schemes without a history are composed.
    pub fn with_implementation(self, implementation: Implementation) -> Self {
        match self {
            Self::AttnRes(config) => Self::AttnRes(config.with_implementation(implementation)),
            Self::Dar(config) => Self::Dar(config.with_implementation(implementation)),
            other => other,
        }
    }

    /// Whether the scheme returns the plain residual's state only up to a scale, so that the model has to normalise it.
    pub fn needs_final_norm(&self) -> bool {
        !matches!(self, Self::Standard | Self::Cascade)
    }

    /// Refuses a configuration that cannot serve `layout`, with the reason.
    pub fn validate(&self, layout: &BranchLayout) -> Result<(), ResidualConfigError> {
        refuse_unless(layout.d_model > 0, "BranchLayout", "d_model", layout.d_model, "at least 1")?;
        refuse_unless(layout.branches > 0, "BranchLayout", "branches", layout.branches, "at least 1")?;
        refuse_unless(
            layout.final_norm || !self.needs_final_norm(),
            self.name(),
            "layout.final_norm",
            layout.final_norm,
            "true: this scheme returns the residual state up to a scale, which a norm after the last branch removes",
        )?;
        match self {
            Self::Standard => Ok(()),
            Self::AttnRes(config) => config.validate(layout),
            Self::Dar(config) => config.validate(layout),
            Self::Hyper(config) => config.validate(),
            Self::Mhc(config) => config.validate(),
            Self::Cascade => refuse_unless(
                layout.alternating && layout.branches.is_multiple_of(2),
                "Cascade",
                "layout.branches",
                layout.branches,
                "an even number of alternating branches: attention and feed-forward of a layer read the same state",
            ),
        }
    }

    /// The scheme's name in messages.
    pub fn name(&self) -> &'static str {
        match self {
            Self::Standard => "Standard",
            Self::AttnRes(_) => "AttnRes",
            Self::Dar(_) => "Dar",
            Self::Hyper(_) => "Hyper",
            Self::Mhc(_) => "Mhc",
            Self::Cascade => "Cascade",
        }
    }

    /// The residual pathway of a model with this layout.
    ///
    /// No scheme draws random numbers, so models of different schemes drawn from one seed share their backbone's draws.
    ///
    /// # Panics
    /// If [`validate`](Self::validate) refuses, with its message.
    #[track_caller]
    pub fn init(&self, layout: &BranchLayout, device: &Device) -> Residual {
        if let Err(error) = self.validate(layout) {
            panic!("{error}");
        }
        let scheme = match self {
            Self::Standard => Scheme::Standard(Standard::new()),
            Self::AttnRes(config) => Scheme::AttnRes(config.init(layout, device)),
            Self::Dar(config) => Scheme::Dar(config.init(layout, device)),
            Self::Hyper(config) => Scheme::Hyper(config.init(layout, device)),
            Self::Mhc(config) => Scheme::Mhc(config.init(layout, device)),
            Self::Cascade => Scheme::Cascade(Cascade::new()),
        };
        let mut hasher = DefaultHasher::new();
        format!("{self:?} {layout:?}").hash(&mut hasher);
        Residual { scheme, d_model: layout.d_model, branches: layout.branches, stamp: hasher.finish() }
    }
}

/// The residual pathway of one model: owns the scheme's parameters, and none of the model's branches.
///
/// ```text
/// state = start(embedding)
/// for every branch f:  (input, pending) = read(state);  state = write(pending, f(input))
/// hidden = finish(state)
/// ```
///
/// Tensors are `[batch, sequence, d_model]`, `[tokens, d_model]`, or any other shape that ends in `d_model`.
#[derive(Module, Debug)]
pub struct Residual {
    scheme: Scheme,
    d_model: usize,
    branches: usize,
    /// Of the configuration and the layout: a state of another residual is told by it.
    stamp: u64,
}

/// The schemes and their parameters.
#[derive(Module, Debug)]
pub enum Scheme {
    /// Plain residual.
    Standard(Standard),
    /// Attention Residuals.
    AttnRes(AttnRes),
    /// Dual Attention Residuals.
    Dar(Dar),
    /// Dynamic hyper-connections.
    Hyper(HyperConnections),
    /// Manifold-constrained hyper-connections.
    Mhc(Mhc),
    /// Stream separation.
    Cascade(Cascade),
}

/// Everything that the residual pathway carries between two branches.
///
/// A value: cheap to clone, and two continuations of one state never disturb each other.
#[derive(Debug, Clone)]
pub struct ResidualState<const D: usize> {
    carry: Carry,
    next: usize,
    shape: [usize; D],
    stamp: u64,
    observer: Option<Arc<dyn Observer>>,
}

/// What a read leaves for its write.
#[derive(Debug, Clone)]
#[must_use = "the branch output has to be written: Residual::write(pending, output)"]
pub struct Pending<const D: usize> {
    carry: PendingCarry,
    branch: usize,
    shape: [usize; D],
    stamp: u64,
    observer: Option<Arc<dyn Observer>>,
}

#[derive(Debug, Clone)]
enum Carry {
    Standard(Tensor<2>),
    AttnRes(HistoryState<attn_res::ComposedState>),
    Dar(HistoryState<dar::ComposedState>),
    Streams(Tensor<3>),
    Cascade(CascadeState),
}

#[derive(Debug, Clone)]
enum PendingCarry {
    Standard(Tensor<2>),
    AttnRes(HistoryPending<attn_res::ComposedPending>),
    Dar(HistoryPending<dar::ComposedPending>),
    Streams(HyperPending),
    Cascade(CascadePending),
}

impl Residual {
    /// The scheme, for its parameters.
    pub fn scheme(&self) -> &Scheme {
        &self.scheme
    }

    /// The scheme, to change its parameters.
    pub fn scheme_mut(&mut self) -> &mut Scheme {
        &mut self.scheme
    }

    /// Panics unless a state or a pending write is of a residual with this configuration and layout.
    #[track_caller]
    fn check_stamp(&self, operation: &'static str, argument: &'static str, stamp: u64) {
        if stamp != self.stamp {
            let got = "of a residual with another configuration or layout";
            require::<()>(Err(KernelError::value(operation, argument, "one that this residual made", got)));
        }
    }

    /// Branches that one pass reads and writes.
    pub fn branches(&self) -> usize {
        self.branches
    }

    /// Begins a pass with the embedding.
    ///
    /// # Shapes
    /// - `embedding`: `[.., d_model]`
    ///
    /// # Panics
    /// If the last axis is not `d_model`.
    #[track_caller]
    pub fn start<const D: usize>(&self, embedding: Tensor<D>) -> ResidualState<D> {
        self.start_with(embedding, None)
    }

    /// As [`start`](Self::start), for a pass that `observer` sees and may change.
    ///
    /// The pass runs the operations as the equations are written, also where the configuration names the fused ones, which
    /// have no place for an observer; the two agree within rounding. An observer that replaces nothing leaves the result
    /// bit for bit that of [`Implementation::Composed`].
    ///
    /// # Panics
    /// As [`start`](Self::start).
    #[track_caller]
    pub fn start_observed<const D: usize>(
        &self,
        embedding: Tensor<D>,
        observer: Arc<dyn Observer>,
    ) -> ResidualState<D> {
        self.start_with(embedding, Some(observer))
    }

    #[track_caller]
    fn start_with<const D: usize>(
        &self,
        embedding: Tensor<D>,
        observer: Option<Arc<dyn Observer>>,
    ) -> ResidualState<D> {
        let shape = embedding.dims();
        let mut expected = shape;
        expected[D - 1] = self.d_model;
        require_shape("Residual::start", "embedding", "[.., d_model]", expected, &embedding);
        let x = flatten(embedding);
        let carry = match &self.scheme {
            Scheme::Standard(_) => Carry::Standard(x),
            Scheme::AttnRes(scheme) => Carry::AttnRes(scheme.start(x, observer.is_some())),
            Scheme::Dar(scheme) => Carry::Dar(scheme.start(x, observer.is_some())),
            Scheme::Hyper(scheme) => Carry::Streams(scheme.start(x)),
            Scheme::Mhc(scheme) => Carry::Streams(scheme.start(x)),
            Scheme::Cascade(scheme) => Carry::Cascade(scheme.start(x)),
        };
        ResidualState { carry, next: 0, shape, stamp: self.stamp, observer }
    }

    /// The input of the next branch, and what its write will need.
    ///
    /// # Shapes
    /// - output: the shape of the embedding
    ///
    /// # Panics
    /// If all branches have been read, or the state is of another residual.
    #[track_caller]
    pub fn read<const D: usize>(&self, state: ResidualState<D>) -> (Tensor<D>, Pending<D>) {
        self.read_with(state, None)
    }

    /// As [`read`](Self::read), with the branch's own norm behind it: the input is `norm(input)`.
    ///
    /// A fused pass normalises in the kernel that reads, which saves a pass over the input forward and backward; the
    /// gradient of the gain comes with those of the read. Other schemes compute the same in Burn's operations.
    ///
    /// # Panics
    /// As [`read`](Self::read), and if the gain is not `[d_model]`, is on another device, or `eps` is negative or not
    /// finite.
    #[track_caller]
    pub fn read_normed<const D: usize>(
        &self,
        state: ResidualState<D>,
        norm: impl Into<BranchNorm>,
    ) -> (Tensor<D>, Pending<D>) {
        let norm = norm.into();
        require_shape("Residual::read_normed", "norm.gain", "[d_model]", [self.d_model], &norm.gain);
        if !(norm.eps >= 0.0 && norm.eps.is_finite()) {
            let (operation, argument) = ("Residual::read_normed", "norm.eps");
            require::<()>(Err(KernelError::value(operation, argument, "a finite number ≥ 0", norm.eps)));
        }
        self.read_with(state, Some(&norm))
    }

    #[track_caller]
    fn read_with<const D: usize>(&self, state: ResidualState<D>, norm: Option<&BranchNorm>) -> (Tensor<D>, Pending<D>) {
        let ResidualState { carry, next: branch, shape, stamp, observer } = state;
        self.check_stamp("Residual::read", "state", stamp);
        if branch >= self.branches {
            require::<()>(Err(KernelError::value(
                "Residual::read",
                "state",
                format!("one of the {} branches that the layout names", self.branches),
                format!("past branch {branch}"),
            )));
        }
        let watch = observer.as_deref();
        let (input, carry) = match (&self.scheme, carry) {
            (Scheme::AttnRes(scheme), Carry::AttnRes(state)) => {
                pend(scheme.read(branch, state, norm, watch), PendingCarry::AttnRes)
            }
            (Scheme::Dar(scheme), Carry::Dar(state)) => {
                pend(scheme.read(branch, state, norm, watch), PendingCarry::Dar)
            }
            (scheme, carry) => {
                let (input, carry) = match (scheme, carry) {
                    (Scheme::Standard(_), Carry::Standard(x)) => (x.clone(), PendingCarry::Standard(x)),
                    (Scheme::Hyper(scheme), Carry::Streams(state)) => {
                        pend(scheme.read(branch, state, watch), PendingCarry::Streams)
                    }
                    (Scheme::Mhc(scheme), Carry::Streams(state)) => {
                        pend(scheme.read(branch, state, watch), PendingCarry::Streams)
                    }
                    (Scheme::Cascade(scheme), Carry::Cascade(state)) => pend(scheme.read(state), PendingCarry::Cascade),
                    _ => unreachable!("the stamp tells the scheme"),
                };
                (normed(input, norm), carry)
            }
        };
        (unflatten(input, shape), Pending { carry, branch, shape, stamp, observer })
    }

    /// Writes the output of the branch whose read left `pending`.
    ///
    /// # Shapes
    /// - `output`: the shape of the embedding
    ///
    /// # Panics
    /// If shape, element type or device of `output` differ from the state, or `pending` is of another residual.
    #[track_caller]
    pub fn write<const D: usize>(&self, pending: Pending<D>, output: Tensor<D>) -> ResidualState<D> {
        let Pending { carry, branch, shape, stamp, observer } = pending;
        self.check_stamp("Residual::write", "pending", stamp);
        require_shape("Residual::write", "output", "the shape of the embedding", shape, &output);
        carry.check(&output);
        let output = flatten(output);
        let watch = observer.as_deref();
        let carry = match (&self.scheme, carry) {
            (Scheme::Standard(scheme), PendingCarry::Standard(x)) => {
                Carry::Standard(scheme.write(branch, x, output, watch))
            }
            (Scheme::AttnRes(scheme), PendingCarry::AttnRes(pending)) => {
                Carry::AttnRes(scheme.write(branch, pending, output, watch))
            }
            (Scheme::Dar(scheme), PendingCarry::Dar(pending)) => {
                Carry::Dar(scheme.write(branch, pending, output, watch))
            }
            (Scheme::Hyper(_) | Scheme::Mhc(_), PendingCarry::Streams(pending)) => {
                Carry::Streams(pending.write(branch, output, watch))
            }
            (Scheme::Cascade(scheme), PendingCarry::Cascade(pending)) => {
                Carry::Cascade(scheme.write(branch, pending, output, watch))
            }
            _ => unreachable!("the stamp tells the scheme"),
        };
        ResidualState { carry, next: branch + 1, shape, stamp, observer }
    }

    /// Read, `branch`, write.
    ///
    /// # Panics
    /// As [`read`](Self::read) and [`write`](Self::write).
    #[track_caller]
    pub fn branch<const D: usize>(
        &self,
        state: ResidualState<D>,
        branch: impl FnOnce(Tensor<D>) -> Tensor<D>,
    ) -> ResidualState<D> {
        let (input, pending) = self.read(state);
        self.write(pending, branch(input))
    }

    /// Normed read, `branch`, write: the branch gets `norm(input)`, and leaves its own norm out.
    ///
    /// ```
    /// # use burn::nn::{LinearConfig, RmsNormConfig};
    /// # use burn::tensor::{Device, Distribution, Tensor};
    /// # use dar_burn::{BranchLayout, ResidualConfig};
    /// # let device = Device::flex();
    /// let residual = ResidualConfig::dar_block(2).init(&BranchLayout::new(16, 4), &device);
    /// let (norm, linear) = (RmsNormConfig::new(16).init(&device), LinearConfig::new(16, 16).init(&device));
    /// let state = residual.start(Tensor::<2>::random([5, 16], Distribution::Default, &device));
    /// let folded = residual.branch_normed(state.clone(), &norm, |x| linear.forward(x));
    /// let apart = residual.branch(state, |x| linear.forward(norm.forward(x)));
    /// ```
    ///
    /// # Panics
    /// As [`read_normed`](Self::read_normed) and [`write`](Self::write).
    #[track_caller]
    pub fn branch_normed<const D: usize>(
        &self,
        state: ResidualState<D>,
        norm: impl Into<BranchNorm>,
        branch: impl FnOnce(Tensor<D>) -> Tensor<D>,
    ) -> ResidualState<D> {
        let (input, pending) = self.read_normed(state, norm);
        self.write(pending, branch(input))
    }

    /// Ends a pass: the hidden state for the model's final norm.
    ///
    /// # Shapes
    /// - output: the shape of the embedding
    ///
    /// # Panics
    /// If branches are left to read, or the state is of another residual.
    #[track_caller]
    pub fn finish<const D: usize>(&self, state: ResidualState<D>) -> Tensor<D> {
        let ResidualState { carry, next, shape, stamp, observer } = state;
        self.check_stamp("Residual::finish", "state", stamp);
        if next != self.branches {
            require::<()>(Err(KernelError::value(
                "Residual::finish",
                "state",
                format!("written by all {} branches", self.branches),
                format!("written by {next}"),
            )));
        }
        let hidden = match (&self.scheme, carry) {
            (Scheme::Standard(_), Carry::Standard(x)) => x,
            (Scheme::AttnRes(scheme), Carry::AttnRes(state)) => scheme.finish(state, observer.as_deref()),
            (Scheme::Dar(scheme), Carry::Dar(state)) => scheme.finish(state, observer.as_deref()),
            (Scheme::Hyper(scheme), Carry::Streams(state)) => scheme.finish(state),
            (Scheme::Mhc(scheme), Carry::Streams(state)) => scheme.finish(state),
            (Scheme::Cascade(scheme), Carry::Cascade(state)) => scheme.finish(state),
            _ => unreachable!("the stamp tells the scheme"),
        };
        unflatten(hidden, shape)
    }

    /// The hidden state if the pass ended here: what [`finish`](Self::finish) returns after the last branch, and before it
    /// the same read of the state so far. No observer sees it.
    ///
    /// # Shapes
    /// - output: the shape of the embedding
    ///
    /// # Panics
    /// If the pass is fused (start it with [`start_observed`](Self::start_observed), or configure
    /// [`Implementation::Composed`]), or the state is of another residual.
    #[track_caller]
    pub fn exit<const D: usize>(&self, state: &ResidualState<D>) -> Tensor<D> {
        self.check_stamp("Residual::exit", "state", state.stamp);
        let hidden = match (&self.scheme, &state.carry) {
            (Scheme::Standard(_), Carry::Standard(x)) => Some(x.clone()),
            (Scheme::AttnRes(scheme), Carry::AttnRes(state)) => scheme.exit(state),
            (Scheme::Dar(scheme), Carry::Dar(state)) => scheme.exit(state),
            (Scheme::Hyper(scheme), Carry::Streams(state)) => Some(scheme.finish(state.clone())),
            (Scheme::Mhc(scheme), Carry::Streams(state)) => Some(scheme.finish(state.clone())),
            (Scheme::Cascade(scheme), Carry::Cascade(state)) => Some(scheme.finish(state.clone())),
            _ => unreachable!("the stamp tells the scheme"),
        };
        let hidden = hidden.ok_or_else(|| {
            KernelError::value("Residual::exit", "state", "one of an observed or composed pass", "one of a fused pass")
        });
        unflatten(require(hidden), state.shape)
    }
}

impl PendingCarry {
    /// Panics unless `output` has the element type and the device of what is carried.
    #[track_caller]
    fn check<const D: usize>(&self, output: &Tensor<D>) {
        match self {
            Self::Standard(x) => check_output(x, output),
            Self::AttnRes(pending) => pending.check(output),
            Self::Dar(pending) => pending.check(output),
            Self::Streams(pending) => check_output(pending.carried(), output),
            Self::Cascade(pending) => check_output(pending.carried(), output),
        }
    }
}

fn pend<P>((input, pending): (Tensor<2>, P), carry: impl FnOnce(P) -> PendingCarry) -> (Tensor<2>, PendingCarry) {
    (input, carry(pending))
}

/// `[.., d_model]` as `[tokens, d_model]`.
fn flatten<const D: usize>(x: Tensor<D>) -> Tensor<2> {
    if D == 1 { x.unsqueeze() } else { x.flatten(0, D - 2) }
}

/// `[tokens, d_model]` as `shape`.
fn unflatten<const D: usize>(x: Tensor<2>, shape: [usize; D]) -> Tensor<D> {
    if shape.contains(&0) {
        // Burn's reshape reads a 0 as "the size that was at this position".
        x.sum().reshape([1; D]).expand(Shape::new(shape))
    } else {
        x.reshape(shape)
    }
}
