//! The built-in task without a tool: two small steps, written in `analysis` as `5+1=6;6-5=1`.

use super::arithmetic::{copy_with_errors, draw_percent, exact_reward};
use super::generated_task::{GeneratedProblem, GeneratedTask};
use super::{Demonstration, Problem, Reward, TaskEntry, Transcript, VALIDATION_PROBLEMS};
use crate::harmony::Message;
use anyhow::Result;
use rand::Rng;

pub(super) const ENTRY: TaskEntry = TaskEntry {
    name: "arithmetic_single",
    meaning: "Small additions and subtractions, solved step by step without a tool.",
    reads_files: false,
    data: "",
    columns: &[],
    reward_min: -1.0,
    keys: &[],
    make: |_, _| Ok(Box::new(ArithmeticSingle::new(VALIDATION_PROBLEMS))),
};

/// Percentage of demonstrations that skip the steps and give a random answer.
const SKIPS_WORKING: u32 = 55;

/// `a ± b ± c` with numbers in 1..=6: 864 problems. About a tenth of them is held out.
#[derive(Debug, Clone, Copy)]
pub struct Steps {
    numbers: [i64; 3],
    minus: [bool; 2],
}

impl Steps {
    /// Iterates over every held-out problem, in a fixed order.
    fn all_held_out() -> impl Iterator<Item = Self> {
        let all = (0..864i64).map(|i| Self {
            numbers: [i / 144 + 1, i / 24 % 6 + 1, i / 4 % 6 + 1],
            minus: [i & 1 == 1, i & 2 == 2],
        });
        all.filter(Self::is_held_out)
    }

    fn signs(&self) -> [char; 2] {
        self.minus.map(|minus| if minus { '-' } else { '+' })
    }

    fn text(&self) -> String {
        let ([a, b, c], [first, second]) = (self.numbers, self.signs());
        format!("{a}{first}{b}{second}{c}")
    }

    fn values(&self) -> [i64; 2] {
        let [a, b, c] = self.numbers;
        let step = |from: i64, minus: bool, by: i64| if minus { from - by } else { from + by };
        let first = step(a, self.minus[0], b);
        [first, step(first, self.minus[1], c)]
    }
}

impl GeneratedProblem for Steps {
    const NAME: &'static str = "arithmetic_single";
    const USES_PYTHON: bool = false;

    fn draw(rng: &mut impl Rng) -> Self {
        Self { numbers: [(); 3].map(|()| rng.random_range(1..=6)), minus: [rng.random(), rng.random()] }
    }

    fn is_held_out(&self) -> bool {
        crc32fast::hash(self.text().as_bytes()).is_multiple_of(10)
    }

    fn problem(&self) -> Problem {
        let text = self.text();
        Problem {
            id: format!("arithmetic_single/{text}"),
            messages: vec![Message::user(format!("{text}?"))],
            answer: self.values()[1].to_string().into(),
        }
    }

    fn demonstration(&self, rng: &mut impl Rng) -> Demonstration {
        let mut messages = vec![Message::user(format!("{}?", self.text()))];
        let answer = if draw_percent(rng, SKIPS_WORKING) {
            rng.random_range(-11..=18i64).to_string()
        } else {
            let ([a, b, c], [first, second], [x, y]) = (self.numbers, self.signs(), self.values());
            messages.push(Message::assistant("analysis", format!("{a}{first}{b}={x};{x}{second}{c}={y}")));
            copy_with_errors(y, rng)
        };
        messages.push(Message::assistant("final", answer));
        Demonstration { messages }
    }

    /// Grades the last line of the final message, because in ChatML the steps are in the lines above.
    fn reward(problem: &Problem, transcript: &Transcript) -> Result<Reward> {
        let answer = transcript.final_text().map(|text| text.rsplit('\n').next().unwrap_or(text));
        Ok(exact_reward(problem, transcript, answer))
    }

    fn validation(count: usize) -> Vec<Problem> {
        Self::all_held_out().take(count).map(|s| s.problem()).collect()
    }
}

/// The task `arithmetic_single`.
pub type ArithmeticSingle = GeneratedTask<Steps>;

#[cfg(test)]
mod tests {
    use super::*;
    use crate::random::{Purpose, stream};
    use crate::tasks::Task;

    #[test]
    fn steps_are_worked_left_to_right() {
        let steps = Steps { numbers: [5, 1, 5], minus: [false, true] };
        assert_eq!((steps.text().as_str(), steps.values()), ("5+1-5", [6, 1]));
        let mut rng = stream(0, Purpose::Demonstration, &[]);
        let worked = (0..100).map(|_| steps.demonstration(&mut rng)).find(|d| d.messages.len() == 3).unwrap();
        assert_eq!(worked.messages[1], Message::assistant("analysis", "5+1=6;6-5=1"));
    }

    #[test]
    fn held_out_problems_are_distinct_and_never_trained_on() {
        let task = ArithmeticSingle::new(512);
        let ids: std::collections::HashSet<_> =
            task.validation_sets()[0].problems.iter().map(|p| p.id.clone()).collect();
        assert_eq!(ids.len(), task.validation_sets()[0].problems.len());
        assert!((60..=110).contains(&ids.len()), "{}", ids.len());
        let trained: std::collections::HashSet<_> =
            (0..20_000).map(|i| task.training_problem(0, i).id).collect();
        assert!(ids.is_disjoint(&trained));
        assert_eq!(ids.len() + trained.len(), 864);
    }
}
