//! The training text: documents, their tokens, the held-out end, and batches that depend on seed and step alone.

use std::collections::HashSet;
use std::env;
use std::fs;
use std::path::{Path, PathBuf};
use std::process::Command;

use burn::tensor::{Device, Int, Tensor, TensorData};
use serde::{Deserialize, Serialize};

use super::cli::{Failure, failed, failed_to};
use super::vocabulary::Vocabulary;

/// Most bytes of the default text: much more than a tiny model reads, little enough to load in a second.
const DEFAULT_TEXT_BYTES: usize = 16 << 20;
/// Longer files of the default text are mostly generated tables.
const DEFAULT_FILE_BYTES: usize = 128 << 10;
/// Tokens of one evaluation, if the held-out part has as many.
const EVALUATED_TOKENS: usize = 8192;

/// Tokens to train on and tokens that are never trained on.
pub struct Text {
    train: Vec<u32>,
    held_out: Vec<u32>,
    /// For people: where the text comes from and how much it is.
    pub description: String,
    pub fingerprint: Fingerprint,
}

/// Tells one text, or one way to cut it into tokens, from another.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Fingerprint {
    tokens: usize,
    hash: String,
}

/// Token ids and the ids after them, `[batch, sequence]` both.
pub struct Batch {
    pub tokens: Tensor<2, Int>,
    pub targets: Tensor<2, Int>,
}

impl Text {
    /// Reads `path`, or the sources and documentation of this project's dependencies, and holds out the last 5 %.
    pub fn load(path: Option<&Path>, vocabulary: &Vocabulary, sequence: usize) -> Result<Self, Failure> {
        Self::read(path, vocabulary, sequence, 20)
    }

    /// Reads a text that no model was trained on: all of it is held out.
    pub fn unseen(path: &Path, vocabulary: &Vocabulary, sequence: usize) -> Result<Self, Failure> {
        Self::read(Some(path), vocabulary, sequence, 1)
    }

    /// Holds out one part in `parts`.
    fn read(path: Option<&Path>, vocabulary: &Vocabulary, sequence: usize, parts: usize) -> Result<Self, Failure> {
        let (mut documents, source) = match path {
            Some(path) => (read_all(path)?, path.display().to_string()),
            None => read_dependencies()?,
        };
        // In the order of a hash, what stands at the end is a sample of everything.
        documents.sort_by_cached_key(|document| (hash(document.bytes()), document.len()));

        let mut tokens = Vec::new();
        for document in &documents {
            tokens.extend(vocabulary.encode_document(document)?);
        }
        let fingerprint = Fingerprint {
            tokens: tokens.len(),
            hash: format!("{:016x}", hash(tokens.iter().flat_map(|token| token.to_le_bytes()))),
        };
        let plural = if documents.len() == 1 { "" } else { "s" };
        let description = format!("{source}: {} document{plural}, {} tokens", documents.len(), tokens.len());
        let held_out = tokens.split_off(tokens.len() - tokens.len() / parts);
        let text = Self { train: tokens, held_out, description, fingerprint };
        if text.held_out.len() <= sequence {
            return Err(Failure::usage(format!(
                "{description}, of which {share} % are held out: too little for sequences of {sequence}; give more text or \
                 a shorter --sequence",
                share = 100 / parts,
                description = text.description
            )));
        }
        Ok(text)
    }

    /// The training batch of `step`: the same in every scheme, and after every resumption.
    pub fn batch(&self, seed: u64, step: usize, shape: [usize; 2], device: &Device) -> Batch {
        let [batch, sequence] = shape;
        let starts = (self.train.len() - sequence) as u64;
        let start = |row: usize| (scramble(scramble(scramble(seed) ^ step as u64) ^ row as u64) % starts) as usize;
        cut(&self.train, (0..batch).map(start), sequence, device)
    }

    /// Batches that spread over the held-out tokens, always the same.
    pub fn held_out<'a>(&'a self, shape: [usize; 2], device: &'a Device) -> impl Iterator<Item = Batch> + 'a {
        let room = self.held_out.len() - shape[1];
        self.windows((EVALUATED_TOKENS.min(room) / shape[1]).max(1), shape, device)
    }

    /// So many windows that spread over the held-out tokens, in batches. They overlap where there are fewer tokens.
    pub fn windows<'a>(
        &'a self,
        windows: usize,
        shape: [usize; 2],
        device: &'a Device,
    ) -> impl Iterator<Item = Batch> + 'a {
        let [batch, sequence] = shape;
        let room = self.held_out.len() - sequence;
        let starts: Vec<usize> = (0..windows).map(|window| window * room / windows).collect();
        let batches: Vec<Vec<usize>> = starts.chunks(batch).map(<[usize]>::to_vec).collect();
        batches.into_iter().map(move |starts| cut(&self.held_out, starts.into_iter(), sequence, device))
    }
}

/// Windows of `sequence` tokens and their successors.
fn cut(tokens: &[u32], starts: impl Iterator<Item = usize>, sequence: usize, device: &Device) -> Batch {
    let starts: Vec<usize> = starts.collect();
    let rows = |shift: usize| {
        let ids = starts.iter().flat_map(|start| &tokens[start + shift..start + shift + sequence]);
        let ids: Vec<i32> = ids.map(|&id| id as i32).collect();
        Tensor::from_data(TensorData::new(ids, [starts.len(), sequence]), device)
    };
    Batch { tokens: rows(0), targets: rows(1) }
}

/// A well-mixed function of its argument (splitmix64).
fn scramble(x: u64) -> u64 {
    let x = x.wrapping_add(0x9e37_79b9_7f4a_7c15);
    let x = (x ^ (x >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
    let x = (x ^ (x >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
    x ^ (x >> 31)
}

/// FNV-1a: the same everywhere and in every version.
fn hash(bytes: impl Iterator<Item = u8>) -> u64 {
    let step = |hash: u64, byte: u8| (hash ^ u64::from(byte)).wrapping_mul(0x100_0000_01b3);
    scramble(bytes.fold(0xcbf2_9ce4_8422_2325, step))
}

/// The text of a file, or of all files under a folder but for hidden ones and those that are not UTF-8 text.
fn read_all(path: &Path) -> Result<Vec<String>, Failure> {
    if path.is_dir() {
        let mut files = Vec::new();
        list(path, &mut files).map_err(failed_to("read", path))?;
        let documents: Vec<String> = files.iter().filter_map(|file| read_text(file)).collect();
        if documents.is_empty() {
            return Err(Failure::usage(format!("there is no UTF-8 text under {}", path.display())));
        }
        return Ok(documents);
    }
    let bytes = fs::read(path).map_err(failed_to("read", path))?;
    let document = as_text(bytes).ok_or_else(|| Failure::usage(format!("{} is not UTF-8 text", path.display())))?;
    Ok(vec![document])
}

/// All files under `folder`, sorted, without hidden files and symbolic links.
fn list(folder: &Path, files: &mut Vec<PathBuf>) -> std::io::Result<()> {
    let mut entries = fs::read_dir(folder)?.collect::<Result<Vec<_>, _>>()?;
    entries.sort_by_key(fs::DirEntry::file_name);
    for entry in entries.iter().filter(|entry| !entry.file_name().as_encoded_bytes().starts_with(b".")) {
        match entry.file_type()? {
            kind if kind.is_dir() => list(&entry.path(), files)?,
            kind if kind.is_file() => files.push(entry.path()),
            _ => {}
        }
    }
    Ok(())
}

fn read_text(file: &Path) -> Option<String> {
    as_text(fs::read(file).ok()?)
}

fn as_text(bytes: Vec<u8>) -> Option<String> {
    String::from_utf8(bytes).ok().filter(|text| !text.is_empty() && !text.contains('\0'))
}

/// Documentation and sources of the crates that this project is built from: real text that every checkout has once it is
/// built. A file of every crate in turn, so that no crate dominates.
fn read_dependencies() -> Result<(Vec<String>, String), Failure> {
    let mut crates = dependency_folders()?
        .into_iter()
        .map(|folder| {
            let mut files = Vec::new();
            list(&folder, &mut files).map_err(failed_to("read", &folder))?;
            files.retain(|file| file.extension().is_some_and(|extension| extension == "md" || extension == "rs"));
            Ok(files.into_iter())
        })
        .collect::<Result<Vec<_>, Failure>>()?;

    let (mut documents, mut bytes) = (Vec::new(), 0);
    // Licences and the like are the same file in many crates: what is held out must not be trained on elsewhere.
    let mut seen = HashSet::new();
    while bytes < DEFAULT_TEXT_BYTES && crates.iter().any(|files| files.len() > 0) {
        for document in crates.iter_mut().filter_map(Iterator::next).filter_map(|file| read_text(&file)) {
            let fits = document.len() <= DEFAULT_FILE_BYTES && bytes + document.len() <= DEFAULT_TEXT_BYTES;
            if fits && seen.insert(hash(document.bytes())) {
                bytes += document.len();
                documents.push(document);
            }
        }
    }
    let source = format!("documentation and sources of the {} crates this is built from", crates.len());
    Ok((documents, source))
}

/// The folders of the workspace's dependencies on this machine, sorted by crate and version.
fn dependency_folders() -> Result<Vec<PathBuf>, Failure> {
    #[derive(Deserialize)]
    struct Metadata {
        packages: Vec<Package>,
    }
    #[derive(Deserialize)]
    struct Package {
        id: String,
        source: Option<String>,
        manifest_path: PathBuf,
    }

    let version = cargo(&["-vV"])?;
    let host = version.lines().find_map(|line| line.strip_prefix("host: ")).unwrap_or_default();
    let manifest = Path::new(env!("CARGO_MANIFEST_DIR")).join("Cargo.toml");
    let json = cargo(&[
        "metadata",
        "--format-version=1",
        "--offline",
        "--locked",
        "--filter-platform",
        host,
        "--manifest-path",
        &manifest.to_string_lossy(),
    ])?;
    let Metadata { mut packages } = serde_json::from_str(&json).map_err(failed("cannot read cargo's metadata"))?;
    packages.retain(|package| package.source.is_some());
    packages.sort_by(|a, b| a.id.cmp(&b.id));
    Ok(packages.iter().filter_map(|package| package.manifest_path.parent()).map(Path::to_owned).collect())
}

/// What cargo prints for `arguments`.
fn cargo(arguments: &[&str]) -> Result<String, Failure> {
    let no_default = |why: String| {
        Failure::run(format!("cannot find the default text, the sources of the dependencies ({why}): use --text PATH"))
    };
    let program = env::var_os("CARGO").unwrap_or_else(|| "cargo".into());
    let output = Command::new(&program).args(arguments).output();
    let output = output.map_err(|error| no_default(format!("{}: {error}", program.to_string_lossy())))?;
    if output.status.success() {
        Ok(String::from_utf8_lossy(&output.stdout).into_owned())
    } else {
        let stderr = String::from_utf8_lossy(&output.stderr);
        Err(no_default(stderr.lines().next().unwrap_or("cargo failed").to_owned()))
    }
}
