//! Comparison of answers: as strings, or as mathematics.
//!
//! An answer is cleaned, parsed into a tree, and compared by structure (lists, tuples, intervals, sets,
//! relations, matrices) and by value. Rational values are compared exactly, other values at pseudo-random
//! points. Text is only parsed, never executed. Length, depth and the size of numbers are bounded, so no
//! answer can block the grader. Existing LaTeX parsers reject common model output (units, words, `\frac12`,
//! lists), so this project has its own.

mod compare;
mod evaluate;
mod exact;
mod expr;
mod normalise;
mod parse;
mod sets;

pub use exact::canonical_text;
pub use normalise::latex_of;

use super::boxed_answer;
use crate::settings::choice;
use expr::Expr;
use num_rational::BigRational;

/// Maximum size of a parsed answer, in bytes. Longer answers are only compared as strings.
pub const ANSWER_BYTES_MAX: usize = 4_000;

choice! {
    /// How answers are compared.
    pub enum AnswerEquality default Exact {
        /// As strings, after the clean-up of MATH; decimals as numbers. This is the published grading.
        Exact = "exact",
        /// As mathematics: 1/2, 0.5 and \frac{1}{2} are equal.
        Equivalent = "equivalent",
    }
}

impl AnswerEquality {
    /// Returns whether `answer` equals `reference`. Both are bare answers, such as the content of `\boxed{}`.
    pub fn matches(self, reference: &str, answer: &str) -> bool {
        let (reference, answer) = (without_box(reference), without_box(answer));
        match self {
            AnswerEquality::Exact => canonical_text(reference) == canonical_text(answer),
            AnswerEquality::Equivalent => is_equivalent(reference, answer, &ComparisonOptions::default()),
        }
    }

    /// Returns why right answers cannot equal `reference`; `None` if the grader can read it. Words are
    /// compared as texts by both ways, so they can be read.
    pub fn refusal(self, reference: &str) -> Option<&'static str> {
        let reference = without_box(reference);
        let (plain, cleaned) = (normalise::strip_markup(reference), normalise::normalise(reference));
        let boxed = format!("\\boxed{{{reference}}}");
        if boxed_answer::find_last_boxed(&boxed) != Some((0, reference)) {
            Some("does not fit into \\boxed{}: match its braces, put no box inside, at most 4,000 bytes")
        } else if plain.is_empty() || canonical_text(reference).is_empty() {
            Some("has no value")
        } else if NO_ANSWERS.iter().any(|text| plain.eq_ignore_ascii_case(text)) {
            Some("says that there is no answer")
        } else if self == AnswerEquality::Exact {
            None
        } else {
            let parsed: Vec<_> = parse::READINGS.iter().filter_map(|&r| parse::parse(&cleaned, r)).collect();
            let words = parsed.is_empty() && !plain.contains(['\\', '^', '_', '=', '<', '>', '|', '{', '}']);
            let read = |expr: &Expr| compare::is_same_answer(expr, expr, &ComparisonOptions::default());
            let is_read = words || parsed.iter().any(read);
            (!is_read).then_some("is not understood; write it in another way, or set task.answer = \"exact\"")
        }
    }
}

/// Texts that data sets have in place of an answer, without white space.
const NO_ANSWERS: [&str; 3] = ["nan", "notfound", "[INVALID]"];

/// Returns the content of a `\boxed{}` that is the whole text.
fn without_box(text: &str) -> &str {
    let inner = text.trim().trim_matches('$').trim();
    match boxed_answer::find_last_boxed(inner) {
        Some((0, content)) if inner.ends_with(&format!("{content}}}")) => content,
        _ => text,
    }
}

/// Returns the rational numbers of `text`, if it is one number or a list of numbers. A percentage counts as
/// its number, and an equation as the value that it gives.
pub fn rational_values(text: &str) -> Option<Vec<BigRational>> {
    if text.len() > ANSWER_BYTES_MAX {
        return None;
    }
    let expr = parse::parse(&normalise::normalise(text), parse::READINGS[0])?;
    let expr = compare::value_of(&expr).unwrap_or(expr);
    let number = |expr: &Expr| match expr {
        Expr::Percent(number) => evaluate::rational_value(number),
        number => evaluate::rational_value(number),
    };
    match &expr {
        Expr::List(items) | Expr::Set(items) | Expr::Tuple(_, items, _) => items.iter().map(number).collect(),
        one => number(one).map(|value| vec![value]),
    }
}

/// Options of [`is_equivalent`].
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct ComparisonOptions {
    /// Number of decimals that are compared if a number has a decimal point.
    pub decimals: u32,
    /// Whether the answer `2 < x < 5` is accepted for the reference `(2, 5)`. The answer `(2, 5)` is always
    /// accepted for the reference `2 < x < 5`.
    pub relation_for_set: bool,
}

impl Default for ComparisonOptions {
    fn default() -> Self {
        Self { decimals: 6, relation_for_set: false }
    }
}

/// Returns whether two bare answers are mathematically equal.
pub fn is_equivalent(reference: &str, answer: &str, options: &ComparisonOptions) -> bool {
    if reference.len().max(answer.len()) > ANSWER_BYTES_MAX {
        return reference.trim() == answer.trim();
    }
    let plain = normalise::strip_markup(reference);
    if !plain.is_empty() && plain == normalise::strip_markup(answer) {
        return true;
    }
    let (reference, answer) = (normalise::normalise(reference), normalise::normalise(answer));
    // Each reading is tried for both answers.
    parse::READINGS.into_iter().any(|reading| {
        match (parse::parse(&reference, reading), parse::parse(&answer, reading)) {
            (Some(reference), Some(answer)) => compare::is_same_answer(&reference, &answer, options),
            _ => false,
        }
    })
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::random::{Purpose, stream};
    use rand::Rng;
    use rand::seq::IndexedRandom;

    fn equal(reference: &str, answer: &str) -> bool {
        is_equivalent(reference, answer, &ComparisonOptions::default())
    }

    #[test]
    fn different_spellings_of_one_answer_are_equal() {
        for (reference, answer) in [
            ("1/2", "\\frac12"),
            ("2\\sqrt{13}", "2√13"),
            ("\\sqrt{10}", "√10"),
            ("\\sqrt{3}", "√3"),
            ("\\sqrt{x}", "√x"),
            ("-3", "\u{2011}3"),
            ("0.5", "\\dfrac{1}{2}"),
            ("1\\frac{1}{2}", "\\frac{3}{2}"),
            ("1 1/2", "3/2"),
            ("2(1/2)", "1"),
            ("0.\\overline{3}", "1/3"),
            ("12,345", "12345"),
            ("12{,}345", "12\\,345"),
            ("(1,234)", "(1, 234)"),
            ("2\\sqrt{2}", "\\sqrt{8}"),
            ("\\frac{1}{\\sqrt{2}}", "\\frac{\\sqrt{2}}{2}"),
            ("x^2+2x+1", "(x+1)^2"),
            ("\\sin 2x", "2\\sin x\\cos x"),
            ("\\log_2 8", "3"),
            ("\\binom{5}{2}", "10"),
            ("5!", "120"),
            ("2^{100}", "1267650600228229401496703205376"),
            ("\\lfloor 3.7 \\rfloor", "3"),
            ("|{-3}|", "3"),
            ("\\sqrt[3]{-8}", "-2"),
            ("3+4i", "4i+3"),
            ("\\{1,2,3\\}", "\\{3,2,1\\}"),
            ("1 \\pm \\sqrt{2}", "1-\\sqrt2, 1+\\sqrt2"),
            ("(-\\infty, 3] \\cup (5, \\infty)", "(5,+\\infty)\\cup(-\\infty,3]"),
            ("x \\le 3", "3 \\ge x"),
            ("2x - 4y = 6", "x - 2y = 3"),
            ("y = 2x + 1", "2x + 1"),
            ("|x| < 3", "(-3, 3)"),
            ("1 \\le |x| < 2", "(-2, -1] \\cup [1, 2)"),
            ("x \\in [1,2]", "[1,2]"),
            ("50\\%", "0.5"),
            ("15\\text{ cm}^2", "15"),
            ("\\$12.50", "12.5"),
            ("90^\\circ", "90"),
            ("\\text{Monday}", "monday"),
            ("(\\text{C})", "C"),
            ("\\begin{pmatrix} 1 & 2 \\\\ 3 & 4 \\end{pmatrix}", "\\begin{bmatrix}1&2\\\\3&4\\end{bmatrix}"),
            ("3:4", "6:8"),
            ("f(x) = x+1", "1+x"),
            ("10^{100}", "10^{99} \\cdot 10"),
            ("2**10", "1024"),
            ("π/2", "\\frac{\\pi}{2}"),
        ] {
            assert!(equal(reference, answer), "{reference} = {answer}");
            // An inequality is not accepted if the question asks for the set.
            assert!(equal(answer, reference) || reference.contains(['<', '|']), "{answer} = {reference}");
        }
    }

    #[test]
    fn different_answers_are_not_equal() {
        for (reference, answer) in [
            ("1/2", "1/3"),
            ("1/3", "0.33"),
            ("0", "0.0000001"),
            ("6.63 \\times 10^{-34}", "1.6 \\times 10^{-19}"),
            ("6.63 \\times 10^{-34}", "0"),
            ("116", "m + n = 115"),
            ("116", "m + n > 116"),
            ("y + z = 5", "x + y = 5"),
            ("12345678901234567890", "12345678901234567891"),
            ("2^{1000}", "2^{1000}+1"),
            ("2^{2008}-2", "0.6"),
            ("2^{3000}", "2^{3001}"),
            ("\\sqrt{2}", "1.41"),
            ("\\sqrt{x^2}", "x"),
            ("x+1", "y+1"),
            ("(1,2)", "(2,1)"),
            ("(1,2)", "[1,2]"),
            ("[1,2]", "[1,2)"),
            ("1,2", "1,2,3"),
            ("1,2,3", "1,2"),
            ("1,2", "12"),
            ("\\{1,2\\}", "(1,2)"),
            ("x < 3", "x > 3"),
            ("|x| < 3", "(-\\infty, 3)"),
            ("(-3, 3)", "-3 < x < 3"),
            ("x < 3", "x \\le 3"),
            ("x = 3", "x = 4"),
            ("x = 1, y = 2", "x = 2, y = 1"),
            ("\\pm 3", "3"),
            ("12:00", "1:00"),
            ("\\text{Monday}", "\\text{Tuesday}"),
            ("A", "B"),
            ("5", ""),
            ("5", "five?"),
            ("5", "x"),
            ("5", "5x"),
            ("5", "1 5"),
            ("5", "1 5 5"),
            ("2 m", "2 n"),
            ("5", "0/0"),
            ("5", "1/0"),
            ("0", "1/0"),
            ("101_2", "101_3"),
            ("\\infty", "-\\infty"),
            ("\\begin{pmatrix}1\\\\2\\end{pmatrix}", "\\begin{pmatrix}1&2\\end{pmatrix}"),
            ("x^2 = 4", "4"),
            ("1 = 1", "2 = 2x"),
        ] {
            assert!(!equal(reference, answer), "{reference} ≠ {answer}");
        }
    }

    #[test]
    fn bug_an_equation_with_a_sum_on_its_left_gives_its_result() {
        assert!(equal("116", "m + n = 116") && equal("116", "m + n = 100 + 16 = 116"));
        assert!(equal("117", "AB^2 = 117") && equal("\\frac12", "\\sin A = \\frac{1}{2}"));
        assert!(equal("6.63 \\times 10^{-34}", "6.63 \\cdot 10^{-34}") && equal("0", "\\sin \\pi"));
    }

    #[test]
    fn exact_unifies_spelling_but_not_value() {
        let exact = |reference, answer| AnswerEquality::Exact.matches(reference, answer);
        assert!(exact("\\frac{1}{2}", "\\dfrac12"));
        assert!(exact("\\frac{\\sqrt{3}}{2}", "\\frac{\\sqrt3}2"));
        assert!(exact("34", " 34 "));
        assert!(!exact("1/2", "2/4"));
        assert!(exact("34", "34.0") && !exact("34", "34.01"));
        assert!(!exact("5\\text{ or }6", "5"));
    }

    /// Answers whose computation would never end, or would overflow the stack.
    #[test]
    fn hostile_answers_end_as_unequal() {
        let towers =
            ["10^{10^{10^{10}}}", "9^{9^{9^{9}}}", "(10^{10^8})!", "\\binom{10^9}{10^8}", "2^{-99999999}"];
        let towers = towers.map(String::from);
        let open = [
            "(",
            "{",
            "\\frac{",
            "\\sqrt{",
            "|",
            "x^{",
            "-",
            "\\{",
            "[",
            "\\left(",
            "2**",
            "\\sin ",
            "\\begin{pmatrix}",
        ];
        let deep = open.map(|open| open.repeat(3_900 / open.len()));
        let closed = [
            format!("{}1{}", "(".repeat(1_900), ")".repeat(1_900)),
            "1+".repeat(1_900) + "1",
            "x!".repeat(1_900),
        ];
        let pairs =
            ["2^{16000}".repeat(400), vec!["2^{9999}+3^{9999}"; 200].join(","), "\\boxed{".repeat(500)];
        for answer in towers.iter().chain(&deep).chain(&closed).chain(&pairs) {
            assert!(!equal("7", answer), "{answer:.40}");
            assert!(!equal(&format!("1, {answer}"), "1, 7"), "{answer:.40}");
            AnswerEquality::Exact.matches("7", answer);
        }
    }

    /// Fragments of answers, complete and incomplete.
    const PIECES: [&str; 74] = [
        "1",
        "23",
        "4.5",
        ",",
        ";",
        ".",
        ":",
        "x",
        "y",
        "AB",
        "e",
        "i",
        "+",
        "-",
        "*",
        "/",
        "=",
        "<",
        ">=",
        "!=",
        "^",
        "_",
        "!",
        "%",
        "'",
        "(",
        ")",
        "[",
        "]",
        "{",
        "}",
        "\\{",
        "\\}",
        "|",
        "\\frac",
        "\\sqrt",
        "\\sqrt[",
        "\\pm",
        "\\in",
        "\\cup",
        "\\cdot",
        "\\text{",
        "\\text{ and }",
        "\\left",
        "\\right",
        "\\pi",
        "\\infty",
        "\\begin{pmatrix}",
        "\\end{pmatrix}",
        "&",
        "\\\\",
        "\\sum",
        "\\log",
        "\\boxed{",
        "\\overline{",
        "$",
        "\\$",
        "\\(",
        "\\)",
        " ",
        "\n",
        "é",
        "∞",
        "½",
        "⁴",
        "₋",
        "∪",
        "\\cap",
        "ℝ",
        "3e-2",
        "€",
        "\\mid",
        "\\boxed{5}",
        "final answer is",
    ];

    /// No text makes the parser panic, and every text that can be parsed equals itself.
    #[test]
    fn any_text_can_be_compared() {
        let mut rng = stream(11, Purpose::Evaluation, &[]);
        for _ in 0..60_000 {
            let length = rng.random_range(1..14);
            let text: String = (0..length).filter_map(|_| PIECES.choose(&mut rng).copied()).collect();
            assert!(equal(&text, &text) || normalise::strip_markup(&text).is_empty(), "{text}");
            equal("\\frac{1}{2}", &text);
            equal(&text, "x=1");
            AnswerEquality::Exact.matches(&text, "1");
            crate::tasks::gsm8k::extract(&text, Default::default());
            crate::tasks::retool::PromptFormat::Boxed.extract(&text);
            crate::tasks::retool::PromptFormat::AnswerLine.extract(&format!("Answer:{text}"));
        }
        for _ in 0..20_000 {
            let length = rng.random_range(0..24);
            let text: String = (0..length).map(|_| rng.random::<char>()).collect();
            equal("1", &text);
            crate::tasks::gsm8k::extract(&text, Default::default());
        }
    }
}
