//! The model under inspection, and what its passes leave on the host.

use std::collections::BTreeMap;
use std::sync::Arc;

use burn::tensor::{Device, Int, Tensor, TensorData};
use dar_burn::diagnostics::ndarray::{Array2, Array3};
use dar_burn::diagnostics::{Intervention, Record, Recorder};
use dar_burn::model::{Decoder, DecoderOutput};
use dar_burn::nn::{Observer, Unobserved};

use crate::support::text::{Batch, Text};

pub struct Subject<'a> {
    pub model: Decoder,
    pub device: &'a Device,
    pub text: &'a Text,
    /// Tokens a sequence.
    pub sequence: usize,
    /// Sequences a pass.
    pub batch: usize,
}

/// A recorded pass: arrays of the last tokens of every sequence.
pub struct Captured {
    pub sequences: usize,
    /// Sampled tokens a sequence.
    pub last: usize,
    pub records: BTreeMap<usize, Record>,
    /// Balance of every layer with experts.
    pub balance: Vec<f64>,
    /// `[sampled, vocab]`
    pub logits: Array2<f64>,
    tokens: Tensor<2, Int>,
    sampled: Vec<i64>,
}

/// What the model's one head makes of the state after every layer.
pub struct Exits {
    /// Mean cross entropy, nats a token.
    pub losses: Vec<f64>,
    /// After the last token of every window, `[windows, vocab]` each.
    pub logits: Vec<Array2<f64>>,
    /// What the head multiplied for those, `[windows, d_model]` each.
    pub states: Vec<Array2<f64>>,
}

impl Subject<'_> {
    pub fn layers(&self) -> usize {
        self.model.layers.len()
    }

    /// Records the last tokens of `sequences` windows of the text.
    pub fn capture(&self, sequences: usize, last: usize) -> Captured {
        let windows = self.text.windows(sequences, [sequences, self.sequence], self.device);
        let Batch { tokens, .. } = windows.last().expect("at least one window");
        let from = self.sequence - last;
        let sampled: Vec<i64> = (0..sequences)
            .flat_map(|row| (from..self.sequence).map(move |place| (row, place)))
            .map(|(row, place)| (row * self.sequence + place) as i64)
            .collect();
        let recorder = Arc::new(Recorder::new().tokens(sampled.iter().map(|&token| token as usize)));
        let observed = self.model.forward_observed(tokens.clone(), recorder.clone());
        let balance = observed.balance.into_iter().map(scalar).collect();
        let logits = self.pick(observed.output.logits, &sampled);
        let records = std::mem::take(&mut *recorder.records());
        Captured { sequences, last, records, balance, logits, tokens, sampled }
    }

    /// Logits of the sampled tokens of a pass that `intervention` changes. `[sampled, vocab]`
    pub fn changed(&self, captured: &Captured, intervention: Intervention) -> Array2<f64> {
        let observed = self.model.forward_observed(captured.tokens.clone(), Arc::new(intervention));
        self.pick(observed.output.logits, &captured.sampled)
    }

    fn pick(&self, logits: Tensor<3>, tokens: &[i64]) -> Array2<f64> {
        let ids = Tensor::<1, Int>::from_data(TensorData::new(tokens.to_vec(), [tokens.len()]), self.device);
        matrix(logits.flatten::<2>(0, 1).select(0, ids))
    }

    /// Mean cross entropy on `windows` windows of the text, nats a token.
    pub fn loss(&self, windows: usize, observer: Arc<dyn Observer>) -> f64 {
        let batches = self.text.windows(windows, [self.batch, self.sequence], self.device);
        let losses = batches.map(|Batch { tokens, targets }| {
            let rows = tokens.dims()[0] as f64;
            let output = self.model.forward_observed(tokens, observer.clone()).output;
            rows * scalar(output.cross_entropy(targets))
        });
        losses.sum::<f64>() / windows as f64
    }

    /// Reads the end of every layer on `windows` windows of the text; `tick` hears of each few.
    pub fn exits(&self, windows: usize, mut tick: impl FnMut(usize)) -> Exits {
        let mut losses = vec![0.0; self.layers()];
        let mut logits: Vec<Vec<f64>> = vec![Vec::new(); self.layers()];
        let mut states: Vec<Vec<f64>> = vec![Vec::new(); self.layers()];
        for Batch { tokens, targets } in self.text.windows(windows, [self.batch, self.sequence], self.device) {
            let rows = tokens.dims()[0];
            let exits = self.model.forward_observed(tokens, Arc::new(Unobserved)).exits;
            for (layer, exit) in exits.into_iter().enumerate() {
                let end = exit.clone().narrow(1, self.sequence - 1, 1);
                states[layer].extend(self.model.final_norm.forward(end).into_data().iter::<f64>());
                let output = DecoderOutput { logits: self.model.logits(exit), balance_loss: None };
                losses[layer] += rows as f64 * scalar(output.cross_entropy(targets.clone()));
                let ends = output.logits.narrow(1, self.sequence - 1, 1);
                logits[layer].extend(ends.into_data().iter::<f64>());
            }
            tick(rows);
        }
        losses.iter_mut().for_each(|loss| *loss /= windows as f64);
        let rows = |values: Vec<f64>| {
            Array2::from_shape_vec((windows, values.len() / windows), values).expect("a row a window")
        };
        let all = |layers: Vec<Vec<f64>>| layers.into_iter().map(rows).collect();
        Exits { losses, logits: all(logits), states: all(states) }
    }

    /// `[vocab, d_model]`
    pub fn unembedding(&self) -> Array2<f64> {
        matrix(self.model.embedding.val())
    }
}

impl Captured {
    /// `[tokens, streams]` as `[sequences, tokens, streams]`.
    pub fn by_sequence(&self, weights: &Array2<f64>) -> Array3<f64> {
        let shape = (self.sequences, self.last, weights.ncols());
        weights.to_shape(shape).expect("tokens are sequences of equal length").into_owned()
    }
}

fn matrix(tensor: Tensor<2>) -> Array2<f64> {
    let [rows, columns] = tensor.dims();
    let values: Vec<f64> = tensor.into_data().iter::<f64>().collect();
    Array2::from_shape_vec((rows, columns), values).expect("as many values as the shape says")
}

fn scalar(tensor: Tensor<1>) -> f64 {
    tensor.into_data().iter::<f64>().next().expect("one value")
}
