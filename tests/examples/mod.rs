//! The example programs, run as a user runs them: `cargo test` builds them beside the tests.

mod conformance;
mod cuda_source;
mod generate;
mod inspect;
mod swap_residual;
mod train;

use std::env;
use std::fs;
use std::path::{Path, PathBuf};
use std::process::Command;

use tempfile::TempDir;

/// What a program left behind.
#[derive(Debug)]
struct Finished {
    code: Option<i32>,
    stdout: String,
    stderr: String,
}

impl Finished {
    /// It succeeded, and showed no panic.
    #[track_caller]
    fn succeeded(self) -> Self {
        assert_eq!(self.code, Some(0), "{self:#?}");
        assert!(!self.stderr.contains("panicked"), "{self:#?}");
        self
    }

    /// It was refused with `code` and one message that has all of `parts`.
    #[track_caller]
    fn refused(self, code: i32, parts: &[&str]) {
        assert_eq!(self.code, Some(code), "{self:#?}");
        assert!(self.stderr.starts_with("error: ") && !self.stderr.contains("panicked"), "{self:#?}");
        for part in parts {
            assert!(self.stderr.contains(part), "`{part}` is missing: {self:#?}");
        }
    }
}

/// The path of a built example.
#[track_caller]
fn program(name: &str) -> PathBuf {
    let test = env::current_exe().expect("a test has a path");
    let folder = test.parent().and_then(Path::parent).expect("tests are in target/PROFILE/deps").join("examples");
    let program = folder.join(name).with_extension(env::consts::EXE_EXTENSION);
    assert!(program.is_file(), "{} is not built: cargo build --release --examples", program.display());
    program
}

/// Runs an example in `folder`.
#[track_caller]
fn run(name: &str, folder: &Path, arguments: &[&str]) -> Finished {
    finish(Command::new(program(name)).args(arguments).current_dir(folder))
}

#[track_caller]
fn finish(command: &mut Command) -> Finished {
    let output = command.output().expect("the example starts");
    let text = |bytes: Vec<u8>| String::from_utf8_lossy(&bytes).into_owned();
    Finished { code: output.status.code(), stdout: text(output.stdout), stderr: text(output.stderr) }
}

/// An empty folder with a small text, `text.txt`, in it.
fn folder_with_text() -> TempDir {
    let folder = TempDir::new().expect("a temporary folder");
    let line = |n: usize| format!("{n} times {n} is {}, and the next number is {}.\n", n * n, n + 1);
    fs::write(folder.path().join("text.txt"), (0..300).map(line).collect::<String>()).expect("a writable folder");
    folder
}
