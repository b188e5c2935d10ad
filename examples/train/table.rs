//! The closing table.

use crate::run::Summary;

/// One row a scheme, columns aligned.
pub fn table(summaries: &[Summary]) -> String {
    let reference = summaries.iter().find(|summary| summary.name == "standard").or(summaries.first());
    let reference = reference.map_or(0.0, speed);
    let headings = ["scheme", "parameters", "residual", "held-out loss", "tokens/s", "relative", "peak memory"];
    let mut rows = vec![headings.map(str::to_owned)];
    rows.extend(summaries.iter().map(|summary| {
        let held_out = summary.rows.iter().rev().find_map(|row| row.valid_loss);
        [
            summary.name.to_owned(),
            summary.parameters.to_string(),
            summary.residual_parameters.to_string(),
            held_out.map_or("-".into(), |loss| format!("{loss:.4}")),
            format!("{:.0}", speed(summary)),
            format!("{:.2}", speed(summary) / reference),
            // A process has one peak for all its schemes, so the CPU backend has none to tell.
            summary.peak_memory.map_or("-".into(), |bytes| format!("{:.1} MiB", bytes as f64 / (1 << 20) as f64)),
        ]
    }));

    let width = |column: usize| rows.iter().map(|row| row[column].chars().count()).max().unwrap_or(0);
    let widths: Vec<usize> = (0..headings.len()).map(width).collect();
    let line = |row: &[String; 7]| {
        let mut cells = row.iter().zip(&widths);
        let first = cells.next().map_or(String::new(), |(cell, &width)| format!("{cell:<width$}"));
        cells.fold(first, |line, (cell, &width)| format!("{line}  {cell:>width$}"))
    };
    rows.iter().map(line).collect::<Vec<_>>().join("\n")
}

/// The median over steps: neither compilation nor a busy moment moves it.
fn speed(summary: &Summary) -> f64 {
    let mut speeds: Vec<f64> = summary.rows.iter().map(|row| row.tokens_per_s).collect();
    speeds.sort_by(f64::total_cmp);
    speeds.get(speeds.len() / 2).copied().unwrap_or(f64::NAN)
}
