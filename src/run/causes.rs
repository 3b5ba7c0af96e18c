//! Warnings about samples from which a policy learns little, with their causes.

use super::context::RunContext;
use crate::harmony::{Message, Role};
use crate::metrics::Console;
use crate::tasks::{Task, Transcript};
use crate::trajectory::{Outcome, Trajectory, TrajectoryRow};

/// Number of causes that [`SampleCauses::messages`] tells apart.
pub const CAUSES: usize = 3;

/// Counts of trajectories.
#[derive(Default)]
pub struct SampleCauses {
    count: usize,
    /// Trajectories that solve their problem.
    successes: usize,
    /// Trajectories that reached the token limit.
    truncated: usize,
    /// Trajectories without a tool call.
    without_call: usize,
    /// Trajectories without a tool call but with code blocks.
    with_code_blocks: usize,
    /// Trajectories that the policy ended.
    ended: usize,
    /// Trajectories that the policy ended, without an answer that the task can read.
    without_answer: usize,
}

impl SampleCauses {
    /// Counts `samples`: trajectories and their conversations.
    pub fn count<'s>(
        task: &dyn Task,
        samples: impl Iterator<Item = (&'s Trajectory, &'s [Message])>,
    ) -> Self {
        let mut counts = Self::default();
        for (trajectory, messages) in samples {
            let last_user = messages.iter().rposition(|message| message.role == Role::User);
            counts.add(task, trajectory, &messages[last_user.map_or(0, |user| user + 1)..]);
        }
        counts
    }

    /// Adds a trajectory with the messages after its prompt.
    fn add(&mut self, task: &dyn Task, trajectory: &Trajectory, messages: &[Message]) {
        let outcome = trajectory.outcome;
        self.count += 1;
        self.successes += usize::from(trajectory.success);
        self.truncated += usize::from(outcome == Outcome::TruncatedLength);
        let has_call = trajectory.turns.iter().any(|turn| !turn.calls.is_empty());
        if !has_call && outcome != Outcome::TurnsExhausted {
            self.without_call += 1;
            let has_code = messages.iter().any(|message| message.content.contains("```py"));
            self.with_code_blocks += usize::from(has_code);
        }
        if matches!(outcome, Outcome::Finished | Outcome::Malformed) {
            let transcript = Transcript { messages, outcome, calls_answered: 0 };
            let has_answer = outcome == Outcome::Finished && task.answer_text(&transcript).is_some();
            self.ended += 1;
            self.without_answer += usize::from(!has_answer);
        }
    }

    /// Returns a sentence for each cause that at least nine tenths of the trajectories have.
    pub fn messages(&self, has_tool: bool, response_tokens_max: usize) -> [Option<String>; CAUSES] {
        let Self { count, successes, truncated, without_call, with_code_blocks, ended, without_answer } =
            *self;
        let is_most = |part: usize, whole: usize| whole > 0 && part * 10 >= whole * 9;
        let blocks = match with_code_blocks {
            0 => String::new(),
            some => format!(", and {some} of them have code blocks in place of calls"),
        };
        [
            is_most(truncated, count).then(|| {
                format!(
                    "{truncated} of {count} trajectories were cut at response_tokens_max = {response_tokens_max}; raise \
                     rollout.response_tokens_max, or ask for shorter answers"
                )
            }),
            // A policy that solves most problems without the tool does not need it.
            (has_tool && is_most(without_call, count) && successes * 2 < count).then(|| {
                format!(
                    "{} of {count} trajectories called the tool{blocks}; ask for the tool in \
                     harmony.developer_instructions, or show calls to the model in an SFT warm-up ([cold_start])",
                    count - without_call
                )
            }),
            is_most(without_answer, ended).then(|| {
                format!(
                    "no answer could be read in {without_answer} of the {ended} trajectories that ended; look at them in \
                     trajectories/, and say in harmony.developer_instructions how to write the answer"
                )
            }),
        ]
    }
}

/// Prints a warning for each cause in `rows`.
pub fn warn_of_causes<'r>(
    context: &RunContext,
    rows: impl Iterator<Item = &'r TrajectoryRow>,
    label: &str,
    console: &Console,
) {
    let samples = rows.map(|row| (&row.trajectory, row.messages.as_slice()));
    let counts = SampleCauses::count(context.task.as_ref(), samples);
    let messages =
        counts.messages(context.interpreter.is_some(), context.recipe().rollout.response_tokens_max);
    messages.iter().flatten().for_each(|message| console.print(&format!("warning: {label}{message}")));
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::tasks::{Problem, Reward, ValidationSet};
    use crate::trajectory::{CallOutcome, Turn};

    /// A task whose answers are whole numbers.
    struct Numbers;

    impl Task for Numbers {
        fn name(&self) -> &str {
            "numbers"
        }
        fn training_problem(&self, _: u64, _: u64) -> Problem {
            unreachable!("no prompt is asked for")
        }
        fn validation_sets(&self) -> &[ValidationSet] {
            &[]
        }
        fn uses_python(&self) -> bool {
            true
        }
        fn answer_text(&self, transcript: &Transcript) -> Option<String> {
            transcript.final_text().filter(|text| text.parse::<u64>().is_ok()).map(str::to_owned)
        }
        fn reward(&self, _: &Problem, _: &Transcript) -> anyhow::Result<Reward> {
            unreachable!("no reward is asked for")
        }
    }

    fn messages(samples: &[(Outcome, bool, &str)]) -> Vec<String> {
        let sample = |&(outcome, calls, text): &(Outcome, bool, &str)| {
            let calls = if calls { vec![CallOutcome::Answered] } else { vec![] };
            let trajectory = Trajectory {
                step: 1,
                prompt: 0,
                sample: 0,
                problem_id: String::new(),
                tokens: vec![0; 2],
                prompt_tokens: 1,
                mask: vec![false, true],
                logprobs: vec![0.0; 2],
                routes: vec![],
                turns: vec![Turn { start: 1, end: 2, calls }],
                outcome,
                reward: 0.0,
                success: false,
                rewards: Default::default(),
                tool_s: 0.0,
            };
            (
                trajectory,
                vec![Message::user("```python blocks are not mine"), Message::assistant("final", text)],
            )
        };
        let samples: Vec<(Trajectory, Vec<Message>)> = samples.iter().map(sample).collect();
        let counts = SampleCauses::count(&Numbers, samples.iter().map(|(t, m)| (t, m.as_slice())));
        counts.messages(true, 64).into_iter().flatten().collect()
    }

    #[test]
    fn samples_that_are_cut_call_no_tool_or_cannot_be_read_are_said() {
        use Outcome::{Finished, TruncatedLength};
        assert!(
            messages(&[(Finished, true, "12"), (TruncatedLength, true, "")]).is_empty(),
            "half is not most"
        );
        let truncated = messages(&[(TruncatedLength, true, "and so on"); 16]);
        assert_eq!(truncated.len(), 1, "{truncated:?}");
        assert!(
            truncated[0].starts_with("16 of 16 trajectories were cut at response_tokens_max = 64"),
            "{truncated:?}"
        );
        let block = (Finished, false, "```python\nprint(12)\n```");
        let without_call = messages(&[(Finished, false, "12"), block, block, block]);
        assert_eq!(without_call.len(), 1, "{without_call:?}");
        assert!(
            without_call[0].starts_with("0 of 4 trajectories called the tool, and 3 of them"),
            "{without_call:?}"
        );
        let without_answer = messages(&[(Finished, true, "\\boxed{The answer}"); 4]);
        assert_eq!(without_answer.len(), 1, "{without_answer:?}");
        assert!(
            without_answer[0].starts_with("no answer could be read in 4 of the 4 trajectories"),
            "{without_answer:?}"
        );
    }
}
