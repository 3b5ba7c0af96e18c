//! Writes a Markdown page that can be pasted into an issue, a chart of |Δlogp| by position, and a table of
//! all tokens.

use super::distance::DifferenceStats;
use super::external_engine::Comparison;
use crate::metrics::{TextTable, format_number};
use crate::vocabulary::Vocabulary;
use anyhow::Result;
use std::fmt::Write;

/// Size and margins of the chart, in SVG user units.
const WIDTH: f64 = 640.0;
const HEIGHT: f64 = 260.0;
const LEFT: f64 = 56.0;
const TOP: f64 = 14.0;
const FOOT: f64 = 36.0;
/// Maximum number of position ranges; the chart shows the median and the maximum of each.
const RANGES_MAX: usize = 80;
/// Number of tokens that the page shows.
const LARGEST_SHOWN: usize = 10;
/// Lower end of the axis. Smaller values are drawn at this value.
const DIFFERENCE_MIN: f64 = 1e-7;

/// Returns `mismatch.md`: the answer, the table and the tokens that are furthest off. `table` is the text of
/// the terminal's table, `largest` that of [`largest_table`]. `formats` lists the formats that were read.
pub fn page(answer: &str, table: &str, largest: &str, formats: &[String]) -> String {
    let formats_list: String = formats.iter().map(|line| format!("- {line}\n")).collect();
    format!(
        "## rloss check-mismatch --against\n\n{answer}\n\n```text\n{}\n\n{largest}```\n\nRows count from 1, tokens from 0, the prompt's included. \
         docs/AGAINST.md defines the columns.\n\nRead:\n{formats_list}\nrloss {}; |Δlogp| by position is drawn in mismatch.svg, statistics are in mismatch.json, single tokens in mismatch.csv.\n",
        table.trim_end(),
        env!("CARGO_PKG_VERSION")
    )
}

/// The columns of a token: its row, position, id and text, both log-probs and their difference, in nats.
const TOKEN_COLUMNS: [&str; 7] = ["row", "token", "id", "text", "engine", "model", "difference"];

/// Returns the [`TOKEN_COLUMNS`] of `target`.
fn token_cells(comparison: &Comparison, vocabulary: &Vocabulary, target: usize) -> [String; 7] {
    let (targets, diagnosis) = (&comparison.target_positions, &comparison.diagnosis);
    let id = targets.tokens[target];
    [
        targets.names[targets.rows[target]].clone(),
        targets.positions[target].to_string(),
        id.to_string(),
        vocabulary.decode(&[id]),
        comparison.engine_log_probs[target].to_string(),
        diagnosis.unmodified_log_probs[target].to_string(),
        format_number(diagnosis.differences[target]),
    ]
}

/// Returns `mismatch.csv`: a line for each token with a log-prob, in the order of rows and positions.
///
/// # Errors
/// Errors of the writer.
pub fn token_table(comparison: &Comparison, vocabulary: &Vocabulary) -> Result<String> {
    let targets = &comparison.target_positions;
    let mut order: Vec<usize> = (0..targets.tokens.len()).collect();
    order.sort_by_key(|&target| (targets.rows[target], targets.positions[target]));
    let mut table = csv::Writer::from_writer(vec![]);
    table.write_record(TOKEN_COLUMNS)?;
    for target in order {
        table.write_record(token_cells(comparison, vocabulary, target))?;
    }
    Ok(String::from_utf8(table.into_inner()?)?)
}

/// Returns the text of a table of the tokens that are furthest off, the furthest first.
pub fn largest_table(comparison: &Comparison, vocabulary: &Vocabulary) -> String {
    let differences = &comparison.diagnosis.differences;
    let mut order: Vec<usize> = (0..differences.len()).collect();
    order.sort_by(|&a, &b| differences[b].abs().total_cmp(&differences[a].abs()));
    let mut table = TextTable::new(TOKEN_COLUMNS);
    for target in order.into_iter().take(LARGEST_SHOWN) {
        let mut cells = token_cells(comparison, vocabulary, target);
        cells[3] = format!("{:?}", cells[3]);
        table.add_row(cells);
    }
    table.to_string()
}

/// Returns `mismatch.svg`: the median and the maximum of |Δlogp| for each range of positions, on a
/// logarithmic axis. Horizontal lines show the bf16 bound.
pub fn chart(comparison: &Comparison) -> String {
    let (positions, differences) =
        (&comparison.target_positions.positions, &comparison.diagnosis.differences);
    let longest = positions.iter().copied().max().unwrap_or(1);
    let width = longest.div_ceil(RANGES_MAX).max(1);
    let mut ranges: Vec<Vec<f64>> = vec![vec![]; longest / width + 1];
    let pairs = positions.iter().zip(differences);
    pairs.for_each(|(position, difference)| ranges[position / width].push(*difference));
    let highest =
        comparison.diagnosis.stats.max.max(comparison.diagnosis.bf16_bound.max).max(10.0 * DIFFERENCE_MIN);
    let decades = (highest / DIFFERENCE_MIN).log10().ceil().max(1.0);
    let y = |difference: f64| {
        let share = (difference.max(DIFFERENCE_MIN) / DIFFERENCE_MIN).log10() / decades;
        HEIGHT - FOOT - share * (HEIGHT - FOOT - TOP)
    };
    let x = |position: f64| LEFT + position / longest as f64 * (WIDTH - LEFT - 10.0);
    let mut svg = format!(
        "<svg xmlns=\"http://www.w3.org/2000/svg\" viewBox=\"0 0 {WIDTH} {HEIGHT}\" font-family=\"sans-serif\" font-size=\"11\">\n\
         <rect width=\"{WIDTH}\" height=\"{HEIGHT}\" fill=\"#fff\"/>\n"
    );
    // Writing to a String cannot fail.
    for decade in 0..=decades as i32 {
        let at = y(DIFFERENCE_MIN * 10f64.powi(decade));
        let label = -7 + decade;
        let right = WIDTH - 10.0;
        let _ = writeln!(
            svg,
            "<path d=\"M{LEFT} {at:.1}H{right}\" stroke=\"#ddd\"/><text x=\"{:.1}\" y=\"{:.1}\" text-anchor=\"end\">1e{label}</text>",
            LEFT - 6.0,
            at + 4.0
        );
    }
    for (name, value) in [
        ("bf16 median", comparison.diagnosis.bf16_bound.median),
        ("bf16 99%", comparison.diagnosis.bf16_bound.p99),
    ] {
        let (at, right) = (y(value), WIDTH - 10.0);
        let _ = writeln!(
            svg,
            "<path d=\"M{LEFT} {at:.1}H{right}\" stroke=\"#888\" stroke-dasharray=\"4 3\"/><text x=\"{right}\" y=\"{:.1}\" text-anchor=\"end\" fill=\"#666\">{name}</text>",
            at - 3.0
        );
    }
    for (range, differences) in ranges.iter().enumerate().filter(|(_, differences)| !differences.is_empty()) {
        let stats = DifferenceStats::from_differences(differences);
        let at = x((range as f64 + 0.5) * width as f64);
        let _ = writeln!(
            svg,
            "<circle cx=\"{at:.1}\" cy=\"{:.1}\" r=\"2.2\" fill=\"#c33\"/><circle cx=\"{at:.1}\" cy=\"{:.1}\" r=\"2.2\" fill=\"#236\"/>",
            y(stats.max),
            y(stats.median)
        );
    }
    let _ = write!(
        svg,
        "<text x=\"{LEFT}\" y=\"{:.1}\">position 1 to {longest}: median (blue) and maximum (red) of |Δlogp|, nats</text>\n</svg>\n",
        HEIGHT - 10.0
    );
    svg
}
