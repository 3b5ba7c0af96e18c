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
    /// The format of the whole response.
    Shape,
}

/// The language that a kind requires.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum LanguageRule {
    Any,
    /// English, because the kind refers to English words or to a script with upper and lower case.
    English,
    /// A language other than English.
    Other,
}

/// A kind of instruction.
pub(super) struct Kind {
    pub(super) id: &'static str,
    language: LanguageRule,
    claims: &'static [Aspect],
}

impl Kind {
    /// Returns whether one response can follow both kinds with any arguments. A kind is not compatible with
    /// itself.
    pub(super) fn is_compatible(&self, other: &Kind) -> bool {
        let tongues = [self.language, other.language];
        let languages_clash =
            tongues.contains(&LanguageRule::Other) && tongues.contains(&LanguageRule::English);
        self.id != other.id
            && !languages_clash
            && !self.claims.iter().any(|claim| other.claims.contains(claim))
    }
}

const fn kind(id: &'static str, language: LanguageRule, claims: &'static [Aspect]) -> Kind {
    Kind { id, language, claims }
}

use Aspect::{Bullets, Case, Commas, End, Length, Paragraphs, Shape, Start, Wording};
use LanguageRule::{Any, English, Other};

/// All kinds that can be drawn.
pub(super) const KINDS: [Kind; 24] = [
    kind("change_case:capital_word_frequency", English, &[Case]),
    kind("change_case:english_capital", English, &[Case]),
    kind("change_case:english_lowercase", English, &[Case]),
    // The response repeats the question's words, commas and layout.
    kind(
        "combination:repeat_prompt",
        English,
        &[Start, Case, Wording, Length, Paragraphs, Bullets, Commas, Shape],
    ),
    kind("combination:two_responses", Any, &[Shape, Paragraphs]),
    kind("detectable_content:number_placeholders", Any, &[]),
    kind("detectable_content:postscript", Any, &[End]),
    kind("detectable_format:json_format", Any, &[Shape, Start, End, Paragraphs, Bullets, Commas]),
    // The heading is an English word with a fixed case.
    kind("detectable_format:multiple_sections", English, &[Shape, Case]),
    kind("detectable_format:number_bullet_lists", Any, &[Bullets]),
    kind("detectable_format:number_highlighted_sections", Any, &[]),
    kind("detectable_format:title", Any, &[]),
    kind("keywords:existence", English, &[Wording]),
    kind("keywords:forbidden_words", English, &[Wording]),
    kind("keywords:frequency", English, &[Wording]),
    kind("keywords:letter_frequency", English, &[Wording]),
    kind("language:response_language", Other, &[]),
    kind("length_constraints:nth_paragraph_first_word", English, &[Paragraphs, Wording, Start]),
    kind("length_constraints:number_paragraphs", Any, &[Paragraphs]),
    // Sentences and words are counted by English conventions.
    kind("length_constraints:number_sentences", English, &[Length]),
    kind("length_constraints:number_words", English, &[Length]),
    kind("punctuation:no_comma", Any, &[Commas]),
    kind("startend:end_checker", English, &[End]),
    kind("startend:quotation", Any, &[Start, End]),
];

#[cfg(test)]
mod tests {
    use super::*;
    use crate::tasks::instructions::IDS;

    #[test]
    fn every_id_but_one_is_drawn() {
        let absent: Vec<_> = IDS.split(' ').filter(|id| !KINDS.iter().any(|kind| kind.id == *id)).collect();
        assert_eq!(absent, ["detectable_format:constrained_response"]);
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
            assert!(!find(a).is_compatible(find(b)) && !find(b).is_compatible(find(a)), "{a} and {b}");
        }
        assert!(find("english_lowercase").is_compatible(find("existence")));
        assert!(find("response_language").is_compatible(find("title")));
    }
}
