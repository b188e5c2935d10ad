use std::fs;
use std::path::Path;
use std::sync::OnceLock;

use tempfile::TempDir;

use super::{folder_with_text, run};

/// A folder with a run of one step in `out`.
fn trained() -> &'static Path {
    static FOLDER: OnceLock<TempDir> = OnceLock::new();
    let train = || {
        let folder = folder_with_text();
        let arguments = ["--device", "flex", "--text", "text.txt", "--output", "out", "--scheme", "dar_block"];
        let small = ["--steps", "1", "--batch", "1", "--sequence", "16"];
        run("train", folder.path(), &[&arguments[..], &small].concat()).succeeded();
        folder
    };
    FOLDER.get_or_init(train).path()
}

fn generate(arguments: &[&str]) -> super::Finished {
    let base = ["--device", "flex", "--checkpoint", "out/dar_block"];
    run("generate", trained(), &[&base[..], arguments].concat())
}

#[test]
fn a_prompt_is_continued_as_its_seed_says() {
    let text = |seed: &str| {
        let arguments = ["--prompt", "héllo ", "--tokens", "40", "--temperature", "1", "--top-k", "50", "--seed", seed];
        generate(&arguments).succeeded().stdout
    };
    let first = text("1");
    assert!(first.starts_with("héllo ") && first.len() > "héllo ".len() + 10, "{first}");
    assert_eq!(first, text("1"));
    assert_ne!(first, text("2"));
}

#[test]
fn no_temperature_means_no_chance() {
    let text = |seed: &str| {
        let arguments = ["--prompt", "7 times", "--tokens", "20", "--temperature", "0", "--seed", seed];
        generate(&arguments).succeeded().stdout
    };
    assert_eq!(text("1"), text("2"));
}

#[test]
fn what_is_missing_is_said() {
    let elsewhere = |folder| run("generate", trained(), &["--checkpoint", folder, "--prompt", "x"]);
    elsewhere("nowhere").refused(1, &["nowhere does not exist"]);
    elsewhere("out").refused(1, &["out holds no checkpoint", "dar_block"]);
    generate(&["--prompt", ""]).refused(2, &["--prompt"]);
    generate(&["--prompt", "x", "--temperature", "-1"]).refused(2, &["--temperature"]);
    generate(&["--prompt", "x", "--top-k", "0"]).refused(2, &["--top-k"]);
    run("generate", trained(), &["--prompt", "x"]).refused(2, &["--checkpoint"]);
}

#[test]
fn a_tokenizer_goes_with_the_checkpoint() {
    let folder = folder_with_text();
    let words = ["[UNK]", "times", "is", "and", "the", "next", "number", ",", "."];
    let ids: Vec<String> = words.iter().enumerate().map(|(id, word)| format!("{word:?}: {id}")).collect();
    let tokenizer = format!(
        r#"{{"version": "1.0", "truncation": null, "padding": null, "added_tokens": [], "normalizer": null,
            "pre_tokenizer": {{"type": "Whitespace"}}, "post_processor": null, "decoder": null,
            "model": {{"type": "WordLevel", "vocab": {{{}}}, "unk_token": "[UNK]"}}}}"#,
        ids.join(", ")
    );
    fs::write(folder.path().join("tokenizer.json"), tokenizer).unwrap();
    let arguments =
        ["--device", "flex", "--text", "text.txt", "--output", "out", "--scheme", "standard", "--steps", "1"];
    let small = ["--batch", "1", "--sequence", "16", "--tokenizer", "tokenizer.json"];
    run("train", folder.path(), &[&arguments[..], &small].concat()).succeeded();
    fs::remove_file(folder.path().join("tokenizer.json")).unwrap();

    let arguments =
        ["--device", "flex", "--checkpoint", "out/standard", "--prompt", "the next number", "--tokens", "5"];
    let stdout = run("generate", folder.path(), &arguments).succeeded().stdout;
    assert!(stdout.starts_with("the next number "), "{stdout}");
    assert!(stdout.split_whitespace().all(|word| words.contains(&word)), "{stdout}");
}
