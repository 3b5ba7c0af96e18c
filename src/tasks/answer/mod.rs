//! Whether an answer is right: as a string, or as mathematics.
//!
//! An answer is cleaned, read into a tree and compared by structure (lists, tuples, intervals, sets,
//! relations, matrices) and by value: exactly where it is rational, else at pseudo-random points.
//! Text is only read, never executed, and length, depth and the size of numbers are bounded, so
//! that no answer can hang the grader. Parsers of LaTeX exist as libraries, but they reject what
//! models really write (units, words, `\frac12`, lists), so the reader is this project's own.

mod compare;
mod evaluate;
mod expr;
mod extract;
mod normalise;
mod parse;

pub use extract::Sources;
pub use normalise::exact_form;

/// Longer answers are only compared as strings, in bytes.
pub const ANSWER_BYTES_MAX: usize = 4_000;
/// Longer texts are searched for an answer only at their end, in bytes.
pub const TEXT_BYTES_MAX: usize = 100_000;

/// How answers are compared.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default, serde::Serialize, serde::Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Equality {
    /// As strings, after spellings are unified ([`exact_form`]).
    Exact,
    /// As mathematics ([`equivalent`]).
    #[default]
    Equivalent,
}

impl Equality {
    /// Whether `answer` equals `gold`; both are bare answers, such as the content of `\boxed{}`.
    pub fn holds(self, gold: &str, answer: &str) -> bool {
        match self {
            Equality::Exact => exact_form(gold) == exact_form(answer),
            Equality::Equivalent => equivalent(gold, answer, &Options::default()),
        }
    }
}

/// What [`equivalent`] accepts.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Options {
    /// Decimals to which a number written with a decimal point must agree.
    pub decimals: u32,
    /// Whether `2 < x < 5` answers a question whose gold answer is `(2, 5)`. The other way round it always does.
    pub relation_for_set: bool,
}

impl Default for Options {
    fn default() -> Self {
        Self { decimals: 6, relation_for_set: false }
    }
}

/// Whether two bare answers are mathematically equal.
pub fn equivalent(gold: &str, answer: &str, options: &Options) -> bool {
    if gold.len().max(answer.len()) > ANSWER_BYTES_MAX {
        return gold.trim() == answer.trim();
    }
    let plain = normalise::plain_form(gold);
    if !plain.is_empty() && plain == normalise::plain_form(answer) {
        return true;
    }
    let (gold, answer) = (normalise::clean(gold), normalise::clean(answer));
    // `1,234` is a number or two: either reading may hold, but the same on both sides.
    [true, false].into_iter().any(|thousands| {
        match (parse::parse(&gold, thousands), parse::parse(&answer, thousands)) {
            (Some(gold), Some(answer)) => compare::same(&gold, &answer, options),
            _ => false,
        }
    })
}

/// Whether the answers that two running texts give are mathematically equal; false when either gives none.
pub fn equivalent_texts(gold: &str, answer: &str, sources: Sources, options: &Options) -> bool {
    match (extract::answer(end_of(gold), sources), extract::answer(end_of(answer), sources)) {
        (Some(gold), Some(answer)) => equivalent(&gold, &answer, options),
        _ => false,
    }
}

/// The last [`TEXT_BYTES_MAX`] bytes of `text`, from a character's start.
fn end_of(text: &str) -> &str {
    let start = text.len().saturating_sub(TEXT_BYTES_MAX);
    let start = (start..text.len()).find(|&i| text.is_char_boundary(i)).unwrap_or(0);
    &text[start..]
}
