//! What the operations of one pass share, forward and backward.
//!
//! # Continuations
//!
//! A state is a value, so two passes may go on from one. The tape knows how many reads it has made; a read that is not the
//! next one goes on in a copy of the arenas, a *fork*, and never writes over what another continuation wrote:
//!
//! ```text
//! trunk:  read 0, 1, 2, 3, 4, …
//! fork:                 3', 4', …      saw the entries of the trunk up to read 2
//! ```
//!
//! In the backward a fork's first read hands its gradients to the trunk's last shared branch, and the entries that both
//! have seen gather the gradients of both.

use std::any::Any;
use std::fmt;
use std::sync::{Arc, Mutex, MutexGuard, OnceLock, Weak};

use burn::backend::TensorMetadata;
use burn::backend::tensor::FloatTensor;
use burn::tensor::{DType, Shape, Slice};

use super::autodiff::Mailbox;
use super::kernels::{self, Norms, PassKernels, Site, Wanted};
use super::{Memory, Plan, parameter_dtype};

/// Where a pass stands, on whatever backend; empty until the operation that gets there.
#[derive(Clone, Default)]
pub(crate) struct Link(Arc<OnceLock<Box<dyn Any + Send + Sync>>>);

impl fmt::Debug for Link {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("Link")
    }
}

impl Link {
    pub(super) fn set<B: PassKernels>(&self, position: Position<B>) {
        assert!(self.0.set(Box::new(Mutex::new(position))).is_ok(), "a link is filled once");
    }

    pub(super) fn get<B: PassKernels>(&self) -> Position<B> {
        let position = self.0.get().and_then(|position| position.downcast_ref::<Mutex<Position<B>>>());
        let position = position.expect("every tensor of a pass is on the backend that it started on");
        position.lock().unwrap_or_else(|poisoned| poisoned.into_inner()).clone()
    }
}

/// A tape and what a state adds to it.
pub(super) struct Position<B: PassKernels> {
    pub(super) tape: Shared<B>,
    /// The open block. `[tokens, streams, d_model]`
    partial: Option<FloatTensor<B>>,
    /// Of the autodiff node of the last read.
    pub(super) mailbox: Option<Mailbox<B>>,
}

impl<B: PassKernels> Clone for Position<B> {
    fn clone(&self) -> Self {
        Self { tape: self.tape.clone(), partial: self.partial.clone(), mailbox: self.mailbox.clone() }
    }
}

impl<B: PassKernels> Position<B> {
    /// Begins a pass. `embedding`: `[tokens, d_model]`, or an entry `[tokens, streams, d_model]`; `query`:
    /// `[reads, outputs, d_model]`; `recorded`: whether a backward may come.
    pub(super) fn start(plan: Plan, embedding: FloatTensor<B>, query: FloatTensor<B>, recorded: bool) -> Self {
        Self { tape: Shared::new(Tape::start(plan, embedding, query, recorded)), partial: None, mailbox: None }
    }

    /// Read `read`: the branch input, and where the pass stands then. `keep`: whether its backward may come.
    pub(super) fn read(
        self,
        read: usize,
        output: Option<FloatTensor<B>>,
        parameters: Parameters<B>,
        keep: bool,
    ) -> (FloatTensor<B>, Self) {
        let tape = self.tape.at(read);
        let (input, partial) = tape.lock().read(read, self.partial, output, parameters, keep);
        (input, Self { tape, partial, mailbox: None })
    }
}

/// The parameters of a read.
pub(super) struct Parameters<B: PassKernels> {
    pub(super) site: Option<Site<B>>,
    /// Of the branch's norm, if that is folded in. `[d_model]`
    pub(super) gain: Option<FloatTensor<B>>,
    /// Epsilon of that norm.
    pub(super) norm: Option<f64>,
}

/// A tape that the nodes of a pass share.
pub(super) struct Shared<B: PassKernels>(Arc<Mutex<Tape<B>>>);

impl<B: PassKernels> Clone for Shared<B> {
    fn clone(&self) -> Self {
        Self(self.0.clone())
    }
}

impl<B: PassKernels> fmt::Debug for Shared<B> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("Tape")
    }
}

impl<B: PassKernels> Shared<B> {
    fn new(tape: Tape<B>) -> Self {
        Self(Arc::new(Mutex::new(tape)))
    }

    pub(super) fn lock(&self) -> MutexGuard<'_, Tape<B>> {
        self.0.lock().unwrap_or_else(|poisoned| poisoned.into_inner())
    }

    /// The tape on which `read` is the next read: this one, or a fork of it.
    fn at(&self, read: usize) -> Self {
        let trunk = self.lock();
        if trunk.next == read {
            return self.clone();
        }
        Self::new(trunk.fork(read, Arc::downgrade(&self.0)))
    }

    /// Backward of read `read`. `parameters`: whether the gradient of the site is wanted.
    pub(super) fn read_backward(
        &self,
        read: usize,
        d_input: Option<FloatTensor<B>>,
        wanted: Wanted,
    ) -> ReadGradients<B> {
        let mut tape = self.lock();
        if let (None, Some((own, trunk))) = (&tape.backward, &tape.trunk)
            && let Some(trunk) = trunk.upgrade()
        {
            // The entries that both have seen gather the gradients of both.
            Self(trunk).lock().forks.push((*own, self.clone()));
        }
        tape.read_backward(read, d_input, wanted)
    }
}

/// A tensor that operations write in place: it leaves its place while one has it, so that no other handle keeps a backend
/// from writing.
struct Arena<B: PassKernels>(Option<FloatTensor<B>>);

impl<B: PassKernels> Arena<B> {
    fn new(tensor: FloatTensor<B>) -> Self {
        Self(Some(tensor))
    }

    fn take(&mut self) -> FloatTensor<B> {
        self.0.take().expect("an operation returns the arenas that it takes")
    }

    fn put(&mut self, tensor: FloatTensor<B>) {
        self.0 = Some(tensor);
    }

    fn get(&self) -> FloatTensor<B> {
        self.0.clone().expect("an operation returns the arenas that it takes")
    }

    fn copy(&self) -> Self {
        Self::new(B::pass_copy(self.get()))
    }
}

/// What a read keeps for its backward.
struct Saved<B: PassKernels> {
    /// The output that it wrote, of the branch before.
    output: Option<FloatTensor<B>>,
    /// The open block that it read. `[tokens, streams, d_model]`
    partial: Option<FloatTensor<B>>,
    /// Packed parameters.
    site: Option<FloatTensor<B>>,
    /// Epsilon of the branch's norm, if that is folded in.
    norm: Option<f64>,
}

impl<B: PassKernels> Clone for Saved<B> {
    fn clone(&self) -> Self {
        Self { output: self.output.clone(), partial: self.partial.clone(), site: self.site.clone(), norm: self.norm }
    }
}

impl<B: PassKernels> Default for Saved<B> {
    fn default() -> Self {
        Self { output: None, partial: None, site: None, norm: None }
    }
}

/// The buffers of a pass.
pub(super) struct Tape<B: PassKernels> {
    plan: Plan,
    tokens: usize,
    dtype: DType,
    /// The next read.
    next: usize,
    /// `[reads, outputs, d_model]`
    query: FloatTensor<B>,
    /// Whether the embedding is one stream, which all streams of entry 0 share.
    broadcast: bool,
    /// The history. `[entries, tokens, streams, d_model]`
    value: Arena<B>,
    /// `[entries, tokens, streams]`
    inv_rms: Arena<B>,
    /// `[reads, tokens, outputs]`
    lse: Arena<B>,
    /// `[entries, reads, tokens, outputs]`
    logit: Arena<B>,
    /// Retrieved states; in the backward, read by read, their gradients. `[slots, tokens, outputs, d_model]`
    state: Arena<B>,
    slots: usize,
    /// Gates of the reads, if there are gates. `[reads, tokens, 5]`
    gate: Option<Arena<B>>,
    /// By read.
    saved: Vec<Saved<B>>,
    backward: Option<Backward<B>>,
    /// The first own read, and the tape that this one is a fork of, which the autodiff graph keeps for the backward.
    trunk: Option<(usize, Weak<Mutex<Tape<B>>>)>,
    /// The forks that have gone back, each with its first own read.
    forks: Vec<(usize, Shared<B>)>,
}

/// Where a backward stands.
struct Backward<B: PassKernels> {
    /// Reads `.. deposited` have left, or will leave, the gradients of their retrieved states.
    deposited: usize,
    /// Gradient of the state after the branch whose read comes next. `[tokens, streams, d_model]`
    d_written: Option<FloatTensor<B>>,
    /// d_beta of a read's branch, then the shift of its logits' gradients, then d_lse. `[reads, tokens, 2 + 2 * outputs]`
    d_token: Arena<B>,
    /// `[entries, reads, tokens, outputs]`
    d_logit: Arena<B>,
    /// `[reads, outputs, d_model]`
    d_query: Arena<B>,
    /// What forks handed over for a branch: the gradient of the state after it, and its d_beta.
    handed: Vec<(usize, FloatTensor<B>, FloatTensor<B>)>,
    /// The first of the reads whose retrieved states have been computed again.
    retrieved: Option<usize>,
}

/// The gradients that a read's backward gives to its parents.
pub(super) struct ReadGradients<B: PassKernels> {
    /// Of the output of the branch before.
    pub(super) d_output: Option<FloatTensor<B>>,
    pub(super) d_site: Option<Site<B>>,
    /// Of the gain of the branch's norm.
    pub(super) d_gain: Option<FloatTensor<B>>,
}

impl<B: PassKernels> Tape<B> {
    fn start(plan: Plan, embedding: FloatTensor<B>, query: FloatTensor<B>, recorded: bool) -> Self {
        let Plan { streams, outputs, d_model, .. } = plan;
        let (reads, entries, tokens, dtype) = (plan.reads(), plan.entries(), embedding.shape()[0], embedding.dtype());
        let accumulator = parameter_dtype(dtype);
        let broadcast = embedding.rank() == 2;
        let slots = if recorded && plan.memory == Memory::Fastest { reads } else { plan.branches_per_block };
        let arena = |shape: &[usize], dtype| B::pass_arena(embedding.clone(), Shape::from(shape.to_vec()), dtype);
        let value = arena(&[entries, tokens, streams, d_model], dtype);
        let inv_rms = arena(&[entries, tokens, streams], accumulator);
        let lse = arena(&[reads, tokens, outputs], accumulator);
        let logit = arena(&[entries, reads, tokens, outputs], accumulator);
        let state = arena(&[slots, tokens, outputs, d_model], dtype);
        let gate = plan.gated.then(|| Arena::new(arena(&[reads, tokens, 5], accumulator)));
        let (value, inv_rms) = B::pass_pack(embedding, value, inv_rms, 0, plan.eps);
        Self {
            plan,
            tokens,
            dtype,
            next: 0,
            query,
            broadcast,
            value: Arena::new(value),
            inv_rms: Arena::new(inv_rms),
            lse: Arena::new(lse),
            logit: Arena::new(logit),
            state: Arena::new(state),
            slots,
            gate,
            saved: Vec::with_capacity(reads),
            backward: None,
            trunk: None,
            forks: Vec::new(),
        }
    }

    /// Another continuation, whose first own read is `read`.
    fn fork(&self, read: usize, trunk: Weak<Mutex<Self>>) -> Self {
        let mut fork = Self {
            plan: self.plan,
            tokens: self.tokens,
            dtype: self.dtype,
            next: read,
            query: self.query.clone(),
            broadcast: self.broadcast,
            value: self.value.copy(),
            inv_rms: self.inv_rms.copy(),
            lse: self.lse.copy(),
            logit: self.logit.copy(),
            state: self.state.copy(),
            slots: self.slots,
            gate: self.gate.as_ref().map(Arena::copy),
            saved: self.saved[..read].to_vec(),
            backward: None,
            trunk: Some((read, trunk)),
            forks: Vec::new(),
        };
        if fork.slots < fork.plan.reads() && !fork.plan.opens(read) {
            // The trunk may have gone on to another block, in the same rows.
            fork.retrieve(read);
        }
        fork
    }

    /// The row of `state` of a read.
    fn slot(&self, read: usize) -> usize {
        if self.slots == self.plan.reads() { read } else { read % self.plan.branches_per_block }
    }

    /// The first of the reads that one prefix serves.
    fn first_of(&self, read: usize) -> usize {
        if read == self.plan.branches { read } else { read - read % self.plan.branches_per_block }
    }

    /// The operands of the prefix of all reads that share one with `read`; its entries, its reads and their first slot.
    fn prefix(&mut self, read: usize) -> (kernels::Prefix<B>, usize, usize, usize) {
        let first = self.first_of(read);
        let prefix = kernels::Prefix {
            value: self.value.get(),
            inv_rms: self.inv_rms.get(),
            query: self.query.clone(),
            lse: self.lse.take(),
            logit: self.logit.take(),
            state: self.state.take(),
        };
        let entries = first / self.plan.branches_per_block + 1;
        (prefix, entries, self.plan.prefix_reads(first), self.slot(first))
    }

    /// Retrieved states of all reads that share a prefix with `read` (A.2–A.5).
    fn retrieve(&mut self, read: usize) {
        let (prefix, entries, count, slot) = self.prefix(read);
        let first = self.first_of(read);
        let (lse, logit, state) = B::pass_prefix(prefix, entries, first, count, slot, self.plan.routing);
        self.lse.put(lse);
        self.logit.put(logit);
        self.state.put(state);
    }

    fn read(
        &mut self,
        read: usize,
        before: Option<FloatTensor<B>>,
        output: Option<FloatTensor<B>>,
        parameters: Parameters<B>,
        keep: bool,
    ) -> (FloatTensor<B>, Option<FloatTensor<B>>) {
        let opens = self.plan.opens(read);
        if let (true, Some(output)) = (opens, &output) {
            self.close(read - 1, before.clone(), output.clone());
        }
        let Parameters { site, gain, norm } = parameters;
        let packed = site.is_some() || gain.is_some();
        let site = packed.then(|| B::pass_pack_site(site.into(), gain.into(), self.dtype));
        let norms = Norms { eps: self.plan.eps, branch: norm };
        let (input, partial) = if opens {
            (self.open(read, site.clone(), norms), None)
        } else {
            if read == self.plan.branches {
                self.retrieve(read);
            }
            self.merge(read, before, output.clone(), site.clone(), norms)
        };
        let kept = partial.clone().filter(|_| self.plan.memory == Memory::Fastest);
        self.saved.push(if keep { Saved { output, partial: kept, site, norm } } else { Saved::default() });
        self.next = read + 1;
        (input, partial)
    }

    /// A read without an open block, and the prefix of all reads that share it.
    fn open(&mut self, read: usize, site: Option<FloatTensor<B>>, norms: Norms) -> FloatTensor<B> {
        let (prefix, entries, count, slot) = self.prefix(read);
        let opened = B::pass_open(
            prefix,
            site.into(),
            self.gate.as_mut().map(Arena::take).into(),
            entries,
            read,
            count,
            slot,
            self.plan.routing,
            norms,
            // With fewer rows than reads no backward comes, or it computes them again.
            self.slots == self.plan.reads(),
        );
        self.lse.put(opened.lse);
        self.logit.put(opened.logit);
        self.state.put(opened.state);
        self.put_gate(opened.gate);
        opened.input
    }

    /// A read of an open block, and the write of the branch before: the branch input, and the block after the write.
    fn merge(
        &mut self,
        read: usize,
        before: Option<FloatTensor<B>>,
        output: Option<FloatTensor<B>>,
        site: Option<FloatTensor<B>>,
        norms: Norms,
    ) -> (FloatTensor<B>, Option<FloatTensor<B>>) {
        let operands = kernels::Read {
            state: self.state.get(),
            before: before.into(),
            output: output.into(),
            query: self.query.clone(),
            lse: self.lse.get(),
            site: site.into(),
            gate: self.gate.as_mut().map(Arena::take).into(),
        };
        let merged = B::pass_merge(operands, read, self.slot(read), self.plan.routing, norms);
        self.put_gate(merged.gate);
        (merged.input, merged.partial.into_option())
    }

    fn put_gate(&mut self, gate: kernels::OptionalTensor<B>) {
        if let (Some(arena), Some(gate)) = (&mut self.gate, gate.into_option()) {
            arena.put(gate);
        }
    }

    /// Writes the last branch of a block, straight into the history.
    fn close(&mut self, branch: usize, before: Option<FloatTensor<B>>, output: FloatTensor<B>) {
        let entry = (branch + 1) / self.plan.branches_per_block;
        let (value, inv_rms) = (self.value.take(), self.inv_rms.take());
        let gate = self.gate.as_ref().map(Arena::get);
        let (value, inv_rms) = if before.is_none() && gate.is_none() {
            B::pass_pack(output, value, inv_rms, entry, self.plan.eps)
        } else {
            let write = kernels::Write { before: before.into(), output, gate: gate.into() };
            B::pass_close(write, value, inv_rms, branch, entry, self.plan.eps)
        };
        self.value.put(value);
        self.inv_rms.put(inv_rms);
    }
}

/// The backward.
impl<B: PassKernels> Tape<B> {
    fn backward(&mut self) -> &mut Backward<B> {
        let Plan { outputs, d_model, .. } = self.plan;
        let (reads, tokens, query, lean) =
            (self.plan.reads(), self.tokens, &self.query, self.slots < self.plan.reads());
        if self.backward.is_none() {
            let accumulator = parameter_dtype(self.dtype);
            let zeros =
                |shape: [usize; 3]| Arena::new(B::float_zeros(Shape::new(shape), &query.device(), accumulator.into()));
            self.backward = Some(Backward {
                deposited: 0,
                d_written: None,
                d_token: zeros([reads, tokens, 2 + 2 * outputs]),
                d_logit: Arena::new(B::pass_arena(query.clone(), self.logit.get().shape(), accumulator)),
                d_query: zeros([reads, outputs, d_model]),
                handed: Vec::new(),
                retrieved: None,
            });
            if lean {
                // From now on every read has a row, for its gradient.
                let shape = Shape::new([reads, tokens, outputs, d_model]);
                self.state.put(B::pass_arena(self.query.clone(), shape, self.dtype));
                self.slots = reads;
            }
        }
        self.backward.as_mut().expect("made above")
    }

    fn read_backward(&mut self, read: usize, d_input: Option<FloatTensor<B>>, wanted: Wanted) -> ReadGradients<B> {
        let d_input = d_input.unwrap_or_else(|| {
            let shape = Shape::new([self.tokens, self.plan.d_model]);
            B::float_zeros(shape, &self.query.device(), self.dtype.into())
        });
        let opens = self.plan.opens(read);
        let lean = self.plan.memory == Memory::Leanest;
        let first = self.first_of(read);
        let backward = self.backward();
        backward.deposited = backward.deposited.max(read + 1);
        let again = lean && backward.retrieved != Some(first);
        if again {
            backward.retrieved = Some(first);
            self.retrieve(read);
        }
        if lean && !opens {
            self.write_again(read);
        }
        self.collect(read);

        let slot = self.slot(read);
        let saved = self.saved[read].clone();
        self.saved[read] = Saved::default();
        let backward = self.backward.as_mut().expect("made above");
        let gradients = B::pass_merge_backward(
            kernels::ReadBackward {
                state: self.state.take(),
                partial: saved.partial.clone().into(),
                output: saved.output.clone().filter(|_| !opens).into(),
                d_written: backward.d_written.take().into(),
                d_input,
                query: self.query.clone(),
                lse: self.lse.get(),
                site: saved.site.into(),
                gate: self.gate.as_ref().map(Arena::get).into(),
                d_token: backward.d_token.take(),
                d_query: backward.d_query.take(),
            },
            read,
            slot,
            self.plan.routing,
            Norms { eps: self.plan.eps, branch: saved.norm },
            wanted,
        );
        self.state.put(gradients.state);
        backward.d_token.put(gradients.d_token);
        backward.d_query.put(gradients.d_query);
        backward.d_written = gradients.d_partial.into_option();

        let d_output = match saved.output {
            Some(output) if opens => Some(self.close_backward(read, output)),
            _ => gradients.d_output.into_option(),
        };
        if let Some((own, trunk)) = &self.trunk
            && *own == read
            && let Some(trunk) = trunk.upgrade()
        {
            self.hand_over(read, &Shared(trunk));
        }
        let (d_site, d_gain) = (gradients.d_site.into_option(), gradients.d_gain.into_option());
        ReadGradients { d_output, d_site, d_gain }
    }

    /// Backward of the close before read `read`: the gradient of the output that it wrote.
    fn close_backward(&mut self, read: usize, output: FloatTensor<B>) -> FloatTensor<B> {
        let entry = read / self.plan.branches_per_block;
        let d_state = self.entry_backward(entry, read, false).expect("this read has left its gradient");
        let backward = self.backward.as_mut().expect("a read is going back");
        backward.d_written = Some(d_state.clone());
        match &self.gate {
            Some(gate) => {
                let d_token = backward.d_token.take();
                let (d_output, d_token) = B::pass_write_backward(d_state, output, gate.get(), d_token, read - 1);
                backward.d_token.put(d_token);
                d_output
            }
            None => B::float_reshape(d_state, output.shape()),
        }
    }

    /// The whole gradient of an entry, which reads from `first` on have seen, on this tape and its forks.
    fn entry_backward(&mut self, entry: usize, first: usize, sum: bool) -> Option<FloatTensor<B>> {
        let own = self.trunk.as_ref().map_or(0, |(own, _)| *own);
        let from = first.max(own);
        let last = self.backward.as_ref().map_or(0, |backward| backward.deposited);
        let mut total = None;
        if let Some(backward) = &mut self.backward
            && from < last
        {
            let prefix = kernels::Prefix {
                value: self.value.get(),
                inv_rms: self.inv_rms.get(),
                query: self.query.clone(),
                lse: self.lse.get(),
                logit: self.logit.get(),
                state: self.state.get(),
            };
            let (d_token, d_logit) = (backward.d_token.get(), backward.d_logit.take());
            let (d_value, d_logit) =
                B::pass_entry_backward(prefix, d_token, d_logit, entry, from, last, self.plan.routing, sum);
            backward.d_logit.put(d_logit);
            total = Some(d_value);
        }
        for (fork_read, fork) in &self.forks {
            // A fork from `first` on closed the block by itself.
            if *fork_read > first || first == 0 {
                let d_value = fork.lock().entry_backward(entry, first, sum);
                total = add::<B>(total, d_value);
            }
        }
        total
    }

    /// Backward of the start: the gradients of the embedding and of all queries.
    pub(super) fn start_backward(&mut self, embedding: bool, queries: bool) -> [Option<FloatTensor<B>>; 2] {
        // Also for the queries alone, as it gives the gradients of the logits of entry 0.
        let d_embedding = self.entry_backward(0, 0, self.broadcast);
        let d_query = if queries { self.query_backward() } else { None };
        [d_embedding.filter(|_| embedding), d_query]
    }

    fn query_backward(&mut self) -> Option<FloatTensor<B>> {
        let own = self.trunk.as_ref().map_or(0, |(own, _)| *own);
        let mut total = None;
        if let Some(backward) = &mut self.backward {
            let queries = kernels::QueryBackward {
                value: self.value.get(),
                inv_rms: self.inv_rms.get(),
                lse: self.lse.get(),
                logit: self.logit.get(),
                d_logit: backward.d_logit.take(),
                d_token: backward.d_token.get(),
                d_query: backward.d_query.take(),
            };
            total = Some(B::pass_query_backward(
                queries,
                own,
                backward.deposited,
                self.plan.branches_per_block,
                self.plan.routing,
            ));
        }
        for (_, fork) in &self.forks {
            let d_query = fork.lock().query_backward();
            total = add::<B>(total, d_query);
        }
        total
    }

    /// The open blocks up to that of read `read`, written again.
    fn write_again(&mut self, read: usize) {
        for later in self.first_of_block(read) + 1..=read {
            if self.saved[later].partial.is_none()
                && let Some(output) = self.saved[later].output.clone()
            {
                let before = self.saved[later - 1].partial.clone();
                let gate = self.gate.as_ref().map(Arena::get);
                let write = kernels::Write { before: before.into(), output, gate: gate.into() };
                self.saved[later].partial = Some(B::pass_write(write, later - 1, self.plan.streams));
            }
        }
    }

    fn first_of_block(&self, read: usize) -> usize {
        read - read % self.plan.branches_per_block
    }

    /// Hands what the first own read computed for the branch before it to the trunk.
    fn hand_over(&mut self, read: usize, trunk: &Shared<B>) {
        let Some(branch) = read.checked_sub(1) else {
            return;
        };
        let backward = self.backward.as_mut().expect("a read is going back");
        if let Some(d_written) = backward.d_written.take() {
            let d_beta = B::float_slice(backward.d_token.get(), &self.plan.d_beta(branch, self.tokens));
            trunk.lock().backward().handed.push((branch, d_written, d_beta));
        }
    }

    /// Adds what forks handed over for branch `branch`.
    fn collect(&mut self, branch: usize) {
        let slices = self.plan.d_beta(branch, self.tokens);
        let backward = self.backward.as_mut().expect("a read is going back");
        let (mine, others) = std::mem::take(&mut backward.handed).into_iter().partition(|handed| handed.0 == branch);
        backward.handed = others;
        let mine: Vec<_> = mine;
        for (_, d_written, d_beta) in mine {
            let d_token = backward.d_token.take();
            let d_beta = match backward.d_written {
                Some(_) => B::float_add(B::float_slice(d_token.clone(), &slices), d_beta),
                None => d_beta,
            };
            backward.d_token.put(B::float_slice_assign(d_token, &slices, d_beta));
            backward.d_written = add::<B>(backward.d_written.take(), Some(d_written));
        }
    }
}

impl Plan {
    /// Where `d_token` holds d_beta of a branch.
    fn d_beta(&self, branch: usize, tokens: usize) -> [Slice; 3] {
        [Slice::from(branch..branch + 1), Slice::from(0..tokens), Slice::from(0..2)]
    }
}

fn add<B: PassKernels>(a: Option<FloatTensor<B>>, b: Option<FloatTensor<B>>) -> Option<FloatTensor<B>> {
    match (a, b) {
        (Some(a), Some(b)) => Some(B::float_add(a, b)),
        (a, b) => a.or(b),
    }
}
