//! Regular expressions from data rows and from this crate.

use regex::{Regex, RegexBuilder};

/// Compiles a pattern that is a constant of this crate.
///
/// # Panics
/// If the pattern is invalid, which the tests of its caller detect.
#[expect(clippy::expect_used, reason = "the source is a constant of this crate")]
pub(super) fn compile_pattern(source: &str) -> Regex {
    Regex::new(source).expect("a constant pattern")
}

/// Compiles a row's keyword between two fixed parts. `fold_case`: whether to ignore case.
///
/// As in IFEval's reference implementation, a keyword **is** a regular expression (`P.S.` also matches
/// `P-S,`). A keyword that is not a valid expression, such as `f(x`, is matched literally; the reference
/// implementation would fail on the row.
pub(super) fn compile_keyword(before: &str, keyword: &str, after: &str, fold_case: bool) -> Regex {
    let build = |middle: &str| {
        RegexBuilder::new(&format!("{before}{middle}{after}")).case_insensitive(fold_case).build()
    };
    build(keyword).or_else(|_| build(&regex::escape(keyword))).unwrap_or_else(|_| compile_pattern(r"[^\s\S]")) // Over the engine's size limit: matches nothing.
}

#[cfg(test)]
mod tests {
    use super::compile_keyword;

    #[test]
    fn a_keyword_is_a_pattern_or_else_its_own_text() {
        assert!(compile_keyword("", "colou?r", "", true).is_match("COLOR"));
        assert!(compile_keyword("", "f(x", "", true).is_match("so F(X) is"));
        assert!(compile_keyword("", "{name}", "", true).is_match("dear {name}"));
        assert!(!compile_keyword(r"\b", "cat", r"\b", true).is_match("concatenate"));
        assert!(!compile_keyword("", "Section", "", false).is_match("section"));
        assert!(!compile_keyword("", &"a".repeat(1_000_000), "", false).is_match("a"));
    }
}
