//! Finds the answer in running text, as the published vectors of answers need it: they hold whole texts.

use rloss::tasks::answer::{ANSWER_BYTES_MAX, ComparisonOptions, is_equivalent};
use rloss::tasks::boxed_answer::find_last_boxed;

/// Longer texts are searched for an answer only at their end, in bytes.
const TEXT_BYTES_MAX: usize = 20_000;

/// Whether the answers that two running texts give are mathematically equal; false when either gives none.
pub fn equivalent_texts(gold: &str, text: &str, sources: Sources, options: &ComparisonOptions) -> bool {
    match (answer(end_of(gold), sources), answer(end_of(text), sources)) {
        (Some(gold), Some(answer)) => is_equivalent(&gold, &answer, options),
        _ => false,
    }
}

/// The last [`TEXT_BYTES_MAX`] bytes of `text`, from a character's start.
fn end_of(text: &str) -> &str {
    &text[text.ceil_char_boundary(text.len().saturating_sub(TEXT_BYTES_MAX))..]
}

/// Whether `text` as a whole reads as an answer: then it is the same in brackets, which no string is.
fn is_answer(text: &str) -> bool {
    is_equivalent(text, &format!("({text})"), &ComparisonOptions::default())
}

/// What may hold the answer.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Sources {
    /// Formulas: `$…$`, `\(…\)`, `$$…$$`, `\[…\]`, `\boxed{…}`.
    pub formulas: bool,
    /// Numbers outside formulas.
    pub numbers: bool,
}

/// After these words the first thing counts.
const ANNOUNCEMENT: &str = "final answer is";
/// How far after the announcement the answer may stand, in bytes.
const ANNOUNCED_WITHIN: usize = 400;
/// Most boxes or formulas that make up one answer.
const JOINED_MAX: usize = 64;
/// Longest text between two boxes that make up one answer.
const GAP_MAX: usize = 40;

/// The answer that `text` gives: announced by “final answer is”, else boxed, else the last formula or number.
///
/// Boxes or formulas joined by `and`, `or` or commas make up one list.
fn answer(text: &str, sources: Sources) -> Option<String> {
    let announced = find_last_ignoring_case(text, ANNOUNCEMENT).and_then(|at| {
        let sentence = text.get(at..text.ceil_char_boundary(at + ANNOUNCED_WITHIN))?;
        let found = candidates(sentence, sources);
        joined(sentence, &found, 0)
    });
    announced.or_else(|| if sources.formulas { boxes(text) } else { None }).or_else(|| {
        let found = candidates(text, sources);
        // `\frac{10}{9}` alone is a formula without its dollar signs.
        let bare = sources.formulas && text.contains('\\') && !found.iter().any(|c| c.formula);
        if bare && is_answer(text) {
            return Some(text.to_owned());
        }
        let mut first = found.len().checked_sub(1)?;
        while first > 0 && joins(text, &found[first - 1], &found[first]) {
            first -= 1;
        }
        joined(text, &found, first)
    })
}

fn find_last_ignoring_case(text: &str, words: &str) -> Option<usize> {
    // ASCII case folding keeps byte positions.
    text.to_ascii_lowercase().rfind(words).map(|at| at + words.len())
}

/// The last `\boxed{}`, together with those before it that belong to the same answer.
fn boxes(text: &str) -> Option<String> {
    let (mut start, content) = find_last_boxed(text)?;
    let mut list = content.to_owned();
    for _ in 1..JOINED_MAX {
        let Some((before, content)) = find_last_boxed(&text[..start]) else { break };
        let end = before + text[before..start].find(content)? + content.len() + 1;
        let gap = text.get(end..start)?;
        let words: Vec<&str> =
            gap.split(|c: char| !c.is_alphabetic() && c != '\\').filter(|w| !w.is_empty()).collect();
        let joining = |w: &&str| matches!(*w, "and" | "or" | "text" | "\\text" | "\\quad" | "\\qquad" | "\\");
        let together = gap.len() <= GAP_MAX && (words.iter().all(joining) || words.contains(&"and"));
        if !together {
            break;
        }
        list = format!("{content}, {list}");
        start = before;
    }
    Some(list)
}

/// A formula or a number in text.
#[derive(Debug)]
struct Candidate {
    start: usize,
    end: usize,
    content: String,
    formula: bool,
}

/// Whether two formulas make up one answer: `$1$ and $2$`.
fn joins(text: &str, left: &Candidate, right: &Candidate) -> bool {
    let gap = text.get(left.end..right.start).unwrap_or("").trim();
    left.formula && right.formula && matches!(gap, "and" | "or" | "," | ", and" | ", or" | ";")
}

fn joined(text: &str, found: &[Candidate], first: usize) -> Option<String> {
    let mut list = found.get(first)?.content.clone();
    for pair in found.get(first..)?.windows(2).take(JOINED_MAX) {
        let [left, right] = pair else { break };
        if !joins(text, left, right) {
            break;
        }
        list = format!("{list}, {}", right.content);
    }
    Some(find_last_boxed(&list).map_or(list.clone(), |(_, content)| content.to_owned()))
}

/// The formulas and numbers of `text` in document order.
fn candidates(text: &str, sources: Sources) -> Vec<Candidate> {
    let mut found = Vec::new();
    let mut at = 0;
    while let Some(rest) = text.get(at..).filter(|rest| !rest.is_empty()) {
        if let Some((inside, length)) = formula(rest).filter(|_| sources.formulas) {
            found.push(Candidate { start: at, end: at + length, content: inside.to_owned(), formula: true });
            at += length;
        } else if let Some((content, length)) = number(&text[..at], rest).filter(|_| sources.numbers) {
            found.push(Candidate { start: at, end: at + length, content, formula: false });
            at += length;
        } else {
            at += rest.chars().next().map_or(1, char::len_utf8);
        }
    }
    found
}

/// The formula at the start of `rest`: its inside, and its length with delimiters.
fn formula(rest: &str) -> Option<(&str, usize)> {
    for (open, close, lines) in
        [("$$", "$$", true), ("\\[", "\\]", true), ("$", "$", false), ("\\(", "\\)", false)]
    {
        let Some(inside) = rest.strip_prefix(open) else { continue };
        let inside = &inside[..inside.floor_char_boundary(ANSWER_BYTES_MAX)];
        let end = find_unescaped(inside, close)?;
        let content = inside.get(..end)?;
        // A formula within a line stays on it: a lone dollar sign is money.
        if content.trim().is_empty() || (!lines && content.contains('\n')) {
            return None;
        }
        return Some((content, open.len() + end + close.len()));
    }
    None
}

/// Where `close` stands first; `\$` is no dollar sign.
fn find_unescaped(text: &str, close: &str) -> Option<usize> {
    let mut from = 0;
    loop {
        let at = from + text.get(from..)?.find(close)?;
        if !(close.starts_with('$') && text[..at].ends_with('\\')) {
            return Some(at);
        }
        from = at + 1;
    }
}

/// The number at the start of `rest`, rewritten with a decimal point, and its length.
///
/// Reads `-5`, `1,234.5`, `1 234`, `2,74` (decimal comma), `.5`, `10/9`, `28%`; not digits inside a word.
fn number(before: &str, rest: &str) -> Option<(String, usize)> {
    let word = |c: char| c.is_alphanumeric() || matches!(c, '_' | '.');
    let unsigned = match rest.strip_prefix('-') {
        Some(unsigned) if !before.ends_with(word) => unsigned,
        Some(_) => return None,
        None if before.ends_with(|c: char| word(c) || c == ',') => return None,
        None => rest,
    };
    let sign = if unsigned.len() < rest.len() { "-" } else { "" };
    let (mut value, length) = decimal(unsigned)?;
    let mut end = sign.len() + length;
    if let Some((below, length)) = rest.get(end..).and_then(|r| r.strip_prefix('/')).and_then(decimal) {
        value = format!("{value}/{below}");
        end += 1 + length;
    }
    if rest.get(end..).is_some_and(|r| r.starts_with('%')) {
        value.push('%');
        end += 1;
    }
    Some((format!("{sign}{value}"), end))
}

fn digits(text: &str) -> &str {
    &text[..text.len() - text.trim_start_matches(|c: char| c.is_ascii_digit()).len()]
}

fn decimal(text: &str) -> Option<(String, usize)> {
    let lead = digits(text);
    let (mut whole, mut rest) = (lead.to_owned(), &text[lead.len()..]);
    for separator in [',', ' '] {
        while (1..=3).contains(&lead.len())
            && !lead.starts_with('0')
            && let Some(group) = rest.strip_prefix(separator).filter(|r| digits(r).len() == 3)
        {
            whole.push_str(digits(group));
            rest = &group[3..];
        }
    }
    let comma_allowed = whole.len() == lead.len() && !lead.is_empty();
    if let Some(decimals) =
        rest.strip_prefix('.').or_else(|| rest.strip_prefix(',').filter(|_| comma_allowed))
    {
        let decimals = digits(decimals);
        if !decimals.is_empty() {
            whole = format!("{whole}.{decimals}");
            rest = &rest[1 + decimals.len()..];
        }
    }
    (!whole.is_empty()).then(|| (whole, text.len() - rest.len()))
}
