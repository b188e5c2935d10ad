use burn::config::Config;
use burn::module::{Module, Param};
use burn::tensor::{Device, Tensor};
use dar_kernels::Routing;

use super::fused::{self, HistoryScheme, Written, stack_queries};
use super::layout::{BranchLayout, ResidualConfigError, Sites, Tying, refuse_unless, refuse_unless_eps};
use super::observer::Observer;
use super::params::{identities, zeros};
use crate::ops::pass::{Pass, Plan};
use crate::ops::{
    History, Implementation, Memory, Retrieved, SiteWeights, accumulator, attnres_read, merge, prefix,
    retrieval_weights,
};

/// Attention Residuals (DAR paper, equations 2–5; Kimi Team et al.): every branch reads a softmax mix of earlier states.
///
/// Parameters: one query of `d_model` a site and one for the output read; a site that only ever sees the embedding has
/// none. Separate values add `maps × d_model²`.
#[derive(Config, Debug, PartialEq)]
pub struct AttnResConfig {
    /// Branches whose outputs sum to one source: 1 is the full form, a source per branch; 2K is a block of K layers.
    pub branches_per_block: usize,
    /// Which branches share a query.
    #[config(default = "Tying::PerBranch")]
    pub tying: Tying,
    /// Projects the values of the sources (SepV control, equation 21); full form only.
    #[config(default = "SeparateValues::None")]
    pub separate_values: SeparateValues,
    /// Epsilon of the key norm.
    #[config(default = 1e-6)]
    pub eps: f64,
    /// What is kept for the backward.
    #[config(default = "Memory::Fastest")]
    pub memory: Memory,
    /// Fused operations, or the graph of the equations as they are written.
    #[config(default = "Implementation::Fused")]
    pub implementation: Implementation,
}

/// Value projections of the sources (equation 21). They start as the identity.
#[derive(Config, Debug, Copy, PartialEq, Eq)]
pub enum SeparateValues {
    /// Values are the sources themselves.
    None,
    /// A map per source, the embedding included.
    PerSource,
    /// This many maps, each shared by a run of neighbouring sources of equal length (but for rounding).
    Maps(usize),
}

impl AttnResConfig {
    /// Full form: every branch output is a source.
    pub fn full() -> Self {
        Self::new(1)
    }

    /// Block form with `layers` Transformer layers (two branches each) a block.
    pub fn block(layers: usize) -> Self {
        Self::new(layers.saturating_mul(2))
    }

    /// Refuses a configuration that cannot serve `layout`, with the reason.
    pub fn validate(&self, layout: &BranchLayout) -> Result<(), ResidualConfigError> {
        let block = self.branches_per_block;
        refuse_unless(block > 0, "AttnRes", "branches_per_block", block, "at least 1")?;
        check_tying("AttnRes", self.tying, block, layout)?;
        refuse_unless_eps("AttnRes", self.eps)?;
        let sources = layout.branches + 1;
        match self.separate_values {
            SeparateValues::None => Ok(()),
            _ if block > 1 => Err(ResidualConfigError::new(
                "AttnRes",
                "branches_per_block",
                block,
                "1 with separate values: equation 21 gives every source a map, and an open block is not a source yet",
            )),
            SeparateValues::PerSource => Ok(()),
            SeparateValues::Maps(maps) => refuse_unless(
                (1..=sources).contains(&maps),
                "AttnRes",
                "separate_values",
                maps,
                &format!("from 1 to {sources} maps, the number of sources"),
            ),
        }
    }

    /// The scheme for a model with this layout.
    ///
    /// # Panics
    /// If [`validate`](Self::validate) refuses, with its message.
    #[track_caller]
    pub fn init(&self, layout: &BranchLayout, device: &Device) -> AttnRes {
        if let Err(error) = self.validate(layout) {
            panic!("{error}");
        }
        let BranchLayout { d_model, branches, .. } = *layout;
        let sites = Sites { branches, branches_per_block: self.branches_per_block, tying: self.tying };
        let maps = match self.separate_values {
            SeparateValues::None => None,
            SeparateValues::PerSource => Some(branches + 1),
            SeparateValues::Maps(maps) => Some(maps),
        };
        AttnRes {
            queries: (0..sites.count()).map(|site| sites.has_query(site).then(|| zeros([d_model], device))).collect(),
            output_query: zeros([d_model], device),
            value_maps: maps.map(|maps| identities(maps, d_model, device)),
            branches,
            branches_per_block: self.branches_per_block,
            tying: self.tying,
            eps: self.eps,
            memory: self.memory,
            implementation: self.implementation,
        }
    }
}

/// Refuses tying per block where branches do not alternate or blocks are not whole layers.
pub(super) fn check_tying(
    scheme: &'static str,
    tying: Tying,
    branches_per_block: usize,
    layout: &BranchLayout,
) -> Result<(), ResidualConfigError> {
    if tying == Tying::PerBranch {
        return Ok(());
    }
    refuse_unless(
        layout.alternating,
        scheme,
        "layout.alternating",
        layout.alternating,
        "true with tying per block: a block has one attention site and one feed-forward site",
    )?;
    refuse_unless(
        branches_per_block == 1 || branches_per_block.is_multiple_of(2),
        scheme,
        "branches_per_block",
        branches_per_block,
        "an even number with tying per block: whole layers",
    )
}

/// Attention Residuals. Made by [`AttnResConfig::init`].
#[derive(Module, Debug)]
pub struct AttnRes {
    /// One pseudo-query a site (4). `[d_model]`
    pub queries: Vec<Option<Param<Tensor<1>>>>,
    /// Query of the output read. `[d_model]`
    pub output_query: Param<Tensor<1>>,
    /// Value projections (21), `value[e] = sum_d map[e][d] source[d]`. `[maps, d_model, d_model]`
    pub value_maps: Option<Param<Tensor<3>>>,
    branches: usize,
    branches_per_block: usize,
    #[module(skip)]
    tying: Tying,
    eps: f64,
    #[module(skip)]
    memory: Memory,
    #[module(skip)]
    implementation: Implementation,
}

#[derive(Debug, Clone)]
pub(super) struct ComposedState {
    history: History,
    open: Option<Open>,
}

/// The block that is still open.
#[derive(Debug, Clone)]
struct Open {
    /// What the queries of this block's sites find in the history.
    retrieved: Vec<Retrieved>,
    /// Sum of the block's branch outputs. `[tokens, 1, d_model]`
    partial: Tensor<3>,
}

#[derive(Debug, Clone)]
pub(super) struct ComposedPending {
    history: History,
    retrieved: Vec<Retrieved>,
    partial: Option<Tensor<3>>,
}

impl AttnRes {
    fn sites(&self) -> Sites {
        Sites { branches: self.branches, branches_per_block: self.branches_per_block, tying: self.tying }
    }

    /// With projected values a history has two streams: the sources, whose norms are the keys, and their values (21).
    fn plan(&self, d_model: usize) -> Plan {
        let (streams, routing) = match self.value_maps {
            Some(_) => (2, Routing::FixedKeyValue),
            None => (1, Routing::SelfKeyValue),
        };
        Plan {
            streams,
            outputs: 1,
            d_model,
            branches: self.branches,
            branches_per_block: self.branches_per_block,
            routing,
            gated: false,
            eps: self.eps,
            memory: self.memory,
        }
    }

    /// A source beside its projected value, if there are maps (21). `[tokens, 2, d_model]`
    fn entry(&self, source: usize, x: Tensor<2>) -> Option<Tensor<3>> {
        let value = self.project(source, x.clone())?;
        Some(Tensor::cat(vec![x.unsqueeze_dim::<3>(1), value], 1))
    }

    /// Tells an observer the weights of a read.
    fn observe_retrieval(
        &self,
        branch: usize,
        history: &History,
        partial: &Option<Tensor<3>>,
        query: &Tensor<1>,
        observer: Option<&dyn Observer>,
    ) {
        if let Some(observer) = observer {
            observer.retrieval(branch, &|| {
                retrieval_weights(history, partial.clone(), query.clone().unsqueeze_dim(0), Routing::SelfKeyValue)
            });
        }
    }

    /// The queries of the sites that the block beginning with `branch` uses. `[sites, 1, d_model]`
    fn block_queries(&self, branch: usize) -> Tensor<3> {
        let queries: Vec<Tensor<1>> = self.sites().of_block(branch).map(|site| self.query(site)).collect();
        Tensor::stack::<2>(queries, 0).unsqueeze_dim(1)
    }

    fn query(&self, site: usize) -> Tensor<1> {
        match &self.queries[site] {
            Some(query) => query.val(),
            None => self.output_query.val().zeros_like(),
        }
    }

    /// The projected value of source `source`, if there are maps (21). `[tokens, 1, d_model]`
    fn project(&self, source: usize, state: Tensor<2>) -> Option<Tensor<3>> {
        let maps = self.value_maps.as_ref()?.val();
        let [count, d_model, _] = maps.dims();
        let map = maps.narrow(0, source * count / (self.branches + 1), 1).reshape([d_model, d_model]);
        let dtype = state.dtype();
        let value = state.cast(accumulator(dtype)).matmul(map.transpose().cast(accumulator(dtype)));
        Some(value.cast(dtype).unsqueeze_dim(1))
    }
}

impl HistoryScheme for AttnRes {
    type State = ComposedState;
    type Pending = ComposedPending;

    fn implementation(&self) -> Implementation {
        self.implementation
    }

    #[track_caller]
    fn start_fused(&self, x: Tensor<2>) -> Pass {
        let d_model = x.dims()[1];
        let queries = (0..self.branches).map(|branch| self.query(self.sites().of(branch)));
        let queries = queries.chain([self.output_query.val()]).map(|query| query.unsqueeze_dim(0)).collect();
        let queries = stack_queries(queries, 1, &x);
        match self.entry(0, x.clone()) {
            Some(entry) => Pass::start(self.plan(d_model), entry, queries),
            None => Pass::start(self.plan(d_model), x, queries),
        }
    }

    fn site_weights(&self, _branch: usize) -> Option<SiteWeights> {
        None
    }

    fn written(&self, branch: usize, output: Tensor<2>) -> Written {
        match self.entry(branch + 1, output.clone()) {
            Some(entry) => Written::Entry(entry),
            None => Written::Output(output),
        }
    }

    fn start_composed(&self, x: Tensor<2>) -> ComposedState {
        let value = self.project(0, x.clone());
        let history = History::new(x.unsqueeze_dim(1), self.eps);
        let history = match value {
            Some(value) => history.with_first_value(value),
            None => history,
        };
        ComposedState { history, open: None }
    }

    fn read_composed(
        &self,
        branch: usize,
        state: ComposedState,
        observer: Option<&dyn Observer>,
    ) -> (Tensor<2>, ComposedPending) {
        let ComposedState { history, open } = state;
        let site = self.sites().of(branch);
        let row = site - self.sites().of_block(branch).start;
        match open {
            None => {
                self.observe_retrieval(branch, &history, &None, &self.query(site), observer);
                let retrieved = prefix(&history, self.block_queries(branch), Routing::SelfKeyValue);
                let input = retrieved[row].state.clone().squeeze_dim(1);
                (input, ComposedPending { history, retrieved, partial: None })
            }
            Some(Open { retrieved, partial }) => {
                let query = self.query(site);
                let (found, open) = (retrieved[row].clone(), Some(partial.clone()));
                self.observe_retrieval(branch, &history, &open, &query, observer);
                let merged = merge(found, partial, query.unsqueeze_dim(0), Routing::SelfKeyValue, self.eps);
                (merged.squeeze_dim(1), ComposedPending { history, retrieved, partial: open })
            }
        }
    }

    fn write_composed(
        &self,
        branch: usize,
        pending: ComposedPending,
        output: Tensor<2>,
        observer: Option<&dyn Observer>,
    ) -> ComposedState {
        let ComposedPending { history, retrieved, partial } = pending;
        let output = output.unsqueeze_dim::<3>(1);
        let partial = match partial {
            Some(partial) => partial + output,
            None => output,
        };
        let value = self.project(history.len(), partial.clone().squeeze_dim(1));
        let (partial, value) = match (observer, value) {
            (None, value) => (partial, value),
            (Some(observer), None) => (observer.state(branch, partial), None),
            (Some(observer), Some(value)) => {
                // With projected values every branch output is an entry at once: a key and a value.
                let entry = observer.state(branch, Tensor::cat(vec![partial, value], 1));
                (entry.clone().narrow(1, 0, 1), Some(entry.narrow(1, 1, 1)))
            }
        };
        if !(branch + 1).is_multiple_of(self.branches_per_block) {
            return ComposedState { history, open: Some(Open { retrieved, partial }) };
        }
        let history = match value {
            Some(value) => history.append_with_value(partial, value),
            None => history.append(partial),
        };
        ComposedState { history, open: None }
    }

    fn finish_composed(&self, state: ComposedState, observer: Option<&dyn Observer>) -> Tensor<2> {
        let ComposedState { history, open } = state;
        let partial = open.map(|open| open.partial);
        self.observe_retrieval(self.branches, &history, &partial, &self.output_query.val(), observer);
        attnres_read(&history, partial, self.output_query.val())
    }
}

impl fused::ComposedPending for ComposedPending {
    fn carried(&self) -> Tensor<3> {
        self.history.value(0)
    }
}
