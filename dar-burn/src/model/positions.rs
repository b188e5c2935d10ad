use burn::tensor::{DType, Device, Tensor, TensorData, s};

/// What attention has to know of the positions of one pass: their rotations (RoPE, Su et al.) and who sees whom.
///
/// Components i and i + d_head/2 of a head form a plane that turns by `position / base^(2i / d_head)`.
pub(super) struct Positions {
    /// `[new, d_head / 2]`, in the accumulator type.
    cos: Tensor<2>,
    /// `[new, d_head / 2]`, in the accumulator type.
    sin: Tensor<2>,
    /// Added to attention scores: 0 for earlier keys and the query's own, hugely negative for later ones; none for a
    /// single new position, which sees all keys. `[1, 1, new, past + new]`
    mask: Option<Tensor<4>>,
}

impl Positions {
    /// Positions `past..past + new`; queries of those see the keys from 0.
    ///
    /// `dtype` is the accumulator type.
    pub(super) fn new(past: usize, new: usize, d_head: usize, base: f64, dtype: DType, device: &Device) -> Self {
        // In f64 on the host: an angle in f32 would be off by `position * 2^-24`.
        let half = d_head / 2;
        let angle = (past..past + new).flat_map(|position| {
            (0..half).map(move |i| position as f64 * base.powf(-((2 * i) as f64) / d_head as f64))
        });
        let (sin, cos): (Vec<f64>, Vec<f64>) = angle.map(f64::sin_cos).unzip();
        let table = |values| Tensor::from_data(TensorData::new(values, [new, half]), (device, dtype));
        let mask = (new > 1).then(|| {
            // Finite, so that no backend meets -inf - (-inf); far below any score, so that its softmax is exactly 0.
            Tensor::<2>::full([new, past + new], -1e30, (device, dtype)).triu(past as i64 + 1).unsqueeze()
        });
        Self { cos: table(cos), sin: table(sin), mask }
    }

    /// Turns every head of every position, in the accumulator type.
    ///
    /// # Shapes
    /// - `x`, output: `[batch, heads, new, d_head]`
    pub(super) fn rotate(&self, x: Tensor<4>) -> Tensor<4> {
        let x = x.cast(self.cos.dtype());
        let half = x.dims()[3] / 2;
        let (cos, sin) = (self.cos.clone().unsqueeze::<4>(), self.sin.clone().unsqueeze::<4>());
        let (x0, x1) = (x.clone().slice(s![.., .., .., ..half]), x.slice(s![.., .., .., half..]));
        let turned = x0.clone() * cos.clone() - x1.clone() * sin.clone();
        Tensor::cat(vec![turned, x1 * cos + x0 * sin], 3)
    }

    /// Hides later keys.
    ///
    /// # Shapes
    /// - `scores`, output: `[.., .., new, past + new]`
    pub(super) fn mask(&self, scores: Tensor<4>) -> Tensor<4> {
        match &self.mask {
            Some(mask) => scores + mask.clone(),
            None => scores,
        }
    }
}
