//! Checks whether a response follows an instruction.

use super::capitals::count_capital_words;
use super::pattern::compile_pattern;
use super::python::{count_words, is_lower, is_space, is_upper, strip};
use super::sentences::split_sentences;
use super::{Instruction, language};
use regex::Regex;
use std::sync::LazyLock;

/// Checks each of `instructions` against `response`. A blank response follows no instruction.
pub fn check_strictly(instructions: &[Instruction], response: &str) -> Vec<bool> {
    let follows =
        |instruction: &Instruction| !strip(response).is_empty() && instruction.is_followed_by(response);
    instructions.iter().map(follows).collect()
}

impl Instruction {
    /// Returns whether `response` follows the instruction. Unlike [`check_strictly`], accepts blank
    /// responses.
    pub fn is_followed_by(&self, response: &str) -> bool {
        match self {
            Self::CapitalWords(bound) => bound.contains(count_capital_words(response)),
            Self::EnglishCapital => is_upper(response) && language::is_in(response, "en"),
            Self::EnglishLowercase => is_lower(response) && language::is_in(response, "en"),
            Self::RepeatPrompt(prompt) => strip(response).to_lowercase().starts_with(prompt),
            Self::TwoResponses => two_responses(response),
            Self::Placeholders(count) => matches(&PLACEHOLDER, response) >= *count,
            Self::Postscript(marker) => marker.is_match(&response.to_lowercase()),
            Self::ConstrainedResponse => CONSTRAINED_RESPONSES.iter().any(|answer| response.contains(answer)),
            Self::JsonFormat => is_json(response),
            Self::Sections { heading, count } => matches(heading, response) >= *count,
            Self::Bullets(count) => {
                matches(&STAR_BULLET, response) + matches(&DASH_BULLET, response) == *count
            }
            Self::Highlights(count) => highlights(response) >= *count,
            Self::Title => TITLE
                .find_iter(response)
                .any(|t| !strip(t.as_str().trim_start_matches('<').trim_end_matches('>')).is_empty()),
            Self::Keywords(keywords) => keywords.iter().all(|keyword| keyword.is_match(response)),
            Self::ForbiddenWords(words) => !words.iter().any(|word| word.is_match(response)),
            Self::KeywordFrequency { keyword, bound } => bound.contains(matches(keyword, response)),
            Self::LetterFrequency { letter, bound } => {
                bound.contains(response.to_lowercase().chars().filter(|c| c == letter).count() as u64)
            }
            Self::Language(code) => language::is_in(response, code),
            Self::NthParagraphFirstWord { paragraphs, nth, first_word } => {
                nth_paragraph_first_word(response, *paragraphs, *nth, first_word)
            }
            Self::Paragraphs(count) => paragraphs(response) == Some(*count),
            Self::Sentences(bound) => bound.contains(split_sentences(response).len() as u64),
            Self::Words(bound) => bound.contains(count_words(response)),
            Self::NoComma => !response.contains(','),
            Self::EndPhrase(phrase) => {
                strip(response).trim_matches('"').to_lowercase().ends_with(phrase.as_str())
            }
            Self::Quotation => {
                let text = strip(response);
                text.len() > 1 && text.starts_with('"') && text.ends_with('"')
            }
        }
    }
}

/// The answers that [`Instruction::ConstrainedResponse`] allows.
pub(super) const CONSTRAINED_RESPONSES: [&str; 3] =
    ["My answer is yes.", "My answer is no.", "My answer is maybe."];

static PLACEHOLDER: LazyLock<Regex> = LazyLock::new(|| compile_pattern(r"\[.*?\]"));
static STAR_BULLET: LazyLock<Regex> = LazyLock::new(|| compile_pattern(r"(?m)^\s*\*[^*].*$"));
static DASH_BULLET: LazyLock<Regex> = LazyLock::new(|| compile_pattern(r"(?m)^\s*-.*$"));
static EMPHASIS: LazyLock<Regex> = LazyLock::new(|| compile_pattern(r"\*[^\n*]*\*"));
static STRONG: LazyLock<Regex> = LazyLock::new(|| compile_pattern(r"\*\*[^\n*]*\*\*"));
static TITLE: LazyLock<Regex> = LazyLock::new(|| compile_pattern(r"<<[^\n]+>>"));
static DIVIDER: LazyLock<Regex> = LazyLock::new(|| compile_pattern(r"\s?\*\*\*\s?"));

fn matches(pattern: &Regex, text: &str) -> u64 {
    pattern.find_iter(text).count() as u64
}

/// Counts the texts between single and between double asterisks. Strong text may count as both.
fn highlights(response: &str) -> u64 {
    let filled = |pattern: &Regex| {
        pattern.find_iter(response).filter(|m| !strip(m.as_str().trim_matches('*')).is_empty()).count() as u64
    };
    filled(&EMPHASIS) + filled(&STRONG)
}

/// Counts the paragraphs between `***` dividers. `None` if an inner paragraph is blank.
fn paragraphs(response: &str) -> Option<u64> {
    filled_parts(&DIVIDER.split(response).collect::<Vec<_>>()).map(|parts| parts.len() as u64)
}

fn two_responses(response: &str) -> bool {
    let parts: Vec<&str> = response.split("******").collect();
    filled_parts(&parts).is_some_and(|parts| matches!(parts[..], [a, b] if strip(a) != strip(b)))
}

/// Returns the parts that are not blank. `None` if an inner part is blank.
fn filled_parts<'t>(parts: &[&'t str]) -> Option<Vec<&'t str>> {
    let blank = |part: &&str| strip(part).is_empty();
    let inner = parts.get(1..parts.len().saturating_sub(1)).unwrap_or_default();
    (!inner.iter().any(blank)).then(|| parts.iter().copied().filter(|part| !blank(part)).collect())
}

/// Returns whether there are `paragraphs` paragraphs that are not blank, and whether paragraph `nth` starts
/// with `first_word`. As in IFEval's reference implementation, `nth` also counts blank paragraphs.
fn nth_paragraph_first_word(response: &str, paragraphs: u64, nth: u64, first_word: &str) -> bool {
    let parts: Vec<&str> = response.split("\n\n").collect();
    let filled = parts.iter().filter(|part| !strip(part).is_empty()).count() as u64;
    let part = nth.checked_sub(1).and_then(|index| parts.get(index as usize)).copied().unwrap_or_default();
    let word = strip(part).split(is_space).next().unwrap_or_default();
    let word = word.trim_start_matches('\'').trim_start_matches('"');
    let bare: String =
        word.chars().take_while(|c| !matches!(c, '.' | ',' | '?' | '!' | '\'' | '"')).collect();
    filled == paragraphs && bare.to_lowercase() == first_word
}

/// Returns whether the response is one JSON value, without a Markdown fence around it.
fn is_json(response: &str) -> bool {
    let fences = ["```json", "```Json", "```JSON", "```"];
    let text = fences.iter().fold(strip(response), |text, fence| text.strip_prefix(fence).unwrap_or(text));
    let text = strip(text.strip_suffix("```").unwrap_or(text));
    // No value is built, so any depth, numbers of any size and lone surrogates are accepted, as in Python.
    serde_json::from_str::<serde::de::IgnoredAny>(text).is_ok()
}
