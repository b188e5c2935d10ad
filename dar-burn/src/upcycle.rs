//! Upcycling: a model trained with the plain residual goes on training with another scheme.

use std::collections::HashSet;
use std::path::{Path, PathBuf};

use burn::module::{Module, ModuleVisitor, Param};
use burn::store::{ApplyResult, BurnpackStore, ModuleSnapshot, SafetensorsStore};
use burn::tensor::Tensor;
use thiserror::Error;

/// Why a checkpoint could not become a model of another scheme.
#[derive(Debug, Error)]
pub enum UpcycleError {
    /// CASCADE runs the branches of a layer in parallel.
    #[error(
        "upcycle: the model's residual is Cascade, expected a scheme that starts as the plain residual: Cascade reads \
         the same state for attention and feed-forward, which a plain model does not"
    )]
    Parallel,
    /// The file is not there, not a checkpoint, or does not fit the model.
    #[error("upcycle: cannot load {path}: {reason}", path = path.display())]
    Load {
        /// The checkpoint.
        path: PathBuf,
        /// What the reader said.
        reason: String,
    },
    /// The checkpoint lacks tensors of the backbone.
    #[error("upcycle: {path} lacks {missing:?}, which the model has outside its residual", path = path.display())]
    Missing {
        /// The checkpoint.
        path: PathBuf,
        /// Tensors of the model.
        missing: Vec<String>,
    },
    /// The checkpoint is of a model with residual parameters.
    #[error(
        "upcycle: {path} holds {parameters:?}, expected a checkpoint of a model with the plain residual, which has no \
         residual parameters",
        path = path.display()
    )]
    NotPlain {
        /// The checkpoint.
        path: PathBuf,
        /// Residual parameters in it.
        parameters: Vec<String>,
    },
    /// The checkpoint holds tensors that the model has no place for.
    #[error(
        "upcycle: {path} holds {unused:?}, which the model has not, expected a checkpoint of the same backbone with the \
         plain residual",
        path = path.display()
    )]
    Unused {
        /// The checkpoint.
        path: PathBuf,
        /// Tensors of the checkpoint.
        unused: Vec<String>,
    },
}

/// Loads a checkpoint of a plain-residual model into `model`, whose residual may be any scheme but CASCADE.
///
/// The parameters of the residual keep their initial values, with which every scheme computes the plain residual, up to a
/// scale that the final norm removes; so the returned model computes the checkpoint's function. The checkpoint is a
/// `.safetensors` file, or else a burnpack file.
///
/// # Errors
/// If the checkpoint cannot be read, holds more or less than the model's backbone, or is of a model that is not plain.
pub fn upcycle<M: Module>(mut model: M, checkpoint: &Path) -> Result<M, UpcycleError> {
    let mut found = FindResidual::default();
    model.visit(&mut found);
    if found.cascade {
        return Err(UpcycleError::Parallel);
    }
    let path = checkpoint.to_owned();
    let ApplyResult { applied, missing, unused, .. } = match apply(&mut model, checkpoint) {
        Ok(result) => result,
        Err(reason) => return Err(UpcycleError::Load { path, reason }),
    };
    let parameters: Vec<String> = applied.into_iter().filter(|name| found.parameters.contains(name)).collect();
    if !parameters.is_empty() {
        return Err(UpcycleError::NotPlain { path, parameters });
    }
    let missing: Vec<String> = missing.into_iter().map(|(name, _)| name).collect();
    let missing: Vec<String> = missing.into_iter().filter(|name| !found.parameters.contains(name)).collect();
    if !missing.is_empty() {
        return Err(UpcycleError::Missing { path, missing });
    }
    if !unused.is_empty() {
        return Err(UpcycleError::Unused { path, unused });
    }
    Ok(model)
}

fn apply<M: Module>(model: &mut M, checkpoint: &Path) -> Result<ApplyResult, String> {
    if !checkpoint.is_file() {
        return Err("it is not a file, expected a .safetensors or a burnpack file".into());
    }
    let safetensors = checkpoint.extension().is_some_and(|extension| extension == "safetensors");
    if safetensors {
        let mut store = SafetensorsStore::from_file(checkpoint).allow_partial(true);
        model.load_from(&mut store).map_err(|error| error.to_string())
    } else {
        let mut store = BurnpackStore::from_file(checkpoint).allow_partial(true);
        model.load_from(&mut store).map_err(|error| error.to_string())
    }
}

/// The parameters of every [`Residual`](crate::Residual) in a module, by name. CASCADE has none, so only its place in
/// the module tree tells that it is there.
#[derive(Default)]
struct FindResidual {
    /// Names and containers from the root to where the visit is.
    place: Vec<(String, String)>,
    parameters: HashSet<String>,
    cascade: bool,
}

impl FindResidual {
    fn in_residual(&self) -> bool {
        self.place.windows(2).any(|pair| pair[0].1 == "Struct:Residual" && pair[1].1 == "Enum:Scheme")
    }
}

impl ModuleVisitor for FindResidual {
    fn enter_module(&mut self, name: &str, container_type: &str) {
        self.place.push((name.to_owned(), container_type.to_owned()));
        self.cascade |= self.in_residual() && name == "Cascade" && container_type == "Enum:Scheme";
    }

    fn exit_module(&mut self, _name: &str, _container_type: &str) {
        self.place.pop();
    }

    fn visit_float<const D: usize>(&mut self, _param: &Param<Tensor<D>>) {
        if self.in_residual() {
            let names: Vec<&str> = self.place.iter().map(|(name, _)| name.as_str()).collect();
            self.parameters.insert(names.join("."));
        }
    }
}
