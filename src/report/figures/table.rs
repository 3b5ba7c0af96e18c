//! A table of the figures' results, with a value for each seed.

use super::curve::Curve;
use crate::metrics::{Phase, format_number};
use crate::report::plot::Points;
use crate::report::tables::is_held_out;
use minijinja::{Value, context};

/// Reduces a run's values of a metric to one number.
type Summary = fn(&Points) -> Option<f64>;
/// Heading, phase, metric, reduction, and number of decimals.
type Column<'a> = (&'static str, Phase, &'a str, Summary, usize);

/// Returns one row per curve. Each cell has one value per seed.
pub(super) fn table(curves: &[Curve]) -> Value {
    let held_out =
        curves.iter().flat_map(|curve| &curve.seeds).flat_map(|(_, run)| &run.rows).find_map(|row| {
            row.metrics.iter().map(|(name, _)| name).find(|name| is_held_out(name)).map(str::to_owned)
        });
    let last: Summary = |points| points.last().map(|point| point.1);
    let largest: Summary = |points| points.iter().map(|point| point.1).reduce(f64::max);
    let mean: Summary = |points| {
        let sum: f64 = points.iter().map(|point| point.1).sum();
        (!points.is_empty()).then(|| sum / points.len() as f64)
    };
    let held_out = held_out.as_deref().unwrap_or_default();
    let columns: [Column; 4] = [
        ("Held-out success, last", Phase::Eval, held_out, last, 3),
        ("Gradient norm, largest", Phase::Rl, "actor/grad_norm", largest, 3),
        ("Clip fraction, mean", Phase::Rl, "actor/pg_clipfrac", mean, 2),
        ("Max log-ppl mismatch, largest", Phase::Rl, "mismatch/log_ppl_abs_diff_max", largest, 2),
    ];
    let rows = curves.iter().enumerate().filter(|(_, curve)| !curve.seeds.is_empty());
    let cell = |curve: &Curve, &(_, phase, metric, summary, digits): &Column| {
        let values = curve.values(phase, metric);
        list(
            values
                .iter()
                .map(|points| summary(points).map_or("–".into(), |v| format_significant(v, digits))),
        )
    };
    let row = |(colour, curve): (usize, &Curve)| {
        context! {
            colour,
            label => curve.label,
            exaggerated => curve.has_strong_ablation(),
            seeds => list(curve.seeds.iter().map(|(seed, _)| seed.to_string())),
            cells => columns.iter().map(|column| cell(curve, column)).collect::<Vec<_>>(),
        }
    };
    let header = columns.map(|column| column.0);
    context! { header, rows => rows.map(row).collect::<Vec<_>>() }
}

fn list(parts: impl Iterator<Item = String>) -> String {
    parts.collect::<Vec<_>>().join(" · ")
}

/// Formats `value` with `digits` significant digits.
fn format_significant(value: f64, digits: usize) -> String {
    let rounded = format!("{value:.*e}", digits.saturating_sub(1)).parse().unwrap_or(value);
    format_number(rounded)
}
