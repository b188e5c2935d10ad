use burn::module::Module;
use burn::tensor::Tensor;

use super::observer::Observer;

/// Stream separation (CASCADE; Bregman conditioning paper, equations 2–3): no parameters.
///
/// The token stream stays the embedding, the context stream `e` starts at zero and collects every branch output. Both
/// branches of a layer read the same state `x + e`, so a layer's branches run in parallel:
///
/// ```text
/// e' = e + attention(x + e) + feed_forward(x + e)
/// ```
#[derive(Module, Debug, Default)]
pub struct Cascade {}

#[derive(Debug, Clone)]
pub(super) struct CascadeState {
    token: Tensor<2>,
    /// Outputs of whole layers; none before the first layer ends.
    context: Option<Tensor<2>>,
    /// Output of the layer that is still open.
    open: Option<Tensor<2>>,
}

#[derive(Debug, Clone)]
pub(super) struct CascadePending(CascadeState);

impl CascadePending {
    pub(super) fn carried(&self) -> &Tensor<2> {
        &self.0.token
    }
}

impl Cascade {
    /// The scheme.
    pub fn new() -> Self {
        Self {}
    }

    pub(super) fn start(&self, x: Tensor<2>) -> CascadeState {
        CascadeState { token: x, context: None, open: None }
    }

    pub(super) fn read(&self, state: CascadeState) -> (Tensor<2>, CascadePending) {
        (state.sum(), CascadePending(state))
    }

    pub(super) fn write(
        &self,
        branch: usize,
        pending: CascadePending,
        output: Tensor<2>,
        observer: Option<&dyn Observer>,
    ) -> CascadeState {
        let CascadePending(CascadeState { token, context, open }) = pending;
        let layer = add(open, output);
        if branch.is_multiple_of(2) {
            CascadeState { token, context, open: Some(layer) }
        } else {
            let context = add(context, layer);
            let (token, context) = match observer {
                None => (token, context),
                Some(observer) => {
                    let streams = observer.state(branch, Tensor::stack(vec![token, context], 1));
                    let stream = |j| streams.clone().narrow(1, j, 1).squeeze_dim(1);
                    (stream(0), stream(1))
                }
            };
            CascadeState { token, context: Some(context), open: None }
        }
    }

    pub(super) fn finish(&self, state: CascadeState) -> Tensor<2> {
        state.sum()
    }
}

impl CascadeState {
    fn sum(&self) -> Tensor<2> {
        add(self.context.clone(), self.token.clone())
    }
}

fn add(sum: Option<Tensor<2>>, term: Tensor<2>) -> Tensor<2> {
    match sum {
        Some(sum) => sum + term,
        None => term,
    }
}
