//! What is launched: every problem of the benchmarks, and a pass over the papers' models.

use cubecl::prelude::*;
use dar_kernels::pack::{Key, PackFwd, pack_fwd};
use dar_kernels::prefix::{
    Mix, PrefixBwdHistory, PrefixBwdQuery, PrefixFwd, prefix_bwd_history, prefix_bwd_query, prefix_fwd,
};
use dar_kernels::read::{Open, OpenBwd, ReadBwd, ReadFwd, read_bwd, read_fwd};
use dar_kernels::site::{GateOperands, PackSite, SiteOperands, pack_site, packed_length};
use dar_kernels::write::{CloseFwd, WriteBwd, WriteFwd, close_fwd, write_bwd, write_fwd};
use dar_kernels::{KernelError, Routing, Tuning};

use crate::buffer::Buffer;
use crate::composed::{EPS, GATE_OUTPUTS};
use crate::fused::{Fused, Packing};
use crate::shapes::{self, BF16, Direction, F16, F32, Problem};

/// Branches a block, and widths, of the papers' models.
const BRANCHES: [usize; 3] = [2, 4, 6];
const WIDTHS: [usize; 4] = [640, 1024, 1280, 2048];
const TOKENS: usize = 4096;

/// One call of the benchmarks, or the calls of a pass.
pub enum Launch {
    Benchmark(Problem, Direction),
    Pass(Pass),
}

/// Everything that the device stores.
pub fn all(client: &Client, few: bool) -> Vec<Launch> {
    let stored = |dtype: &ElemType| client.properties().supports_type(*dtype);
    let dtypes: Vec<ElemType> = [F32, F16, BF16].into_iter().filter(stored).collect();
    let problems = if few { shapes::few() } else { shapes::all(&dtypes) };
    let (widths, branches) = if few { (&WIDTHS[..1], &BRANCHES[2..]) } else { (&WIDTHS[..], &BRANCHES[..]) };
    let benchmarks = problems
        .into_iter()
        .flat_map(|problem| problem.directions().iter().map(move |&direction| Launch::Benchmark(problem, direction)));
    let mut all: Vec<Launch> = benchmarks.collect();
    for &dtype in &dtypes {
        for &d_model in widths {
            for &branches in branches {
                for streams in [1, 2] {
                    let plain = Pass { dtype, d_model, branches, streams, keyed: false, normed: false };
                    all.extend([plain, Pass { normed: true, ..plain }].map(Launch::Pass));
                    if streams == 2 {
                        all.push(Launch::Pass(Pass { keyed: true, ..plain }));
                    }
                }
            }
        }
    }
    all
}

impl Launch {
    pub fn name(&self) -> String {
        match self {
            Self::Benchmark(problem, direction) => {
                let Problem { operation, entries, queries, tokens, d_model, dtype, .. } = problem;
                let (operation, direction) = (operation.name(), direction.name());
                format!("{operation} {direction} {dtype}, {entries} × {queries} × {tokens} × {d_model}")
            }
            Self::Pass(Pass { dtype, d_model, branches, streams, .. }) => {
                format!("a pass in {dtype}, {streams} × {d_model}, {branches} branches a block")
            }
        }
    }

    pub fn run(&self, client: &Client) -> Result<(), KernelError> {
        match self {
            Self::Benchmark(problem, direction) => {
                Fused::new(client, *problem, *direction, Packing::InverseRms)?.launch()
            }
            Self::Pass(pass) => pass.run(client),
        }
    }
}

/// Forward and backward of two blocks, of the second of which one branch is done when the output is read.
#[derive(Debug, Clone, Copy)]
pub struct Pass {
    dtype: ElemType,
    d_model: usize,
    /// Branches a block.
    branches: usize,
    /// Two have gates, one has none.
    streams: usize,
    /// Whether keys are packed.
    keyed: bool,
    /// Whether reads take the norms of their branches along.
    normed: bool,
}

impl Pass {
    fn run(self, client: &Client) -> Result<(), KernelError> {
        let Self { dtype, d_model, branches, streams, keyed, normed } = self;
        let gated = streams == 2;
        let routing = if gated { Routing::CrossKey } else { Routing::SelfKeyValue };
        let (entries, reads, tuning, eps) = (2, branches + 2, Tuning::default(), EPS);
        let stored = |shape: &[usize]| Buffer::empty(client, shape, dtype);
        let scalars = |shape: &[usize]| Buffer::empty(client, shape, F32);

        let embedding = stored(&[TOKENS, d_model]);
        let (value, inv_rms) = (stored(&[entries, TOKENS, streams, d_model]), scalars(&[entries, TOKENS, streams]));
        let keys = keyed.then(|| stored(&[entries, TOKENS, streams, d_model]));
        let key = keys.as_ref().map(Buffer::operand);
        let packed_key = key.map(|key| Key { key, routing });
        let (query, lse) = (scalars(&[reads, streams, d_model]), scalars(&[reads, TOKENS, streams]));
        let logit = scalars(&[entries, reads, TOKENS, streams]);
        let state = stored(&[reads, TOKENS, streams, d_model]);
        let gates = gated.then(|| scalars(&[reads, TOKENS, 5]));
        let gate = gates.as_ref().map(Buffer::operand);
        let packed = (gated || normed).then(|| scalars(&[packed_length(d_model, gated, normed)]));
        let norm = normed.then_some(eps);
        let site = packed.as_ref().map(Buffer::operand);
        let (input, output) = (stored(&[TOKENS, d_model]), stored(&[TOKENS, d_model]));
        let [before, partial, d_state] = [(); 3].map(|()| stored(&[TOKENS, streams, d_model]));
        let parameters = Site::new(client, d_model, dtype);

        // Forward.
        let gain = stored(&[d_model]);
        if let Some(site) = site.filter(|_| gated) {
            let gain = normed.then(|| gain.operand());
            pack_site(client, PackSite { parameters: parameters.operands(), gain, site })?;
        }
        let (value, inv_rms) = (value.operand(), inv_rms.operand());
        for state in [&embedding, &before] {
            let operands = PackFwd { state: state.operand(), value, inv_rms, key: packed_key, entry: 0, eps };
            pack_fwd(client, operands, tuning)?;
        }
        // A block with and without a first state that is kept; the output of complete blocks, and of an open one.
        for (first, count, keep_first, sited) in
            [(0, branches, true, true), (0, branches, false, true), (branches + 1, 1, true, false)]
        {
            let (site, norm) = (site.filter(|_| sited), norm.filter(|_| sited));
            let mix = Mix { site, gate, input: input.operand(), keep_first, eps, norm };
            for mix in [Some(mix), None] {
                let operands = PrefixFwd {
                    value,
                    inv_rms,
                    key,
                    query: query.operand(),
                    lse: lse.operand(),
                    logit: logit.operand(),
                    state: state.operand(),
                    mix,
                    entries,
                    first,
                    count,
                    slot: first,
                };
                prefix_fwd(client, operands, routing, tuning)?;
            }
        }
        // The first branch of a block, the second, a later one; then the output, which has no site.
        let open = |before| Open { before, output: output.operand(), partial: partial.operand() };
        let second = Some(open(None));
        let later = Some(open(Some(before.operand())));
        for (open, site) in [(None, site), (second, site), (later, site), (None, None), (second, None), (later, None)] {
            let operands = ReadFwd {
                state: state.operand(),
                slot: 1,
                open,
                query: query.operand(),
                lse: lse.operand(),
                site,
                gate,
                input: input.operand(),
                read: 1,
                eps,
                norm: norm.filter(|_| site.is_some()),
            };
            read_fwd(client, operands, routing, tuning)?;
        }
        for before in [None, Some(before.operand())] {
            let output = output.operand();
            write_fwd(client, WriteFwd { before, output, gate, read: 0, state: partial.operand() })?;
            let operands = CloseFwd { before, output, gate, read: 0, value, inv_rms, key: packed_key, entry: 1, eps };
            close_fwd(client, operands, tuning)?;
        }
        if keyed {
            return Ok(()); // backward kernels read no keys
        }

        // Backward.
        let d_token = scalars(&[reads, TOKENS, 2 + 2 * streams]);
        let (d_logit, d_query) = (scalars(&[entries, reads, TOKENS, streams]), scalars(&[reads, streams, d_model]));
        let d_parameters = Site::new(client, d_model, F32);
        let d_site = gated.then(|| d_parameters.operands());
        let d_gain = normed.then(|| scalars(&[d_model]));
        let d_output = stored(&[TOKENS, d_model]);
        let open = OpenBwd {
            partial: partial.operand(),
            d_partial: d_state.operand(),
            output: gate.map(|_| output.operand()),
            d_output: Some(d_output.operand()),
        };
        for (open, sited, written) in
            [(Some(open), true, true), (None, true, true), (Some(open), false, false), (None, false, false)]
        {
            for (d_site, trained) in [(d_site, true), (None, false)] {
                let operands = ReadBwd {
                    state: state.operand(),
                    slot: 1,
                    lse: lse.operand(),
                    query: query.operand(),
                    site: site.filter(|_| sited),
                    gate,
                    d_input: input.operand(),
                    written,
                    open,
                    d_token: d_token.operand(),
                    d_site: d_site.filter(|_| sited),
                    d_gain: d_gain.as_ref().filter(|_| sited && trained).map(Buffer::operand),
                    d_query: d_query.operand(),
                    read: 1,
                    eps,
                    norm: norm.filter(|_| sited),
                };
                read_bwd(client, operands, routing, tuning)?;
            }
        }
        for d_value in [&d_state, &d_output] {
            let operands = PrefixBwdHistory {
                value,
                inv_rms,
                query: query.operand(),
                lse: lse.operand(),
                logit: logit.operand(),
                d_state: state.operand(),
                d_token: d_token.operand(),
                d_logit: d_logit.operand(),
                d_value: d_value.operand(),
                entry: 0,
                first: 0,
                last: reads,
            };
            prefix_bwd_history(client, operands, routing, tuning)?;
        }
        let operands = PrefixBwdQuery {
            value,
            inv_rms,
            lse: lse.operand(),
            logit: logit.operand(),
            d_logit: d_logit.operand(),
            d_token: d_token.operand(),
            d_query: d_query.operand(),
            entries,
            first: 0,
            reads,
            branches_per_block: branches,
        };
        prefix_bwd_query(client, operands, routing)?;
        if let Some(gate) = gate {
            let operands = WriteBwd {
                d_state: d_state.operand(),
                output: output.operand(),
                gate,
                read: 0,
                d_output: d_output.operand(),
                d_token: d_token.operand(),
            };
            write_bwd(client, operands, tuning)?;
        }
        Ok(())
    }
}

/// The nine parameters of a site.
struct Site([[Buffer; 3]; 3]);

impl Site {
    fn new(client: &Client, d_model: usize, dtype: ElemType) -> Self {
        let gate =
            |outputs| [&[2 * d_model, outputs][..], &[outputs], &[1]].map(|shape| Buffer::empty(client, shape, dtype));
        Self(GATE_OUTPUTS.map(gate))
    }

    fn operands(&self) -> SiteOperands<'_> {
        let [alpha, beta, rho] = self.0.each_ref().map(|[weight, bias, scale]| GateOperands {
            weight: weight.operand(),
            bias: bias.operand(),
            scale: scale.operand(),
        });
        SiteOperands { alpha, beta, rho }
    }
}
