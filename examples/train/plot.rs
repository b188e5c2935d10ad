//! Loss curves as SVG: training loss smoothed, held-out loss as points.

use std::path::Path;

use plotters::prelude::*;

use crate::run::Row;
use crate::support::cli::{Failure, failed_to};

/// The loss curve of one scheme.
pub struct Curve<'a> {
    pub name: &'a str,
    pub rows: &'a [Row],
}

/// The first of so many parts is not drawn: its fall from the initial loss would flatten everything after it.
const LEFT_OUT: usize = 10;
/// Weight of the past in the smoothed training loss.
const SMOOTHING: f64 = 0.9;

/// Colours that stay apart, also for most colour-blind eyes.
const COLOURS: [RGBColor; 12] = [
    RGBColor(0x33, 0x33, 0x33),
    RGBColor(0x00, 0x72, 0xb2),
    RGBColor(0xd5, 0x5e, 0x00),
    RGBColor(0x00, 0x9e, 0x73),
    RGBColor(0xcc, 0x79, 0xa7),
    RGBColor(0x56, 0xb4, 0xe9),
    RGBColor(0xe6, 0x9f, 0x00),
    RGBColor(0x7b, 0x3f, 0x99),
    RGBColor(0x8c, 0x6d, 0x31),
    RGBColor(0x99, 0x99, 0x99),
    RGBColor(0xb0, 0x1e, 0x4f),
    RGBColor(0x5a, 0x8f, 0x00),
];

/// Draws `curves` into the SVG file `path`.
pub fn draw(path: &Path, title: &str, curves: &[Curve]) -> Result<(), Failure> {
    try_draw(path, title, curves).map_err(failed_to("draw", path))
}

fn try_draw(path: &Path, title: &str, curves: &[Curve]) -> Result<(), Box<dyn std::error::Error>> {
    let last = curves.iter().filter_map(|curve| curve.rows.last()).map(|row| row.step).max().unwrap_or(1);
    let first = last / LEFT_OUT;
    let shown = |curve: &Curve| curve.rows.iter().filter(|row| row.step >= first).cloned().collect::<Vec<_>>();
    let smoothed: Vec<Vec<(f64, f64)>> = curves.iter().map(|curve| smooth(&shown(curve))).collect();
    let held_out: Vec<Vec<(f64, f64)>> = curves.iter().map(|curve| held_out(&shown(curve))).collect();
    let points = || smoothed.iter().chain(&held_out).flatten();
    let (low, high) = points().fold((f64::MAX, f64::MIN), |(low, high), point| (low.min(point.1), high.max(point.1)));
    if low > high {
        return Ok(());
    }
    let margin = 0.05 * (high - low).max(0.1);

    let area = SVGBackend::new(path, (900, 560)).into_drawing_area();
    area.fill(&WHITE)?;
    let mut chart = ChartBuilder::on(&area)
        .caption(title, ("sans-serif", 20))
        .margin(16)
        .x_label_area_size(44)
        .y_label_area_size(60)
        .build_cartesian_2d(first as f64..last as f64, low - margin..high + margin)?;
    chart
        .configure_mesh()
        .x_desc("step   (lines: training loss, smoothed and without its first fall; dots: held-out loss)")
        .y_desc("loss (nats per token)")
        .x_label_formatter(&|step| format!("{step:.0}"))
        .y_label_formatter(&|loss| format!("{loss:.2}"))
        .label_style(("sans-serif", 14))
        .axis_desc_style(("sans-serif", 16))
        .light_line_style(TRANSPARENT)
        .bold_line_style(RGBColor(0xdd, 0xdd, 0xdd))
        .draw()?;
    for (index, curve) in curves.iter().enumerate() {
        let colour = COLOURS[index % COLOURS.len()];
        let label = match held_out[index].last() {
            Some((_, loss)) => format!("{} (held out {loss:.3})", curve.name),
            None => curve.name.to_owned(),
        };
        chart
            .draw_series(LineSeries::new(smoothed[index].iter().copied(), colour.stroke_width(2)))?
            .label(label)
            .legend(move |(x, y)| PathElement::new([(x, y), (x + 18, y)], colour.stroke_width(2)));
        chart.draw_series(held_out[index].iter().map(|&point| Circle::new(point, 4, colour.filled())))?;
    }
    chart
        .configure_series_labels()
        .position(SeriesLabelPosition::UpperRight)
        .label_font(("sans-serif", 14))
        .background_style(WHITE)
        .border_style(RGBColor(0xdd, 0xdd, 0xdd))
        .draw()?;
    area.present()?;
    Ok(())
}

/// Exponential mean of the training loss, without the bias of its start.
fn smooth(rows: &[Row]) -> Vec<(f64, f64)> {
    let (mut sum, mut weight) = (0.0, 0.0);
    let point = |row: &Row| {
        sum = SMOOTHING * sum + f64::from(row.train_loss);
        weight = SMOOTHING * weight + 1.0;
        (row.step as f64, sum / weight)
    };
    rows.iter().map(point).collect()
}

fn held_out(rows: &[Row]) -> Vec<(f64, f64)> {
    rows.iter().filter_map(|row| Some((row.step as f64, row.valid_loss?.into()))).collect()
}
