//! A whole pass, forward and backward, as the documentation of the crate orders it.

use burn::tensor::{Tensor, activation::tanh};
use cubecl::prelude::*;
use dar_burn::Routing;
use dar_burn::ops::rms_norm;
use dar_kernels::pack::{PackFwd, pack_fwd};
use dar_kernels::prefix::{
    Mix, PrefixBwdHistory, PrefixBwdQuery, PrefixFwd, prefix_bwd_history, prefix_bwd_query, prefix_fwd,
};
use dar_kernels::read::{Open, OpenBwd, ReadBwd, ReadFwd, read_bwd, read_fwd};
use dar_kernels::site::{PackSite, pack_site, site_length};
use dar_kernels::write::{CloseFwd, WriteBwd, close_fwd, write_bwd};
use dar_kernels::{Tuning, launches};

use super::support::{
    Buffer, F32, SiteBuffers, assert_close, clients, golden_cases, gradient, host, leaf, routing, truth,
};
use crate::support::golden::Case;

/// A stack of branches `tanh(norm(h) W)` under Dual Attention Residuals.
struct Stack<'a> {
    client: &'a Client,
    case: &'a Case,
    tokens: usize,
    d_model: usize,
    branches: usize,
    branches_per_block: usize,
    routing: Routing,
    eps: f64,
}

/// What the forward leaves behind.
struct Saved {
    value: Buffer,
    inv_rms: Buffer,
    query: Buffer,
    lse: Buffer,
    logit: Buffer,
    state: Buffer,
    gate: Buffer,
    sites: Vec<Buffer>,
    /// The state that each read found open, none where it had no branch before it in the block.
    partials: Vec<Option<Buffer>>,
    inputs: Vec<Vec<f64>>,
    outputs: Vec<Buffer>,
}

impl<'a> Stack<'a> {
    fn new(client: &'a Client, case: &'a Case) -> Self {
        let weight = case.tensor("W").unwrap();
        Self {
            client,
            case,
            tokens: case.tensor("x").unwrap().shape[0],
            d_model: weight.shape[1],
            branches: weight.shape[0],
            branches_per_block: 2 * case.number::<usize>("K").unwrap(),
            routing: routing(case),
            eps: case.eps().unwrap(),
        }
    }

    fn buffer(&self, shape: &[usize]) -> Buffer {
        Buffer::output(self.client, shape, F32)
    }

    /// Row `branch` of a parameter of all branches.
    fn parameter(&self, name: &str, branch: usize) -> Vec<f64> {
        let all = &self.case.tensor(name).unwrap().values;
        let length = all.len() / self.branches;
        all[branch * length..][..length].to_vec()
    }

    fn entries(&self) -> usize {
        self.branches / self.branches_per_block + 1
    }

    /// Whether a read goes on with a block that is open.
    fn is_open(&self, read: usize) -> bool {
        !read.is_multiple_of(self.branches_per_block)
    }

    fn branch(&self, index: usize, input: Tensor<2>, weight: fn(&[f64], [usize; 2]) -> Tensor<2>) -> [Tensor<2>; 2] {
        let weight = weight(&self.parameter("W", index), [self.d_model; 2]);
        [tanh(rms_norm(input, self.eps).matmul(weight.clone())), weight]
    }

    /// The hidden state of the output read.
    fn forward(&self) -> (Saved, Vec<f64>) {
        let Self { client, tokens, d_model, branches, routing, eps, .. } = *self;
        let (entries, reads) = (self.entries(), branches + 1);
        let queries = [&self.case.tensor("q").unwrap().values[..], &self.case.tensor("q_out").unwrap().values].concat();
        let mut saved = Saved {
            value: self.buffer(&[entries, tokens, 2, d_model]),
            inv_rms: self.buffer(&[entries, tokens, 2]),
            query: Buffer::new(client, &[reads, 2, d_model], F32, &queries),
            lse: self.buffer(&[reads, tokens, 2]),
            logit: self.buffer(&[entries, reads, tokens, 2]),
            state: self.buffer(&[reads, tokens, 2, d_model]),
            gate: self.buffer(&[reads, tokens, 5]),
            sites: Vec::new(),
            partials: Vec::new(),
            inputs: Vec::new(),
            outputs: Vec::new(),
        };
        let embedding = Buffer::new(client, &[tokens, d_model], F32, &self.case.tensor("x").unwrap().values);
        let operands = PackFwd {
            state: embedding.operand(),
            value: saved.value.operand(),
            inv_rms: saved.inv_rms.operand(),
            key: None,
            entry: 0,
            eps,
        };
        pack_fwd(client, operands, Tuning::default()).unwrap();

        for read in 0..reads {
            if read < branches {
                saved.sites.push(self.site(read));
            }
            let partial = self.is_open(read).then(|| self.buffer(&[tokens, 2, d_model]));
            let input = self.buffer(&[tokens, d_model]);
            // All reads of a block at once, and the input of the first; the output read may be the only one.
            if !self.is_open(read) || read == branches {
                let block = if read == branches { 1 } else { self.branches_per_block.min(branches - read) };
                let operands = PrefixFwd {
                    value: saved.value.operand(),
                    inv_rms: saved.inv_rms.operand(),
                    key: None,
                    query: saved.query.operand(),
                    lse: saved.lse.operand(),
                    logit: saved.logit.operand(),
                    state: saved.state.operand(),
                    mix: partial.is_none().then(|| Mix {
                        site: saved.sites.get(read).map(Buffer::operand),
                        gate: Some(saved.gate.operand()),
                        input: input.operand(),
                        keep_first: true,
                        eps,
                        norm: None,
                    }),
                    entries: read / self.branches_per_block + 1,
                    first: read,
                    count: block,
                    slot: read,
                };
                prefix_fwd(client, operands, routing, Tuning::default()).unwrap();
            }
            if let Some(partial) = &partial {
                let operands = ReadFwd {
                    state: saved.state.operand(),
                    slot: read,
                    open: Some(Open {
                        before: saved.partials[read - 1].as_ref().map(Buffer::operand),
                        output: saved.outputs[read - 1].operand(),
                        partial: partial.operand(),
                    }),
                    query: saved.query.operand(),
                    lse: saved.lse.operand(),
                    site: saved.sites.get(read).map(Buffer::operand),
                    gate: Some(saved.gate.operand()),
                    input: input.operand(),
                    read,
                    eps,
                    norm: None,
                };
                read_fwd(client, operands, routing, Tuning::default()).unwrap();
            }
            saved.partials.push(partial);
            if read == branches {
                return (saved, input.read());
            }
            saved.inputs.push(input.read());
            let [output, _] = self.branch(read, truth(&saved.inputs[read], [tokens, d_model]), truth);
            saved.outputs.push(Buffer::new(client, &[tokens, d_model], F32, &host(output)));
            if !self.is_open(read + 1) {
                let operands = CloseFwd {
                    before: saved.partials[read].as_ref().map(Buffer::operand),
                    output: saved.outputs[read].operand(),
                    gate: Some(saved.gate.operand()),
                    read,
                    value: saved.value.operand(),
                    inv_rms: saved.inv_rms.operand(),
                    key: None,
                    entry: (read + 1) / self.branches_per_block,
                    eps,
                };
                close_fwd(client, operands, Tuning::default()).unwrap();
            }
        }
        unreachable!("the output read returns")
    }

    fn site(&self, branch: usize) -> Buffer {
        let gate = |weight, bias| [self.parameter(weight, branch), self.parameter(bias, branch), vec![1.0]];
        let parameters = [gate("Wa", "ba"), gate("Wb", "bb"), gate("Wr", "br")];
        let parameters = SiteBuffers::new(self.client, self.d_model, F32, Some(&parameters));
        let site = self.buffer(&[site_length(self.d_model)]);
        pack_site(self.client, PackSite { parameters: parameters.operands(), gain: None, site: site.operand() })
            .unwrap();
        site
    }

    /// Gradients by the names of the case.
    fn backward(&self, saved: &Saved, d_hidden: &[f64]) -> Vec<(&'static str, Vec<f64>)> {
        let Self { client, tokens, d_model, branches, routing, eps, .. } = *self;
        let (entries, reads) = (self.entries(), branches + 1);
        let d_token = self.buffer(&[reads, tokens, 6]);
        let d_logit = self.buffer(&[entries, reads, tokens, 2]);
        let d_query = Buffer::new(client, &[reads, 2, d_model], F32, &vec![0.0; reads * 2 * d_model]);
        let mut d_input = Buffer::new(client, &[tokens, d_model], F32, d_hidden);
        let mut d_state = self.buffer(&[tokens, 2, d_model]); // of the open block
        let mut d_output = self.buffer(&[tokens, d_model]);
        let history = |entry: usize, d_value: &Buffer| {
            let operands = PrefixBwdHistory {
                value: saved.value.operand(),
                inv_rms: saved.inv_rms.operand(),
                query: saved.query.operand(),
                lse: saved.lse.operand(),
                logit: saved.logit.operand(),
                d_logit: d_logit.operand(),
                d_state: saved.state.operand(),
                d_token: d_token.operand(),
                d_value: d_value.operand(),
                entry,
                first: entry * self.branches_per_block,
                last: reads,
            };
            prefix_bwd_history(client, operands, routing, Tuning::default()).unwrap();
        };

        let (mut weights, mut sites) = (vec![Vec::new(); branches], vec![Vec::new(); branches]);
        for read in (0..reads).rev() {
            if read < branches {
                if !self.is_open(read + 1) {
                    d_state = self.buffer(&[tokens, 2, d_model]);
                    history((read + 1) / self.branches_per_block, &d_state);
                    let operands = WriteBwd {
                        d_state: d_state.operand(),
                        output: saved.outputs[read].operand(),
                        gate: saved.gate.operand(),
                        read,
                        d_output: d_output.operand(),
                        d_token: d_token.operand(),
                    };
                    write_bwd(client, operands, Tuning::default()).unwrap();
                }
                let input = leaf(&saved.inputs[read], [tokens, d_model]);
                let [output, weight] = self.branch(read, input.clone(), leaf);
                let gradients = (output * leaf(&d_output.read(), [tokens, d_model])).sum().backward();
                d_input = Buffer::new(client, &[tokens, d_model], F32, &gradient(&input, &gradients));
                weights[read] = gradient(&weight, &gradients);
            }
            let parameters = SiteBuffers::new(client, d_model, F32, None);
            let earlier = self.buffer(&[tokens, d_model]); // the gradient of the output of the branch before
            let operands = ReadBwd {
                state: saved.state.operand(),
                slot: read,
                lse: saved.lse.operand(),
                query: saved.query.operand(),
                site: saved.sites.get(read).map(Buffer::operand),
                gate: Some(saved.gate.operand()),
                d_input: d_input.operand(),
                written: read < branches,
                open: saved.partials[read].as_ref().map(|partial| OpenBwd {
                    partial: partial.operand(),
                    d_partial: d_state.operand(),
                    output: Some(saved.outputs[read - 1].operand()),
                    d_output: Some(earlier.operand()),
                }),
                d_token: d_token.operand(),
                d_site: (read < branches).then(|| parameters.operands()),
                d_gain: None,
                d_query: d_query.operand(),
                read,
                eps,
                norm: None,
            };
            read_bwd(client, operands, routing, Tuning::default()).unwrap();
            d_output = earlier;
            if read < branches {
                sites[read] = parameters.read();
            }
        }
        let d_embedding = self.buffer(&[tokens, d_model]);
        history(0, &d_embedding);
        let operands = PrefixBwdQuery {
            value: saved.value.operand(),
            inv_rms: saved.inv_rms.operand(),
            lse: saved.lse.operand(),
            logit: saved.logit.operand(),
            d_logit: d_logit.operand(),
            d_token: d_token.operand(),
            d_query: d_query.operand(),
            entries,
            first: 0,
            reads,
            branches_per_block: self.branches_per_block,
        };
        prefix_bwd_query(client, operands, routing).unwrap();

        let mut d_query = d_query.read();
        let d_output_query = d_query.split_off(branches * 2 * d_model);
        let all = |parameter: usize| sites.iter().flat_map(|site| site[parameter].clone()).collect();
        vec![
            ("x", d_embedding.read()),
            ("W", weights.concat()),
            ("q", d_query),
            ("q_out", d_output_query),
            ("Wa", all(0)),
            ("ba", all(1)),
            ("Wb", all(3)),
            ("bb", all(4)),
            ("Wr", all(6)),
            ("br", all(7)),
        ]
    }
}

/// Whole stacks of the golden cases, with every gradient.
#[test]
fn golden() {
    for (client, device) in clients() {
        for case in golden_cases("dar_stack_") {
            let about = format!("{} on {device}", case.name);
            let stack = Stack::new(&client, &case);
            let before = launches();
            let (saved, hidden) = stack.forward();
            // Sites, reads with an open block, the embedding; blocks that close, prefixes of blocks and of the output.
            // Other tests add theirs.
            let (branches, blocks) = (stack.branches, stack.branches.div_ceil(stack.branches_per_block));
            let least = branches + (branches + 1 - stack.entries()) + 1 + (stack.entries() - 1) + (blocks + 1);
            assert!(launches() - before >= least as u64, "{about}: not by kernels");
            assert_close(&about, &[("y", &hidden, &case.tensor("out.y").unwrap().values, 1e-5)]);
            for (name, got) in stack.backward(&saved, &case.tensor("cot.y").unwrap().values) {
                let truth = &case.tensor(&format!("grad.{name}")).unwrap().values;
                assert_close(&about, &[(name, &got, truth, 1e-5)]);
            }
        }
    }
}
