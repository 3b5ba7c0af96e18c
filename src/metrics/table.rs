//! A text table with aligned columns.

use super::terminal::sanitize_line;
use indicatif::HumanCount;
use unicode_width::UnicodeWidthStr;

/// Rows under a header. A column of numbers is aligned to the right.
#[derive(Debug, Clone)]
pub struct TextTable {
    header: Vec<String>,
    rows: Vec<Vec<String>>,
}

impl TextTable {
    pub fn new<S: Into<String>>(header: impl IntoIterator<Item = S>) -> Self {
        Self { header: header.into_iter().map(clean).collect(), rows: Vec::new() }
    }

    /// Adds a row. Missing cells are empty; surplus cells are dropped.
    pub fn add_row<S: Into<String>>(&mut self, cells: impl IntoIterator<Item = S>) {
        let mut row: Vec<String> = cells.into_iter().map(clean).collect();
        row.resize(self.header.len(), String::new());
        self.rows.push(row);
    }

    /// Formats the table with at most `columns` characters per line. Columns that do not fit go into further
    /// tables below; each of these repeats the first column.
    pub fn format_within(&self, columns: usize) -> String {
        let lines = || std::iter::once(&self.header).chain(&self.rows);
        let width_of = |at: usize| lines().map(|line| line[at].width()).max().unwrap_or(0);
        let (mut parts, mut part, mut width) = (vec![], vec![0], width_of(0));
        for at in 1..self.header.len() {
            if part.len() > 1 && width + 2 + width_of(at) > columns {
                parts.push(std::mem::replace(&mut part, vec![0]));
                width = width_of(0);
            }
            part.push(at);
            width += 2 + width_of(at);
        }
        parts.push(part);
        let only = |line: &Vec<String>, part: &[usize]| part.iter().map(|&at| line[at].clone()).collect();
        let table = |part: Vec<usize>| TextTable {
            header: only(&self.header, &part),
            rows: self.rows.iter().map(|row| only(row, &part)).collect(),
        };
        parts.into_iter().map(|part| table(part).to_string()).collect::<Vec<_>>().join("\n")
    }
}

impl std::fmt::Display for TextTable {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        let lines = || std::iter::once(&self.header).chain(&self.rows);
        let column = |i: usize| lines().filter_map(move |line| line.get(i));
        let widths: Vec<usize> =
            (0..self.header.len()).map(|i| column(i).map(|c| c.width()).max().unwrap_or(0)).collect();
        let right: Vec<bool> =
            (0..self.header.len()).map(|i| column(i).skip(1).all(|c| is_number(c))).collect();
        for (at, line) in lines().enumerate() {
            let cells = line.iter().zip(&widths).zip(&right).map(|((cell, &width), &right)| {
                let pad = " ".repeat(width - cell.width());
                if right { format!("{pad}{cell}") } else { format!("{cell}{pad}") }
            });
            writeln!(f, "{}", cells.collect::<Vec<_>>().join("  ").trim_end())?;
            if at == 0 {
                let rules: Vec<String> = widths.iter().map(|&w| "─".repeat(w)).collect();
                writeln!(f, "{}", rules.join("  "))?;
            }
        }
        Ok(())
    }
}

fn clean(cell: impl Into<String>) -> String {
    sanitize_line(&cell.into()).into_owned()
}

/// Returns whether a cell counts as a number. It may have a sign, an exponent, a percent sign or an interval.
/// An empty cell and a dash count too.
fn is_number(cell: &str) -> bool {
    let number = cell.trim_end_matches('%').replace([',', ' '], "");
    matches!(number.as_str(), "" | "-" | "–" | "—") || number.parse::<f64>().is_ok()
}

/// Formats `value` with four significant digits. Whole numbers keep all digits and have thousands separators.
pub fn format_number(value: f64) -> String {
    let magnitude = value.abs();
    match value {
        _ if value.is_nan() => return "NaN".to_owned(),
        f64::INFINITY => return "∞".to_owned(),
        f64::NEG_INFINITY => return "-∞".to_owned(),
        0.0 => return "0".to_owned(),
        _ => {}
    }
    if !(1e-3..1e9).contains(&magnitude) {
        let text = format!("{value:.3e}");
        let (digits, exponent) = text.split_once('e').unwrap_or((&text, "0"));
        return format!("{}e{exponent}", trim_zeros(digits));
    }
    if value.fract() == 0.0 || magnitude >= 1e3 {
        let sign = if value < 0.0 { "-" } else { "" };
        return format!("{sign}{}", HumanCount(magnitude.round() as u64));
    }
    let decimals = (3 - magnitude.log10().floor() as i32).clamp(0, 6) as usize;
    trim_zeros(&format!("{value:.decimals$}")).to_owned()
}

/// Formats a count and its noun, such as `1 step` or `1,200 steps`.
pub fn format_count(count: u64, noun: &str) -> String {
    format!("{} {noun}{}", format_number(count as f64), if count == 1 { "" } else { "s" })
}

fn trim_zeros(digits: &str) -> &str {
    if digits.contains('.') { digits.trim_end_matches('0').trim_end_matches('.') } else { digits }
}
