//! The 25 instructions of IFEval (Zhou et al. 2023, arXiv:2311.07911) as pure functions of a response.
//!
//! A row of an IFEval file names instructions by id, and has `kwargs` for each. [`Instruction::parse`] parses
//! one instruction. [`Instruction::is_followed_by`] and [`check_strictly`] grade a response by the rules of
//! the reference implementation, including its quirks. [`compose`] draws instructions for training prompts.
//!
//! Known differences from the reference implementation:
//! - A kwarg that it would replace by a random value is rejected. A letter outside a-z is counted
//!   as given.
//! - A keyword that is not a valid pattern is matched literally.
//! - `NaN` and `Infinity` are not JSON.
//! - Sentences are split by [a compact implementation of Punkt](sentences).

mod capitals;
mod checker;
pub mod compose;
mod kwargs;
mod language;
mod pattern;
mod python;
mod sentences;

pub use checker::check_strictly;
pub use language::LANGUAGES;

use crate::bad_input;
use anyhow::Result;
use kwargs::Kwargs;
use regex::Regex;
use serde_json::Value;

/// How a count is compared with its bound.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum CountRelation {
    AtLeast,
    LessThan,
}

/// A bound on a count.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Bound {
    pub relation: CountRelation,
    pub count: u64,
}

impl Bound {
    /// Returns whether `count` is within the bound.
    pub fn contains(self, count: u64) -> bool {
        if let CountRelation::AtLeast = self.relation { count >= self.count } else { count < self.count }
    }
}

/// Every instruction id, in alphabetical order, divided by spaces.
pub const IDS: &str = "change_case:capital_word_frequency change_case:english_capital \
    change_case:english_lowercase combination:repeat_prompt combination:two_responses \
    detectable_content:number_placeholders detectable_content:postscript \
    detectable_format:constrained_response detectable_format:json_format \
    detectable_format:multiple_sections detectable_format:number_bullet_lists \
    detectable_format:number_highlighted_sections detectable_format:title keywords:existence \
    keywords:forbidden_words keywords:frequency keywords:letter_frequency language:response_language \
    length_constraints:nth_paragraph_first_word length_constraints:number_paragraphs \
    length_constraints:number_sentences length_constraints:number_words punctuation:no_comma \
    startend:end_checker startend:quotation";

/// A checkable instruction with its arguments.
#[derive(Debug, Clone)]
pub enum Instruction {
    /// The number of words in capitals is within a bound.
    CapitalWords(Bound),
    /// The response is English, in capitals only.
    EnglishCapital,
    /// The response is English, in lower case only.
    EnglishLowercase,
    /// The response starts with this lower-cased text. Its case in the response does not matter.
    RepeatPrompt(String),
    /// The response has two different answers, separated by `******`.
    TwoResponses,
    /// The response has at least this many `[placeholders]`.
    Placeholders(u64),
    /// The response has a postscript. Its marker matches this pattern after the response is lower-cased.
    Postscript(Regex),
    /// The response contains one of three fixed answers.
    ConstrainedResponse,
    /// The whole response is JSON. A Markdown fence around it is allowed.
    JsonFormat,
    /// The response has at least `count` matches of `heading`, such as `Section 1`.
    Sections { heading: Regex, count: u64 },
    /// The response has exactly this many Markdown bullets.
    Bullets(u64),
    /// The response has at least this many `*highlighted*` parts.
    Highlights(u64),
    /// The response has a title in `<<double angular brackets>>`.
    Title,
    /// All of these keywords occur.
    Keywords(Vec<Regex>),
    /// None of these keywords occurs as a word.
    ForbiddenWords(Vec<Regex>),
    /// The number of occurrences of a keyword is within a bound.
    KeywordFrequency { keyword: Regex, bound: Bound },
    /// The number of occurrences of a letter, upper or lower case, is within a bound. `letter` is in lower
    /// case.
    LetterFrequency { letter: char, bound: Bound },
    /// The whole response is in this language.
    Language(&'static str),
    /// The response has `paragraphs` paragraphs, separated by blank lines. Paragraph `nth` (from 1) starts
    /// with `first_word`.
    NthParagraphFirstWord { paragraphs: u64, nth: u64, first_word: String },
    /// The response has this many paragraphs, separated by `***`.
    Paragraphs(u64),
    /// The number of sentences is within a bound.
    Sentences(Bound),
    /// The number of words is within a bound.
    Words(Bound),
    /// The response has no comma.
    NoComma,
    /// The response ends with this lower-cased phrase. Its case in the response does not matter.
    EndPhrase(String),
    /// The whole response is between double quotation marks.
    Quotation,
}

impl Instruction {
    /// Parses instruction `id` with its `kwargs`, an object or null.
    ///
    /// # Errors
    /// `BadInput` with the id, the kwarg and the remedy.
    pub fn parse(id: &str, kwargs: &Value) -> Result<Self> {
        let read = |keys: &[&str]| Kwargs::new(id, kwargs, keys);
        let bare = |instruction| read(&[]).map(|_| instruction);
        let bound = |k: &Kwargs, relation, count| {
            anyhow::Ok(Bound { relation: k.relation(relation)?, count: k.count(count, 0)? })
        };
        Ok(match id {
            "change_case:capital_word_frequency" => {
                let k = read(&["capital_frequency", "capital_relation"])?;
                Self::CapitalWords(bound(&k, "capital_relation", "capital_frequency")?)
            }
            "change_case:english_capital" => bare(Self::EnglishCapital)?,
            "change_case:english_lowercase" => bare(Self::EnglishLowercase)?,
            "combination:repeat_prompt" => {
                let prompt = read(&["prompt_to_repeat"])?.text("prompt_to_repeat")?;
                Self::RepeatPrompt(python::strip(prompt).to_lowercase())
            }
            "combination:two_responses" => bare(Self::TwoResponses)?,
            "detectable_content:number_placeholders" => {
                Self::Placeholders(read(&["num_placeholders"])?.count("num_placeholders", 0)?)
            }
            "detectable_content:postscript" => {
                Self::Postscript(postscript(read(&["postscript_marker"])?.text("postscript_marker")?))
            }
            "detectable_format:constrained_response" => bare(Self::ConstrainedResponse)?,
            "detectable_format:json_format" => bare(Self::JsonFormat)?,
            "detectable_format:multiple_sections" => {
                let k = read(&["section_spliter", "num_sections"])?;
                let splitter = python::strip(k.text("section_spliter")?);
                Self::Sections {
                    heading: pattern::compile_keyword(r"\s?", splitter, r"\s?\d+\s?", false),
                    count: k.count("num_sections", 0)?,
                }
            }
            "detectable_format:number_bullet_lists" => {
                Self::Bullets(read(&["num_bullets"])?.count("num_bullets", 0)?)
            }
            "detectable_format:number_highlighted_sections" => {
                Self::Highlights(read(&["num_highlights"])?.count("num_highlights", 0)?)
            }
            "detectable_format:title" => bare(Self::Title)?,
            "keywords:existence" => {
                let keywords = read(&["keywords"])?.texts("keywords")?;
                Self::Keywords(keywords.iter().map(|k| pattern::compile_keyword("", k, "", true)).collect())
            }
            "keywords:forbidden_words" => {
                let words = read(&["forbidden_words"])?.texts("forbidden_words")?;
                Self::ForbiddenWords(
                    words.iter().map(|w| pattern::compile_keyword(r"\b", w, r"\b", true)).collect(),
                )
            }
            "keywords:frequency" => {
                let k = read(&["keyword", "frequency", "relation"])?;
                let keyword = pattern::compile_keyword("", python::strip(k.text("keyword")?), "", true);
                Self::KeywordFrequency { keyword, bound: bound(&k, "relation", "frequency")? }
            }
            "keywords:letter_frequency" => {
                let k = read(&["letter", "let_frequency", "let_relation"])?;
                let letter = k.character("letter")?;
                Self::LetterFrequency { letter, bound: bound(&k, "let_relation", "let_frequency")? }
            }
            "language:response_language" => Self::Language(read(&["language"])?.language("language")?),
            "length_constraints:nth_paragraph_first_word" => nth_paragraph(id, kwargs)?,
            "length_constraints:number_paragraphs" => {
                Self::Paragraphs(read(&["num_paragraphs"])?.count("num_paragraphs", 0)?)
            }
            "length_constraints:number_sentences" => {
                Self::Sentences(bound(&read(&["num_sentences", "relation"])?, "relation", "num_sentences")?)
            }
            "length_constraints:number_words" => {
                Self::Words(bound(&read(&["num_words", "relation"])?, "relation", "num_words")?)
            }
            "punctuation:no_comma" => bare(Self::NoComma)?,
            "startend:end_checker" => {
                let phrase = read(&["end_phrase"])?.text("end_phrase")?;
                Self::EndPhrase(python::strip(phrase).to_lowercase())
            }
            "startend:quotation" => bare(Self::Quotation)?,
            _ => return Err(unknown_id_error(id)),
        })
    }
}

/// Returns the pattern of a postscript. Two markers have a pattern of their own; any other marker is itself
/// the pattern, as in the reference.
fn postscript(marker: &str) -> Regex {
    match python::strip(marker) {
        "P.P.S" => pattern::compile_pattern(r"p\.\s?p\.\s?s"),
        "P.S." => pattern::compile_pattern(r"p\.\s?s\."),
        other => pattern::compile_keyword("", &other.to_lowercase(), "", false),
    }
}

fn nth_paragraph(id: &str, kwargs: &Value) -> Result<Instruction> {
    let k = Kwargs::new(id, kwargs, &["num_paragraphs", "nth_paragraph", "first_word"])?;
    let (paragraphs, nth) = (k.count("num_paragraphs", 1)?, k.count("nth_paragraph", 1)?);
    if nth > paragraphs {
        return Err(bad_input!(
            "{id}: kwarg `nth_paragraph` is {nth}; give at most `num_paragraphs`, {paragraphs}"
        ));
    }
    Ok(Instruction::NthParagraphFirstWord {
        paragraphs,
        nth,
        first_word: k.text("first_word")?.to_lowercase(),
    })
}

fn unknown_id_error(id: &str) -> anyhow::Error {
    let nearest = IDS.split(' ').min_by_key(|known| strsim::levenshtein(known, id)).unwrap_or(IDS);
    bad_input!(
        "unknown instruction id `{id}`; the most similar of the {} known ids is `{nearest}`",
        IDS.split(' ').count()
    )
}
