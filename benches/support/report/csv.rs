//! One number a line.

use super::{KernelsPart, Machine, ThroughputPart};
use crate::support::statistics::Spread;

const HEADER: &str = "benchmark,device,host,commit,quick,subject,size,dtype,quantity,unit,low,median,high";

pub fn report(throughput: Option<&ThroughputPart>, kernels: Option<&KernelsPart>) -> String {
    let mut lines = vec![HEADER.to_owned()];
    if let Some(ThroughputPart { machine, models }) = throughput {
        for model in models {
            for row in &model.rows {
                let mut line = |quantity: &str, unit: &str, low: f64, median: f64, high: f64| {
                    let subject = [&*row.name, &model.sizes, &model.dtype];
                    lines.push(format_line("throughput", machine, subject, quantity, unit, [low, median, high]));
                };
                let mut spread = |quantity, unit, Spread { low, median, high }| line(quantity, unit, low, median, high);
                spread("speed", "tokens/s", row.tokens_per_s);
                spread("step", "s", row.seconds);
                spread("residual pathway", "s", row.pathway_seconds);
                if let Some(ratio) = row.ratio {
                    spread("speed to standard", "1", ratio);
                }
                let mut exact = |quantity, unit, value: f64| line(quantity, unit, value, value, value);
                exact("parameters", "1", row.parameters as f64);
                exact("residual parameters", "1", row.residual_parameters as f64);
                exact("kernels a step", "1", row.launches as f64);
                if let Some(memory) = row.memory {
                    exact("peak memory", "B", memory.bytes as f64);
                    if let Some(in_use) = memory.in_use {
                        exact("peak memory in use", "B", in_use as f64);
                    }
                }
            }
        }
    }
    if let Some(KernelsPart { machine, copies, results }) = kernels {
        for copy in copies {
            let Spread { low, median, high } = copy.seconds;
            let subject = ["copy", &format!("{} bytes", copy.bytes), ""];
            lines.push(format_line("kernels", machine, subject, "time", "s", [low, median, high]));
        }
        for result in results {
            let name = format!("{} {}", result.group, result.implementation);
            let size = result.size();
            let subject = [&*name, &size, &result.dtype];
            let mut line = |quantity, unit, values| {
                lines.push(format_line("kernels", machine, subject, quantity, unit, values));
            };
            let Spread { low, median, high } = result.seconds;
            line("time", "s", [low, median, high]);
            let bytes = result.bytes as f64;
            line("bytes that must move", "B", [bytes; 3]);
            line("bandwidth", "B/s", [bytes / high, bytes / median, bytes / low]);
            line("bandwidth of a copy", "B/s", [result.copy_bytes_per_s; 3]);
        }
    }
    lines.push(String::new());
    lines.join("\n")
}

fn format_line(
    benchmark: &str,
    machine: &Machine,
    [subject, size, dtype]: [&str; 3],
    quantity: &str,
    unit: &str,
    values: [f64; 3],
) -> String {
    let Machine { device, host, commit, quick } = machine;
    let quick = quick.to_string();
    let texts = [benchmark, device, host, commit, &quick, subject, size, dtype, quantity, unit].map(quoted);
    texts.into_iter().chain(values.map(|value| value.to_string())).collect::<Vec<_>>().join(",")
}

fn quoted(text: &str) -> String {
    if text.contains([',', '"', '\n']) { format!("\"{}\"", text.replace('"', "\"\"")) } else { text.to_owned() }
}
