use std::fs;
use std::path::Path;

use tempfile::TempDir;

use super::{Finished, folder_with_text, run};

/// Runs of two steps of `schemes` in `out`.
#[track_caller]
fn trained(schemes: &str, size: &str) -> TempDir {
    let folder = folder_with_text();
    let arguments = ["--device", "flex", "--text", "text.txt", "--output", "out", "--batch", "2", "--sequence", "32"];
    let short = ["--scheme", schemes, "--size", size, "--steps", "2"];
    run("train", folder.path(), &[&arguments[..], &short].concat()).succeeded();
    folder
}

fn inspect(folder: &Path, scheme: &str, arguments: &[&str]) -> Finished {
    let checkpoint = format!("out/{scheme}");
    let small = ["--device", "flex", "--sequences", "2", "--last", "16", "--windows", "2", "--contexts", "4"];
    let named = ["--checkpoint", &checkpoint, "--report", "report"];
    run("inspect", folder, &[&small[..], &named, arguments].concat())
}

/// The lines of a table, without its header.
#[track_caller]
fn table(folder: &Path, name: &str) -> Vec<Vec<String>> {
    let csv = fs::read_to_string(folder.join("report").join(name).with_extension("csv")).unwrap();
    csv.lines().skip(1).map(|line| line.split(',').map(str::to_owned).collect()).collect()
}

/// The page, after a look at every picture that it shows and every table that it names.
#[track_caller]
fn page(folder: &Path) -> String {
    let page = fs::read_to_string(folder.join("report/report.md")).unwrap();
    for link in page.split("](").skip(1).map(|rest| rest.split(')').next().unwrap()) {
        let file = fs::read_to_string(folder.join("report").join(link)).unwrap();
        assert!(!file.contains("NaN"), "{link} has a NaN");
        if link.ends_with(".svg") {
            assert!(file.starts_with("<svg") && file.contains("<text"), "{link} has no labels");
        } else {
            let columns = file.lines().next().unwrap().split(',').count();
            assert!(file.lines().all(|line| line.split(',').count() == columns), "{link}");
        }
    }
    page
}

#[test]
fn a_dar_model_has_every_measurement() {
    let folder = trained("dar_block", "tiny");
    fs::write(folder.path().join("pairs.txt"), "# small and capital\na A\nb B\n").unwrap();
    inspect(folder.path(), "dar_block", &["--pairs", "pairs.txt"]).succeeded();
    let page = page(folder.path());
    for picture in ["retrieval_attention", "retrieval_feed_forward", "cka", "cosine", "rescue", "gate_rescue", "routes"]
    {
        assert!(page.contains(&format!("({picture}.svg)")), "{picture} is missing:\n{page}");
    }
    assert!(page.contains("Router balance: the feed-forward branches are dense"), "{page}");
    assert!(!page.contains("Concept directions"), "{page}");

    // Weights of every branch and of the output read sum to 1, stream by stream.
    let mut sums = std::collections::BTreeMap::new();
    for row in table(folder.path(), "retrieval") {
        *sums.entry(row[..3].to_vec()).or_insert(0.0) += row[4].parse::<f64>().unwrap();
    }
    assert_eq!(sums.len(), 2 * 6 * 2 + 2);
    assert!(sums.values().all(|sum| (sum - 1.0).abs() < 1e-4), "{sums:?}");
    assert_eq!(table(folder.path(), "rescue").len(), 6 * 2);
    assert_eq!(table(folder.path(), "cka").len(), 6 * 6);
    let steering = table(folder.path(), "steering");
    assert!(steering.len() == 6 && steering.iter().all(|row| row[1].parse::<usize>().unwrap() <= 4), "{steering:?}");
    let layers = table(folder.path(), "layers");
    assert_eq!((layers.len(), layers[0].len()), (6, 7));
    // Every task of the file, six layers, six step sizes.
    assert!(page.contains("(sweep.svg)"));
    let tasks: Vec<String> = table(folder.path(), "sweep_tasks").into_iter().map(|row| row[0].clone()).collect();
    assert_eq!(tasks, ["coreference", "induction", "recency", "capitalization"]);
    assert_eq!(table(folder.path(), "sweep_layers").len(), 4 * 6);
    assert_eq!(table(folder.path(), "sweep").len(), 4 * 6 * 6);
    let fixed = table(folder.path(), "interventions").into_iter().find(|row| row[0] == "mean mixers in all layers");
    assert!(fixed.is_some());
}

#[test]
fn every_other_scheme_leaves_out_what_it_has_not() {
    let schemes = "standard,attnres_block,attnres_sepv,dar_fixed,mhc,hc,cascade";
    let folder = trained(schemes, "tiny");
    for scheme in schemes.split(',') {
        inspect(folder.path(), scheme, &["--prompts", "1"]).succeeded();
        let page = page(folder.path());
        let has = |what: &str| !page.contains(&format!("* {what}: "));
        assert_eq!(has("Retrieval maps"), scheme.starts_with("attnres") || scheme.starts_with("dar"), "{scheme}");
        let streams = !["standard", "attnres_block"].contains(&scheme);
        assert_eq!(has("CKA and cosines between streams"), streams, "{scheme}");
        assert_eq!(has("Rescue gains"), streams, "{scheme}");
        assert_eq!(has("Residual mixers"), ["dar_fixed", "mhc", "hc"].contains(&scheme), "{scheme}");
        assert!(!has("Concept directions"), "{scheme}");
        fs::remove_dir_all(folder.path().join("report")).unwrap();
    }
}

#[test]
fn tasks_and_scales_of_ones_own_are_swept() {
    let folder = trained("standard", "tiny");
    let file = folder.path().join("mine.txt");
    fs::write(&file, "# mine\n[letters]\nabcabc{a|b}\nxyxy {xy|yx}\n[digits]\n1 2 1 {2|1}\n").unwrap();
    inspect(folder.path(), "standard", &["--tasks", "mine.txt", "--scales=-0.01,0.01"]).succeeded();
    page(folder.path());
    let picture = fs::read_to_string(folder.path().join("report/sweep.svg")).unwrap();
    for label in ["letters", "digits", "-0.01", "scale", "layer", "nats"] {
        assert!(picture.contains(label), "{label} is missing");
    }
    // At the last layer only the final norm follows, so the odds rise along the direction, and almost along a line.
    let last: Vec<_> = table(folder.path(), "sweep_layers").into_iter().filter(|row| row[1] == "5").collect();
    assert_eq!(last.len(), 2);
    for row in last {
        assert_eq!(row[4..], ["1.000000", "1.000000"], "{row:?}");
        assert!(row[2].parse::<f64>().unwrap() > 0.0 && row[3].parse::<f64>().unwrap() > 0.999, "{row:?}");
    }
    inspect(folder.path(), "standard", &["--prompts", "0"]).succeeded();
    assert!(page(folder.path()).contains("* Steering sweeps: "));

    let refused = |text: &str, parts: &[&str]| {
        fs::write(&file, text).unwrap();
        inspect(folder.path(), "standard", &["--tasks", "mine.txt"]).refused(2, parts);
    };
    refused("ab{c|d}\n", &["`ab{c|d}`", "before the first"]);
    refused("[a]\nabc\n", &["`abc`", "{target|alternative}"]);
    refused("[a]\nab{c|c}\n", &["leaves no token open"]);
    refused("[a]\n{c|d}\n", &["leaves no token open"]);
    refused("[a]\n[b]\nab{c|d}\n", &["[a] holds no prompts"]);
    refused("[a]\nab{c|d}\n[a]\n", &["`[a]`", "there already"]);
    refused("# nothing\n", &["holds no tasks"]);
    inspect(folder.path(), "standard", &["--scales", "0"]).refused(2, &["--scales", "other than 0"]);
}

#[test]
fn prompts_that_a_tokenizer_does_not_tell_apart_are_left_out() {
    let folder = folder_with_text();
    let words = ["[UNK]", "times", "is", "and", "the", "next", "number", ",", ".", "red", "blue", "green", "yellow"];
    let vocab: serde_json::Map<_, _> = words.iter().enumerate().map(|(id, &word)| (word.into(), id.into())).collect();
    let tokenizer = serde_json::json!({
        "version": "1.0", "truncation": null, "padding": null, "added_tokens": [], "normalizer": null,
        "pre_tokenizer": { "type": "Whitespace" }, "post_processor": null, "decoder": null,
        "model": { "type": "WordLevel", "vocab": vocab, "unk_token": "[UNK]" },
    });
    fs::write(folder.path().join("tokenizer.json"), tokenizer.to_string()).unwrap();
    let arguments = ["--device", "flex", "--text", "text.txt", "--tokenizer", "tokenizer.json", "--output", "out"];
    let short = ["--scheme", "standard", "--batch", "2", "--sequence", "32", "--steps", "2"];
    run("train", folder.path(), &[&arguments[..], &short].concat()).succeeded();
    inspect(folder.path(), "standard", &[]).succeeded();
    let page = page(folder.path());
    assert!(page.contains("* Steering sweep of coreference: "), "{page}");
    // One prompt of induction and one of recency know both colours; capitalization has `The`, which is unknown, twice.
    let swept: Vec<_> = table(folder.path(), "sweep_tasks").into_iter().map(|row| row[..2].to_vec()).collect();
    assert_eq!(swept, [["induction", "1"], ["recency", "1"], ["capitalization", "2"]]);
}

#[test]
fn experts_have_a_balance() {
    let folder = trained("mhc", "tiny_moe");
    inspect(folder.path(), "mhc", &[]).succeeded();
    assert!(page(folder.path()).contains("(balance.svg)"));
    let balance = table(folder.path(), "balance");
    assert_eq!(balance.len(), 6);
    assert!(balance.iter().all(|row| row[1].parse::<f64>().unwrap() > 0.5), "{balance:?}");
}

#[test]
fn what_cannot_be_meant_is_refused() {
    let folder = trained("standard", "tiny");
    let refused =
        |arguments: &[&str], code, parts: &[&str]| inspect(folder.path(), "standard", arguments).refused(code, parts);
    refused(&["--pairs", "nothing.txt"], 1, &["nothing.txt"]);
    fs::write(folder.path().join("words.txt"), "king queen\n").unwrap();
    refused(&["--pairs", "words.txt"], 2, &["`king queen`", "one token"]);
    refused(&["--text", "words.txt"], 2, &["more text"]);
    run("inspect", folder.path(), &["--checkpoint", "nowhere"]).refused(1, &["nowhere does not exist"]);
}
