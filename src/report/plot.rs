//! The geometry of one chart: scales, ticks, paths. Lengths are in SVG user units.

use crate::metrics::format_number;
use serde::Serialize;
use serde_json::{Value, json};
use std::fmt::Write;

/// Width of the view box.
pub(super) const WIDTH: f64 = 460.0;
/// Height of the view box.
pub(super) const HEIGHT: f64 = 236.0;
/// Left edge of the drawing area. It moves right if tick labels and the unit need more width.
const LEFT: f64 = 58.0;
const UNIT_WIDTH: f64 = 23.0;
const TICK_CHARACTER: f64 = 7.2;
const RIGHT: f64 = WIDTH - 12.0;
const TOP: f64 = 10.0;
const BOTTOM: f64 = HEIGHT - 38.0;

/// Maximum number of points of a curve. A longer curve is divided into segments; see [`thin`].
const POINTS_MAX: usize = 600;
/// Minimum number of points of a smoothed curve.
const SMOOTHED_POINTS_MIN: usize = 30;
/// Minimum number of points on each side of the smoothing window's centre. In long curves it is 1/50 of the
/// points.
const WINDOW_HALF_MIN: usize = 4;
/// With [`Scale::LogWhenWide`], an axis is logarithmic if its largest value is at least this multiple of its
/// smallest value.
const LOG_RATIO_MIN: f64 = 50.0;

/// (step, value), in ascending order of steps.
pub(super) type Points = Vec<(u64, f64)>;

/// The scale of the y-axis.
#[derive(Clone, Copy, PartialEq)]
pub(super) enum Scale {
    /// Linear, from the smallest to the largest value.
    Linear,
    /// Logarithmic if all values are positive and span a factor of `LOG_RATIO_MIN` or more, otherwise linear.
    LogWhenWide,
    /// Linear, from 0 to 1.
    Unit,
}

/// One curve of a chart.
pub(super) struct Series {
    pub run: usize,
    pub name: String,
    pub dashed: bool,
    pub points: Points,
    /// The lower and the upper end of the band, by step. The band is a run's 95% interval or the range over
    /// seeds. Empty if there is neither.
    pub interval: (Points, Points),
}

/// A chart for the template.
#[derive(Serialize)]
pub(super) struct Plot {
    width: f64,
    height: f64,
    left: f64,
    right: f64,
    top: f64,
    bottom: f64,
    log: bool,
    thinned: bool,
    /// Whether a curve is smoothed.
    smoothed: bool,
    /// Whether a curve has a band.
    shaded: bool,
    x_ticks: Vec<Tick>,
    y_ticks: Vec<Tick>,
    lines: Vec<Line>,
    /// SVG y-coordinates of the alarm limits that are within the axis.
    levels: Vec<String>,
    /// Notes below the chart, such as "exactly 0 at all 80 steps".
    notes: Vec<Note>,
    #[serde(skip)]
    x: Axis,
    #[serde(skip)]
    y: Axis,
}

#[derive(Serialize)]
struct Note {
    run: usize,
    text: String,
}

#[derive(Serialize)]
struct Tick {
    at: String,
    label: String,
}

#[derive(Serialize)]
struct Line {
    run: usize,
    name: String,
    dashed: bool,
    /// SVG paths. The smoothed curve and the band may be empty.
    raw: String,
    smooth: String,
    band: String,
    /// The points as dots. Empty if there are many points.
    dots: Vec<[String; 2]>,
    /// x-coordinates of the values that are not finite.
    broken: Vec<String>,
    last_step: u64,
    last: String,
    #[serde(skip)]
    points: Points,
    /// Indices of the drawn points.
    #[serde(skip)]
    kept: Vec<usize>,
}

/// Maps values to positions.
#[derive(Clone, Copy)]
struct Axis {
    low: f64,
    high: f64,
    from: f64,
    to: f64,
    log: bool,
}

impl Axis {
    fn pixel(&self, value: f64) -> f64 {
        let scale = |v: f64| if self.log { v.log10() } else { v };
        let share = (scale(value) - scale(self.low)) / (scale(self.high) - scale(self.low));
        self.from + share * (self.to - self.from)
    }

    fn at(&self, value: f64) -> String {
        format!("{:.1}", self.pixel(value))
    }
}

impl Plot {
    /// Lays out the chart. `None` if there is no point.
    pub fn new(series: Vec<Series>, scale: Scale) -> Option<Plot> {
        let steps = || series.iter().flat_map(|s| &s.points).map(|&(step, _)| step as f64);
        let (first, last) = range(steps())?;
        let last = if first == last { first + 1.0 } else { last };
        let y = y_axis(&series, scale);
        let y_ticks = if y.log { log_ticks(&y) } else { linear_ticks(&y, 5.0) };
        let longest = y_ticks.iter().map(|tick| tick.label.chars().count()).max().unwrap_or(0);
        let left = LEFT.max(UNIT_WIDTH + TICK_CHARACTER * longest as f64);
        let x = Axis { low: first, high: last, from: left, to: RIGHT, log: false };
        let lines: Vec<Line> = series.into_iter().map(|s| line(s, &x, &y)).collect();
        Some(Plot {
            width: WIDTH,
            height: HEIGHT,
            left,
            right: RIGHT,
            top: TOP,
            bottom: BOTTOM,
            log: y.log,
            thinned: lines.iter().any(|line| line.points.len() > POINTS_MAX),
            smoothed: lines.iter().any(|line| !line.smooth.is_empty()),
            shaded: lines.iter().any(|line| !line.band.is_empty()),
            x_ticks: linear_ticks(&x, f64::min(6.0, last - first)),
            y_ticks,
            notes: notes(&lines),
            lines,
            levels: Vec::new(),
            x,
            y,
        })
    }

    /// Returns whether every curve has more than one step and is exactly 0 at every step.
    pub fn is_zero(&self) -> bool {
        let zero = |line: &Line| line.points.len() > 1 && line.points.iter().all(|point| point.1 == 0.0);
        self.lines.iter().all(zero)
    }

    /// Adds a line for each of `levels` that is within the y-axis.
    pub fn add_levels(&mut self, levels: &[f64]) {
        let y = &self.y;
        let is_visible = |level: &&f64| (y.low..=y.high).contains(*level) && (!y.log || **level > 0.0);
        self.levels = levels.iter().filter(is_visible).map(|&level| y.at(level)).collect();
    }

    /// Returns the data for the page's script, which shows the values under the pointer.
    pub fn data(&self) -> Value {
        let series = self.lines.iter().map(|line| {
            let (steps, values): (Vec<u64>, Vec<Value>) =
                line.kept.iter().map(|&i| line.points[i]).map(|(step, value)| (step, short(value))).unzip();
            json!({"run": line.run, "x": steps, "y": values})
        });
        json!({
            "x": [self.x.low, self.x.high, self.x.from, self.x.to],
            "y": [self.y.low, self.y.high, self.y.from, self.y.to],
            "log": self.log,
            "series": series.collect::<Vec<_>>(),
        })
    }
}

pub(super) fn range(values: impl Iterator<Item = f64>) -> Option<(f64, f64)> {
    values.filter(|v| v.is_finite()).fold(None, |range, v| match range {
        None => Some((v, v)),
        Some((low, high)) => Some((low.min(v), high.max(v))),
    })
}

fn y_axis(series: &[Series], scale: Scale) -> Axis {
    let drawn = series.iter().flat_map(|s| s.points.iter().chain(&s.interval.0).chain(&s.interval.1));
    let (low, high) = range(drawn.map(|&(_, value)| value)).unwrap_or((0.0, 1.0));
    let axis = |low, high, log| Axis { low, high, from: BOTTOM, to: TOP, log };
    if scale == Scale::LogWhenWide && low > 0.0 && high / low >= LOG_RATIO_MIN {
        return axis(low / 1.15, high * 1.15, true);
    }
    if scale == Scale::Unit && low >= 0.0 && high <= 1.0 {
        return axis(0.0, 1.0, false);
    }
    // A flat curve is centred on its axis. An axis with values near zero starts at zero.
    let spread = match high - low {
        0.0 if high == 0.0 => 1.0,
        0.0 => high.abs(),
        spread => spread,
    };
    let floor = if low >= 0.0 && low <= spread * 0.6 { 0.0 } else { low - spread * 0.05 };
    axis(floor, high + spread * 0.05, false)
}

/// Returns about `count` ticks: multiples of 1, 2 or 5 times a power of ten, all with the same number of
/// decimals.
fn linear_ticks(axis: &Axis, count: f64) -> Vec<Tick> {
    let rough = (axis.high - axis.low) / count;
    let power = 10f64.powf(rough.log10().floor());
    let step = [1.0, 2.0, 5.0].map(|m| m * power).into_iter().find(|s| *s >= rough * 0.7);
    let step = step.unwrap_or(10.0 * power);
    let label = |value: f64| match -step.log10().floor() {
        d if (1.0..=6.0).contains(&d) && value.abs() < 1e6 => format!("{value:.*}", d as usize),
        _ => format_number(value),
    };
    let (first, last) = ((axis.low / step).ceil() as i64, (axis.high / step).floor() as i64);
    let values = (first..=last).take(20).map(|i| i as f64 * step);
    values.map(|value| Tick { at: axis.at(value), label: label(value) }).collect()
}

/// Returns ticks at powers of ten, and at 2 and 5 times a power of ten if there are few.
fn log_ticks(axis: &Axis) -> Vec<Tick> {
    let (first, last) = (axis.low.log10().floor() as i32, axis.high.log10().ceil() as i32);
    let decades = last - first;
    let stride = (decades / 6 + 1) as usize;
    let between: &[f64] = if decades <= 3 { &[1.0, 2.0, 5.0] } else { &[1.0] };
    let powers = (first..=last).step_by(stride).map(|e| 10f64.powi(e));
    let all = powers.flat_map(|power| between.iter().map(move |m| m * power));
    let inside = all.filter(|tick| (axis.low..=axis.high).contains(tick));
    inside.map(|value| Tick { at: axis.at(value), label: format_number(value) }).collect()
}

fn line(series: Series, x: &Axis, y: &Axis) -> Line {
    let Series { run, name, dashed, points, interval } = series;
    let kept = thin(&points);
    let raw: Vec<(u64, f64)> = kept.iter().map(|&i| points[i]).collect();
    let flat = range(points.iter().map(|p| p.1)).is_none_or(|(low, high)| low == high);
    let smooth = if points.len() >= SMOOTHED_POINTS_MIN && !flat {
        let smoothed = smooth(&points, y.log);
        path(kept.iter().map(|&i| smoothed[i]), x, y)
    } else {
        String::new()
    };
    let (last_step, last) = points.last().copied().unwrap_or((0, f64::NAN));
    let point = |&(step, value): &(u64, f64)| [x.at(step as f64), y.at(value)];
    let finite = |p: &&(u64, f64)| p.1.is_finite();
    Line {
        run,
        name,
        dashed,
        raw: path(raw.iter().copied(), x, y),
        smooth,
        band: band(&interval, x, y),
        dots: if raw.len() < SMOOTHED_POINTS_MIN {
            raw.iter().filter(finite).map(point).collect()
        } else {
            Vec::new()
        },
        broken: raw.iter().filter(|p| !p.1.is_finite()).map(|p| x.at(p.0 as f64)).collect(),
        last_step,
        last: format_number(last),
        points,
        kept,
    }
}

/// Returns the indices of the points to draw: all, or for each segment the points with the smallest, the
/// largest and the first non-finite value.
fn thin(points: &[(u64, f64)]) -> Vec<usize> {
    if points.len() <= POINTS_MAX {
        return (0..points.len()).collect();
    }
    let stretch = points.len().div_ceil(POINTS_MAX / 2);
    let mut kept = Vec::with_capacity(POINTS_MAX);
    for start in (0..points.len()).step_by(stretch) {
        let indices = start..(start + stretch).min(points.len());
        let finite = || indices.clone().filter(|&i| points[i].1.is_finite());
        let by_value = |a: &usize, b: &usize| points[*a].1.total_cmp(&points[*b].1);
        let mut chosen: Vec<usize> =
            finite().min_by(by_value).into_iter().chain(finite().max_by(by_value)).collect();
        chosen.extend(indices.clone().find(|&i| !points[i].1.is_finite()));
        chosen.sort_unstable();
        chosen.dedup();
        kept.extend(chosen);
    }
    kept
}

/// Returns the mean over a centred window (on a log axis, the mean of the logarithm). Unlike a trailing
/// average, a centred window does not lag. At both ends the window has fewer points.
fn smooth(points: &[(u64, f64)], log: bool) -> Points {
    let half = WINDOW_HALF_MIN.max(points.len() / 50);
    let window_mean = |i: usize| {
        let window = &points[i.saturating_sub(half)..(i + half + 1).min(points.len())];
        let finite = window.iter().map(|p| p.1).filter(|v| v.is_finite());
        let (count, sum) =
            finite.fold((0u32, 0.0), |(n, sum), v| (n + 1, sum + if log { v.log10() } else { v }));
        let mean = sum / f64::from(count);
        (points[i].0, if log { 10f64.powf(mean) } else { mean })
    };
    (0..points.len()).map(window_mean).collect()
}

/// Draws a line through the points. The line is broken where a value is not finite.
fn path(points: impl Iterator<Item = (u64, f64)>, x: &Axis, y: &Axis) -> String {
    let mut path = String::new();
    let mut pen_down = false;
    for (step, value) in points {
        if value.is_finite() {
            let command = if pen_down { 'L' } else { 'M' };
            let _ = write!(path, "{command}{} {}", x.at(step as f64), y.at(value));
        }
        pen_down = value.is_finite();
    }
    path
}

/// Draws the area between the lower and the upper end of the interval. Empty if the two ends have different
/// numbers of points, fewer than two points, or a value that is not finite.
fn band((low, high): &(Points, Points), x: &Axis, y: &Axis) -> String {
    if low.len() != high.len() || low.len() < 2 || low.iter().chain(high).any(|p| !p.1.is_finite()) {
        return String::new();
    }
    let there = path(low.iter().copied(), x, y);
    let back = path(high.iter().rev().copied(), x, y).replacen('M', "L", 1);
    format!("{there}{back}Z")
}

fn notes(lines: &[Line]) -> Vec<Note> {
    let mut notes = Vec::new();
    let mut note = |line: &Line, what: String| {
        notes.push(Note { run: line.run, text: format!("{}: {what}", line.name) })
    };
    for line in lines {
        let count = line.points.len();
        let (_, first) = line.points.first().copied().unwrap_or_default();
        if count > 1 && first.is_finite() && line.points.iter().all(|p| p.1 == first) {
            note(line, format!("exactly {} at all {count} steps", format_number(first)));
        }
        let broken = line.points.iter().filter(|p| !p.1.is_finite()).count();
        if broken > 0 {
            note(line, format!("not finite at {broken} of {count} steps (×)"));
        }
    }
    notes
}

/// Formats a value with six significant digits. A value that is not finite becomes a string.
fn short(value: f64) -> Value {
    let rounded = format!("{value:.5e}").parse().unwrap_or(value);
    serde_json::Number::from_f64(rounded).map_or_else(|| json!(format_number(value)), Value::Number)
}
