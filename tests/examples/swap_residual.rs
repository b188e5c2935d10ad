use std::path::Path;

use super::run;

#[test]
fn one_line_swaps_the_residual_of_a_model() {
    let stdout = run("swap_residual", Path::new("."), &["--device", "flex", "--steps", "30"]).succeeded().stdout;
    let losses = |name: &str| {
        let line =
            stdout.lines().find(|line| line.starts_with(name)).unwrap_or_else(|| panic!("no {name} in\n{stdout}"));
        let mut numbers = line.split_whitespace().rev().map(|number| number.parse::<f64>().unwrap());
        let (last, first) = (numbers.next().unwrap(), numbers.next().unwrap());
        (first, last)
    };
    let (standard, _) = losses("standard");
    for name in ["standard", "attnres_block(2)", "dar_block(2)"] {
        let (first, last) = losses(name);
        // All start as the plain residual.
        assert!((first - standard).abs() < 1e-2, "{stdout}");
        assert!(last < first, "{stdout}");
    }
}
