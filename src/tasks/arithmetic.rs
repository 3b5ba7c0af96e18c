//! The built-in task with a tool: word problems with two operations, computed with the Python tool.
//!
//! Problems are generated, so nothing is downloaded. A hash of a problem's numbers decides whether it is held
//! out (about one in ten) and never used in training. The demonstrations are noisy on purpose: most skip the
//! tool and guess. RL then selects the good behaviour among the demonstrated ones; it does not discover new
//! behaviour.

use super::generated_task::{GeneratedProblem, GeneratedTask};
use super::{Demonstration, Problem, Reward, TaskEntry, Transcript};
use crate::harmony::Message;
use crate::trajectory::Outcome;
use anyhow::Result;
use rand::Rng;
use rand::seq::IndexedRandom;

pub(super) const ENTRY: TaskEntry = TaskEntry {
    name: "arithmetic",
    meaning: "Three-number word problems, answered with the Python tool.",
    reads_files: false,
    data: "",
    columns: &[],
    reward_min: -1.0,
    keys: &[],
    make: |_, _| Ok(Box::new(Arithmetic::new(VALIDATION_PROBLEMS))),
};

/// Default number of held-out problems in the validation set.
pub const VALIDATION_PROBLEMS: usize = 512;

/// Reply of the interpreter to an expression that ends in an operator.
pub const SYNTAX_ERROR: &str = "SyntaxError: Expected an expression";

/// Percentage of demonstrations that skip the tool.
const SKIPS_TOOL: u32 = 55;
/// Of the demonstrations with a tool call: percentage whose first call has a syntax error.
const MALFORMED: u32 = 20;
/// Of the demonstrations with a tool call: percentage whose code has a wrong operator or lost parentheses.
const WRONG_CODE: u32 = 25;
/// Of the demonstrations with a syntax error: percentage with a second call, which is right. The other ones
/// guess the answer.
const RETRIES: u32 = 50;
/// Of the demonstrations that copy a number into the answer: percentage with one wrong digit in the copy.
const MISCOPIED: u32 = 15;

/// A problem of three numbers. `operators[0]` joins the first two, `operators[1]` joins the result and the
/// third. `grouped`: whether the first two are in parentheses.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct ArithmeticProblem {
    template: u8,
    numbers: [i64; 3],
    operators: [char; 2],
    grouped: bool,
}

impl ArithmeticProblem {
    fn question(&self) -> String {
        let [a, b, c] = self.numbers;
        match self.template {
            0 => format!("{a} boxes of {b}, {c} sold. Left?"),
            1 => format!("{a} boxes of {b}, {c} more. Total?"),
            2 => format!("{a} red, {b} blue in each of {c} bags. Total?"),
            _ => format!("{a} made, {b} broke, each day, {c} days. Total?"),
        }
    }

    fn code(&self) -> String {
        let ([a, b, c], [first, second]) = (self.numbers, self.operators);
        if self.grouped { format!("({a}{first}{b}){second}{c}") } else { format!("{a}{first}{b}{second}{c}") }
    }

    /// Returns the value of [`ArithmeticProblem::code`] in Python.
    fn value(&self) -> i64 {
        let ([a, b, c], [first, second]) = (self.numbers, self.operators);
        if self.grouped || first == '*' || second != '*' {
            apply(second, apply(first, a, b), c)
        } else {
            apply(first, a, apply(second, b, c))
        }
    }

    /// Returns the problem with a mistake: a wrong operator or, if there are parentheses, possibly no
    /// parentheses.
    fn with_mistake(&self, rng: &mut impl Rng) -> Self {
        let mut wrong = *self;
        if self.grouped && rng.random_bool(0.5) {
            wrong.grouped = false;
            return wrong;
        }
        let place = rng.random_range(0..2usize);
        let others = ['+', '-', '*'].map(|o| (o != self.operators[place]).then_some(o));
        let others: Vec<char> = others.into_iter().flatten().collect();
        wrong.operators[place] = others.choose(rng).copied().unwrap_or('+');
        wrong
    }

    /// Returns [`ArithmeticProblem::code`] without its last number, which is a syntax error.
    fn malformed_code(&self) -> String {
        self.code().trim_end_matches(|c: char| c.is_ascii_digit()).to_owned()
    }
}

impl GeneratedProblem for ArithmeticProblem {
    const NAME: &'static str = "arithmetic";
    const USES_PYTHON: bool = true;

    /// Draws a problem from one of the four templates, with numbers in 11..=99 and a positive value.
    fn draw(rng: &mut impl Rng) -> Self {
        let template = rng.random_range(0..4u8);
        let [mut a, mut b, c] = [(); 3].map(|()| rng.random_range(11..=99i64));
        if template == 3 {
            while a == b {
                b = rng.random_range(11..=99);
            }
            (a, b) = (a.max(b), a.min(b));
        }
        let operators = [['*', '-'], ['*', '+'], ['+', '*'], ['-', '*']][usize::from(template)];
        Self { template, numbers: [a, b, c], operators, grouped: template >= 2 }
    }

    /// Returns whether the problem is in the held-out tenth, by the CRC-32 of (template, a, b, c).
    fn is_held_out(&self) -> bool {
        let [a, b, c] = self.numbers.map(|n| n as u8);
        crc32fast::hash(&[self.template, a, b, c]).is_multiple_of(10)
    }

    fn problem(&self) -> Problem {
        let [a, b, c] = self.numbers;
        Problem {
            id: format!("arithmetic/{}-{a}-{b}-{c}", self.template),
            messages: vec![Message::user(self.question())],
            answer: self.value().to_string().into(),
        }
    }

    /// Returns a noisy demonstration. The constants above give the percentages.
    fn demonstration(&self, rng: &mut impl Rng) -> Demonstration {
        let mut messages = vec![Message::user(self.question())];
        let mut call = |code: String, reply: String| {
            messages.push(Message::call("python", "analysis", code));
            messages.push(Message::tool("python", Some("analysis"), reply));
        };
        let answer = if draw_percent(rng, SKIPS_TOOL) {
            guess(self.value(), rng)
        } else {
            let kind = rng.random_range(0..100u32);
            let run = if kind < MALFORMED {
                call(self.malformed_code(), SYNTAX_ERROR.into());
                draw_percent(rng, RETRIES).then_some(*self)
            } else if kind < MALFORMED + WRONG_CODE {
                Some(self.with_mistake(rng))
            } else {
                Some(*self)
            };
            match run {
                Some(sum) => {
                    call(sum.code(), sum.value().to_string());
                    copy_with_errors(sum.value(), rng)
                }
                None => guess(self.value(), rng),
            }
        };
        messages.push(Message::assistant("final", answer));
        Demonstration { messages }
    }

    fn reward(problem: &Problem, transcript: &Transcript) -> Result<Reward> {
        Ok(exact_reward(problem, transcript, transcript.final_text()))
    }
}

fn apply(operator: char, a: i64, b: i64) -> i64 {
    match operator {
        '+' => a + b,
        '-' => a - b,
        _ => a * b,
    }
}

pub(super) fn draw_percent(rng: &mut impl Rng, share: u32) -> bool {
    rng.random_range(0..100u32) < share
}

/// Returns a random number with as many digits as `value`, which must not be negative.
fn guess(value: i64, rng: &mut impl Rng) -> String {
    let low = 10i64.pow(value.to_string().len() as u32 - 1);
    rng.random_range(low..low * 10).to_string()
}

/// Copies `value`. In [`MISCOPIED`] of 100 cases, one digit of the copy is wrong.
pub(super) fn copy_with_errors(value: i64, rng: &mut impl Rng) -> String {
    let text = value.to_string();
    if !draw_percent(rng, MISCOPIED) {
        return text;
    }
    let first = usize::from(text.starts_with('-'));
    let place = rng.random_range(first..text.len());
    // The leading digit must stay above 0, so that the text is a normal number.
    let lowest = if place == first && text.len() > 1 { '1' } else { '0' };
    let digits: Vec<char> = (lowest..='9').filter(|&d| !text[place..].starts_with(d)).collect();
    let digit = digits.choose(rng).copied().unwrap_or('0');
    text.char_indices().map(|(i, c)| if i == place { digit } else { c }).collect()
}

/// Returns +1 if `answer` is exactly the number and the conversation finished, otherwise −1.
pub(super) fn exact_reward(problem: &Problem, transcript: &Transcript, answer: Option<&str>) -> Reward {
    let right = answer.is_some_and(|text| problem.answer.as_str() == Some(text));
    let success = right && transcript.outcome == Outcome::Finished;
    Reward::new(if success { 1.0 } else { -1.0 }, success)
}

/// The task `arithmetic`. At most three turns fit in its 72 sampled tokens and a context of 160. About
/// 250,000 problems are held out.
pub type Arithmetic = GeneratedTask<ArithmeticProblem>;

#[cfg(test)]
mod tests {
    use super::*;
    use crate::harmony::Role;
    use crate::random::{Purpose, stream};
    use crate::tasks::Task;

    #[test]
    fn values_follow_pythons_precedence() {
        let sum = |operators, grouped| {
            ArithmeticProblem { template: 0, numbers: [7, 12, 5], operators, grouped }.value()
        };
        assert_eq!(sum(['*', '-'], false), 79);
        assert_eq!(sum(['-', '*'], false), 7 - 12 * 5);
        assert_eq!(sum(['-', '*'], true), (7 - 12) * 5);
        assert_eq!(sum(['-', '+'], false), 7 - 12 + 5);
    }

    #[test]
    fn the_split_holds_out_a_tenth_and_training_never_sees_it() {
        let mut rng = stream(1, Purpose::Problem, &[]);
        let held = (0..100_000).filter(|_| ArithmeticProblem::draw(&mut rng).is_held_out()).count();
        assert!((9_500..10_500).contains(&held), "{held}");
        let task = Arithmetic::new(VALIDATION_PROBLEMS);
        let problems = &task.validation_sets()[0].problems;
        let ids: std::collections::HashSet<_> = problems.iter().map(|p| &p.id).collect();
        assert_eq!(ids.len(), 512);
        assert!((0..20_000).all(|i| !ids.contains(&task.training_problem(0, i).id)));
        let questions: std::collections::HashSet<_> =
            problems.iter().map(|p| &p.messages[0].content).collect();
        let shown = |i| task.demonstration(0, i).unwrap().messages[0].content.clone();
        assert!((0..20_000).all(|i| !questions.contains(&shown(i))));
    }

    /// Returns for a demonstration: the number of calls, whether the last code is right, whether the answer
    /// is right.
    fn read(demonstration: &Demonstration) -> (usize, bool, bool) {
        let calls = demonstration.messages.iter().filter(|m| m.recipient.as_deref() == Some("python"));
        let replies: Vec<_> = demonstration.messages.iter().filter(|m| m.role == Role::Tool).collect();
        let answer = &demonstration.messages.last().unwrap().content;
        let raised = replies.first().is_some_and(|m| m.content == SYNTAX_ERROR);
        let copied = replies.last().is_some_and(|m| m.content == *answer);
        (calls.count(), raised, copied)
    }

    #[test]
    fn demonstrations_have_the_described_shares() {
        let task = Arithmetic::new(1);
        let n = 40_000;
        let shown: Vec<_> = (0..n).map(|i| read(&task.demonstration(5, i).unwrap())).collect();
        let share = |part: usize, whole: usize| part as f64 / whole as f64;
        let near = |got: f64, want: f64| assert!((got - want).abs() < 0.015, "{got} against {want}");
        let with_tool = shown.iter().filter(|d| d.0 > 0).count();
        near(share(with_tool, n as usize), 0.45);
        let raised = shown.iter().filter(|d| d.1).count();
        near(share(raised, with_tool), 0.20);
        near(share(shown.iter().filter(|d| d.1 && d.0 == 2).count(), raised), 0.50);
        let with_output: Vec<_> = shown.iter().filter(|d| d.0 > usize::from(d.1)).collect();
        near(share(with_output.iter().filter(|d| d.2).count(), with_output.len()), 0.85);
    }

    #[test]
    fn code_with_a_mistake_is_another_expression() {
        let mut rng = stream(2, Purpose::Demonstration, &[]);
        let (mut lost, n) = (0, 10_000);
        for _ in 0..n {
            let sum = ArithmeticProblem::draw(&mut rng);
            let wrong = sum.with_mistake(&mut rng);
            assert_ne!(sum.code(), wrong.code());
            lost += usize::from(sum.grouped && !wrong.grouped);
        }
        assert!((2_200..2_800).contains(&lost), "a quarter loses its parentheses: {lost} of {n}");
    }

    #[test]
    fn a_miscopied_number_differs_in_exactly_one_digit() {
        let mut rng = stream(3, Purpose::Demonstration, &[]);
        for value in [7, 10, -5, -120, 99_999] {
            for _ in 0..2_000 {
                let (copied, text) = (copy_with_errors(value, &mut rng), value.to_string());
                assert_eq!(copied.len(), text.len());
                assert!(copied.bytes().zip(text.bytes()).filter(|(a, b)| a != b).count() <= 1);
                assert_eq!(copied.parse::<i64>().unwrap().to_string(), copied);
            }
        }
    }

    #[test]
    fn the_reward_wants_the_exact_number_in_a_finished_final_message() {
        let task = Arithmetic::new(1);
        let problem =
            ArithmeticProblem { template: 0, numbers: [7, 12, 5], operators: ['*', '-'], grouped: false }
                .problem();
        let reward = |channel: &str, text: &str, outcome| {
            let messages = [Message::assistant(channel, text)];
            let transcript = Transcript::new(&messages, outcome);
            task.reward(&problem, &transcript).unwrap()
        };
        assert_eq!(reward("final", "79", Outcome::Finished), Reward::new(1.0, true));
        let wrong = Reward::new(-1.0, false);
        assert_eq!(reward("final", "79", Outcome::TruncatedLength), wrong);
        assert_eq!(reward("analysis", "79", Outcome::Finished), wrong);
        assert_eq!(reward("final", "80", Outcome::Finished), wrong);
        assert_eq!(reward("final", "79.0", Outcome::Finished), wrong);
        assert_eq!(reward("final", "", Outcome::Finished), wrong);
    }
}
