//! Files that are never seen half-written: everything is written beside its place and then renamed into it.

use std::fmt::Write;
use std::fs;
use std::path::{Path, PathBuf};

use serde::Serialize;
use serde::de::DeserializeOwned;

use crate::run::Row;
use crate::support::checkpoint::Checkpoint;
use crate::support::cli::{Failure, failed_to};

const HEADER: &str = "step,train_loss,valid_loss,tokens_per_s,auxiliary_loss";

/// Writes a file through `write` and puts it in the place of `path`.
pub fn replace(path: &Path, write: impl FnOnce(&Path) -> Result<(), Failure>) -> Result<(), Failure> {
    let fresh = sibling(path, "new");
    write(&fresh)?;
    fs::rename(&fresh, path).map_err(failed_to("write", path))
}

/// Writes a folder through `write` and puts it in the place of `path`.
pub fn replace_folder(path: &Path, write: impl FnOnce(&Path) -> Result<(), Failure>) -> Result<(), Failure> {
    let (fresh, old) = (sibling(path, "new"), sibling(path, "old"));
    let wrap = |result: std::io::Result<()>| result.map_err(failed_to("write", path));
    wrap(remove(&fresh))?;
    wrap(fs::create_dir_all(&fresh))?;
    write(&fresh)?;
    // A folder cannot be renamed over another. Cut off between the two, the old one is complete.
    wrap(remove(&old))?;
    if path.exists() {
        wrap(fs::rename(path, &old))?;
    }
    wrap(fs::rename(&fresh, path))?;
    wrap(remove(&old))
}

/// The checkpoint in `path`, or the one that [`replace_folder`] had set aside when it was cut off.
pub fn surviving_checkpoint(path: &Path) -> Result<Option<Checkpoint>, Failure> {
    let old = sibling(path, "old");
    if !path.exists() && old.exists() {
        fs::rename(&old, path).map_err(failed_to("restore", path))?;
    }
    Ok(path.exists().then(|| Checkpoint::at(path)))
}

fn sibling(path: &Path, suffix: &str) -> PathBuf {
    let mut name = path.file_name().unwrap_or_default().to_owned();
    name.push(".");
    name.push(suffix);
    path.with_file_name(name)
}

fn remove(folder: &Path) -> std::io::Result<()> {
    if folder.exists() { fs::remove_dir_all(folder) } else { Ok(()) }
}

pub fn write_json(path: &Path, value: &impl Serialize) -> Result<(), Failure> {
    let json = serde_json::to_string_pretty(value).map_err(failed_to("write", path))?;
    fs::write(path, json + "\n").map_err(failed_to("write", path))
}

pub fn read_json<T: DeserializeOwned>(path: &Path) -> Result<T, Failure> {
    let json = fs::read(path).map_err(failed_to("read", path))?;
    serde_json::from_slice(&json).map_err(failed_to("read", path))
}

pub fn write_metrics(path: &Path, rows: &[Row]) -> Result<(), Failure> {
    let mut csv = format!("{HEADER}\n");
    let cell = |loss: &Option<f32>| loss.map_or(String::new(), |loss| loss.to_string());
    for Row { step, train_loss, valid_loss, tokens_per_s, auxiliary_loss } in rows {
        let [valid_loss, auxiliary_loss] = [valid_loss, auxiliary_loss].map(cell);
        let _ = writeln!(csv, "{step},{train_loss},{valid_loss},{tokens_per_s:.1},{auxiliary_loss}");
    }
    fs::write(path, csv).map_err(failed_to("write", path))
}

pub fn read_metrics(path: &Path) -> Result<Vec<Row>, Failure> {
    let csv = fs::read_to_string(path).map_err(failed_to("read", path))?;
    // `None` where it is no number, `Some(None)` where there is none.
    let cell = |cell: &str| if cell.is_empty() { Some(None) } else { cell.parse().ok().map(Some) };
    let row = |line: &str| {
        let mut cells: Vec<&str> = line.split(',').collect();
        if cells.len() == 4 {
            cells.push(""); // of a run from before the auxiliary loss was kept
        }
        let [step, train_loss, valid_loss, tokens_per_s, auxiliary_loss] = cells.try_into().ok()?;
        Some(Row {
            step: step.parse().ok()?,
            train_loss: train_loss.parse().ok()?,
            valid_loss: cell(valid_loss)?,
            tokens_per_s: tokens_per_s.parse().ok()?,
            auxiliary_loss: cell(auxiliary_loss)?,
        })
    };
    let wrong = |line: &str| Failure::run(format!("{}: `{line}` is not a line of `{HEADER}`", path.display()));
    csv.lines().skip(1).map(|line| row(line).ok_or_else(|| wrong(line))).collect()
}
