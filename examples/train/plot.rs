//! Curves over the steps as SVG: the training loss smoothed, the held-out loss as points; the router balance of
//! mixtures of experts as the DAR paper's Figure A.2 draws it.

use std::path::Path;

use dar_burn::diagnostics::{MOVING_AVERAGE_STEPS, moving_average};
use plotters::prelude::*;

use crate::files::replace;
use crate::run::Row;
use crate::support::cli::{Failure, failed, failed_to};

/// The steps of one scheme.
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

/// One scheme in a picture.
struct Drawn {
    label: String,
    line: Vec<(f64, f64)>,
    dots: Vec<(f64, f64)>,
}

/// Draws `loss.svg` into `folder`, and for mixtures of experts `balance.svg`.
pub fn draw(folder: &Path, title: &str, curves: &[Curve]) -> Result<(), Failure> {
    let last = curves.iter().filter_map(|curve| curve.rows.last()).map(|row| row.step).max().unwrap_or(1);
    let first = last / LEFT_OUT;
    let picture = |name: &str, axes: [&str; 2], reference: Option<f64>, drawn: &[Drawn]| {
        replace(&folder.join(name), |path| {
            try_draw(path, title, axes, first as f64..last as f64, reference, drawn).map_err(failed_to("draw", path))
        })
    };

    let loss = |curve: &Curve| {
        let shown: Vec<Row> = curve.rows.iter().filter(|row| row.step >= first).cloned().collect();
        let (line, dots) = (smooth(&shown), held_out(&shown));
        let label = match dots.last() {
            Some((_, loss)) => format!("{} (held out {loss:.3})", curve.name),
            None => curve.name.to_owned(),
        };
        Drawn { label, line, dots }
    };
    let losses: Vec<Drawn> = curves.iter().map(loss).collect();
    let x = "step   (lines: training loss, smoothed and without its first fall; dots: held-out loss)";
    picture("loss.svg", [x, "loss (nats per token)"], None, &losses)?;

    // The window of the paper, or a tenth of a run that is too short for it.
    let window = MOVING_AVERAGE_STEPS.min(last.div_ceil(LEFT_OUT));
    let balances = curves.iter().filter_map(|curve| balance(curve, window, first).transpose());
    let balances = balances.collect::<Result<Vec<_>, _>>()?;
    if balances.is_empty() {
        return Ok(());
    }
    let x = format!("step   (mean of the last {window} steps; dashed: all experts used evenly)");
    picture("balance.svg", [&x, "router auxiliary loss"], Some(1.0), &balances)
}

/// The moving average of the router balance; none of a dense model, nor of a run that is shorter than the window.
fn balance(curve: &Curve, window: usize, first: usize) -> Result<Option<Drawn>, Failure> {
    // Steps of a run that was begun before the balance was kept have none.
    let rows: Vec<(usize, f64)> =
        curve.rows.iter().filter_map(|row| Some((row.step, row.auxiliary_loss?.into()))).collect();
    if rows.len() < window {
        return Ok(None);
    }
    let values: Vec<f64> = rows.iter().map(|&(_, value)| value).collect();
    let means = moving_average(&values, window).map_err(failed("cannot smooth the router balance"))?;
    let line = rows[window - 1..].iter().zip(means).map(|(&(step, _), mean)| (step as f64, mean));
    let line: Vec<(f64, f64)> = line.filter(|&(step, _)| step >= first as f64).collect();
    let label = match line.last() {
        Some((_, mean)) => format!("{} (at the end {mean:.3})", curve.name),
        None => curve.name.to_owned(),
    };
    Ok(Some(Drawn { label, line, dots: Vec::new() }))
}

fn try_draw(
    path: &Path,
    title: &str,
    [x, y]: [&str; 2],
    steps: std::ops::Range<f64>,
    reference: Option<f64>,
    drawn: &[Drawn],
) -> Result<(), Box<dyn std::error::Error>> {
    let values = drawn.iter().flat_map(|drawn| drawn.line.iter().chain(&drawn.dots)).map(|point| point.1);
    let values = values.chain(reference);
    let (low, high) = values.fold((f64::MAX, f64::MIN), |(low, high), value| (low.min(value), high.max(value)));
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
        .build_cartesian_2d(steps.clone(), low - margin..high + margin)?;
    chart
        .configure_mesh()
        .x_desc(x)
        .y_desc(y)
        .x_label_formatter(&|step| format!("{step:.0}"))
        .y_label_formatter(&|value| format!("{value:.2}"))
        .label_style(("sans-serif", 14))
        .axis_desc_style(("sans-serif", 16))
        .light_line_style(TRANSPARENT)
        .bold_line_style(RGBColor(0xdd, 0xdd, 0xdd))
        .draw()?;
    if let Some(value) = reference {
        let line = [(steps.start, value), (steps.end, value)];
        chart.draw_series(DashedLineSeries::new(line, 6, 4, BLACK.stroke_width(1)))?;
    }
    for (index, Drawn { label, line, dots }) in drawn.iter().enumerate() {
        let colour = COLOURS[index % COLOURS.len()];
        chart
            .draw_series(LineSeries::new(line.iter().copied(), colour.stroke_width(2)))?
            .label(label)
            .legend(move |(x, y)| PathElement::new([(x, y), (x + 18, y)], colour.stroke_width(2)));
        chart.draw_series(dots.iter().map(|&point| Circle::new(point, 4, colour.filled())))?;
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
