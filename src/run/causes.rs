//! Warnings about samples from which a policy learns little. A warning names the cause and a remedy.

use super::environment::Environment;
use super::loaded::LoadedModel;
use crate::harmony::{Message, Role};
use crate::tasks::{Task, Transcript};
use crate::trajectory::{Outcome, Trajectory, TrajectoryRow};

/// Number of causes that [`SampleCounts::messages`] distinguishes.
pub const CAUSE_COUNT: usize = 5;

/// Counts of the trajectories that have certain properties.
#[derive(Default)]
pub struct SampleCounts {
    count: usize,
    /// Trajectories that solved their problem.
    successes: usize,
    /// Trajectories that reached `response_tokens_max`.
    truncated: usize,
    /// Trajectories that reached the end of the model's context.
    out_of_context: usize,
    /// Trajectories without a tool call.
    without_call: usize,
    /// Trajectories without a tool call, but with a Python code block.
    with_code_blocks: usize,
    /// Trajectories without a tool call, but with the JSON text of a call outside the tags of calls.
    with_untagged_calls: usize,
    /// Trajectories that the policy itself ended.
    ended: usize,
    /// Trajectories that the policy itself ended, without an answer that the task can read.
    without_answer: usize,
}

impl SampleCounts {
    /// Counts `samples`, which are trajectories with their conversations.
    pub fn count<'s>(
        task: &dyn Task,
        response_tokens_max: usize,
        samples: impl Iterator<Item = (&'s Trajectory, &'s [Message])>,
    ) -> Self {
        let mut counts = Self::default();
        for (trajectory, messages) in samples {
            let last_user = messages.iter().rposition(|message| message.role == Role::User);
            let answer = &messages[last_user.map_or(0, |user| user + 1)..];
            counts.add((task, response_tokens_max), trajectory, answer);
        }
        counts
    }

    /// Adds a trajectory with the messages after its prompt.
    fn add(
        &mut self,
        (task, response_tokens_max): (&dyn Task, usize),
        trajectory: &Trajectory,
        messages: &[Message],
    ) {
        let outcome = trajectory.outcome;
        self.count += 1;
        self.successes += usize::from(trajectory.success);
        if outcome == Outcome::TruncatedLength {
            let is_full = trajectory.sampled_tokens() >= response_tokens_max;
            *(if is_full { &mut self.truncated } else { &mut self.out_of_context }) += 1;
        }
        let has_call = trajectory.turns.iter().any(|turn| !turn.calls.is_empty());
        if !has_call && outcome != Outcome::TurnsExhausted {
            self.without_call += 1;
            let holds =
                |test: fn(&str) -> bool| usize::from(messages.iter().any(|message| test(&message.content)));
            self.with_code_blocks += holds(|text| text.contains("```py"));
            self.with_untagged_calls += holds(holds_call);
        }
        if matches!(outcome, Outcome::Finished | Outcome::Malformed) {
            let transcript = Transcript::new(messages, outcome);
            let has_answer = outcome == Outcome::Finished && task.answer_text(&transcript).is_some();
            self.ended += 1;
            self.without_answer += usize::from(!has_answer);
        }
    }

    /// Returns whether the task could read at least half of the answers.
    pub fn has_readable_answers(&self) -> bool {
        self.ended > 0 && self.without_answer * 2 <= self.ended
    }

    /// Returns a sentence for each cause that holds for at least 90 % of the trajectories (50 % for calls
    /// outside their tags).
    pub fn messages(&self, facts: &SampleFacts) -> [Option<String>; CAUSE_COUNT] {
        let Self {
            count,
            successes,
            truncated,
            out_of_context,
            without_call,
            with_code_blocks,
            with_untagged_calls,
            ended,
            without_answer,
        } = *self;
        let SampleFacts {
            has_tool,
            random_weights,
            cold_start_steps,
            response_tokens_max,
            context_tokens_max,
            answers_read_in_step,
        } = *facts;
        let is_most = |part: usize, whole: usize| whole > 0 && part * 10 >= whole * 9;
        let calls_outside_tags =
            format!("{with_untagged_calls} of {count} answers have a call without its tags");
        let mut other_formats = String::new();
        if with_code_blocks > 0 {
            other_formats +=
                &format!("; {with_code_blocks} of {count} answers have a code block instead of a call");
        }
        if with_untagged_calls > 0 {
            other_formats += &format!("; {calls_outside_tags}");
        }
        // A policy that solves most problems without the tool does not need it.
        let is_tool_unused = has_tool && is_most(without_call, count) && successes * 2 < count;
        let show = |what: &str| match cold_start_steps {
            0 => format!("show {what} to the model in an SFT warm-up ([cold_start])"),
            steps => {
                format!("raise cold_start.steps (now {steps}), and have {what} in the demonstrations")
            }
        };
        let show_calls = show("calls");
        let are_untagged = with_untagged_calls > 0 && with_untagged_calls * 2 >= count;
        let ask_for_tool = match (random_weights, are_untagged) {
            (true, _) => format!("the weights began at random, so {show_calls}"),
            (false, true) => format!("show the tags in chat.developer_instructions, or {show_calls}"),
            (false, false) => format!("ask for the tool in chat.developer_instructions, or {show_calls}"),
        };
        let ask_for_answer = match (answers_read_in_step, random_weights) {
            (Some(step), _) => format!(
                "in step {step} they could be read, so the updates since then broke their form; go back to a checkpoint before \
                 them, with a lower train.optimizer.lr"
            ),
            (None, true) => {
                let show_answers = show("answers");
                format!(
                    "the weights began at random, so {show_answers}, or name a trained model with model.path"
                )
            }
            (None, false) => {
                let how = "read them in trajectories/, and say in chat.developer_instructions how to write the answer";
                how.to_owned()
            }
        };
        [
            is_most(truncated, count).then(|| {
                format!(
                    "{truncated} of {count} trajectories reached response_tokens_max = {response_tokens_max}; raise \
                     rollout.response_tokens_max, or ask for shorter answers in chat.developer_instructions"
                )
            }),
            is_most(out_of_context, count).then(|| {
                format!(
                    "{out_of_context} of {count} trajectories reached the end of the model's context of {context_tokens_max} \
                     tokens (prompt, answer and tool replies together); shorten the prompt, or use a model with a longer \
                     context"
                )
            }),
            is_tool_unused.then(|| {
                format!("{} of {count} trajectories called the tool{other_formats}; {ask_for_tool}", count - without_call)
            }),
            (has_tool && !is_tool_unused && are_untagged).then(|| {
                format!("{calls_outside_tags}, so nothing executed the call; show the tags in chat.developer_instructions, or {show_calls}")
            }),
            is_most(without_answer, ended).then(|| {
                format!(
                    "no answer could be read in {without_answer} of the {ended} trajectories that ended; {ask_for_answer}"
                )
            }),
        ]
    }
}

/// Facts about a run, for the sentences of [`SampleCounts::messages`].
#[derive(Debug, Clone, Copy)]
pub struct SampleFacts {
    /// Whether the model may call a tool.
    pub has_tool: bool,
    /// Whether the run began with random weights.
    pub random_weights: bool,
    /// `cold_start.steps`.
    pub cold_start_steps: u64,
    pub response_tokens_max: usize,
    pub context_tokens_max: usize,
    /// The last step so far in which at least half of the answers could be read.
    pub answers_read_in_step: Option<u64>,
}

impl SampleFacts {
    pub fn new(loaded: &LoadedModel, environment: &Environment) -> Self {
        let recipe = environment.recipe();
        Self {
            has_tool: environment.interpreter.is_some() || environment.task.answers_calls(),
            random_weights: loaded.random_weights,
            cold_start_steps: recipe.cold_start.steps,
            response_tokens_max: recipe.rollout.response_tokens_max,
            context_tokens_max: loaded.actor.model.context_tokens_max(),
            answers_read_in_step: None,
        }
    }
}

/// Maximum number of braces in a text that are tried as the start of a call.
const BRACES_MAX: usize = 32;

/// Returns whether `text` has a call as JSON: `{"name": …, "arguments": …}`. The caller has removed calls
/// inside tags, so a call in `text` is outside them.
fn holds_call(text: &str) -> bool {
    let is_call = |(at, _): (usize, &str)| {
        let mut values = serde_json::Deserializer::from_str(&text[at..]).into_iter::<serde_json::Value>();
        let value = values.next().and_then(Result::ok).unwrap_or_default();
        value["name"].is_string() && ["arguments", "parameters"].iter().any(|key| value.get(key).is_some())
    };
    text.contains("\"name\"") && text.match_indices('{').take(BRACES_MAX).any(is_call)
}

/// Returns the warnings about the samples in `rows`.
pub fn sample_causes<'r>(
    facts: &SampleFacts,
    environment: &Environment,
    rows: impl Iterator<Item = &'r TrajectoryRow>,
) -> Vec<String> {
    let samples = rows.map(|row| (&row.trajectory, row.messages.as_slice()));
    let counts = SampleCounts::count(environment.task.as_ref(), facts.response_tokens_max, samples);
    counts.messages(facts).into_iter().flatten().collect()
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

    const FACTS: SampleFacts = SampleFacts {
        has_tool: true,
        random_weights: false,
        cold_start_steps: 0,
        response_tokens_max: 1,
        context_tokens_max: 64,
        answers_read_in_step: None,
    };

    fn messages(samples: &[(Outcome, bool, &str)]) -> Vec<String> {
        messages_with(FACTS, samples)
    }

    fn messages_with(facts: SampleFacts, samples: &[(Outcome, bool, &str)]) -> Vec<String> {
        let sample = |&(outcome, calls, text): &(Outcome, bool, &str)| {
            let calls = if calls { vec![CallOutcome::Answered] } else { vec![] };
            let trajectory = Trajectory {
                step: 1,
                prompt: 0,
                sample: 0,
                part: 0,
                policy_version: None,
                policy_versions: vec![],
                problem_id: String::new(),
                tokens: vec![0; 2],
                prompt_tokens: 1,
                mask: vec![false, true],
                log_probs: vec![0.0; 2],
                kept_tokens: vec![],
                routed_experts: vec![],
                turns: vec![Turn { start: 1, end: 2, calls }],
                outcome,
                reward: 0.0,
                success: false,
                rewards: Default::default(),
                failed_rewards: vec![],
                dropped: false,
                tool_s: 0.0,
            };
            (
                trajectory,
                vec![Message::user("```python blocks are not mine"), Message::assistant("final", text)],
            )
        };
        let samples: Vec<(Trajectory, Vec<Message>)> = samples.iter().map(sample).collect();
        let counts = SampleCounts::count(
            &Numbers,
            facts.response_tokens_max,
            samples.iter().map(|(t, m)| (t, m.as_slice())),
        );
        counts.messages(&facts).into_iter().flatten().collect()
    }

    #[test]
    fn each_cause_of_poor_samples_is_reported() {
        use Outcome::{Finished, TruncatedLength};
        assert!(
            messages(&[(Finished, true, "12"), (TruncatedLength, true, "")]).is_empty(),
            "half is not most"
        );
        let truncated = messages(&[(TruncatedLength, true, "and so on"); 16]);
        assert_eq!(truncated.len(), 1, "{truncated:?}");
        assert!(
            truncated[0].starts_with("16 of 16 trajectories reached response_tokens_max = 1;"),
            "{truncated:?}"
        );
        let block = (Finished, false, "```python\nprint(12)\n```");
        let without_call = messages(&[(Finished, false, "12"), block, block, block]);
        assert_eq!(without_call.len(), 1, "{without_call:?}");
        assert!(
            without_call[0].starts_with(
                "0 of 4 trajectories called the tool; 3 of 4 answers have a code block instead of a call; ask"
            ),
            "{without_call:?}"
        );
        let without_answer = messages(&[(Finished, true, "\\boxed{The answer}"); 4]);
        assert_eq!(without_answer.len(), 1, "{without_answer:?}");
        assert!(
            without_answer[0].starts_with("no answer could be read in 4 of the 4 trajectories"),
            "{without_answer:?}"
        );
        let facts = SampleFacts { answers_read_in_step: Some(3), ..FACTS };
        let broken = messages_with(facts, &[(Outcome::Malformed, true, ""); 4]);
        assert!(
            broken[0].contains("in step 3 they could be read")
                && broken[0].contains("a lower train.optimizer.lr"),
            "{broken:?}"
        );
        // The limit of response_tokens_max was not reached.
        let facts = SampleFacts { response_tokens_max: 2, ..FACTS };
        let ended = messages_with(facts, &[(TruncatedLength, true, "and so on"); 4]);
        assert!(
            ended.len() == 1
                && ended[0]
                    .starts_with("4 of 4 trajectories reached the end of the model's context of 64 tokens"),
            "{ended:?}"
        );
    }

    #[test]
    fn a_call_without_its_tags_is_reported() {
        let call = "{\"name\": \"python\", \"arguments\": {\"code\": \"1\"}}";
        let fenced = format!("I compute {{1}}:\n```json\n{call}\n```");
        let answers = [(Outcome::Finished, false, call), (Outcome::Finished, false, &fenced)];
        let unused = messages(&answers);
        let said =
            "0 of 2 trajectories called the tool; 2 of 2 answers have a call without its tags; show the tags";
        assert!(unused[0].starts_with(said), "{unused:?}");
        let half = messages(&[answers[0], (Outcome::Finished, true, "12")]);
        assert!(
            half.len() == 1 && half[0].starts_with("1 of 2 answers have a call without its tags, so nothing"),
            "{half:?}"
        );
        for text in ["{\"name\": \"Ann\"}", "12", "\"name\" {", "{\"name\": 1, \"arguments\": 2}"] {
            assert!(!holds_call(text), "{text}");
        }
    }

    /// Instructions do not help a model with random weights.
    #[test]
    fn random_weights_need_an_sft_warm_up() {
        let facts = SampleFacts { random_weights: true, ..FACTS };
        let told = messages_with(facts, &[(Outcome::Finished, false, "x"); 4]);
        assert_eq!(told.len(), 2, "{told:?}");
        assert!(told.iter().all(|line| line.contains("the weights began at random")), "{told:?}");
        assert!(told.iter().all(|line| !line.contains("developer_instructions")), "{told:?}");
        let facts = SampleFacts { cold_start_steps: 3, ..facts };
        let told = messages_with(facts, &[(Outcome::Finished, false, "x"); 4]);
        assert!(told.iter().all(|line| line.contains("raise cold_start.steps (now 3)")), "{told:?}");
    }
}
