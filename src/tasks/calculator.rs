//! The built-in task whose numbers no small model has in its head: nested expressions, word problems,
//! remainders and dates, to be computed with the Python tool.
//!
//! Problems are generated, so nothing is downloaded. A hash of the question decides whether it is held out
//! (about one in ten) and never used in training. There are no demonstrations, and the right answer alone is
//! rewarded: whether the tool helps is what RL finds out.

use super::answer::AnswerEquality;
use super::retool::PromptFormat;
use super::{Problem, Reward, Task, TaskEntry, Transcript, VALIDATION_PROBLEMS, ValidationSet};
use crate::random::{Purpose, stream};
use anyhow::Result;
use chrono::{NaiveDate, TimeDelta};
use num_bigint::BigInt;
use rand::Rng;
use rand::seq::IndexedRandom;
use std::collections::HashSet;

pub(super) const ENTRY: TaskEntry = TaskEntry {
    name: "calculator",
    meaning: "Generated problems with large numbers, answered with the Python tool or without it.",
    reads_files: false,
    data: "",
    columns: &[],
    reward_min: 0.0,
    keys: &["level"],
    make: |settings, _| Ok(Box::new(Calculator::new(settings.level.unwrap_or(LEVEL), VALIDATION_PROBLEMS))),
};

/// Default of `task.level`.
pub const LEVEL: usize = 1;

/// An arithmetic expression.
enum Expression {
    Number(BigInt),
    Operation(char, Box<Expression>, Box<Expression>),
}

impl Expression {
    /// Draws an expression of `operations` operations. Its operands have 4 to `digits_max` digits.
    fn draw(rng: &mut impl Rng, operations: usize, digits_max: u32) -> Self {
        if operations == 0 {
            return Self::Number(operand(rng, digits_max));
        }
        let nested = Self::draw(rng, operations - 1, digits_max);
        let number = Self::Number(operand(rng, digits_max));
        let (left, right) = if rng.random_bool(0.7) { (nested, number) } else { (number, nested) };
        let operator = ['+', '-', '*'].choose(rng).copied().unwrap_or('+');
        Self::Operation(operator, Box::new(left), Box::new(right))
    }

    fn value(&self) -> BigInt {
        match self {
            Self::Number(number) => number.clone(),
            Self::Operation('+', left, right) => left.value() + right.value(),
            Self::Operation('-', left, right) => left.value() - right.value(),
            Self::Operation(_, left, right) => left.value() * right.value(),
        }
    }

    fn text(&self) -> String {
        match self {
            Self::Number(number) => number.to_string(),
            Self::Operation(operator, left, right) => {
                format!("({} {operator} {})", left.text(), right.text())
            }
        }
    }
}

fn operand(rng: &mut impl Rng, digits_max: u32) -> BigInt {
    let digits = rng.random_range(4..=digits_max);
    rng.random_range(10i64.pow(digits - 1)..10i64.pow(digits)).into()
}

/// A question and its answer.
struct Question {
    text: String,
    answer: String,
}

impl Question {
    /// Draws a question of `level`: 1 has nested expressions of three operations and their remainders, 2 also
    /// word problems and dates, 3 longer expressions and numbers.
    fn draw(rng: &mut impl Rng, level: usize) -> Self {
        let (operations, digits_max) = if level < 3 { (3, 5) } else { (5, 7) };
        let kinds = if level == 1 { 4u32 } else { 6 };
        match rng.random_range(0..kinds) {
            4 => return Self::words(rng, digits_max),
            5 => return Self::dates(rng),
            0 => {}
            _ => {
                let drawn = Expression::draw(rng, operations, digits_max);
                let asks = ["What is {}?", "Compute {}.", "A machine counts {} parts. How many is that?"];
                let ask = asks.choose(rng).copied().unwrap_or("What is {}?");
                return Self { text: ask.replace("{}", &drawn.text()), answer: drawn.value().to_string() };
            }
        }
        let drawn = loop {
            let drawn = Expression::draw(rng, operations, digits_max);
            if drawn.value() >= BigInt::ZERO {
                break drawn;
            }
        };
        let divisor = rng.random_range(101..=997i64);
        let text = format!("What is the remainder when {} is divided by {divisor}?", drawn.text());
        Self { text, answer: (drawn.value() % divisor).to_string() }
    }

    /// Draws a word problem of three operations.
    fn words(rng: &mut impl Rng, digits_max: u32) -> Self {
        let [a, b, c, d] = [(); 4].map(|()| operand(rng, digits_max));
        let (text, value) = match rng.random_range(0..4u32) {
            0 => (
                format!(
                    "A library has {a} shelves with {b} books each and {c} books in boxes. {d} books are lent out. \
                     How many books are left?"
                ),
                &a * &b + &c - &d,
            ),
            1 => (
                format!(
                    "Two plants make {a} and {b} bolts an hour. They run for {c} hours, and {d} bolts are rejected. \
                     How many bolts are good?"
                ),
                (&a + &b) * &c - &d,
            ),
            2 => (
                format!(
                    "One ship carries {a} containers of {b} boxes, another one {c} containers of {d} boxes. How many \
                     boxes do they carry together?"
                ),
                &a * &b + &c * &d,
            ),
            _ => (
                format!(
                    "A mine loads {a} wagons with {b} kilograms each, and {c} kilograms fall off every wagon. Then {d} \
                     kilograms are sold. How many kilograms are left?"
                ),
                &a * (&b - &c) - &d,
            ),
        };
        Self { text, answer: value.to_string() }
    }

    /// Draws a question about the Gregorian calendar from 1900 on.
    fn dates(rng: &mut impl Rng) -> Self {
        let from = rng.random_range(-36_000..9_000i64);
        let days = rng.random_range(1_000..40_000i64);
        if rng.random_bool(0.5) {
            let text = format!("Which date is {days} days after {}? Write it as YYYY-MM-DD.", date(from));
            return Self { text, answer: date(from + days) };
        }
        let text = format!("How many days after {} is {}?", date(from), date(from + days));
        Self { text, answer: days.to_string() }
    }

    /// Returns whether the question is in the held-out tenth.
    fn is_held_out(&self) -> bool {
        crc32fast::hash(self.text.as_bytes()).is_multiple_of(10)
    }

    fn draw_split(rng: &mut impl Rng, level: usize, held_out: bool) -> Self {
        loop {
            let drawn = Self::draw(rng, level);
            if drawn.is_held_out() == held_out {
                return drawn;
            }
        }
    }

    fn problem(self) -> Problem {
        Problem {
            id: format!("calculator/{:08x}", crc32fast::hash(self.text.as_bytes())),
            messages: vec![PromptFormat::BoxedPlain.prompt(&self.text)],
            answer: self.answer.into(),
        }
    }
}

/// Returns the date `days` after 2000-01-01 as YYYY-MM-DD.
fn date(days: i64) -> String {
    let first = NaiveDate::from_ymd_opt(2000, 1, 1);
    let date = first.and_then(|first| first.checked_add_signed(TimeDelta::try_days(days)?));
    date.unwrap_or_default().to_string()
}

/// The task `calculator`: reward 1 for the right answer, else 0.
pub struct Calculator {
    level: usize,
    validation: [ValidationSet; 1],
}

impl Calculator {
    /// Returns the task with `validation_problems` held-out problems of `level`.
    pub fn new(level: usize, validation_problems: usize) -> Self {
        let mut rng = stream(0, Purpose::Problem, &[u64::MAX, level as u64]);
        let (mut problems, mut seen) = (Vec::with_capacity(validation_problems), HashSet::new());
        while problems.len() < validation_problems {
            let problem = Question::draw_split(&mut rng, level, true).problem();
            if seen.insert(problem.id.clone()) {
                problems.push(problem);
            }
        }
        Self { level, validation: [ValidationSet { name: "calculator".into(), problems }] }
    }
}

impl Task for Calculator {
    fn name(&self) -> &str {
        "calculator"
    }

    fn training_problem(&self, seed: u64, index: u64) -> Problem {
        let mut rng = stream(seed, Purpose::Problem, &[index]);
        Question::draw_split(&mut rng, self.level, false).problem()
    }

    fn validation_sets(&self) -> &[ValidationSet] {
        &self.validation
    }

    fn uses_python(&self) -> bool {
        true
    }

    fn answer_text(&self, transcript: &Transcript) -> Option<String> {
        transcript.final_text().and_then(|text| PromptFormat::BoxedPlain.extract(text)).map(str::to_owned)
    }

    fn same_answer(&self, a: &str, b: &str) -> bool {
        AnswerEquality::Exact.matches(a, b)
    }

    fn reward(&self, problem: &Problem, transcript: &Transcript) -> Result<Reward> {
        let answer = transcript.final_text().and_then(|text| PromptFormat::BoxedPlain.extract(text));
        let reference = problem.answer.as_str().unwrap_or_default();
        let success = answer.is_some_and(|answer| AnswerEquality::Exact.matches(reference, answer));
        Ok(Reward::new(if success { 1.0 } else { 0.0 }, success))
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::harmony::Message;
    use crate::trajectory::Outcome;

    /// Python's `datetime` gave the dates.
    #[test]
    fn dates_are_those_of_the_calendar() {
        for (days, expected) in [
            (0, "2000-01-01"),
            (59, "2000-02-29"),
            (60, "2000-03-01"),
            (-1, "1999-12-31"),
            (-36_524, "1900-01-01"),
            (-36_466, "1900-02-28"),
            (-36_465, "1900-03-01"),
            (8_826, "2024-03-01"),
            (36_525, "2100-01-01"),
            (48_999, "2134-02-26"),
        ] {
            assert_eq!(date(days), expected, "{days}");
        }
    }

    #[test]
    fn expressions_have_the_value_of_their_text() {
        let number = |value: i64| Box::new(Expression::Number(value.into()));
        let nested = Expression::Operation(
            '-',
            number(1_000),
            Box::new(Expression::Operation('*', number(2_000), number(3_000))),
        );
        assert_eq!(
            (nested.text(), nested.value()),
            ("(1000 - (2000 * 3000))".into(), (-5_999_000i64).into())
        );
        let mut rng = stream(1, Purpose::Problem, &[]);
        for _ in 0..200 {
            let drawn = Expression::draw(&mut rng, 3, 5);
            let text = drawn.text();
            assert_eq!(text.matches(['+', '*']).count() + text.matches(" - ").count(), 3, "{text}");
            let numbers = text.split(|c: char| !c.is_ascii_digit()).filter(|digits| !digits.is_empty());
            assert!(
                numbers.clone().count() == 4 && numbers.clone().all(|digits| (4..=5).contains(&digits.len())),
                "{text}"
            );
        }
    }

    #[test]
    fn held_out_problems_are_never_trained_on_and_levels_differ() {
        for level in 1..=3 {
            let task = Calculator::new(level, 200);
            let held_out: HashSet<_> =
                task.validation_sets()[0].problems.iter().map(|p| p.messages[0].content.clone()).collect();
            assert_eq!(held_out.len(), 200);
            let trained: Vec<Problem> = (0..2_000).map(|index| task.training_problem(0, index)).collect();
            assert!(trained.iter().all(|problem| !held_out.contains(&problem.messages[0].content)));
            let asks = |word: &str| {
                trained.iter().filter(|problem| problem.messages[0].content.contains(word)).count()
            };
            assert!(asks("remainder") > 200, "level {level}");
            assert_eq!(asks("days after") > 200, level > 1, "level {level}");
            assert_eq!(asks("How many b") > 100, level > 1, "level {level}");
        }
    }

    #[test]
    fn the_right_answer_alone_is_rewarded() {
        let task = Calculator::new(2, 1);
        let problem = Problem { id: String::new(), messages: vec![], answer: "1234567".into() };
        let reward = |text: &str, calls_answered| {
            let messages = [Message::assistant("final", text)];
            let transcript = Transcript { calls_answered, ..Transcript::new(&messages, Outcome::Finished) };
            task.reward(&problem, &transcript).unwrap()
        };
        for right in ["\\boxed{1234567}", "So \\boxed{1,234,567}.", "\\boxed{1234567.0}"] {
            assert_eq!(reward(right, 0), Reward::new(1.0, true), "{right}");
        }
        for wrong in ["1234567", "\\boxed{1234568}", "\\boxed{}", ""] {
            assert_eq!(reward(wrong, 3), Reward::new(0.0, false), "{wrong}");
        }
    }
}
