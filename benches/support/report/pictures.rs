//! Pictures, SVG.

use std::collections::BTreeMap;
use std::error::Error;
use std::path::Path;

use plotters::coord::ranged1d::{KeyPointHint, Ranged};
use plotters::prelude::*;

use super::{KernelResult, KernelsPart, Machine, ModelTable, ThroughputPart};
use crate::support::cli::{Failure, failed_to};

type Drawn = Result<(), Box<dyn Error>>;

/// Colours that stay apart, also for most colour-blind eyes.
const COLOURS: [RGBColor; 10] = [
    RGBColor(0x00, 0x72, 0xb2),
    RGBColor(0xd5, 0x5e, 0x00),
    RGBColor(0x00, 0x9e, 0x73),
    RGBColor(0xcc, 0x79, 0xa7),
    RGBColor(0x56, 0xb4, 0xe9),
    RGBColor(0xe6, 0x9f, 0x00),
    RGBColor(0x7b, 0x3f, 0x99),
    RGBColor(0x8c, 0x6d, 0x31),
    RGBColor(0xb0, 0x1e, 0x4f),
    RGBColor(0x5a, 0x8f, 0x00),
];
const GREY: RGBColor = RGBColor(0x99, 0x99, 0x99);
const DARK: RGBColor = RGBColor(0x33, 0x33, 0x33);
const LINES: RGBColor = RGBColor(0xdd, 0xdd, 0xdd);
const WIDTH: u32 = 940;
const SOURCE_HEIGHT: u32 = 22;

/// Draws what there are numbers for; the files and what they show.
pub fn draw(
    folder: &Path,
    throughput: Option<&ThroughputPart>,
    kernels: Option<&KernelsPart>,
) -> Result<Vec<(&'static str, &'static str)>, Failure> {
    let mut drawn = Vec::new();
    if let Some(ThroughputPart { machine, models }) = throughput {
        let text = ("ratios.svg", "Training tokens/s relative to the standard residual (grey: the paper's)");
        drawn.push(picture(folder, text, machine, |frame| ratios(frame, models))?);
        let text = ("memory.svg", "Peak memory of a training process");
        drawn.push(picture(folder, text, machine, |frame| memory(frame, models))?);
    }
    if let Some(part) = kernels {
        let machine = &part.machine;
        let text = ("roofline.svg", "Achieved bandwidth by bytes that must move, against a copy");
        drawn.push(picture(folder, text, machine, |frame| roofline(frame, part))?);
        let text = ("entries.svg", "Cost by number of entries");
        drawn.push(picture(folder, text, machine, |frame| {
            growth(frame, "entries", part, |result| result.entries, |result| (result.tokens, result.queries))
        })?);
        let text = ("tokens.svg", "Cost by number of tokens");
        drawn.push(picture(folder, text, machine, |frame| {
            growth(frame, "tokens", part, |result| result.tokens, |result| (result.entries, result.queries))
        })?);
    }
    Ok(drawn)
}

/// What every picture has: a file, a caption, and where its numbers are from.
struct Frame<'a> {
    path: &'a Path,
    caption: &'a str,
    source: String,
}

impl Frame<'_> {
    /// An empty picture with its source in the corner.
    fn area(&self, height: u32) -> Result<DrawingArea<SVGBackend<'_>, plotters::coord::Shift>, Box<dyn Error>> {
        let area = SVGBackend::new(self.path, (WIDTH, height + SOURCE_HEIGHT)).into_drawing_area();
        area.fill(&WHITE)?;
        let style = ("sans-serif", 11).into_font().color(&GREY);
        area.draw(&Text::new(self.source.clone(), (14, height as i32), style))?;
        Ok(area.margin(0, SOURCE_HEIGHT, 0, 0))
    }
}

fn picture(
    folder: &Path,
    (file, caption): (&'static str, &'static str),
    machine: &Machine,
    draw: impl FnOnce(&Frame) -> Drawn,
) -> Result<(&'static str, &'static str), Failure> {
    let path = folder.join(file);
    let Machine { device, host, commit, quick } = machine;
    let quick = if *quick { "; quick mode, compares nothing" } else { "" };
    let frame = Frame { path: &path, caption, source: format!("{device}; {host}; commit {commit}{quick}") };
    draw(&frame).map_err(failed_to("draw", &path))?;
    Ok((file, caption))
}

/// One bar of a horizontal bar chart.
struct Bar {
    label: String,
    low: f64,
    value: f64,
    high: f64,
    /// A mark to compare with.
    mark: Option<f64>,
    text: String,
}

fn ratios(frame: &Frame, models: &[ModelTable]) -> Drawn {
    let bars = models.iter().flat_map(|model| {
        model.rows.iter().filter_map(|row| {
            let ratio = row.ratio?;
            Some(Bar {
                label: format!("{} ({})", row.name, model.model),
                low: ratio.low,
                value: ratio.median,
                high: ratio.high,
                mark: row.paper.map(|paper| paper.ratio),
                text: format!("{:.3}", ratio.median),
            })
        })
    });
    draw_bars(frame, "tokens/s, standard = 1", bars.collect())
}

fn memory(frame: &Frame, models: &[ModelTable]) -> Drawn {
    let bars = models.iter().flat_map(|model| {
        model.rows.iter().filter_map(|row| {
            let mib = row.memory?.bytes as f64 / f64::from(1 << 20);
            let label = format!("{} ({})", row.name, model.model);
            Some(Bar { label, low: mib, value: mib, high: mib, mark: None, text: format!("{mib:.1}") })
        })
    });
    draw_bars(frame, "MiB", bars.collect())
}

fn draw_bars(frame: &Frame, axis: &str, bars: Vec<Bar>) -> Drawn {
    let most = bars.iter().flat_map(|bar| [bar.high, bar.mark.unwrap_or(0.0)]).fold(0.0, f64::max).max(1e-9);
    let count = bars.len() as f64;
    let area = frame.area(110 + 26 * bars.len().max(1) as u32)?;
    let mut chart = ChartBuilder::on(&area)
        .caption(frame.caption, ("sans-serif", 18))
        .margin(14)
        .x_label_area_size(44)
        .y_label_area_size(210)
        .build_cartesian_2d(0.0..most * 1.12, 0.0..count.max(1.0))?;
    chart
        .configure_mesh()
        .disable_y_mesh()
        .disable_y_axis()
        .x_desc(axis)
        .label_style(("sans-serif", 13))
        .axis_desc_style(("sans-serif", 15))
        .light_line_style(TRANSPARENT)
        .bold_line_style(LINES)
        .draw()?;
    for (index, bar) in bars.iter().enumerate() {
        // The first bar on top.
        let bottom = count - 1.0 - index as f64;
        let middle = bottom + 0.5;
        let colour = COLOURS[0];
        chart.draw_series([Rectangle::new(
            [(0.0, bottom + 0.15), (bar.value, bottom + 0.85)],
            colour.mix(0.75).filled(),
        )])?;
        if bar.low < bar.high {
            let whisker = [(bar.low, middle), (bar.high, middle)];
            chart.draw_series([PathElement::new(whisker, DARK.stroke_width(2))])?;
        }
        if let Some(mark) = bar.mark {
            chart.draw_series([PathElement::new([(mark, bottom), (mark, bottom + 1.0)], GREY.stroke_width(3))])?;
        }
        let right = bar.high.max(bar.mark.unwrap_or(0.0));
        let style = ("sans-serif", 13).into_font().color(&DARK);
        chart.draw_series([EmptyElement::at((right, middle)) + Text::new(bar.text.clone(), (6, -6), style.clone())])?;
        let style = style.pos(plotters::style::text_anchor::Pos::new(
            plotters::style::text_anchor::HPos::Right,
            plotters::style::text_anchor::VPos::Center,
        ));
        chart.draw_series([EmptyElement::at((0.0, middle)) + Text::new(bar.label.clone(), (-8, 0), style)])?;
    }
    area.present()?;
    Ok(())
}

/// Points that belong together: a colour an operation, full for kernels and hollow for graphs, a triangle for a backward.
struct Series {
    name: String,
    points: Vec<(f64, f64)>,
    composed: bool,
    joined: bool,
}

impl Series {
    fn operation(&self) -> &str {
        let (group, _) = self.name.split_once(',').unwrap_or((&self.name, ""));
        group.rsplit_once('_').map_or(group, |(operation, _)| operation)
    }
}

fn roofline(frame: &Frame, part: &KernelsPart) -> Drawn {
    let mut series: Vec<Series> = by_group(part, |_| Some(()))
        .into_iter()
        .map(|((name, composed, _, ()), results)| {
            let points = results.iter().map(|result| (result.bytes as f64 / 1e6, result.bytes_per_s() / 1e9)).collect();
            Series { name, points, composed, joined: false }
        })
        .collect();
    let copies =
        part.copies.iter().map(|copy| (copy.bytes as f64 / 1e6, copy.bytes as f64 / copy.seconds.median / 1e9));
    series.push(Series { name: "copy".into(), points: copies.collect(), composed: false, joined: true });
    draw_points(frame, ["MB that must move", "GB/s"], &series)
}

fn growth<K: Ord + Copy>(
    frame: &Frame,
    axis: &str,
    part: &KernelsPart,
    by: fn(&KernelResult) -> usize,
    fixed: fn(&KernelResult) -> K,
) -> Drawn {
    // Of all sizes that differ in nothing else, those with the most points.
    let mut longest: BTreeMap<_, (String, Vec<_>)> = BTreeMap::new();
    for ((name, composed, dtype, size), results) in
        by_group(part, |result| Some((fixed(result), result.d_model, result.streams)))
    {
        let mut points: BTreeMap<usize, f64> = BTreeMap::new();
        results.iter().for_each(|result| {
            points.insert(by(result), 1e6 * result.seconds.median);
        });
        let points: Vec<(f64, f64)> = points.into_iter().filter(|(x, _)| *x > 0).map(|(x, y)| (x as f64, y)).collect();
        let label = format!("{name}, {dtype}, {} wide", size.1);
        let kept = longest.entry((name, composed)).or_default();
        if points.len() > kept.1.len() {
            *kept = (label, points);
        }
    }
    let series: Vec<Series> = longest
        .into_iter()
        .filter(|(_, (_, points))| points.len() > 1)
        .map(|((_, composed), (name, points))| Series { name, points, composed, joined: true })
        .collect();
    draw_points(frame, [axis, "µs"], &series)
}

/// Results by name, implementation, element type and a key.
fn by_group<K: Ord>(
    part: &KernelsPart,
    key: impl Fn(&KernelResult) -> Option<K>,
) -> BTreeMap<(String, bool, String, K), Vec<&KernelResult>> {
    let mut groups = BTreeMap::new();
    for result in &part.results {
        let composed = result.implementation.starts_with("composed");
        let name = match result.implementation.as_str() {
            "fused" => result.group.clone(),
            other => format!("{}, {other}", result.group),
        };
        if let Some(key) = key(result) {
            groups.entry((name, composed, result.dtype.clone(), key)).or_insert_with(Vec::new).push(result);
        }
    }
    groups
}

fn draw_points(frame: &Frame, axes: [&str; 2], series: &[Series]) -> Drawn {
    let points = || series.iter().flat_map(|series| &series.points).filter(|(x, y)| *x > 0.0 && *y > 0.0);
    let range = |values: Vec<f64>| {
        let (low, high) = values.iter().fold((f64::MAX, 0.0_f64), |(low, high), &x| (low.min(x), high.max(x)));
        if low > high { 0.5..2.0 } else { low / 1.5..high * 1.5 }
    };
    let xs = range(points().map(|point| point.0).collect());
    let ys = range(points().map(|point| point.1).collect());
    let area = frame.area(620)?;
    let mut chart = ChartBuilder::on(&area)
        .caption(frame.caption, ("sans-serif", 18))
        .margin(14)
        .margin_right(280)
        .x_label_area_size(44)
        .y_label_area_size(70)
        .build_cartesian_2d(Logarithmic(xs.start, xs.end), Logarithmic(ys.start, ys.end))?;
    chart
        .configure_mesh()
        .x_desc(axes[0])
        .y_desc(axes[1])
        .x_label_formatter(&short)
        .y_label_formatter(&short)
        .label_style(("sans-serif", 13))
        .axis_desc_style(("sans-serif", 15))
        .light_line_style(TRANSPARENT)
        .bold_line_style(LINES)
        .draw()?;
    let style = ("sans-serif", 12).into_font().color(&DARK);
    let right = chart.plotting_area().get_pixel_range().0.end;
    let mut operations: Vec<&str> = series.iter().map(Series::operation).collect();
    operations.dedup(); // groups are sorted
    for (index, series) in series.iter().enumerate() {
        let place = operations.iter().position(|operation| *operation == series.operation()).unwrap_or(0);
        let colour = if series.name == "copy" { DARK } else { COLOURS[place % COLOURS.len()] };
        let points = series.points.iter().copied().filter(|(x, y)| *x > 0.0 && *y > 0.0);
        if series.joined {
            chart.draw_series([PathElement::new(points.clone().collect::<Vec<_>>(), colour.stroke_width(2))])?;
        }
        let fill = if series.composed { colour.stroke_width(2) } else { colour.filled() };
        let backward = series.name.contains("backward");
        match (backward, series.composed) {
            (false, _) => chart.draw_series(points.map(|point| Circle::new(point, 4, fill)))?,
            (true, false) => chart.draw_series(points.map(|point| TriangleMarker::new(point, 6, fill)))?,
            (true, true) => chart.draw_series(points.map(|point| EmptyElement::at(point) + outline(fill)))?,
        };
        // The legend stands beside the chart: there may be many series.
        let y = 48 + 17 * index as i32;
        let place = (right + 22, y);
        match (backward, series.composed) {
            (false, _) => area.draw(&Circle::new(place, 4, fill))?,
            (true, false) => area.draw(&TriangleMarker::new(place, 6, fill))?,
            (true, true) => area.draw(&(EmptyElement::at(place) + outline(fill)))?,
        }
        area.draw(&Text::new(series.name.clone(), (right + 34, y - 6), style.clone()))?;
    }
    area.present()?;
    Ok(())
}

/// A hollow triangle around a point.
fn outline(style: ShapeStyle) -> PathElement<(i32, i32)> {
    PathElement::new([(-5, 3), (5, 3), (0, -6), (-5, 3)], style)
}

fn short(value: &f64) -> String {
    if *value >= 1000.0 || *value == 0.0 {
        format!("{value:.0}")
    } else {
        format!("{}", (value * 1000.0).round() / 1000.0)
    }
}

/// A logarithmic axis with a label at 1, 2 and 5 of each power of ten.
struct Logarithmic(f64, f64);

impl Ranged for Logarithmic {
    type FormatOption = plotters::coord::ranged1d::NoDefaultFormatting;
    type ValueType = f64;

    fn map(&self, value: &f64, limit: (i32, i32)) -> i32 {
        let share = (value / self.0).ln() / (self.1 / self.0).ln();
        limit.0 + (share * f64::from(limit.1 - limit.0)).round() as i32
    }

    fn key_points<Hint: KeyPointHint>(&self, _: Hint) -> Vec<f64> {
        let powers = (self.0.log10().floor() as i32)..=(self.1.log10().ceil() as i32);
        let points: Vec<f64> = powers.flat_map(|power| [1.0, 2.0, 5.0].map(|x| x * 10_f64.powi(power))).collect();
        let inside: Vec<f64> = points.into_iter().filter(|x| (self.0..=self.1).contains(x)).collect();
        // Only the powers where there are many.
        let few = |x: &f64| inside.len() <= 12 || (x.log10() - x.log10().round()).abs() < 1e-9;
        inside.iter().copied().filter(few).collect()
    }

    fn range(&self) -> std::ops::Range<f64> {
        self.0..self.1
    }
}

impl plotters::coord::ranged1d::ValueFormatter<f64> for Logarithmic {
    fn format_ext(&self, value: &f64) -> String {
        short(value)
    }
}
