//! The bar chart of the mismatch table: the difference between rollout and training for each ablation.

use super::plot::range;
use crate::metrics::format_number;
use minijinja::{Value, context};
use serde_json::{Map, Value as Json};

/// Width in SVG user units. The ablations' names are left of `PLOT_LEFT`, the values right of the bars.
const WIDTH: f64 = 720.0;
const PLOT_LEFT: f64 = 176.0;
const RIGHT: f64 = WIDTH - 70.0;
const PLOT_TOP: f64 = 6.0;
const BAR_HEIGHT: f64 = 13.0;
/// Height of one ablation: three bars and the space below them.
const ABLATION_HEIGHT: f64 = 3.0 * BAR_HEIGHT + 12.0;
/// Height of the ticks, the tick labels and the axis label.
const FOOTER_HEIGHT: f64 = 38.0;
/// Maximum number of characters of a name. A longer name is truncated; a tooltip shows the whole name.
const NAME_CHARS_MAX: usize = 26;
/// Decades of the axis if no value is above 0.
const DEFAULT_DECADES: (f64, f64) = (-6.0, 0.0);
const TICKS_MAX: f64 = 8.0;

const LOGP_MAX: &str = "mismatch/logprob_abs_diff_max";
/// The metrics of the bars: key, name and colour. A row of the table that has only the first metric is an
/// equality check, not an ablation.
const METRICS: [(&str, &str, usize); 3] = [
    (LOGP_MAX, "|Δlogp| max", 5),
    ("mismatch/logprob_abs_diff_mean", "|Δlogp| mean", 4),
    ("mismatch/log_ppl_abs_diff_max", "log-ppl mismatch max", 3),
];

/// The decades at the left and the right edge.
struct Decades(f64, f64);

impl Decades {
    /// Returns decades that cover `values`, from the power of ten below the smallest positive value. There is
    /// at least one decade.
    fn covering(values: impl Iterator<Item = f64>) -> Self {
        let logs = values.filter(|v| *v > 0.0 && v.is_finite()).map(f64::log10);
        let (low, high) = range(logs).map_or(DEFAULT_DECADES, |(low, high)| (low.ceil() - 1.0, high));
        Self(low, high.max(low + 1.0))
    }

    fn x_of(&self, log: f64) -> f64 {
        PLOT_LEFT + (log - self.0) / (self.1 - self.0) * (RIGHT - PLOT_LEFT)
    }

    fn ticks(&self) -> Vec<Value> {
        let stride = ((self.1 - self.0) / TICKS_MAX).ceil().max(1.0) as usize;
        let powers = (self.0 as i32..=self.1.floor() as i32).step_by(stride);
        let label = |e: i32| if e < -3 { format!("1e{e}") } else { format_number(10f64.powi(e)) };
        let at = |e: i32| format!("{:.1}", self.x_of(f64::from(e)));
        powers.map(|e| context! { at => at(e), label => label(e) }).collect()
    }
}

/// Lays out a bar chart for the template. `None` if no row is an ablation.
pub(super) fn chart(rows: &[&Map<String, Json>]) -> Option<Value> {
    let is_ablation = |row: &&&Map<String, Json>| METRICS[1..].iter().any(|(key, ..)| row.contains_key(*key));
    let rows: Vec<_> = rows.iter().filter(is_ablation).collect();
    if rows.is_empty() {
        return None;
    }
    let number = |row: &Map<String, Json>, key: &str| row.get(key).and_then(Json::as_f64);
    let all = rows.iter().flat_map(|row| METRICS.iter().filter_map(|(key, ..)| number(row, key)));
    let decades = Decades::covering(all);
    let ablations = rows.iter().enumerate().map(|(i, row)| {
        let top = PLOT_TOP + i as f64 * ABLATION_HEIGHT + 6.0;
        let same_bits = number(row, LOGP_MAX) == Some(0.0);
        let bars = METRICS.iter().enumerate().map(|(nth, &(key, metric, colour))| {
            let y = top + nth as f64 * BAR_HEIGHT;
            let value = number(row, key);
            let end = value.filter(|v| *v > 0.0).map(|v| decades.x_of(v.log10()));
            let zero = value == Some(0.0);
            let label = match value {
                // The value alone does not show equal bits: differences that cancel within a sequence also
                // give 0.
                Some(_) if zero && same_bits => "0: same bits".to_owned(),
                value => value.map_or("–".to_owned(), format_number),
            };
            context! {
                metric,
                colour,
                y,
                height => BAR_HEIGHT - 2.0,
                // `None` if there is no bar: the value is 0 or not a number.
                width => end.map(|end| format!("{:.1}", end - PLOT_LEFT)),
                zero,
                label_x => format!("{:.1}", end.unwrap_or(PLOT_LEFT + 4.0) + 5.0),
                label,
            }
        });
        let name = row.get("name").and_then(Json::as_str).unwrap_or("–");
        // The full name, and the name truncated to the available width.
        context! { short => truncate_name(name), name, y => top + 1.5 * BAR_HEIGHT, bars => bars.collect::<Vec<_>>() }
    });
    let bottom = PLOT_TOP + rows.len() as f64 * ABLATION_HEIGHT;
    Some(context! {
        width => WIDTH,
        height => bottom + FOOTER_HEIGHT,
        left => PLOT_LEFT,
        right => RIGHT,
        top => PLOT_TOP,
        bottom,
        ticks => decades.ticks(),
        ablations => ablations.collect::<Vec<_>>(),
        legend => METRICS.map(|(key, metric, colour)| context! { key, metric, colour }),
    })
}

fn truncate_name(name: &str) -> String {
    if name.chars().count() <= NAME_CHARS_MAX {
        return name.to_owned();
    }
    name.chars().take(NAME_CHARS_MAX - 1).chain(['…']).collect()
}
