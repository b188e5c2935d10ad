//! A golden file on the host.

use std::collections::{BTreeMap, HashMap};
use std::path::{Path, PathBuf};
use std::str::FromStr;

use safetensors::{Dtype, SafeTensors};

use super::Reason;

/// A row-major array of float64.
#[derive(Debug, Clone)]
pub struct Array {
    pub shape: Vec<usize>,
    pub values: Vec<f64>,
}

impl Array {
    /// This array with axes `axis` and `axis + 1` exchanged.
    pub fn swap_axes(&self, axis: usize) -> Self {
        let (a, b) = (self.shape[axis], self.shape[axis + 1]);
        let inner: usize = self.shape[axis + 2..].iter().product();
        let mut values = Vec::with_capacity(self.values.len());
        if a * b * inner > 0 {
            for outer in self.values.chunks(a * b * inner) {
                for j in 0..b {
                    for i in 0..a {
                        let start = (i * b + j) * inner;
                        values.extend_from_slice(&outer[start..start + inner]);
                    }
                }
            }
        }
        let mut shape = self.shape.clone();
        shape.swap(axis, axis + 1);
        Self { shape, values }
    }
}

/// One golden case: tensors by name, and the metadata.
pub struct Case {
    pub name: String,
    pub tensors: BTreeMap<String, Array>,
    pub metadata: HashMap<String, String>,
}

impl Case {
    /// Reads a safetensors file of float64 tensors.
    pub fn read(path: &Path) -> Result<Self, Reason> {
        let bytes = std::fs::read(path).map_err(|error| format!("cannot be read: {error}"))?;
        let corrupt = |error| format!("is no safetensors file: {error}");
        let (_, header) = SafeTensors::read_metadata(&bytes).map_err(corrupt)?;
        let file = SafeTensors::deserialize(&bytes).map_err(corrupt)?;
        let tensors = file.iter().map(|(name, view)| {
            if view.dtype() != Dtype::F64 {
                return Err(format!("tensor `{name}` has element type {:?}, expected F64", view.dtype()));
            }
            let values =
                view.data().chunks_exact(8).map(|chunk| f64::from_le_bytes(chunk.try_into().expect("8 bytes")));
            Ok((name.to_owned(), Array { shape: view.shape().to_vec(), values: values.collect() }))
        });
        Ok(Self {
            name: path.file_stem().unwrap_or(path.as_os_str()).to_string_lossy().into_owned(),
            tensors: tensors.collect::<Result<_, _>>()?,
            metadata: header.metadata().clone().unwrap_or_default(),
        })
    }

    pub fn op(&self) -> Result<&str, Reason> {
        self.text("op")
    }

    /// Whether the logits are so far apart that f32 keeps only the winner.
    pub fn is_extreme(&self) -> bool {
        self.name.contains("extreme")
            || self.metadata.iter().any(|(key, value)| key.contains("extreme") || value.contains("extreme"))
    }

    pub fn text(&self, key: &str) -> Result<&str, Reason> {
        self.metadata.get(key).map(String::as_str).ok_or_else(|| format!("metadata `{key}` is missing"))
    }

    pub fn optional_text(&self, key: &str) -> Option<&str> {
        self.metadata.get(key).map(String::as_str)
    }

    pub fn number<T: FromStr>(&self, key: &str) -> Result<T, Reason> {
        let text = self.text(key)?;
        text.trim().parse().map_err(|_| format!("metadata `{key}` is `{text}`, expected a number"))
    }

    pub fn eps(&self) -> Result<f64, Reason> {
        self.number("eps")
    }

    pub fn tensor(&self, name: &str) -> Result<&Array, Reason> {
        self.tensors.get(name).ok_or_else(|| format!("tensor `{name}` is missing"))
    }
}

/// The golden files that `path` names: itself, or the files of a folder in the order of their names.
pub fn case_files(path: &Path) -> Result<Vec<PathBuf>, Reason> {
    if !path.is_dir() {
        return Ok(vec![path.to_owned()]);
    }
    let entries = std::fs::read_dir(path).and_then(Iterator::collect::<Result<Vec<_>, _>>);
    let entries = entries.map_err(|error| format!("cannot be read: {error}"))?;
    let mut files: Vec<PathBuf> = entries.into_iter().map(|entry| entry.path()).collect();
    files.retain(|file| file.extension().is_some_and(|extension| extension == "safetensors"));
    files.sort();
    if files.is_empty() { Err("holds no .safetensors file".into()) } else { Ok(files) }
}
