//! The layout of a figure: a legend, and the panels below it, two per row. Lengths are in SVG user units.

use super::curve::Curve;
use crate::metrics::Phase;
use crate::report::charts;
use crate::report::plot::{HEIGHT, Plot, Scale, WIDTH};
use minijinja::{Value, context};
use serde::Serialize;

/// Space around and between the panels.
const GAP: f64 = 20.0;
/// Height of the figure's title.
const TITLE: f64 = 30.0;
/// Height of a panel's title.
const PANEL_TITLE: f64 = 24.0;
/// Height of a row of the legend.
const LEGEND_ROW: f64 = 18.0;
/// Width of a character in the title. The figure is at least as wide as its title.
const TITLE_CHARACTER: f64 = 8.5;
/// Lower limit for the start of a log axis, as a fraction of the largest value. The axis begins at the
/// smallest value, but not below this limit or [`AXIS_MIN_CAP`], whichever is smaller. Without the limit,
/// vanishing gradients would take up most of the axis.
const FLOOR_SHARE: f64 = 1e-4;
const AXIS_MIN_CAP: f64 = 1e-3;

/// A figure with its layout, for the template.
#[derive(Serialize)]
pub(super) struct FigureLayout {
    width: f64,
    height: f64,
    legend: Vec<Value>,
    panels: Vec<Panel>,
}

#[derive(Serialize)]
struct Panel {
    x: f64,
    y: f64,
    title: String,
    unit: &'static str,
    /// Whether some values are below the log axis. They are drawn at its lower edge.
    floored: bool,
    plot: Plot,
}

impl FigureLayout {
    /// Lays out one panel for each metric for which a curve has values.
    pub fn new(title: &str, metrics: &[String], curves: &[Curve]) -> FigureLayout {
        let mut panels: Vec<Panel> = metrics.iter().filter_map(|metric| panel(metric, curves)).collect();
        let columns = panels.len().clamp(1, 2);
        let legend_columns = if curves.len() > 3 { columns } else { 1 };
        let title_width = 2.0 * GAP + TITLE_CHARACTER * title.chars().count() as f64;
        let width = f64::max(GAP + columns as f64 * (WIDTH + GAP), title_width);
        let drawn = curves.iter().enumerate().filter(|(_, curve)| !curve.seeds.is_empty());
        let legend: Vec<Value> = drawn
            .enumerate()
            .map(|(index, (colour, curve))| {
                context! {
                    colour,
                    label => curve.label,
                    exaggerated => curve.has_strong_ablation(),
                    x => GAP + (index % legend_columns) as f64 * (WIDTH + GAP),
                    y => TITLE + GAP + (index / legend_columns) as f64 * LEGEND_ROW,
                }
            })
            .collect();
        let top = TITLE + GAP + legend.len().div_ceil(legend_columns) as f64 * LEGEND_ROW;
        for (index, panel) in panels.iter_mut().enumerate() {
            panel.x = GAP + (index % columns) as f64 * (WIDTH + GAP);
            panel.y = top + (index / columns) as f64 * (PANEL_TITLE + HEIGHT) + PANEL_TITLE;
        }
        let height = top + panels.len().div_ceil(columns) as f64 * (PANEL_TITLE + HEIGHT) + GAP / 2.0;
        FigureLayout { width, height, legend, panels }
    }
}

/// Lays out the panel of one metric. `None` if no run has a value. The index of a curve among all curves
/// selects its colour.
fn panel(metric: &str, curves: &[Curve]) -> Option<Panel> {
    let (title, unit, phase, scale) = charts::chart_style(metric);
    let (scale, floor, floored) = match scale {
        Scale::LogWhenWide => {
            let (floor, floored) = floor(curves, phase, metric)?;
            (Scale::Log, Some(floor), floored)
        }
        scale => (scale, None, false),
    };
    let drawn = curves.iter().enumerate().filter(|(_, curve)| !curve.seeds.is_empty());
    let series = drawn.map(|(index, curve)| curve.series(index, phase, metric, floor));
    let plot = Plot::new(series.filter(|series| !series.points.is_empty()).collect(), scale)?;
    Some(Panel { x: 0.0, y: 0.0, title, unit, floored, plot })
}

/// Returns the lower end of a log axis, and whether a value is below that end.
fn floor(curves: &[Curve], phase: Phase, metric: &str) -> Option<(f64, bool)> {
    let all =
        || curves.iter().flat_map(|curve| curve.values(phase, metric)).flatten().map(|(_, value)| value);
    let positive = || all().filter(|value| value.is_finite() && *value > 0.0);
    let lowest = AXIS_MIN_CAP.min(FLOOR_SHARE * positive().reduce(f64::max)?);
    let floor = positive().reduce(f64::min)?.max(lowest);
    Some((floor, all().any(|value| value < floor)))
}
