use std::fs;
use std::path::Path;

use super::{Finished, folder_with_text, run};

const CASE: &str = concat!(env!("CARGO_MANIFEST_DIR"), "/tests/golden/dar_stack_l4k1n3d10_cross_key.safetensors");

#[track_caller]
fn conformance(folder: &Path, arguments: &[&str]) -> Finished {
    run("conformance", folder, &[&["--device", "flex"], arguments].concat())
}

/// It ran to the end, and some case failed.
#[track_caller]
fn failed(finished: Finished, last: &str, parts: &[&str]) {
    assert_eq!(finished.code, Some(1), "{finished:#?}");
    assert_eq!(finished.stdout.lines().last(), Some(last), "{finished:#?}");
    for part in parts {
        assert!(finished.stdout.contains(part), "`{part}` is missing: {finished:#?}");
    }
}

#[test]
fn a_case_passes_and_what_is_no_case_fails_beside_it() {
    let folder = folder_with_text();
    let folder = folder.path();
    let passed = conformance(folder, &["--dtype", "f64", CASE]).succeeded();
    assert_eq!(passed.stdout.lines().last(), Some("1 passed, 0 failed"), "{passed:#?}");

    failed(conformance(folder, &[CASE, "absent.safetensors"]), "1 passed, 1 failed", &["FAIL  absent.safetensors"]);
    failed(conformance(folder, &["text.txt"]), "0 passed, 1 failed", &["FAIL  text.txt"]);
    // The same bytes under the name of another operation of the same length, and of another tensor.
    let bytes = fs::read(CASE).unwrap();
    let replaced = |from: &str, to: &str| {
        assert_eq!(from.len(), to.len());
        let at = bytes.windows(from.len()).position(|window| window == from.as_bytes()).unwrap();
        [&bytes[..at], to.as_bytes(), &bytes[at + from.len()..]].concat()
    };
    fs::write(folder.join("operation.safetensors"), replaced("\"dar_stack\"", "\"dra_stack\"")).unwrap();
    failed(conformance(folder, &["operation.safetensors"]), "0 passed, 1 failed", &["`dra_stack` is unknown"]);
    fs::write(folder.join("tensor.safetensors"), replaced("\"q_out\"", "\"q_tuo\"")).unwrap();
    failed(conformance(folder, &["tensor.safetensors"]), "0 passed, 1 failed", &["q_out"]);
}

#[test]
fn arguments_that_cannot_be_meant_are_refused() {
    let folder = folder_with_text();
    conformance(folder.path(), &["--dtype", "f8", CASE]).refused(2, &["`f8`", "f32, f16, bf16, f64"]);
    conformance(folder.path(), &[]).refused(2, &["FILE"]);
    run("conformance", folder.path(), &["--device", "tpu", CASE]).refused(2, &["`tpu`", "flex"]);
}
