//! Parameter counts of the papers' models: `cargo run --release --example parameters`.
//!
//! Counts are those of the modules themselves, whose parameters are drawn only when used: nothing is allocated.

#[path = "support/mod.rs"]
mod support;

use std::fs;
use std::io::{self, Write};
use std::path::{Path, PathBuf};
use std::process::ExitCode;

use burn::module::Module;
use burn::tensor::Device;
use clap::Parser;
use dar_burn::model::{Decoder, DecoderConfig, FeedForwardConfig, Method, MoeConfig, Preset};
use dar_burn::nn::{AttnResConfig, DarConfig, HyperConfig, MhcConfig, SeparateValues, Tying};
use dar_burn::{ResidualConfig, Routing};
use support::cli::{self, Failure, failed, failed_to};

/// Count the parameters of the papers' models, of every size and residual method.
#[derive(Parser, Debug)]
#[command(
    name = "parameters",
    after_help = "\
Examples:
  parameters                                         all sizes and methods
  parameters --size 7B-MoE                           one size
  parameters --check tests/data/parameter_counts.csv compare with a table

The table of --check has a header line and the columns size, method, layers, heads, kv_heads, d_model, d_ff, K,
printed_excl_M, printed_incl_M, exact_excl; lines that start with # are comments.
  d_ff    a width, or WIDTHxEXPERTStopN for a sparse mixture of experts, like 704x64top8
  K       layers in a block of the block forms; not read for the others, where it may be -
  method  Residual, AttnRes-Block, AttnRes-Full, AttnRes-SepV, DAR-Block, DAR-Full, DAR-SelfKV, DAR-CrossV,
          DAR-FixedKV, mHC, mHC-2, HC, CASCADE. A number after mHC and HC is that of the streams (4), after SepV that of
          the value maps (what a feed-forward network narrower than the size's pays for, else one a source)
  printed_excl_M, printed_incl_M
          millions without and with the vocabulary, rounded to the decimals that they have; - where nothing is printed

Exit code: 0 when every row agrees, 1 when one differs, 2 when the table cannot be read."
)]
struct Cli {
    /// Compare the counts with a table
    #[arg(long, value_name = "FILE.csv", conflicts_with = "size")]
    check: Option<PathBuf>,

    /// Show one size: 0.1B, 0.3B, 0.5B, 1B, 7B-MoE
    #[arg(long, value_name = "NAME")]
    size: Option<Preset>,
}

fn main() -> ExitCode {
    let cli = Cli::parse();
    let shown = match &cli.check {
        Some(path) => check(path),
        None => Ok((show(cli.size), ExitCode::SUCCESS)),
    };
    cli::exit(shown.and_then(|(lines, code)| match writeln!(io::stdout(), "{}", lines.join("\n")) {
        // `parameters | head` has read enough.
        Err(error) if error.kind() == io::ErrorKind::BrokenPipe => Ok(code),
        written => written.map(|()| code).map_err(failed("cannot write the table")),
    }))
}

/// Vocabulary of all the papers' models.
const VOCAB_SIZE: usize = 131_072;

struct Count {
    total: usize,
    vocabulary: usize,
    residual: usize,
    active: usize,
}

impl Count {
    /// The configuration must be valid.
    fn of(config: &DecoderConfig) -> Self {
        let decoder: Decoder = config.init(&Device::flex());
        Self {
            total: decoder.num_params(),
            vocabulary: decoder.embedding.num_params(),
            residual: decoder.residual.num_params(),
            active: decoder.active_params(),
        }
    }

    fn excluding_vocabulary(&self) -> usize {
        self.total - self.vocabulary
    }
}

// ------------------------------------------------------------------------------------------------------ all presets

fn show(size: Option<Preset>) -> Vec<String> {
    let mut lines = vec![format!(
        "{:<7} {:<14} {:>14} {:>14} {:>12} {:>17}",
        "size", "method", "excl. vocab.", "incl. vocab.", "residual", "active incl."
    )];
    for preset in Preset::ALL.into_iter().filter(|&preset| size.is_none_or(|size| size == preset)) {
        lines.extend(Method::ALL.map(|method| {
            let count = Count::of(&preset.model(method));
            format!(
                "{preset:<7} {method:<14} {:>14} {:>14} {:>12} {:>17}",
                grouped(count.excluding_vocabulary()),
                grouped(count.total),
                grouped(count.residual),
                grouped(count.active)
            )
        }));
    }
    lines
}

/// `1234567` as `1,234,567`.
fn grouped(number: usize) -> String {
    let digits = number.to_string();
    let mut text = String::with_capacity(digits.len() * 4 / 3);
    for (place, digit) in digits.chars().enumerate() {
        if place > 0 && (digits.len() - place).is_multiple_of(3) {
            text.push(',');
        }
        text.push(digit);
    }
    text
}

// ------------------------------------------------------------------------------------------------------ --check

const COLUMNS: [&str; 11] = [
    "size",
    "method",
    "layers",
    "heads",
    "kv_heads",
    "d_model",
    "d_ff",
    "K",
    "printed_excl_M",
    "printed_incl_M",
    "exact_excl",
];

fn check(path: &Path) -> Result<(Vec<String>, ExitCode), Failure> {
    let bytes = fs::read(path).map_err(|error| usage(failed_to("read", path)(error)))?;
    let text = String::from_utf8(bytes).map_err(|error| usage(failed_to("read", path)(error)))?;
    let rows = Row::table(&text).map_err(|message| Failure::usage(format!("{}: {message}", path.display())))?;

    let mut lines = vec![format!(
        "{:<8} {:<16} {:>11} {:>11} {:>14} {:>14} {:>14} {:>11}  result",
        "size", "method", "printed ex.", "printed in.", "expected ex.", "counted ex.", "counted in.", "difference"
    )];
    let mut failed = 0;
    for row in &rows {
        let count = Count::of(&row.config);
        let (excluding, including) = (count.excluding_vocabulary(), count.total);
        let difference = excluding as i128 - row.exact_excluding as i128;
        let mut faults = Vec::new();
        if difference != 0 {
            faults.push("exact_excl differs");
        }
        if !row.printed_excluding.agrees(excluding) {
            faults.push("printed_excl_M differs");
        }
        if !row.printed_including.agrees(including) {
            faults.push("printed_incl_M differs");
        }
        failed += usize::from(!faults.is_empty());
        lines.push(format!(
            "{:<8} {:<16} {:>11} {:>11} {:>14} {:>14} {:>14} {:>11}  {}",
            row.size,
            row.method,
            row.printed_excluding.text,
            row.printed_including.text,
            row.exact_excluding,
            excluding,
            including,
            difference,
            if faults.is_empty() { "ok".to_owned() } else { faults.join(", ") }
        ));
    }
    lines.push(format!("{} passed, {failed} failed", rows.len() - failed));
    Ok((lines, if failed == 0 { ExitCode::SUCCESS } else { ExitCode::FAILURE }))
}

/// A table that cannot be read is a wrong argument.
fn usage(failure: Failure) -> Failure {
    match failure {
        Failure::Run(message) | Failure::Usage(message) => Failure::Usage(message),
    }
}

/// One model of the table.
struct Row {
    size: String,
    method: String,
    config: DecoderConfig,
    printed_excluding: Printed,
    printed_including: Printed,
    exact_excluding: usize,
}

impl Row {
    /// All rows, or what is wrong with one.
    fn table(text: &str) -> Result<Vec<Self>, String> {
        let text = text.strip_prefix('\u{feff}').unwrap_or(text);
        let mut lines = text
            .lines()
            .enumerate()
            .map(|(index, line)| (index + 1, line.trim()))
            .filter(|(_, line)| !line.is_empty() && !line.starts_with('#'));
        let (number, header) = lines.next().ok_or("no header line")?;
        let header = fields(header);
        let mut places = [0; COLUMNS.len()];
        for (place, column) in places.iter_mut().zip(COLUMNS) {
            *place = header
                .iter()
                .position(|name| name == column)
                .ok_or_else(|| format!("line {number}: no column `{column}` in the header"))?;
        }
        let rows = lines
            .map(|(number, line)| Self::parse(line, header.len(), &places).map_err(|e| format!("line {number}: {e}")))
            .collect::<Result<Vec<_>, _>>()?;
        if rows.is_empty() { Err("no rows under the header".into()) } else { Ok(rows) }
    }

    fn parse(line: &str, columns: usize, places: &[usize; COLUMNS.len()]) -> Result<Self, String> {
        let fields = fields(line);
        if fields.len() != columns {
            return Err(format!("{} fields, expected {columns} as in the header", fields.len()));
        }
        let [size, method, layers, heads, kv_heads, d_model, d_ff, block, printed_excl, printed_incl, exact] =
            places.map(|place| fields[place].as_str());
        let layers = number("layers", layers, MOST_LAYERS)?;
        let d_model = number("d_model", d_model, MOST_WIDTH)?;
        let heads = number("heads", heads, MOST_WIDTH)?;
        let kv_heads = number("kv_heads", kv_heads, MOST_WIDTH)?;
        let feed_forward = parse_feed_forward(d_ff)?;
        let residual = parse_residual(method, block, size, layers, d_model, &feed_forward)?;
        let config = DecoderConfig::new(VOCAB_SIZE, d_model, layers, heads, kv_heads, feed_forward, residual);
        config.validate().map_err(|error| error.to_string())?;
        Ok(Self {
            size: size.into(),
            method: method.into(),
            config,
            printed_excluding: Printed::parse("printed_excl_M", printed_excl)?,
            printed_including: Printed::parse("printed_incl_M", printed_incl)?,
            exact_excluding: number("exact_excl", exact, usize::MAX)?,
        })
    }
}

/// Limits under which no count overflows.
const MOST_LAYERS: usize = 10_000;
const MOST_WIDTH: usize = 1 << 17;
const MOST_EXPERTS: usize = 1 << 12;
/// More streams or value maps than this are a slip of the pen.
const MOST_STREAMS: usize = 1024;

/// The fields of a line, which may be quoted.
fn fields(line: &str) -> Vec<String> {
    let mut fields = vec![String::new()];
    let mut quoted = false;
    for character in line.chars() {
        match character {
            '"' => quoted = !quoted,
            ',' if !quoted => fields.push(String::new()),
            _ => fields.last_mut().expect("there is a first field").push(character),
        }
    }
    fields.iter().map(|field| field.trim().to_owned()).collect()
}

/// A whole number in `1..=most`; `1_000` and `1,000` are 1000.
fn number(column: &str, text: &str, most: usize) -> Result<usize, String> {
    let wrong = || {
        let up_to = if most == usize::MAX { String::new() } else { format!(" up to {most}") };
        format!("`{column}` is {text:?}, expected a whole number from 1{up_to}")
    };
    let value: usize = text.replace(['_', ','], "").parse().map_err(|_| wrong())?;
    if (1..=most).contains(&value) { Ok(value) } else { Err(wrong()) }
}

/// `5120`, or `704x64top8`: 64 experts of width 704, 8 a token.
fn parse_feed_forward(text: &str) -> Result<FeedForwardConfig, String> {
    let lower = text.to_lowercase();
    let Some((width, routed)) = lower.split_once('x') else {
        return Ok(FeedForwardConfig::Dense { d_ff: number("d_ff", &lower, MOST_WIDTH)? });
    };
    let (experts, chosen) = routed
        .split_once("top")
        .ok_or_else(|| format!("`d_ff` is {text:?}, expected WIDTH, or WIDTHxEXPERTStopN like 704x64top8"))?;
    let part = |part: &str, most| number("d_ff", part.trim(), most).map_err(|error| format!("{error} in {text:?}"));
    let (width, experts, chosen) =
        (part(width, MOST_WIDTH)?, part(experts, MOST_EXPERTS)?, part(chosen, MOST_EXPERTS)?);
    Ok(FeedForwardConfig::MixtureOfExperts(MoeConfig::new(experts, chosen, width)))
}

fn parse_residual(
    method: &str,
    block: &str,
    size: &str,
    layers: usize,
    d_model: usize,
    feed_forward: &FeedForwardConfig,
) -> Result<ResidualConfig, String> {
    // `mHC-2` is the name `mhc` with the number 2
    let name: String = method.to_lowercase().chars().filter(char::is_ascii_alphanumeric).collect();
    let letters = name.trim_end_matches(|digit: char| digit.is_ascii_digit());
    let suffix = match &name[letters.len()..] {
        "" => None,
        digits => Some(number("method", digits, MOST_STREAMS).map_err(|error| format!("{error} in {method:?}"))?),
    };
    let unknown = || {
        let names = Method::ALL.map(Method::name).join(", ");
        format!("`method` is {method:?}, expected one of {names}")
    };
    let block = || match block {
        "-" | "" => Ok(None),
        text => number("K", text, MOST_LAYERS).map(Some),
    };
    let block_form = || block()?.ok_or_else(|| format!("`K` is missing, which {method} needs: layers in a block"));
    let attn_res = |config: AttnResConfig| ResidualConfig::AttnRes(config.with_tying(Tying::PerBlock));
    let dar = |layers: usize, routing: Routing| {
        ResidualConfig::Dar(DarConfig::block(layers).with_tying(Tying::PerBlock).with_routing(routing))
    };
    let full_or_block = |routing| Ok::<_, String>(dar(block()?.unwrap_or(1), routing));
    let streams = suffix.unwrap_or(4);
    let takes_number =
        matches!(letters, "mhc" | "mhcn" | "hc" | "hcn" | "dhc" | "dhcn" | "hyperconnections" | "sepv" | "attnressepv");
    if suffix.is_some() && !takes_number {
        return Err(unknown());
    }
    Ok(match letters {
        "residual" | "standard" | "baseline" => ResidualConfig::Standard,
        "attnresblock" => attn_res(AttnResConfig::block(block_form()?)),
        "attnresfull" => attn_res(AttnResConfig::full()),
        // The tables write the full form as K = 1.
        "attnres" => attn_res(match block()? {
            None | Some(1) => AttnResConfig::full(),
            Some(layers) => AttnResConfig::block(layers),
        }),
        "sepv" | "attnressepv" => {
            let values = match suffix.or(paid_maps(size, layers, d_model, feed_forward)) {
                Some(maps) => SeparateValues::Maps(maps),
                None => SeparateValues::PerSource,
            };
            attn_res(AttnResConfig::full().with_separate_values(values))
        }
        "darblock" => dar(block_form()?, Routing::CrossKey),
        "darfull" => dar(1, Routing::CrossKey),
        "dar" | "darcrosskey" => full_or_block(Routing::CrossKey)?,
        "darselfkv" => full_or_block(Routing::SelfKeyValue)?,
        "darcrossv" => full_or_block(Routing::CrossValue)?,
        "darfixedkv" => full_or_block(Routing::FixedKeyValue)?,
        "mhc" | "mhcn" => ResidualConfig::Mhc(MhcConfig::new().with_streams(streams)),
        "hc" | "hcn" | "dhc" | "dhcn" | "hyperconnections" => {
            ResidualConfig::Hyper(HyperConfig::new().with_streams(streams))
        }
        "cascade" => ResidualConfig::Cascade,
        _ => return Err(unknown()),
    })
}

/// The value maps that a feed-forward network narrower than this size's pays for.
fn paid_maps(size: &str, layers: usize, d_model: usize, feed_forward: &FeedForwardConfig) -> Option<usize> {
    let preset: Preset = size.parse().ok()?;
    let freed = match (preset.decoder(ResidualConfig::Standard).feed_forward, feed_forward) {
        (FeedForwardConfig::Dense { d_ff: whole }, FeedForwardConfig::Dense { d_ff }) => whole.checked_sub(*d_ff)?,
        _ => return None,
    };
    let maps = (3 * layers * freed + d_model / 2) / d_model;
    (maps > 0).then_some(maps)
}

/// A printed number of millions.
struct Printed {
    text: String,
    /// The digits as one number, and how many of them are decimals; none where nothing is printed.
    value: Option<(u128, u32)>,
}

impl Printed {
    fn parse(column: &str, text: &str) -> Result<Self, String> {
        if matches!(text, "-" | "") {
            return Ok(Self { text: "-".into(), value: None });
        }
        let wrong = || format!("`{column}` is {text:?}, expected millions like 98.325");
        let plain = text.replace(['_', ','], "");
        let (whole, decimals) = plain.split_once('.').unwrap_or((&plain, ""));
        let digits = format!("{whole}{decimals}");
        if whole.is_empty() || decimals.len() > 6 || !digits.bytes().all(|digit| digit.is_ascii_digit()) {
            return Err(wrong());
        }
        let value = digits.parse().map_err(|_| wrong())?;
        Ok(Self { text: text.into(), value: Some((value, decimals.len() as u32)) })
    }

    /// Whether `count` rounds to what is printed.
    fn agrees(&self, count: usize) -> bool {
        self.value.is_none_or(|(value, decimals)| {
            let unit = 10_u128.pow(6 - decimals);
            (count as u128 + unit / 2) / unit == value
        })
    }
}
