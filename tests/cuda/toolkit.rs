use std::fs;
use std::hash::{DefaultHasher, Hash, Hasher};
use std::path::{Path, PathBuf};
use std::process::Command;
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};

/// Wheels with the headers of CUDA's half types and what these include. They are NVIDIA's, so they are fetched.
const WHEELS: [&str; 3] = ["nvidia-cuda-runtime==13.5.37", "nvidia-cuda-crt==13.5.37", "nvidia-cuda-cccl==13.3.5.0.6"];

const SHIM_HEADER: &str = include_str!("shim.hpp");
const SHIM: &str = include_str!("shim.cpp");

/// The source is compiled quickly rather than well: most kernels run a few times.
const FLAGS: [&str; 6] = ["-std=c++17", "-O1", "-fPIC", "-w", "-U_FORTIFY_SOURCE", "-fno-strict-aliasing"];

/// A C++ compiler that compiles CUDA source for the host.
#[derive(Debug, Clone)]
pub struct Toolkit {
    compiler: PathBuf,
    folder: Arc<Path>,
    include: Arc<Path>,
}

impl Toolkit {
    /// Fetches the headers if they are not there yet, and compiles the shim.
    pub fn find() -> Result<Self, String> {
        let compiler = PathBuf::from(std::env::var_os("CXX").unwrap_or("g++".into()));
        run(Command::new(&compiler).arg("--version"))?;
        let target = Path::new(env!("CARGO_TARGET_TMPDIR"));
        let include = headers(target)?;
        let shim = hash(&(SHIM_HEADER, SHIM, FLAGS, &compiler, &include));
        let folder = target.join(format!("cuda-source-{shim:016x}"));
        fs::create_dir_all(&folder).map_err(|error| format!("cannot make {}: {error}", folder.display()))?;
        let toolkit = Self { compiler, folder: folder.into(), include: include.into() };
        toolkit.make("shim.hpp.gch", |made| {
            let header = toolkit.write("shim.hpp", SHIM_HEADER)?;
            run(toolkit.compile().args(["-x", "c++-header"]).arg(header).arg("-o").arg(made))
        })?;
        toolkit.make("shim.so", |made| {
            let source = toolkit.write("shim.cpp", SHIM)?;
            run(toolkit.compile().arg("-shared").arg(source).arg("-o").arg(made))
        })?;
        Ok(toolkit)
    }

    /// What the kernels are linked with.
    pub fn shim(&self) -> PathBuf {
        self.folder.join("shim.so")
    }

    /// The shared object of a source.
    pub fn build(&self, source: &str) -> Result<PathBuf, String> {
        let name = format!("{:016x}", hash(&source));
        self.make(&format!("{name}.so"), |made| {
            let source = self.write(&format!("{name}.cpp"), source)?;
            let shim = self.shim();
            run(self.compile().args(["-include", "shim.hpp", "-shared"]).arg(source).arg(shim).arg("-o").arg(made))
        })
    }

    fn compile(&self) -> Command {
        let mut command = Command::new(&self.compiler);
        command.args(FLAGS).arg("-I").arg(&*self.folder).arg("-I").arg(&*self.include);
        command
    }

    fn write(&self, name: &str, text: &str) -> Result<PathBuf, String> {
        let path = self.folder.join(name);
        fs::write(&path, text).map_err(|error| format!("cannot write {}: {error}", path.display()))?;
        Ok(path)
    }

    /// A file of the folder, made if it is not there: under another name first, as other tests may do the same.
    fn make(&self, name: &str, make: impl FnOnce(&Path) -> Result<(), String>) -> Result<PathBuf, String> {
        static NEXT: AtomicUsize = AtomicUsize::new(0);
        let path = self.folder.join(name);
        if path.is_file() {
            return Ok(path);
        }
        let unique = format!("{}-{}-{name}", std::process::id(), NEXT.fetch_add(1, Ordering::Relaxed));
        let made = self.folder.join(unique);
        make(&made)?;
        fs::rename(&made, &path).map_err(|error| format!("cannot rename {}: {error}", made.display()))?;
        Ok(path)
    }
}

/// The folder of the headers: those of a toolkit that `CUDA_PATH` names, or fetched ones.
fn headers(target: &Path) -> Result<PathBuf, String> {
    if let Some(toolkit) = std::env::var_os("CUDA_PATH") {
        let include = Path::new(&toolkit).join("include");
        if include.join("cuda_bf16.h").is_file() && include.join("nv/target").is_file() {
            return Ok(include);
        }
    }
    let folder = target.join(format!("cuda-headers-{:016x}", hash(&WHEELS)));
    let include = folder.join("nvidia/cu13/include");
    if !folder.is_dir() {
        let fetched = target.join(format!("cuda-headers-{}", std::process::id()));
        let pip = ["-m", "pip", "install", "--quiet", "--disable-pip-version-check", "--no-deps", "--target"];
        run(Command::new("python3").args(pip).arg(&fetched).args(WHEELS))?;
        // Another process may have been faster.
        if fs::rename(&fetched, &folder).is_err() {
            let _ = fs::remove_dir_all(&fetched);
        }
    }
    if include.join("cuda_bf16.h").is_file() {
        Ok(include)
    } else {
        Err(format!("no headers in {}", include.display()))
    }
}

fn hash(what: &impl Hash) -> u64 {
    let mut hasher = DefaultHasher::new();
    what.hash(&mut hasher);
    hasher.finish()
}

fn run(command: &mut Command) -> Result<(), String> {
    let program = command.get_program().to_string_lossy().into_owned();
    let output = command.output().map_err(|error| format!("{program} does not start: {error}"))?;
    if output.status.success() {
        return Ok(());
    }
    let message = String::from_utf8_lossy(&output.stderr);
    Err(format!("{program} failed: {}", message.lines().take(20).collect::<Vec<_>>().join("\n")))
}
