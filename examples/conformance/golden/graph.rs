//! The tensors of one case: leaves for its inputs, a loss from its outputs, arrays from both.

use std::collections::BTreeMap;

use burn::tensor::{DType, Device, Gradients, Tensor, TensorData};
use dar_burn::ops::{Implementation, accumulator};

use super::Reason;
use super::case::{Array, Case};

/// Arrays by the names `out.NAME` and `grad.NAME`, in the layout of the file.
pub type Results = BTreeMap<String, Array>;

/// How the axes of a file's array (stream-major) lie in the operand (token-major).
#[derive(Clone, Copy)]
pub enum Axes {
    Same,
    /// This axis and the next are exchanged.
    Swap(usize),
}

impl Axes {
    /// From the file's order to the operand's, or back: an exchange is its own inverse.
    fn apply(self, array: Array) -> Array {
        match self {
            Self::Same => array,
            Self::Swap(axis) => array.swap_axes(axis),
        }
    }
}

/// Reads the values of a tensor, or the gradient of a leaf; none where the loss does not depend on the leaf.
type ReadOutput = Box<dyn FnOnce() -> Result<Vec<f64>, Reason>>;
type ReadGradient = Box<dyn Fn(&Gradients) -> Result<Option<Vec<f64>>, Reason>>;

struct Input {
    name: &'static str,
    axes: Axes,
    shape: Vec<usize>,
    /// One leaf, or one a row of the first axis.
    leaves: Vec<ReadGradient>,
}

struct Output {
    name: &'static str,
    axes: Axes,
    shape: Vec<usize>,
    read: ReadOutput,
}

/// What one evaluation of a case has built so far.
pub struct Graph<'a> {
    pub case: &'a Case,
    /// With autodiff.
    pub device: Device,
    /// Type of the states and parameters.
    pub storage: DType,
    /// Of the schemes that have a choice.
    pub implementation: Implementation,
    inputs: Vec<Input>,
    outputs: Vec<Output>,
    loss: Option<Tensor<1>>,
}

impl<'a> Graph<'a> {
    pub fn new(case: &'a Case, device: &Device, storage: DType, implementation: Implementation) -> Self {
        let device = device.clone().autodiff();
        Self { case, device, storage, implementation, inputs: Vec::new(), outputs: Vec::new(), loss: None }
    }

    /// Type of gates, log-sum-exps and sums.
    pub fn accumulator(&self) -> DType {
        accumulator(self.storage)
    }

    /// The input `name` as a leaf in the storage type.
    pub fn input<const D: usize>(&mut self, name: &'static str, axes: Axes) -> Result<Tensor<D>, Reason> {
        self.leaf(name, axes, self.storage)
    }

    /// The input `name` as a leaf in the accumulator type: what an operation hands on without storing it.
    pub fn accumulated<const D: usize>(&mut self, name: &'static str, axes: Axes) -> Result<Tensor<D>, Reason> {
        self.leaf(name, axes, self.accumulator())
    }

    /// The rows of the input `name` along its first axis, each a leaf in the storage type.
    pub fn rows<const D: usize>(&mut self, name: &'static str) -> Result<Vec<Tensor<D>>, Reason> {
        let array = self.array(name, D + 1, Axes::Same)?;
        let row: [usize; D] = array.shape[1..].try_into().expect("the rank is checked");
        let length = row.iter().product();
        let values = (0..array.shape[0]).map(|index| array.values[index * length..][..length].to_vec());
        let rows: Vec<Tensor<D>> = values.map(|values| self.tensor(values, row, self.storage)).collect();
        let leaves = rows.iter().cloned().map(gradient_of).collect();
        self.inputs.push(Input { name, axes: Axes::Same, shape: array.shape, leaves });
        Ok(rows)
    }

    fn leaf<const D: usize>(&mut self, name: &'static str, axes: Axes, dtype: DType) -> Result<Tensor<D>, Reason> {
        let array = self.array(name, D, axes)?;
        let shape: [usize; D] = array.shape[..].try_into().expect("the rank is checked");
        let leaf = self.tensor(array.values, shape, dtype);
        self.inputs.push(Input { name, axes, shape: array.shape, leaves: vec![gradient_of(leaf.clone())] });
        Ok(leaf)
    }

    fn tensor<const D: usize>(&self, values: Vec<f64>, shape: [usize; D], dtype: DType) -> Tensor<D> {
        Tensor::from_data(TensorData::new(values, shape), (&self.device, dtype)).require_grad()
    }

    fn array(&self, name: &str, rank: usize, axes: Axes) -> Result<Array, Reason> {
        let array = self.case.tensor(name)?;
        if array.shape.len() != rank {
            return Err(format!("tensor `{name}` has shape {:?}, expected {rank} axes", array.shape));
        }
        Ok(axes.apply(array.clone()))
    }

    /// Adds the output `name` to the loss; the product with its cotangent is in the accumulator type.
    pub fn output<const D: usize>(&mut self, name: &'static str, axes: Axes, output: Tensor<D>) -> Result<(), Reason> {
        let cotangent = self.array(&format!("cot.{name}"), D, axes)?;
        let shape = output.dims();
        if cotangent.shape != shape {
            return Err(format!("output `{name}` has shape {shape:?}, its cotangent {:?}", cotangent.shape));
        }
        let dtype = self.accumulator();
        let cotangent = Tensor::<D>::from_data(TensorData::new(cotangent.values, shape), (&self.device, dtype));
        let term = (output.clone().cast(dtype) * cotangent).sum();
        self.loss = Some(match self.loss.take() {
            Some(loss) => loss + term,
            None => term,
        });
        let read = Box::new(move || values_of(output));
        self.outputs.push(Output { name, axes, shape: shape.to_vec(), read });
        Ok(())
    }

    /// Runs backward and reads every output and gradient.
    pub fn backward(self) -> Result<Results, Reason> {
        let loss = self.loss.ok_or("the operation has no output")?;
        let gradients = loss.backward();
        let mut results = Results::new();
        for Output { name, axes, shape, read } in self.outputs {
            results.insert(format!("out.{name}"), axes.apply(Array { shape, values: read()? }));
        }
        for Input { name, axes, shape, leaves } in self.inputs {
            let length = shape.iter().product::<usize>() / leaves.len().max(1);
            let mut values = Vec::with_capacity(length * leaves.len());
            for leaf in leaves {
                values.extend(leaf(&gradients)?.unwrap_or_else(|| vec![0.0; length]));
            }
            results.insert(format!("grad.{name}"), axes.apply(Array { shape, values }));
        }
        Ok(results)
    }
}

fn gradient_of<const D: usize>(leaf: Tensor<D>) -> ReadGradient {
    Box::new(move |gradients| leaf.grad(gradients).map(values_of).transpose())
}

fn values_of<const D: usize>(tensor: Tensor<D>) -> Result<Vec<f64>, Reason> {
    tensor.try_into_vec_as::<f64>().map_err(|error| format!("cannot be read back: {error}"))
}
