//! Tables for people.

use super::{KernelResult, KernelsPart, Machine, MemoryUse, ModelTable, SchemeRow, ThroughputPart};
use crate::support::statistics::Spread;

/// The whole `report.md`; `pictures`: files and what they show.
pub fn report(throughput: Option<&ThroughputPart>, kernels: Option<&KernelsPart>, pictures: &[(&str, &str)]) -> String {
    let mut text = String::from("# Benchmarks\n");
    if let Some(part) = throughput {
        text += &format!("\n## Training steps\n\n{}", throughput_table(part));
    }
    if let Some(part) = kernels {
        text += &format!("\n## Kernels\n\n{}", kernel_table(part));
    }
    if !pictures.is_empty() {
        text += "\n## Pictures\n";
    }
    for (file, caption) in pictures {
        text += &format!("\n{caption}\n\n![{caption}]({file})\n");
    }
    text
}

fn heading(machine: &Machine) -> String {
    let Machine { device, host, commit, quick } = machine;
    let warning = if *quick {
        "\n\n**Quick mode: few repetitions of small sizes, which show that the benchmark works and compare nothing.**"
    } else {
        ""
    };
    format!("Device: {device}. Host: {host}. Commit: {commit}.{warning}\n")
}

/// Tokens/s, memory, and where the time goes, a table a model.
pub fn throughput_table(part: &ThroughputPart) -> String {
    let mut text = heading(&part.machine);
    for model in &part.models {
        let ModelTable { sizes, rounds, steps, rows, .. } = model;
        text += &format!("\n**{sizes}**; {rounds} turns of {steps} timed steps for every scheme.\n\n");
        let standard = rows.iter().find(|row| row.paper.is_some_and(|paper| paper.ratio == 1.0));
        let header = [
            "scheme",
            "parameters",
            "residual",
            "tokens/s",
            "ratio to standard",
            "paper's",
            "peak memory",
            "to standard",
            "paper's",
            "step, ms",
            "residual pathway alone, ms",
            "share",
            "branches and the rest, ms",
            "kernels a step",
        ];
        let lines = rows.iter().map(|row| scheme_line(row, standard));
        text += &table(&header, lines);
    }
    text += "\nMedian (quartiles). Ratios are of turns in the same round. *Residual pathway alone*: forward and backward with \
             branches that return their input; *share*: of the step; *branches and the rest*: the step without it. *Kernels a step*: of dar-kernels; 0 where the scheme \
             runs as Burn's graph, or in its own operations on the CPU. Peak memory is that of a process that trains only this scheme: what the \
             device's pool held (in use of it), or all of the process where the device has no pool. The paper's numbers \
             (Table 3): 7B sparse mixture of experts, K = 3, eight H800.\n";
    text
}

fn scheme_line(row: &SchemeRow, standard: Option<&SchemeRow>) -> [String; 14] {
    let more = match (row.memory, standard.and_then(|standard| standard.memory)) {
        (Some(own), Some(standard)) => format!("{:+.1} MiB", mib(own.bytes) - mib(standard.bytes)),
        _ => "—".into(),
    };
    [
        row.name.clone(),
        row.parameters.to_string(),
        row.residual_parameters.to_string(),
        with_quartiles(row.tokens_per_s, 0),
        row.ratio.map_or("—".into(), |ratio| with_quartiles(ratio, 3)),
        row.paper.map_or(String::new(), |paper| format!("{:.3}", paper.ratio)),
        row.memory.map_or("—".into(), memory),
        more,
        row.paper.map_or(String::new(), |paper| format!("{:+.1} GiB", paper.more_gib)),
        with_quartiles(row.seconds.map(|seconds| 1e3 * seconds), 1),
        with_quartiles(row.pathway_seconds.map(|seconds| 1e3 * seconds), 1),
        format!("{:.0} %", 100.0 * row.pathway_seconds.median / row.seconds.median),
        format!("{:.1}", 1e3 * (row.seconds.median - row.pathway_seconds.median)),
        row.launches.to_string(),
    ]
}

fn memory(memory: MemoryUse) -> String {
    let in_use = memory.in_use.map_or(String::new(), |bytes| format!(" ({:.1})", mib(bytes)));
    format!("{:.1}{in_use} MiB", mib(memory.bytes))
}

fn mib(bytes: u64) -> f64 {
    bytes as f64 / f64::from(1 << 20)
}

fn with_quartiles(Spread { low, median, high }: Spread, digits: usize) -> String {
    format!("{median:.digits$} ({low:.digits$}–{high:.digits$})")
}

/// Time and bandwidth, a table an operation.
pub fn kernel_table(part: &KernelsPart) -> String {
    let mut text = heading(&part.machine);
    text += "\nCopies in the same run:\n\n";
    let copies = part.copies.iter().map(|copy| {
        let rate = copy.bytes as f64 / copy.seconds.median;
        [format!("{:.2}", mib(copy.bytes)), microseconds(copy.seconds), format!("{:.2}", rate / 1e9)]
    });
    text += &table(&["MiB read and written", "time, µs", "GB/s"], copies);

    let mut groups: Vec<&str> = Vec::new();
    for result in &part.results {
        if !groups.contains(&&*result.group) {
            groups.push(&result.group);
        }
    }
    for group in groups {
        text += &format!("\n### {group}\n\n");
        let results = part.results.iter().filter(|result| result.group == group);
        let header =
            ["size run", "of", "type", "implementation", "time, µs", "MiB that must move", "GB/s", "% of copy"];
        text += &table(&header, results.map(kernel_line));
    }
    text += "\nMedian (quartiles). Bytes that must move: every operand once. *fused*: a kernel of dar-kernels; *fused_keys*: on a history with packed keys; *composed*: \
             the graph of Burn's operations with Burn's fusion; *composed_unfused*: without it, in a process of its own. \
             The backward of *composed* is timed after its forward, one at a time; kernels are \
             launched many at a time. Size: entries (r), queries (q), tokens (t), streams (s), d_model (d).\n";
    text
}

fn kernel_line(result: &KernelResult) -> [String; 8] {
    let scaled = if result.full_tokens == result.tokens { String::new() } else { format!("{}t", result.full_tokens) };
    [
        result.size(),
        scaled,
        result.dtype.clone(),
        result.implementation.clone(),
        microseconds(result.seconds),
        format!("{:.2}", mib(result.bytes)),
        format!("{:.2}", result.bytes_per_s() / 1e9),
        format!("{:.0}", 100.0 * result.share_of_copy()),
    ]
}

fn microseconds(seconds: Spread) -> String {
    with_quartiles(seconds.map(|seconds| 1e6 * seconds), 1)
}

fn table<const N: usize>(header: &[&str; N], lines: impl Iterator<Item = [String; N]>) -> String {
    let line = |cells: &[String]| format!("| {} |\n", cells.join(" | "));
    let mut text = line(&header.map(str::to_owned));
    text += &format!("|{}\n", "---|".repeat(N));
    lines.for_each(|cells| text += &line(&cells));
    text
}
