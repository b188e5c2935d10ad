use std::collections::{BTreeMap, HashSet};
use std::fs;
use std::hash::{DefaultHasher, Hash, Hasher};
use std::ops::Range;
use std::path::{Path, PathBuf};
use std::sync::{Arc, Mutex};

use cubecl::CubeKernel;
use cubecl::ir::DeviceProperties;
use cubecl::prelude::KernelId;

use naga::valid::{Capabilities, ValidationFlags, Validator};

use crate::offline::{Arguments, Language, Machine, Memory, Source, hopper, webgpu};

/// A machine that compiles kernels and writes them down in place of running them.
#[derive(Debug)]
pub struct Writer {
    language: Language,
    folder: PathBuf,
    seen: HashSet<KernelId>,
    written: Arc<Mutex<Written>>,
}

/// What a writer has done.
#[derive(Debug, Default)]
pub struct Written {
    /// Sources by kernel.
    pub kernels: BTreeMap<&'static str, usize>,
    pub failures: Vec<String>,
}

impl Writer {
    /// Writes into `folder`, which is made; what it has done is in the second part.
    pub fn new(language: Language, folder: &Path) -> Result<(Self, Arc<Mutex<Written>>), String> {
        fs::create_dir_all(folder).map_err(|error| format!("cannot make {}: {error}", folder.display()))?;
        let written = Arc::new(Mutex::new(Written::default()));
        Ok((Self { language, folder: folder.into(), seen: HashSet::new(), written: written.clone() }, written))
    }

    fn write(&self, kernel: &dyn CubeKernel) -> Result<(), String> {
        let source = Source::compile(self.language, kernel, &self.device())?;
        if self.language == Language::Wgsl {
            validate(&source.text)?;
        }
        let choice = choice(kernel);
        let name = name(function(kernel.id().type_name()), &choice);
        let file = self.folder.join(format!("{name}.{}", self.language.extension()));
        fs::write(&file, format!("// {choice}\n{}", source.text))
            .map_err(|error| format!("cannot write {}: {error}", file.display()))
    }
}

impl Machine for Writer {
    type Memory = Nothing;

    fn device(&self) -> DeviceProperties {
        match self.language {
            Language::Wgsl => webgpu(),
            _ => hopper(),
        }
    }

    fn launch(&mut self, kernel: &dyn CubeKernel, _: Arguments<'_, Nothing>) -> Result<(), String> {
        let id = kernel.id();
        // Benchmarks fill their operands with kernels of their own.
        if !id.type_name().starts_with("dar_kernels") || !self.seen.insert(id.clone()) {
            return Ok(());
        }
        let result = self.write(kernel);
        let mut written = self.written.lock().expect("no launch panicked");
        match &result {
            Ok(()) => *written.kernels.entry(function(id.type_name())).or_default() += 1,
            Err(reason) => written.failures.push(format!("{}: {reason}", choice(kernel))),
        }
        Ok(())
    }
}

/// A buffer that is not there: it reads as zeros.
pub struct Nothing;

impl Memory for Nothing {
    fn new(_: u64) -> Self {
        Self
    }

    fn read(&self, range: Range<u64>) -> Vec<u8> {
        vec![0; (range.end - range.start) as usize]
    }

    fn write(&mut self, _: u64, _: &[u8]) {}
}

/// The type, the units and everything comptime of a kernel.
fn choice(kernel: &dyn CubeKernel) -> String {
    format!("{:?}", kernel.id())
}

/// The name of a kernel's function: what its type is named after is the module before it.
fn function(type_name: &'static str) -> &'static str {
    let path = type_name.split('<').next().unwrap_or(type_name);
    path.rsplit("::").nth(1).unwrap_or(path)
}

/// What tells the files of one kernel apart at a glance, and a hash of the choice.
fn name(function: &str, choice: &str) -> String {
    let mut name = function.to_owned();
    if let Some(dtype) = field(choice, "dtype") {
        name += &format!("-{}", dtype.trim_start_matches("Float(").trim_end_matches(')').to_lowercase());
    }
    for (part, unit) in
        [("n", "lanes"), ("x", "units"), ("columns", "columns"), ("group", "queries"), ("chunk", "entries")]
    {
        if let Some(number) = field(choice, part) {
            name += &format!("-{number}{unit}");
        }
    }
    if let Some(reduction) = field(choice, "reduction") {
        name += if reduction.starts_with("Planes") { "-planes" } else { "-shared" };
    }
    let mut hasher = DefaultHasher::new();
    choice.hash(&mut hasher);
    format!("{name}-{:08x}", hasher.finish() as u32)
}

/// The value of a field in what `Debug` prints.
fn field<'a>(choice: &'a str, name: &str) -> Option<&'a str> {
    let (_, rest) = choice.split_once(&format!("{name}: "))?;
    rest.split([',', ' ', '}']).next()
}

/// Whether WebGPU takes the source, with half precision.
fn validate(source: &str) -> Result<(), String> {
    let module = naga::front::wgsl::parse_str(source).map_err(|error| error.emit_to_string(source))?;
    Validator::new(ValidationFlags::all(), Capabilities::SHADER_FLOAT16)
        .validate(&module)
        .map(|_| ())
        .map_err(|error| error.emit_to_string(source))
}
