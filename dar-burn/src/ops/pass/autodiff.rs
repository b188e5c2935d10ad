//! The operations of a pass, tracked and not.
//!
//! A read has two results, the branch input and where the pass stands. One node, the hub, has the true parents; the branch
//! input is a port, a node whose only parent is the hub and that leaves its gradient there. The hub runs after its port and
//! after the next read, and launches the backward once. The edge from read to read is the chain, a tensor of one element.

#![expect(clippy::too_many_arguments, reason = "one argument a tensor and size")]

use std::fmt;
use std::sync::{Arc, Mutex, MutexGuard};

use burn::backend::autodiff::checkpoint::base::Checkpointer;
use burn::backend::autodiff::checkpoint::strategy::CheckpointStrategy;
use burn::backend::autodiff::grads::Gradients;
use burn::backend::autodiff::ops::{Backward, NodeGuard, Ops, OpsKind};
use burn::backend::autodiff::{Autodiff, NodeId};
use burn::backend::tensor::FloatTensor;
use burn::backend::{Backend, TensorMetadata, backend_extension};
use burn::tensor::{DType, Shape};

use super::Plan;
use super::kernels::{OptionalSite, OptionalTensor, PassKernels, Site, Wanted};
use super::tape::{Link, Parameters, Position, ReadGradients, Shared};

/// The operations of a pass.
#[backend_extension(Autodiff, Cube: cfg(feature = "cube"), Flex: cfg(feature = "flex"))]
pub(crate) trait PassOps: Backend {
    /// Begins a pass: fills `link` and returns the chain.
    fn pass_start(embedding: FloatTensor<Self>, query: FloatTensor<Self>, plan: Plan, link: Link) -> FloatTensor<Self>;

    /// Read `read` from where `link` says: fills `forward` and returns the branch input and the chain. With `gain` the
    /// branch input is normalised, with epsilon `norm`.
    fn pass_read(
        chain: FloatTensor<Self>,
        #[extension_type] output: OptionalTensor<Self>,
        #[extension_type] site: OptionalSite<Self>,
        #[extension_type] gain: OptionalTensor<Self>,
        norm: Option<f64>,
        read: usize,
        link: Link,
        forward: Link,
    ) -> (FloatTensor<Self>, FloatTensor<Self>);
}

fn start<B: PassKernels>(
    plan: Plan,
    embedding: FloatTensor<B>,
    query: FloatTensor<B>,
    recorded: bool,
) -> (FloatTensor<B>, Position<B>) {
    let chain = B::float_zeros(Shape::new([1]), &embedding.device(), embedding.dtype().into());
    (chain, Position::start(plan, embedding, query, recorded))
}

macro_rules! untracked {
    ($backend:ty) => {
        impl PassOps for $backend {
            fn pass_start(
                embedding: FloatTensor<Self>,
                query: FloatTensor<Self>,
                plan: Plan,
                link: Link,
            ) -> FloatTensor<Self> {
                let (chain, position) = start::<Self>(plan, embedding, query, false);
                link.set(position);
                chain
            }

            fn pass_read(
                chain: FloatTensor<Self>,
                output: OptionalTensor<Self>,
                site: OptionalSite<Self>,
                gain: OptionalTensor<Self>,
                norm: Option<f64>,
                read: usize,
                link: Link,
                forward: Link,
            ) -> (FloatTensor<Self>, FloatTensor<Self>) {
                let position = link.get::<Self>();
                let parameters = Parameters { site: site.into_option(), gain: gain.into_option(), norm };
                let (input, position) = position.read(read, output.into_option(), parameters, false);
                forward.set(position);
                (input, chain)
            }
        }
    };
}

#[cfg(feature = "cube")]
untracked!(burn::backend::Cube);
#[cfg(feature = "flex")]
untracked!(burn::backend::Flex);

impl<B: PassKernels, C: CheckpointStrategy> PassOps for Autodiff<B, C> {
    fn pass_start(embedding: FloatTensor<Self>, query: FloatTensor<Self>, plan: Plan, link: Link) -> FloatTensor<Self> {
        let nodes = [embedding.node(), query.node()];
        let (chain, position) = start::<B>(plan, embedding.into_primitive(), query.into_primitive(), true);
        link.set(position.clone());
        match StartNode.prepare::<C>(nodes).compute_bound().stateful() {
            OpsKind::Tracked(prep) => prep.finish(position.tape, chain),
            OpsKind::UnTracked(prep) => prep.finish(chain),
        }
    }

    fn pass_read(
        chain: FloatTensor<Self>,
        output: OptionalTensor<Self>,
        site: OptionalSite<Self>,
        gain: OptionalTensor<Self>,
        norm: Option<f64>,
        read: usize,
        link: Link,
        forward: Link,
    ) -> (FloatTensor<Self>, FloatTensor<Self>) {
        let (position, output) = (link.get::<B>(), output.into_option());
        let gain = gain.into_option();
        // What is not there is the chain once more, and gets nothing.
        let nodes = [Some(&chain), output.as_ref(), gain.as_ref()].map(|tensor| tensor.unwrap_or(&chain).node());
        let mut dtypes: Vec<_> = gain.iter().map(|gain| gain.dtype()).collect();
        let [output, gain] = [output, gain].map(|tensor| tensor.map(FloatTensor::<Self>::into_primitive));
        let chain = chain.into_primitive();
        let (input, chain, position) = match site.into_option() {
            None => {
                let parameters = Parameters { site: None, gain, norm };
                Hub { position, chain, output, parameters, read }.record::<C, 3>(nodes, dtypes)
            }
            Some(site) => {
                let parameters = site.into_array();
                let [a, b, c, d, e, f, g, h, i] = parameters.each_ref().map(|parameter| parameter.node());
                let [of_chain, of_output, of_gain] = nodes;
                dtypes.extend(parameters.each_ref().map(|parameter| parameter.dtype()));
                let site = Site::from_array(parameters.map(FloatTensor::<Self>::into_primitive));
                let parameters = Parameters { site: Some(site), gain, norm };
                let nodes = [of_chain, of_output, of_gain, a, b, c, d, e, f, g, h, i];
                Hub { position, chain, output, parameters, read }.record::<C, 12>(nodes, dtypes)
            }
        };
        forward.set(position);
        (input, chain)
    }
}

/// The branch input, the chain and where the pass stands.
type Recorded<B, C> = (FloatTensor<Autodiff<B, C>>, FloatTensor<Autodiff<B, C>>, Position<B>);

/// The operands of a read that is about to be recorded.
struct Hub<B: PassKernels> {
    position: Position<B>,
    chain: FloatTensor<B>,
    output: Option<FloatTensor<B>>,
    parameters: Parameters<B>,
    read: usize,
}

impl<B: PassKernels> Hub<B> {
    /// Makes the read and its nodes. `nodes`: chain, output, gain, parameters of the site; `dtypes`: of the parameters that
    /// are there.
    fn record<C: CheckpointStrategy, const N: usize>(
        self,
        nodes: [NodeGuard; N],
        dtypes: Vec<DType>,
    ) -> Recorded<B, C> {
        let Self { position, chain, output, parameters, read } = self;
        let normed = parameters.gain.is_some();
        let (before, mailbox, written) = (position.mailbox.clone(), Mailbox::default(), output.is_some());
        let hub = HubNode.prepare::<C>(nodes).compute_bound().stateful();
        let keep = matches!(hub, OpsKind::Tracked(_));
        let (input, mut position) = position.read(read, output, parameters, keep);
        position.mailbox = Some(mailbox.clone());
        let hub = match hub {
            OpsKind::Tracked(prep) => {
                let (tape, own) = (position.tape.clone(), mailbox.clone());
                let step = Step { tape, read, written, normed, dtypes, chain: chain.clone(), mailbox: own, before };
                prep.finish(step, chain.clone())
            }
            OpsKind::UnTracked(prep) => prep.finish(chain.clone()),
        };
        let input = match PortNode.prepare::<C>([hub.node()]).compute_bound().stateful() {
            OpsKind::Tracked(prep) => prep.finish((mailbox, chain), input),
            OpsKind::UnTracked(prep) => prep.finish(input),
        };
        (input, hub, position)
    }
}

/// Where a port leaves its gradient for the hub.
pub(super) struct Mailbox<B: PassKernels>(Arc<Mutex<Mail<B>>>);

struct Mail<B: PassKernels> {
    d_input: Option<FloatTensor<B>>,
    /// Whether the hub has a gradient, without which the engine could not run it.
    anchored: bool,
}

impl<B: PassKernels> Default for Mailbox<B> {
    fn default() -> Self {
        Self(Arc::new(Mutex::new(Mail { d_input: None, anchored: false })))
    }
}

impl<B: PassKernels> Clone for Mailbox<B> {
    fn clone(&self) -> Self {
        Self(self.0.clone())
    }
}

impl<B: PassKernels> fmt::Debug for Mailbox<B> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("Mailbox")
    }
}

impl<B: PassKernels> Mailbox<B> {
    fn lock(&self) -> MutexGuard<'_, Mail<B>> {
        self.0.lock().unwrap_or_else(|poisoned| poisoned.into_inner())
    }

    /// Gives the hub a gradient, once: whatever it is, nobody reads it.
    fn anchor(&self, hub: NodeId, any: FloatTensor<B>, grads: &mut Gradients) {
        let mut mail = self.lock();
        if !mail.anchored {
            mail.anchored = true;
            grads.register::<B>(hub, any);
        }
    }
}

/// What a hub knows in the backward.
#[derive(Debug)]
struct Step<B: PassKernels> {
    tape: Shared<B>,
    read: usize,
    /// Whether the second parent is an output.
    written: bool,
    /// Whether the third parent is a gain.
    normed: bool,
    /// Of the parameters, the gain first.
    dtypes: Vec<DType>,
    chain: FloatTensor<B>,
    mailbox: Mailbox<B>,
    /// The hub of the read before.
    before: Option<Mailbox<B>>,
}

impl<B: PassKernels> Clone for Step<B> {
    fn clone(&self) -> Self {
        Self {
            tape: self.tape.clone(),
            read: self.read,
            written: self.written,
            normed: self.normed,
            dtypes: self.dtypes.clone(),
            chain: self.chain.clone(),
            mailbox: self.mailbox.clone(),
            before: self.before.clone(),
        }
    }
}

#[derive(Debug)]
struct StartNode;

impl<B: PassKernels> Backward<B, 2> for StartNode {
    type State = Shared<B>;

    fn backward(self, ops: Ops<Self::State, 2>, grads: &mut Gradients, _: &mut Checkpointer) {
        drop(grads.consume::<B>(&ops.node));
        let [embedding, query] = &ops.parents;
        let gradients = ops.state.lock().start_backward(embedding.is_some(), query.is_some());
        for (parent, gradient) in ops.parents.iter().zip(gradients) {
            if let (Some(parent), Some(gradient)) = (parent, gradient) {
                grads.register::<B>(parent.id, gradient);
            }
        }
    }
}

#[derive(Debug)]
struct PortNode;

impl<B: PassKernels> Backward<B, 1> for PortNode {
    type State = (Mailbox<B>, FloatTensor<B>);

    fn backward(self, ops: Ops<Self::State, 1>, grads: &mut Gradients, _: &mut Checkpointer) {
        let gradient = grads.consume::<B>(&ops.node);
        let (mailbox, any) = ops.state;
        mailbox.lock().d_input = Some(gradient);
        if let [Some(hub)] = &ops.parents {
            mailbox.anchor(hub.id, any, grads);
        }
    }
}

#[derive(Debug)]
struct HubNode;

impl<B: PassKernels, const N: usize> Backward<B, N> for HubNode {
    type State = Step<B>;

    fn backward(self, ops: Ops<Self::State, N>, grads: &mut Gradients, _: &mut Checkpointer) {
        drop(grads.consume::<B>(&ops.node));
        let Step { tape, read, written, normed, dtypes, chain, mailbox, before } = ops.state;
        let d_input = mailbox.lock().d_input.take();
        let parents = ops.parents.each_ref().map(|parent| parent.as_ref().map(|parent| parent.id));
        let wanted = Wanted { site: parents[3..].iter().any(Option::is_some), gain: normed && parents[2].is_some() };
        let ReadGradients { d_output, d_site, d_gain } = tape.read_backward(read, d_input, wanted);

        if let (true, Some(output), Some(gradient)) = (written, parents[1], d_output) {
            grads.register::<B>(output, gradient);
        }
        // In the types of the parameters.
        let mut dtypes = dtypes.into_iter();
        let mut register = |parent: Option<NodeId>, gradient: Option<FloatTensor<B>>, dtype: Option<DType>| {
            if let (Some(parent), Some(gradient), Some(dtype)) = (parent, gradient, dtype) {
                let same = gradient.dtype() == dtype;
                grads.register::<B>(parent, if same { gradient } else { B::float_cast(gradient, dtype.into()) });
            }
        };
        if normed {
            register(parents[2], d_gain, dtypes.next());
        }
        if let Some(site) = d_site {
            for (&parent, gradient) in parents[3..].iter().zip(site.into_array()) {
                register(parent, Some(gradient), dtypes.next());
            }
        }
        match (parents[0], before) {
            (Some(hub), Some(before)) => before.anchor(hub, chain, grads),
            (Some(start), None) => grads.register::<B>(start, chain),
            (None, _) => {}
        }
    }
}
