//! The kinds of drawn instructions, and their compatibility.

/// An aspect of the response that at most one instruction may determine.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Aspect {
    Start,
    End,
    /// Upper and lower case.
    Case,
    /// Words and letters, and their frequencies.
    Wording,
    /// Sentences and words.
    Length,
    /// Blank lines and dividers.
    Paragraphs,
    Bullets,
    Commas,
    /// The form of the whole response.
    Shape,
}

/// Language requirement of a kind.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Tongue {
    Any,
    /// Refers to English words or to a script with upper and lower case.
    English,
    /// Requires another language.
    Other,
}

/// The form of the wording and the arguments.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Form {
    CapitalWords,
    EnglishCapital,
    EnglishLowercase,
    RepeatPrompt,
    TwoResponses,
    Placeholders,
    Postscript,
    JsonFormat,
    Sections,
    Bullets,
    Highlights,
    Title,
    Keywords,
    ForbiddenWords,
    KeywordFrequency,
    LetterFrequency,
    Language,
    NthParagraphFirstWord,
    Paragraphs,
    Sentences,
    Words,
    NoComma,
    EndPhrase,
    Quotation,
}

/// A kind of instruction.
pub(super) struct Kind {
    pub(super) id: &'static str,
    pub(super) form: Form,
    tongue: Tongue,
    claims: &'static [Aspect],
}

impl Kind {
    /// Returns true when one response can follow both kinds, whatever their arguments. A kind does not fit
    /// itself.
    pub(super) fn fits(&self, other: &Kind) -> bool {
        let tongues = [self.tongue, other.tongue];
        let languages_clash = tongues.contains(&Tongue::Other) && tongues.contains(&Tongue::English);
        self.id != other.id
            && !languages_clash
            && !self.claims.iter().any(|claim| other.claims.contains(claim))
    }
}

const fn kind(id: &'static str, form: Form, tongue: Tongue, claims: &'static [Aspect]) -> Kind {
    Kind { id, form, tongue, claims }
}

use Aspect::{Bullets, Case, Commas, End, Length, Paragraphs, Shape, Start, Wording};
use Tongue::{Any, English, Other};

/// All kinds that can be drawn.
pub(super) const KINDS: [Kind; 24] = [
    kind("change_case:capital_word_frequency", Form::CapitalWords, English, &[Case]),
    kind("change_case:english_capital", Form::EnglishCapital, English, &[Case]),
    kind("change_case:english_lowercase", Form::EnglishLowercase, English, &[Case]),
    // The question's own words, commas and layout are part of the response.
    kind(
        "combination:repeat_prompt",
        Form::RepeatPrompt,
        English,
        &[Start, Case, Wording, Length, Paragraphs, Bullets, Commas, Shape],
    ),
    kind("combination:two_responses", Form::TwoResponses, Any, &[Shape, Paragraphs]),
    kind("detectable_content:number_placeholders", Form::Placeholders, Any, &[]),
    kind("detectable_content:postscript", Form::Postscript, Any, &[End]),
    kind(
        "detectable_format:json_format",
        Form::JsonFormat,
        Any,
        &[Shape, Start, End, Paragraphs, Bullets, Commas],
    ),
    // The heading is an English word whose case matters.
    kind("detectable_format:multiple_sections", Form::Sections, English, &[Shape, Case]),
    kind("detectable_format:number_bullet_lists", Form::Bullets, Any, &[Bullets]),
    kind("detectable_format:number_highlighted_sections", Form::Highlights, Any, &[]),
    kind("detectable_format:title", Form::Title, Any, &[]),
    kind("keywords:existence", Form::Keywords, English, &[Wording]),
    kind("keywords:forbidden_words", Form::ForbiddenWords, English, &[Wording]),
    kind("keywords:frequency", Form::KeywordFrequency, English, &[Wording]),
    kind("keywords:letter_frequency", Form::LetterFrequency, English, &[Wording]),
    kind("language:response_language", Form::Language, Other, &[]),
    kind(
        "length_constraints:nth_paragraph_first_word",
        Form::NthParagraphFirstWord,
        English,
        &[Paragraphs, Wording, Start],
    ),
    kind("length_constraints:number_paragraphs", Form::Paragraphs, Any, &[Paragraphs]),
    // Sentences and words are counted by English conventions.
    kind("length_constraints:number_sentences", Form::Sentences, English, &[Length]),
    kind("length_constraints:number_words", Form::Words, English, &[Length]),
    kind("punctuation:no_comma", Form::NoComma, Any, &[Commas]),
    kind("startend:end_checker", Form::EndPhrase, English, &[End]),
    kind("startend:quotation", Form::Quotation, Any, &[Start, End]),
];

#[cfg(test)]
mod tests {
    use super::*;
    use crate::tasks::instructions::IDS;

    #[test]
    fn every_id_but_one_is_drawn() {
        let absent: Vec<_> = IDS.iter().filter(|id| !KINDS.iter().any(|kind| kind.id == **id)).collect();
        assert_eq!(absent, [&"detectable_format:constrained_response"]);
    }

    #[test]
    fn known_conflicts_are_refused_both_ways() {
        let find = |id: &str| KINDS.iter().find(|kind| kind.id.ends_with(id)).unwrap();
        for (a, b) in [
            ("english_lowercase", "capital_word_frequency"),
            ("english_lowercase", "multiple_sections"),
            ("json_format", "quotation"),
            ("repeat_prompt", "no_comma"),
            ("existence", "forbidden_words"),
            ("response_language", "english_capital"),
            ("response_language", "end_checker"),
            ("number_paragraphs", "nth_paragraph_first_word"),
            ("title", "title"),
        ] {
            assert!(!find(a).fits(find(b)) && !find(b).fits(find(a)), "{a} and {b}");
        }
        assert!(find("english_lowercase").fits(find("existence")));
        assert!(find("response_language").fits(find("title")));
    }
}
