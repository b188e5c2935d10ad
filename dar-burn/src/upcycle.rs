//! Upcycling: a model trained with the plain residual goes on training with another scheme.

use std::path::{Path, PathBuf};

use burn::module::{Module, ModuleVisitor};
use burn::store::{ApplyResult, BurnpackStore, ModuleSnapshot, SafetensorsStore};
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
/// If the checkpoint cannot be read, or holds more or less than the model's backbone.
pub fn upcycle<M: Module>(mut model: M, checkpoint: &Path) -> Result<M, UpcycleError> {
    let mut visitor = FindCascade(false);
    model.visit(&mut visitor);
    if visitor.0 {
        return Err(UpcycleError::Parallel);
    }
    let ApplyResult { missing, unused, .. } =
        apply(&mut model, checkpoint).map_err(|reason| UpcycleError::Load { path: checkpoint.to_owned(), reason })?;
    let missing: Vec<String> = missing
        .into_iter()
        .filter(|(_, containers)| !containers.split('.').any(|container| container == "Struct:Residual"))
        .map(|(path, _)| path)
        .collect();
    if !missing.is_empty() {
        return Err(UpcycleError::Missing { path: checkpoint.to_owned(), missing });
    }
    if !unused.is_empty() {
        return Err(UpcycleError::Unused { path: checkpoint.to_owned(), unused });
    }
    Ok(model)
}

fn apply<M: Module>(model: &mut M, checkpoint: &Path) -> Result<ApplyResult, String> {
    if !checkpoint.is_file() {
        return Err("no such file".into());
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

/// CASCADE has no parameters, so only its place in the module tree tells that it is there.
struct FindCascade(bool);

impl ModuleVisitor for FindCascade {
    fn enter_module(&mut self, name: &str, container_type: &str) {
        self.0 |= name == "Cascade" && container_type == "Enum:Scheme";
    }
}
