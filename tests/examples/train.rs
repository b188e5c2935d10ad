use std::fs;
use std::path::Path;
use std::process::Command;

use burn::config::Config;
use burn::module::{Module, ModuleVisitor, Param};
use burn::tensor::{Tensor, TensorData};
use dar_burn::ResidualConfig;
use dar_burn::model::DecoderConfig;
use dar_burn::nn::DarConfig;
use tempfile::TempDir;

use super::{Finished, finish, folder_with_text, program, run};
use crate::support::devices::flex;

const SCHEMES: &str = "standard,attnres_block,attnres_full,attnres_sepv,dar_block,dar_full,dar_self,dar_cross_value,\
                       dar_fixed,mhc,mhc_2,hc,cascade";

/// A run that takes a moment.
const SMALL: [&str; 10] =
    ["--device", "flex", "--text", "text.txt", "--output", "out", "--batch", "2", "--sequence", "32"];

#[track_caller]
fn train(folder: &TempDir, arguments: &[&str]) -> Finished {
    run("train", folder.path(), &[&SMALL, arguments].concat())
}

/// The lines of a scheme's metrics but for the header: step, train_loss, valid_loss, tokens_per_s, auxiliary_loss.
#[track_caller]
fn metrics(folder: &TempDir, scheme: &str) -> Vec<[String; 5]> {
    let csv = fs::read_to_string(folder.path().join("out").join(scheme).join("metrics.csv")).unwrap();
    let mut lines = csv.lines();
    assert_eq!(lines.next(), Some("step,train_loss,valid_loss,tokens_per_s,auxiliary_loss"));
    let cells = |line: &str| line.split(',').map(str::to_owned).collect::<Vec<_>>().try_into();
    lines.map(|line| cells(line).unwrap()).collect()
}

/// All parameters of a scheme's checkpoint.
#[track_caller]
fn parameters(folder: &TempDir, scheme: &str) -> Vec<TensorData> {
    struct Read(Vec<TensorData>);
    impl ModuleVisitor for Read {
        fn visit_float<const D: usize>(&mut self, param: &Param<Tensor<D>>) {
            self.0.push(param.val().into_data());
        }
    }
    let checkpoint = folder.path().join("out").join(scheme).join("checkpoint");
    let config = DecoderConfig::load(checkpoint.join("config.json")).unwrap();
    let model = config.init(&flex()).try_load_file(checkpoint.join("model.bpk")).unwrap();
    let mut read = Read(Vec::new());
    model.visit(&mut read);
    read.0
}

#[test]
fn help_names_every_scheme_and_has_examples() {
    let help = run("train", Path::new("."), &["--help"]).succeeded().stdout;
    let unwrapped = help.split_whitespace().collect::<Vec<_>>().join(" ");
    for name in SCHEMES.split(',') {
        assert!(unwrapped.contains(name), "{name} is missing:\n{help}");
    }
    assert!(help.contains("Examples:"), "{help}");
}

#[test]
fn arguments_that_cannot_be_meant_are_refused() {
    let folder = folder_with_text();
    train(&folder, &["--scheme", "standard,dra"]).refused(2, &["`dra`", "dar_block", "cascade"]);
    train(&folder, &["--scheme", "mhc,mhc"]).refused(2, &["mhc twice"]);
    train(&folder, &["--size", "huge"]).refused(2, &["`huge`", "tiny_moe", "0.1B"]);
    train(&folder, &["--steps", "0"]).refused(2, &["--steps", "from 1"]);
    train(&folder, &["--lr", "-1"]).refused(2, &["--lr"]);
    train(&folder, &["--resume"]).refused(2, &["no run to resume"]);
    train(&folder, &["--resume", "--force"]).refused(2, &["--force"]);
    let other = |device| run("train", folder.path(), &["--device", device]);
    other("tpu").refused(2, &["`tpu`", "flex", "vulkan"]);
    let text = |path| run("train", folder.path(), &["--device", "flex", "--text", path]);
    text("nothing.txt").refused(1, &["nothing.txt"]);
    fs::write(folder.path().join("short.txt"), "too short").unwrap();
    text("short.txt").refused(2, &["more text"]);
    fs::write(folder.path().join("binary"), [0xff, 0xfe, 0]).unwrap();
    text("binary").refused(2, &["not UTF-8"]);
    let nothing_made = fs::read_dir(folder.path()).unwrap().count();
    assert_eq!(nothing_made, 3, "a refused run leaves no output");
}

#[test]
fn without_cargo_the_default_text_is_an_error_that_names_the_way_out() {
    let folder = folder_with_text();
    let mut command = Command::new(program("train"));
    command.args(["--device", "flex"]).current_dir(folder.path()).env("CARGO", "no-such-cargo");
    finish(&mut command).refused(1, &["no-such-cargo", "--text"]);
}

#[test]
fn the_default_text_is_there_in_every_checkout() {
    let folder = folder_with_text();
    let arguments = ["--device", "flex", "--scheme", "standard", "--steps", "1", "--batch", "1", "--sequence", "16"];
    let stdout = run("train", folder.path(), &arguments).succeeded().stdout;
    assert!(stdout.contains("crates"), "{stdout}");
    assert!(folder.path().join("runs/tiny/standard/metrics.csv").is_file());
}

#[test]
fn every_scheme_trains() {
    let folder = folder_with_text();
    let arguments = ["--scheme", SCHEMES, "--steps", "3", "--eval-every", "2"];
    let stdout = train(&folder, &arguments).succeeded().stdout;
    let out = folder.path().join("out");
    for name in SCHEMES.split(',') {
        assert!(stdout.lines().any(|line| line.starts_with(&format!("{name} "))), "{name} is not in\n{stdout}");
        let rows = metrics(&folder, name);
        let evaluated: Vec<bool> = rows.iter().map(|[_, _, valid_loss, ..]| !valid_loss.is_empty()).collect();
        assert_eq!(evaluated, [false, true, true], "{name}");
        for file in ["config.json", "model.bpk", "optimiser.bpk", "state.json"] {
            assert!(out.join(name).join("checkpoint").join(file).is_file(), "{name}/checkpoint/{file}");
        }
        assert!(fs::read_to_string(out.join(name).join("loss.svg")).unwrap().starts_with("<svg"));
        assert!(rows.iter().all(|row| row[4].is_empty()) && !out.join(name).join("balance.svg").exists(), "{name}");
    }
    assert!(fs::read_to_string(out.join("loss.svg")).unwrap().contains("dar_cross_value"));

    // These start as the plain residual, so one backbone and one order of the text show in the first loss.
    let first = |name: &str| metrics(&folder, name)[0][1].parse::<f64>().unwrap();
    for name in ["attnres_block", "attnres_full", "dar_block", "dar_full", "dar_self"] {
        assert!((first(name) - first("standard")).abs() < 1e-3, "{name}: {} and {}", first(name), first("standard"));
    }
}

#[test]
fn a_mixture_of_experts_trains() {
    let folder = folder_with_text();
    train(&folder, &["--size", "tiny_moe", "--scheme", "standard,dar_block", "--steps", "4"]).succeeded();
    let out = folder.path().join("out");
    for scheme in ["standard", "dar_block"] {
        let rows = metrics(&folder, scheme);
        assert_eq!(rows.len(), 4);
        // From 1, evenly used, to 2: two of the four experts for every token.
        let balance = rows.iter().map(|row| row[4].parse::<f64>().unwrap());
        assert!(balance.clone().all(|balance| (0.9..2.0).contains(&balance)), "{rows:?}");
        let picture = fs::read_to_string(out.join(scheme).join("balance.svg")).unwrap();
        assert!(picture.contains("router auxiliary loss") && picture.contains("last 1 steps"), "{picture}");
    }
    let picture = fs::read_to_string(out.join("balance.svg")).unwrap();
    assert!(["standard (", "dar_block ("].iter().all(|name| picture.contains(name)), "{picture}");
}

#[test]
fn a_run_of_before_the_auxiliary_loss_goes_on() {
    let folder = folder_with_text();
    let arguments = ["--size", "tiny_moe", "--scheme", "standard", "--steps", "3"];
    train(&folder, &[&arguments[..], &["--stop-after", "1"]].concat()).succeeded();
    let path = folder.path().join("out/standard/metrics.csv");
    let cut = |line: &str| line.rsplit_once(',').unwrap().0.to_owned() + "\n";
    let old: String = fs::read_to_string(&path).unwrap().lines().map(cut).collect();
    fs::write(&path, old).unwrap();
    train(&folder, &["--resume"]).succeeded();
    let known: Vec<bool> = metrics(&folder, "standard").iter().map(|row| !row[4].is_empty()).collect();
    assert_eq!(known, [false, true, true]);
}

#[test]
fn the_ends_of_layers_are_trained_too() {
    let folder = folder_with_text();
    train(&folder, &["--scheme", "standard,dar_block", "--steps", "12", "--layer-loss"]).succeeded();
    let supervised = ["standard", "dar_block"].map(|scheme| metrics(&folder, scheme));
    train(&folder, &["--resume", "--layer-loss=0.2"]).refused(2, &["--layer-loss is 0.2, was 0.1"]);
    train(&folder, &["--force", "--scheme", "standard,dar_block", "--steps", "12"]).succeeded();
    for (scheme, supervised) in ["standard", "dar_block"].into_iter().zip(supervised) {
        let plain = metrics(&folder, scheme);
        let loss = |row: &[String; 5]| row[1].parse::<f64>().unwrap();
        // The metrics are those of the last layer, so both start at the same loss and part then.
        assert!((loss(&plain[0]) - loss(&supervised[0])).abs() < 1e-4, "{scheme}");
        assert!((loss(&plain[11]) - loss(&supervised[11])).abs() > 1e-4, "{scheme}");
    }
}

#[test]
fn forty_steps_bring_the_loss_down() {
    let folder = folder_with_text();
    train(&folder, &["--scheme", "standard", "--steps", "40"]).succeeded();
    let rows = metrics(&folder, "standard");
    let loss = |row: usize| rows[row][1].parse::<f64>().unwrap();
    assert!(loss(39) < loss(0) - 2.0, "from {} to {}", loss(0), loss(39));
}

#[test]
fn a_stopped_run_goes_on_bit_for_bit() {
    let arguments = ["--scheme", "standard,dar_block", "--steps", "20", "--eval-every", "5"];
    let (whole, parts) = (folder_with_text(), folder_with_text());
    train(&whole, &arguments).succeeded();
    let stopped = train(&parts, &[&arguments[..], &["--stop-after", "10"]].concat()).succeeded();
    assert!(stopped.stdout.contains("--resume"), "{}", stopped.stdout);
    assert_eq!(metrics(&parts, "dar_block").len(), 10);
    // What is not said again is the run's.
    run("train", parts.path(), &["--output", "out", "--resume"]).succeeded();
    for scheme in ["standard", "dar_block"] {
        let losses = |folder| metrics(folder, scheme).into_iter().map(|[step, train, valid, ..]| [step, train, valid]);
        assert_eq!(losses(&whole).collect::<Vec<_>>(), losses(&parts).collect::<Vec<_>>());
        assert_eq!(parameters(&whole, scheme), parameters(&parts, scheme));
    }
}

#[test]
fn a_run_is_not_resumed_as_another_nor_overwritten() {
    let folder = folder_with_text();
    let arguments = ["--scheme", "standard", "--steps", "2"];
    train(&folder, &[&arguments[..], &["--stop-after", "1"]].concat()).succeeded();

    train(&folder, &arguments).refused(2, &["--resume", "--force"]);
    train(&folder, &["--resume", "--lr", "0.5", "--seed", "9"]).refused(2, &["--seed is 9, was 1", "--lr is 0.5"]);
    fs::write(folder.path().join("other.txt"), "Another text altogether. ".repeat(200)).unwrap();
    train(&folder, &["--resume"]).succeeded();
    let other = ["--output", "out", "--resume", "--text", "other.txt"];
    run("train", folder.path(), &other).refused(2, &["another text"]);
    // A refusal leaves the run as it was, and a further scheme joins it.
    run("train", folder.path(), &["--output", "out", "--resume"]).succeeded();
    let stdout = run("train", folder.path(), &["--output", "out", "--resume", "--scheme", "hc"]).succeeded().stdout;
    assert!(["standard ", "hc "].iter().all(|name| stdout.lines().any(|line| line.starts_with(name))), "{stdout}");

    train(&folder, &[&arguments[..], &["--force", "--stop-after", "1"]].concat()).succeeded();
    assert_eq!(metrics(&folder, "standard").len(), 1);
    fs::create_dir(folder.path().join("mine")).unwrap();
    fs::write(folder.path().join("mine/thesis.txt"), "irreplaceable").unwrap();
    run("train", folder.path(), &["--output", "mine", "--force"]).refused(2, &["not a run"]);
}

#[test]
fn a_configuration_of_ones_own_is_a_scheme() {
    let folder = folder_with_text();
    let file = folder.path().join("mine.json");
    let own = |keep| ResidualConfig::Dar(DarConfig::block(3).with_keep(keep));
    own(0.7).save(&file).unwrap();
    let arguments = ["--scheme", "standard,mine.json", "--steps", "2", "--stop-after", "1"];
    train(&folder, &arguments).succeeded();
    let saved = DecoderConfig::load(folder.path().join("out/mine/checkpoint/config.json")).unwrap();
    assert_eq!(saved.residual, own(0.7));

    own(0.8).save(&file).unwrap();
    train(&folder, &["--resume"]).refused(2, &["cannot resume mine", "another configuration"]);
    fs::write(&file, "{}").unwrap();
    train(&folder, &["--resume"]).refused(2, &["mine.json", "not a residual configuration"]);
}

#[test]
fn a_folder_of_text_is_read_without_what_is_not_text() {
    let folder = folder_with_text();
    let text = folder.path().join("folder");
    fs::create_dir_all(text.join("deep/.hidden")).unwrap();
    fs::copy(folder.path().join("text.txt"), text.join("deep/a.txt")).unwrap();
    fs::copy(folder.path().join("text.txt"), text.join("deep/.hidden/b.txt")).unwrap();
    fs::write(text.join("picture"), [0, 1, 2, 255]).unwrap();
    fs::write(text.join("c.md"), "# A second document\n").unwrap();
    let arguments = ["--device", "flex", "--scheme", "standard", "--steps", "1", "--batch", "1", "--sequence", "16"];
    let stdout = run("train", folder.path(), &[&arguments[..], &["--text", "folder"]].concat()).succeeded().stdout;
    assert!(stdout.contains("2 documents"), "{stdout}");
}

#[cfg(unix)]
#[test]
fn ctrl_c_saves_and_says_how_to_go_on() {
    use std::process::Stdio;
    use std::thread::sleep;
    use std::time::Duration;

    let folder = folder_with_text();
    let arguments = ["--scheme", "standard,dar_block", "--steps", "5000", "--eval-every", "1"];
    let mut command = Command::new(program("train"));
    command.args(SMALL).args(arguments).current_dir(folder.path()).stdout(Stdio::piped()).stderr(Stdio::piped());
    let child = command.spawn().unwrap();
    let saved = folder.path().join("out/standard/checkpoint");
    for _ in 0..600 {
        if saved.is_dir() {
            break;
        }
        sleep(Duration::from_millis(50));
    }
    let killed = Command::new("kill").args(["-INT", &child.id().to_string()]).status().unwrap();
    assert!(killed.success());
    let output = child.wait_with_output().unwrap();
    let stdout = String::from_utf8_lossy(&output.stdout);
    assert_eq!(output.status.code(), Some(130), "{stdout}\n{}", String::from_utf8_lossy(&output.stderr));
    assert!(stdout.contains("train -- --output out --resume"), "{stdout}");

    let done = metrics(&folder, "standard").len();
    let until = (done + 1).to_string();
    train(&folder, &["--resume", "--stop-after", &until]).succeeded();
    assert_eq!(metrics(&folder, "standard").len(), done + 1);
}
