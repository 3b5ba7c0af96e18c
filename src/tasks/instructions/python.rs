//! Python's string functions that IFEval's reference implementation uses and that differ from Rust's.

use regex::Regex;
use std::sync::LazyLock;

/// `str.isspace` of one character: whether it is Unicode white space or one of the four ASCII separators.
pub(super) fn is_space(c: char) -> bool {
    c.is_whitespace() || ('\u{1c}'..='\u{1f}').contains(&c)
}

/// `str.strip()`.
pub(super) fn strip(text: &str) -> &str {
    text.trim_matches(is_space)
}

/// `str.isupper()`: whether there is a cased character, and none of them is lower case or title case.
pub(super) fn is_upper(text: &str) -> bool {
    text.chars().any(char::is_uppercase) && !text.chars().any(|c| c.is_lowercase() || is_title(c))
}

/// `str.islower()`: whether there is a cased character, and none of them is upper case or title case.
pub(super) fn is_lower(text: &str) -> bool {
    text.chars().any(char::is_lowercase) && !text.chars().any(|c| c.is_uppercase() || is_title(c))
}

/// Returns whether `c` is a title-case digraph such as `ǅ`: neither upper nor lower case, and changed by both
/// mappings.
fn is_title(c: char) -> bool {
    !c.is_uppercase()
        && !c.is_lowercase()
        && c.to_lowercase().next() != Some(c)
        && c.to_uppercase().next() != Some(c)
}

/// Counts the matches of Python's `\w+`: letters, numbers and `_`. In Python a combining mark ends a word,
/// unlike in the `regex` crate, so scripts with vowel signs have more words.
pub(super) fn count_words(text: &str) -> u64 {
    static WORD: LazyLock<Regex> = LazyLock::new(|| super::pattern::compile_pattern(r"[\p{L}\p{N}_]+"));
    WORD.find_iter(text).count() as u64
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn case_and_words_are_pythons() {
        assert!(is_upper("A1!") && !is_upper("Aa") && !is_upper("1!") && !is_upper(""));
        assert!(is_lower("a1!") && !is_lower("aA") && !is_lower("1!"));
        assert!(!is_upper("Aǅ") && !is_lower("aǅ"));
        // The expected values are those of CPython 3.11's `len(re.findall(r"\w+", text))`.
        for (text, words) in [("it's 1.5x_y ½", 5), ("हिन्दी", 3), ("日本語 です", 2), ("", 0)]
        {
            assert_eq!(count_words(text), words, "{text}");
        }
    }
}
