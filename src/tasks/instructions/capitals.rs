//! Words in capitals, counted over Penn Treebank tokens as in the reference implementation.

use super::{pattern::compile_pattern, python::is_upper, sentences::split_sentences};
use regex::Regex;
use std::sync::LazyLock;

/// The Treebank rules that separate capital words, in order. Each is a pattern and its replacement, applied
/// to one sentence with a space at each end. Rules that only rename punctuation are omitted.
static STEPS: LazyLock<Vec<(Regex, &str)>> = LazyLock::new(|| {
    [
        // A quote before a lone letter is not part of the letter.
        (r"(?i)'([\w&&[^mtsdn]])\b", "' $1"),
        // The sentence's last period.
        (r#"([^.])\.([\])}>"'»”’ ]*)\s*$"#, "$1 . $2 "),
        (r"([:,])([^0-9]|$)", " $1 $2"),
        (r#"\.{2,}|--|''|[«“‘„`»”’";@#$%&?!*\[\](){}<>]"#, " $0 "),
        (r"([^'])' ", "$1 ' "),
        // Clitics, and the quote that closes a word.
        (r"([^' ])('[sSmMdD]|') ", "$1 $2 "),
        (r"([^' ])('ll|'LL|'re|'RE|'ve|'VE|n't|N'T) ", "$1 $2 "),
        // Two words written as one.
        (r"(?i)\b(can)(not)\b", "$1 $2"),
        (r"(?i)\b(d)('ye)\b", "$1 $2"),
        (r"(?i)\b(gim|lem)(me)\b", "$1 $2"),
        (r"(?i)\b(gon)(na)\b", "$1 $2"),
        (r"(?i)\b(got)(ta)\b", "$1 $2"),
        (r"(?i)\b(more)('n)\b", "$1 $2"),
        (r"(?i)\b(wan)(na)(\s)", "$1 $2$3"),
        (r"(?i) ('t)(is|was)\b", " $1 $2"),
    ]
    .map(|(pattern, replacement)| (compile_pattern(pattern), replacement))
    .into()
});

/// Counts the words of `text` in which all letters are capitals. A hyphenated word is one word.
pub(super) fn count_capital_words(text: &str) -> u64 {
    split_sentences(text)
        .into_iter()
        .map(|sentence| tokens(sentence).split_whitespace().filter(|t| is_upper(t)).count() as u64)
        .sum()
}

/// Returns `sentence` with spaces between its tokens.
fn tokens(sentence: &str) -> String {
    STEPS.iter().fold(format!(" {sentence} "), |text, (pattern, replacement)| {
        pattern.replace_all(&text, *replacement).into_owned()
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn capital_words_are_treebank_tokens() {
        // The expected counts are those of NLTK 3.8.1.
        for (text, count) in [
            ("HELLO world. THE END.", 3),
            ("I CAN'T. It's NASA'S U.S. plan", 6),
            ("ALL-CAPS one, A/B two; (YES) *NO*", 4),
            ("CANNOT, GONNA: 'TIS", 6),
            ("lower Case 123", 0),
        ] {
            assert_eq!(count_capital_words(text), count, "{text}: {}", tokens(text));
        }
    }
}
