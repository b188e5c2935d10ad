//! Heat maps, lines and points as SVG, with labelled axes. Dark is much, so that a print in grey reads the same.

use std::path::Path;

use dar_burn::diagnostics::ndarray::Array2;
use plotters::prelude::*;
use plotters::style::text_anchor::{HPos, Pos, VPos};

use crate::support::cli::{Failure, failed_to};

type Drawn = Result<(), Box<dyn std::error::Error>>;

/// What a colour means.
#[derive(Clone, Copy)]
pub struct Scale<'a> {
    pub name: &'a str,
    pub low: f64,
    pub high: f64,
}

impl Scale<'_> {
    /// White at `low`, or at zero where the scale has both signs; dark blue far above, dark red far below.
    fn colour(self, value: f64) -> RGBColor {
        let white = if self.low < 0.0 { 0.0 } else { self.low };
        let (dark, distance) = if value < white {
            (RGBColor(0x8c, 0x1c, 0x13), (white - value) / (white - self.low))
        } else {
            (RGBColor(0x08, 0x30, 0x6b), (value - white) / (self.high - white))
        };
        let share = distance.clamp(0.0, 1.0);
        let mix = |dark: u8| (255.0 + (f64::from(dark) - 255.0) * share).round() as u8;
        RGBColor(mix(dark.0), mix(dark.1), mix(dark.2))
    }
}

/// What rows and columns of a map are; rows are numbered from 0.
#[derive(Clone, Copy)]
pub struct Axes<'a> {
    pub columns: &'a str,
    pub rows: &'a str,
    /// One a column; numbers from 0 if there are none.
    pub column_labels: &'a [String],
}

impl<'a> From<[&'a str; 2]> for Axes<'a> {
    fn from([columns, rows]: [&'a str; 2]) -> Self {
        Self { columns, rows, column_labels: &[] }
    }
}

const CELL: u32 = 46;
const EDGE: u32 = 76;
const BAR: u32 = 110;

/// Draws maps of equal size side by side, with one colour bar. Rows run down from 0, columns right from 0; `NaN` is blank.
pub fn heat_maps<'a>(
    path: &Path,
    title: &str,
    axes: impl Into<Axes<'a>>,
    maps: &[(String, Array2<f64>)],
    scale: Scale,
) -> Result<(), Failure> {
    let axes = axes.into();
    let draw = || -> Drawn {
        let (height, width) = maps[0].1.dim();
        let panel = (width as u32 * CELL + EDGE + 16).max(240);
        let size = (panel * maps.len() as u32 + BAR, height as u32 * CELL + EDGE + 70);
        let area = SVGBackend::new(path, size).into_drawing_area();
        area.fill(&WHITE)?;
        let area = area.titled(title, ("sans-serif", 20))?;
        let (panels, bar) = area.split_horizontally(size.0 - BAR);
        for ((name, map), area) in maps.iter().zip(panels.split_evenly((1, maps.len()))) {
            heat_map(&area, name, axes, map, scale)?;
        }
        colour_bar(&bar, scale)?;
        Ok(area.present()?)
    };
    draw().map_err(failed_to("draw", path))
}

type Area<'a> = DrawingArea<SVGBackend<'a>, plotters::coord::Shift>;

fn heat_map(area: &Area, name: &str, axes: Axes, map: &Array2<f64>, scale: Scale) -> Drawn {
    let (height, width) = map.dim();
    let mut chart = ChartBuilder::on(area)
        .caption(name, ("sans-serif", 15))
        .margin(8)
        .x_label_area_size(40)
        .y_label_area_size(52)
        .build_cartesian_2d(-0.5..width as f64 - 0.5, -0.5..height as f64 - 0.5)?;
    let Axes { columns, rows, column_labels } = axes;
    let whole = |value: f64, label: f64| if value.fract() == 0.0 { format!("{label:.0}") } else { String::new() };
    chart
        .configure_mesh()
        .disable_mesh()
        .x_desc(columns)
        .y_desc(rows)
        .x_labels(width.min(30))
        .y_labels(height.min(30))
        .x_label_formatter(&|&x| match column_labels.get(x.max(0.0) as usize) {
            Some(label) if x.fract() == 0.0 && x >= 0.0 => label.clone(),
            _ => {
                if column_labels.is_empty() {
                    whole(x, x)
                } else {
                    String::new()
                }
            }
        })
        .y_label_formatter(&|&y| whole(y, height as f64 - 1.0 - y))
        .label_style(("sans-serif", 13))
        .axis_desc_style(("sans-serif", 14))
        .draw()?;
    for ((row, column), &value) in map.indexed_iter().filter(|(_, value)| !value.is_nan()) {
        let (x, y) = (column as f64, height as f64 - 1.0 - row as f64);
        let colour = scale.colour(value);
        chart.draw_series([Rectangle::new([(x - 0.5, y - 0.5), (x + 0.5, y + 0.5)], colour.filled())])?;
        // Of width 46, a cell has room for its number.
        let light = u32::from(colour.0) + u32::from(colour.1) + u32::from(colour.2) > 400;
        let ink = if light { BLACK } else { WHITE };
        let style = ("sans-serif", 12).into_font().color(&ink).pos(Pos::new(HPos::Center, VPos::Center));
        chart.draw_series([Text::new(format!("{value:.2}"), (x, y), style)])?;
    }
    Ok(())
}

fn colour_bar(area: &Area, scale: Scale) -> Drawn {
    const STEPS: usize = 64;
    let mut chart = ChartBuilder::on(area)
        .caption(scale.name, ("sans-serif", 13))
        .margin(8)
        .x_label_area_size(40)
        .y_label_area_size(52)
        .build_cartesian_2d(0.0..1.0, scale.low..scale.high)?;
    chart
        .configure_mesh()
        .disable_mesh()
        .disable_x_axis()
        .y_labels(6)
        .y_label_formatter(&|value| format!("{value:.2}"))
        .label_style(("sans-serif", 12))
        .draw()?;
    let at = |step: usize| scale.low + (scale.high - scale.low) * step as f64 / STEPS as f64;
    let part = |step: usize| {
        Rectangle::new([(0.0, at(step)), (1.0, at(step + 1))], scale.colour((at(step) + at(step + 1)) / 2.0).filled())
    };
    chart.draw_series((0..STEPS).map(part))?;
    Ok(())
}

/// Colours that stay apart, also for most colour-blind eyes.
const COLOURS: [RGBColor; 6] = [
    RGBColor(0x00, 0x72, 0xb2),
    RGBColor(0xd5, 0x5e, 0x00),
    RGBColor(0x00, 0x9e, 0x73),
    RGBColor(0xcc, 0x79, 0xa7),
    RGBColor(0x33, 0x33, 0x33),
    RGBColor(0xe6, 0x9f, 0x00),
];

/// One curve of a plot.
pub struct Curve {
    pub name: String,
    pub points: Vec<(f64, f64)>,
    /// The points are joined.
    pub joined: bool,
}

/// Draws curves; points that are not finite are left out.
pub fn curves(path: &Path, title: &str, [x, y]: [&str; 2], curves: &[Curve]) -> Result<(), Failure> {
    let draw = || -> Drawn {
        let finite = |&&(x, y): &&(f64, f64)| x.is_finite() && y.is_finite();
        let all = || curves.iter().flat_map(|curve| curve.points.iter().filter(finite));
        let range = |value: fn(&(f64, f64)) -> f64| {
            let (low, high) = all().map(value).fold((f64::MAX, f64::MIN), |(l, h), v| (l.min(v), h.max(v)));
            let margin = 0.06 * (high - low).max(1e-3);
            if low > high { 0.0..1.0 } else { low - margin..high + margin }
        };
        let area = SVGBackend::new(path, (760, 440)).into_drawing_area();
        area.fill(&WHITE)?;
        let mut chart = ChartBuilder::on(&area)
            .caption(title, ("sans-serif", 20))
            .margin(14)
            .x_label_area_size(44)
            .y_label_area_size(70)
            .build_cartesian_2d(range(|point| point.0), range(|point| point.1))?;
        chart
            .configure_mesh()
            .x_desc(x)
            .y_desc(y)
            .light_line_style(TRANSPARENT)
            .bold_line_style(RGBColor(0xdd, 0xdd, 0xdd))
            .label_style(("sans-serif", 13))
            .axis_desc_style(("sans-serif", 15))
            .draw()?;
        for (index, curve) in curves.iter().enumerate() {
            let colour = COLOURS[index % COLOURS.len()];
            let points = || curve.points.iter().filter(finite).copied();
            if curve.joined {
                chart.draw_series(LineSeries::new(points(), colour.stroke_width(2)))?;
            }
            chart
                .draw_series(points().map(|point| Circle::new(point, 4, colour.filled())))?
                .label(&curve.name)
                .legend(move |(x, y)| Circle::new((x + 9, y), 4, colour.filled()));
        }
        let labels = &mut chart.configure_series_labels();
        labels
            .label_font(("sans-serif", 13))
            .background_style(WHITE)
            .border_style(RGBColor(0xdd, 0xdd, 0xdd))
            .draw()?;
        Ok(area.present()?)
    };
    draw().map_err(failed_to("draw", path))
}
