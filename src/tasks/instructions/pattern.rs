//! Regular expressions from data rows and from this crate.

use regex::{Regex, RegexBuilder};

/// A pattern written in this crate.
///
/// # Panics
/// When it does not compile, which the tests of its user would show.
#[expect(clippy::expect_used, reason = "the source is a constant of this crate")]
pub(super) fn constant(source: &str) -> Regex {
    Regex::new(source).expect("a constant pattern")
}

/// A row's keyword between two fixed pieces, without regard to case when `fold_case`.
///
/// As in the reference a keyword **is** a regular expression (`P.S.` also matches `P-S,`). One that does
/// not compile, such as `f(x`, stands for its own text, where the reference would fail on the row.
pub(super) fn keyword(before: &str, keyword: &str, after: &str, fold_case: bool) -> Regex {
    let build = |middle: &str| {
        RegexBuilder::new(&format!("{before}{middle}{after}")).case_insensitive(fold_case).build()
    };
    build(keyword).or_else(|_| build(&regex::escape(keyword))).unwrap_or_else(|_| constant(r"[^\s\S]")) // Longer than the engine's size limit: found nowhere.
}

#[cfg(test)]
mod tests {
    use super::keyword;

    #[test]
    fn a_keyword_is_a_pattern_or_else_its_own_text() {
        assert!(keyword("", "colou?r", "", true).is_match("COLOR"));
        assert!(keyword("", "f(x", "", true).is_match("so F(X) is"));
        assert!(keyword("", "{name}", "", true).is_match("dear {name}"));
        assert!(!keyword(r"\b", "cat", r"\b", true).is_match("concatenate"));
        assert!(!keyword("", "Section", "", false).is_match("section"));
        assert!(!keyword("", &"a".repeat(1_000_000), "", false).is_match("a"));
    }
}
