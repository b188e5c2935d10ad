//! The example `parameters`, run as a user runs it: `cargo test` builds it beside the tests.

use std::env;
use std::fs;
use std::path::Path;
use std::process::{Command, Output};

const HEADER: &str = "size,method,layers,heads,kv_heads,d_model,d_ff,K,printed_excl_M,printed_incl_M,exact_excl";

fn parameters(arguments: &[&str]) -> Output {
    let test = env::current_exe().expect("a test has a path");
    let folder = test.parent().and_then(Path::parent).expect("tests are in target/PROFILE/deps").join("examples");
    let program = folder.join("parameters").with_extension(env::consts::EXE_EXTENSION);
    Command::new(&program).args(arguments).output().expect("the example is built: cargo build --release --examples")
}

/// Exit code, stdout and stderr of `--check` on a table with these rows.
fn check(table: &str) -> (Option<i32>, String, String) {
    let folder = tempfile::TempDir::new().unwrap();
    let path = folder.path().join("table.csv");
    fs::write(&path, table).unwrap();
    let Output { status, stdout, stderr } = parameters(&["--check", path.to_str().unwrap()]);
    let text = |bytes| String::from_utf8(bytes).unwrap();
    (status.code(), text(stdout), text(stderr))
}

#[test]
fn the_papers_tables_agree() {
    let (code, stdout, stderr) = check(include_str!("../data/parameter_counts.csv"));
    assert_eq!(code, Some(0), "{stdout}{stderr}");
    assert!(stdout.ends_with("24 passed, 0 failed\n"), "{stdout}");
}

#[test]
fn other_sizes_and_methods_are_counted() {
    // d = 64, two layers, d_ff 96: 2 (2 * 64² + 2 * 64 * 32 + 3 * 64 * 96) + 5 * 64 = 61 760.
    let rows = [
        "tiny,Residual,2,4,2,64,96,-,-,-,61760",
        "tiny,standard,2,4,2,64,96,,0.062,8.450,61_760",
        "tiny,\"AttnRes + SepV\",2,4,2,64,96,1,,,82496", // + 4 queries, 5 maps of 64²
        "tiny,AttnRes-SepV-2,2,4,2,64,96,1,,,70208",
        "0.5B,AttnRes-SepV,20,20,10,1280,4992,1,491.624,659.396,491623680",
        "0.5B,mHC-2,20,20,10,1280,5120,-,,,492392120",
        "tiny,mHC-2,2,4,2,64,96,-,,,65900", // + 4 (8 * (2 * 64 + 1) + 3)
        "tiny,HC,2,4,2,64,96,-,,,63404",    // + 4 (6 * 64 + 8 + 16 + 3)
        "tiny,HC-2,2,4,2,64,96,-,,,62828",  // + 4 (4 * 64 + 4 + 4 + 3)
        "tiny,CASCADE,2,4,2,64,96,-,,,61760",
        "tiny,dar_self_kv,2,4,2,64,96,1,,,64864", // + 4 (12 * 64 + 8)
        "tiny,DAR-Block,2,4,2,64,96,2,,,63440",   // + 2 (12 * 64 + 8) + 128
        "tiny,DAR-Block,3,4,2,64,96,2,,,95840",   // a rest of one layer
        "moe,Residual,2,4,2,64,16x8top2,-,,,75072",
    ];
    let (code, stdout, stderr) = check(&format!("# a comment\n\n{HEADER}\r\n{}\n", rows.join("\r\n")));
    assert_eq!(code, Some(0), "{stdout}{stderr}");
    assert!(stdout.ends_with("14 passed, 0 failed\n"), "{stdout}");
}

#[test]
fn a_difference_fails() {
    let rows = [
        "tiny,Residual,2,4,2,64,96,-,0.062,8.450,61760",
        "tiny,Residual,2,4,2,64,96,-,0.062,8.450,61761",
        "tiny,Residual,2,4,2,64,96,-,0.061,8.451,61760",
    ];
    let (code, stdout, _) = check(&format!("{HEADER}\n{}\n", rows.join("\n")));
    assert_eq!(code, Some(1), "{stdout}");
    assert!(stdout.contains("exact_excl differs") && stdout.contains(" -1 "), "{stdout}");
    assert!(stdout.contains("printed_excl_M differs, printed_incl_M differs"), "{stdout}");
    assert!(stdout.ends_with("1 passed, 2 failed\n"), "{stdout}");
}

#[test]
fn an_unreadable_table_is_refused_in_one_line() {
    let row = |row: &str| format!("# a comment\n{HEADER}\n{row}\n");
    for (table, parts) in [
        (String::new(), vec!["no header line"]),
        (format!("{HEADER}\n"), vec!["no rows"]),
        (HEADER.replace("kv_heads,", ""), vec!["line 1", "`kv_heads`"]),
        (row("a,Residual,2,4"), vec!["line 3", "4 fields", "11"]),
        (row("a,Residual,two,4,2,64,96,-,-,-,1"), vec!["line 3", "`layers`", "\"two\""]),
        (row("a,Residual,0,4,2,64,96,-,-,-,1"), vec!["line 3", "`layers`", "\"0\""]),
        (row("a,Residual,2,4,2,64,96,-,-,-,-1"), vec!["line 3", "`exact_excl`"]),
        (row("a,Residual,2,4,2,64,96,-,1.2.3,-,1"), vec!["line 3", "`printed_excl_M`"]),
        (row("a,Resdual,2,4,2,64,96,-,-,-,1"), vec!["line 3", "`method`", "Resdual", "DAR-Block"]),
        (row("a,DAR-Block-3,2,4,2,64,96,2,-,-,1"), vec!["line 3", "`method`"]),
        (row("a,DAR-Block,2,4,2,64,96,-,-,-,1"), vec!["line 3", "`K`", "DAR-Block"]),
        (row("a,Residual,2,4,2,64,96x4,-,-,-,1"), vec!["line 3", "`d_ff`", "96x4"]),
        (row("a,Residual,2,4,2,64,96x4top5,-,-,-,1"), vec!["line 3", "experts_per_token"]),
        (row("a,Residual,2,5,2,64,96,-,-,-,1"), vec!["line 3", "`heads` is 5"]),
        (row("a,mHC-1,2,4,2,64,96,-,-,-,1"), vec!["line 3", "`streams` is 1"]),
        (row("a,Residual,99999999999,4,2,64,96,-,-,-,1"), vec!["line 3", "`layers`", "up to"]),
    ] {
        let (code, stdout, stderr) = check(&table);
        assert_eq!((code, stdout.as_str()), (Some(2), ""), "{table}{stderr}");
        assert!(stderr.starts_with("error: ") && stderr.lines().count() == 1, "{stderr}");
        parts.iter().for_each(|part| assert!(stderr.contains(part), "`{part}` is missing: {stderr}"));
    }
    let output = parameters(&["--check", "no/such/table.csv"]);
    assert_eq!(output.status.code(), Some(2));
    assert!(String::from_utf8(output.stderr).unwrap().starts_with("error: cannot read no/such/table.csv: "));
}

#[test]
fn all_sizes_and_methods_are_listed() {
    let output = parameters(&[]);
    let stdout = String::from_utf8(output.stdout).unwrap();
    assert_eq!((output.status.code(), stdout.lines().count()), (Some(0), 1 + 5 * 13));
    let row = stdout.lines().find(|line| line.starts_with("7B-MoE  DAR-Block")).unwrap();
    assert!(row.contains("6,949,410,944") && row.contains("7,217,846,400"), "{row}");
}
