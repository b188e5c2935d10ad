//! The residual pathway on its own: a pass whose branches return their input, forward and backward.

use std::time::Instant;

use burn::tensor::{Device, Distribution, Tensor};
use dar_burn::Residual;

use crate::arguments::Model;
use crate::support::cli::{Failure, failed};

/// Seconds of `count` passes after an untimed one.
pub fn times(residual: &Residual, model: &Model, device: &Device, count: usize) -> Result<Vec<f64>, Failure> {
    let d_model = model.d_model();
    let shape = [model.batch, model.sequence, d_model];
    let embedding = Tensor::<3>::random(shape, Distribution::Normal(0.0, 1.0), device).require_grad();
    let sync = || device.sync().map_err(failed("the residual pathway failed"));
    let mut seconds = Vec::new();
    for pass in 0..=count {
        sync()?;
        let begin = Instant::now();
        let mut state = residual.start(embedding.clone());
        for _ in 0..residual.branches() {
            state = residual.branch(state, |input| input);
        }
        let grads = residual.finish(state).sum().backward();
        sync()?;
        if pass > 0 {
            seconds.push(begin.elapsed().as_secs_f64());
        }
        drop(grads);
    }
    Ok(seconds)
}
