//! Instruction following with instructions that a program can check. Validation: IFEval and Multi-IF.
//! Training: rows in their format, or prompts that are composed from maths questions.

use super::instructions::compose::{INSTRUCTION_CHARS_MAX, INSTRUCTIONS_MAX, compose};
use super::instructions::{Instruction, check_strictly};
use super::rows::{self, EpochOrder};
use super::{Problem, Reward, Task, TaskContext, TaskEntry, TaskSettings, Transcript, ValidationSet};
use crate::bad_input;
use crate::harmony::{Message, Role};
use crate::random::{Purpose, stream};
use crate::settings::choice;
use crate::trajectory::Outcome;
use anyhow::{Context, Result};
use serde_json::{Value, json};

const TRAIN_FORM: &str = r#"{"prompt": "...", "instruction_id_list": ["punctuation:no_comma"], "kwargs": [{}]}, or {"question": "..."} or {"problem": "..."} to compose instructions for"#;

const VALIDATION_FORM: &str = r#"{"prompt": "...", "instruction_id_list": ["punctuation:no_comma"], "kwargs": [{}]}, or {"turns": [...]} with a list of such objects"#;

pub(super) const ENTRY: TaskEntry = TaskEntry {
    name: "verify_if",
    meaning: "Checkable instructions in IFEval's format, without a tool.",
    reads_files: true,
    data: "gsm8k ifeval",
    columns: &[],
    reward_min: 0.0,
    keys: &["grading"],
    make: |settings, context| Ok(Box::new(VerifyIf::load(settings, context)?)),
};

choice! {
    /// How the checked instructions become a reward.
    pub enum Grading default Share {
        /// The share of the instructions that were followed.
        Share = "share",
        /// 1 if all instructions were followed, otherwise 0.
        All = "all",
    }
}

impl Grading {
    /// Returns the reward of one response, between 0 and 1.
    fn reward(self, verdicts: &[bool]) -> f32 {
        let followed = verdicts.iter().filter(|&&v| v).count();
        match self {
            Grading::Share => followed as f32 / verdicts.len().max(1) as f32,
            Grading::All => f32::from(u8::from(followed == verdicts.len())),
        }
    }
}

/// A user's message and the instructions for its answer, in IFEval's format.
#[derive(Debug, Clone)]
struct RowTurn {
    prompt: String,
    ids: Value,
    kwargs: Value,
}

impl RowTurn {
    fn read(row: &Value) -> Result<Self, String> {
        let prompt = rows::text(row, "prompt")?.to_owned();
        let turn = Self { prompt, ids: row["instruction_id_list"].clone(), kwargs: row["kwargs"].clone() };
        instructions(&turn.ids, &turn.kwargs).map_err(|e| e.to_string())?;
        Ok(turn)
    }

    /// Reads the turns of a conversation. A row without `turns` is a single turn.
    fn read_all(row: &Value) -> Result<Vec<Self>, String> {
        match row.get("turns") {
            None => Ok(vec![Self::read(row)?]),
            Some(Value::Array(turns)) if !turns.is_empty() => turns
                .iter()
                .enumerate()
                .map(|(i, turn)| Self::read(turn).map_err(|e| format!("turn {}: {e}", i + 1)))
                .collect(),
            Some(_) => Err("`turns` is not a list of one or more turns".into()),
        }
    }
}

/// Parses the instructions of one turn.
///
/// # Errors
/// When the two lists differ in length, are empty or have an invalid instruction.
fn instructions(ids: &Value, kwargs: &Value) -> Result<Vec<Instruction>> {
    let ids = ids.as_array().ok_or_else(|| bad_input!("`instruction_id_list` is not a list"))?;
    let kwargs = kwargs.as_array().ok_or_else(|| bad_input!("`kwargs` is not a list"))?;
    if ids.is_empty() || ids.len() != kwargs.len() {
        let (n, m) = (ids.len(), kwargs.len());
        return Err(bad_input!(
            "`instruction_id_list` has {n} entries and `kwargs` {m}; give one `kwargs` entry per id"
        ));
    }
    let id = |value: &Value| {
        value.as_str().map(str::to_owned).ok_or_else(|| bad_input!("id {value} is not a string"))
    };
    ids.iter().zip(kwargs).map(|(i, k)| Instruction::parse(&id(i)?, k)).collect()
}

/// Builds the problem of a conversation. Its answer stores every turn.
fn problem(id: String, turns: &[RowTurn]) -> Problem {
    let answer = turns
        .iter()
        .map(|turn| json!({ "prompt": turn.prompt, "instruction_id_list": turn.ids, "kwargs": turn.kwargs }));
    let messages = turns.first().map(|turn| Message::user(&*turn.prompt)).into_iter().collect();
    Problem { id, messages, answer: answer.collect() }
}

/// The source of a training prompt.
#[derive(Debug)]
enum PromptSource {
    /// A prompt with its instructions.
    Ready(RowTurn),
    /// A question, which gets new instructions each time it is used.
    Question(String),
}

impl PromptSource {
    fn read(row: &Value) -> Result<Self, String> {
        match ["question", "problem"].into_iter().find(|key| row.get(*key).is_some()) {
            Some(key) if ["prompt", "instruction_id_list", "kwargs"].iter().all(|k| row.get(k).is_none()) => {
                Ok(Self::Question(rows::text(row, key)?.to_owned()))
            }
            _ => RowTurn::read(row).map(Self::Ready),
        }
    }

    fn text(&self) -> &str {
        match self {
            Self::Ready(turn) => &turn.prompt,
            Self::Question(question) => question,
        }
    }
}

/// The task `verify_if`. Its reward comes from the checkers in [`super::instructions`], applied strictly.
///
/// In a conversation of several turns, each answer is graded on its own turn's instructions. The reward is
/// the mean over the turns. `success` is true if the last answer follows all instructions of the last turn,
/// because in Multi-IF the last turn includes the instructions of earlier turns.
pub struct VerifyIf {
    train: Vec<PromptSource>,
    order: EpochOrder,
    validation: Vec<ValidationSet>,
    grading: Grading,
}

impl VerifyIf {
    /// Reads both files. Validation rows with `turns` form the set `multi_if`, the others `ifeval`.
    ///
    /// # Errors
    /// [`crate::error::BadInput`] with the file and every broken row, or with the first prompt that is in
    /// both files.
    pub fn load(settings: &TaskSettings, context: &TaskContext) -> Result<Self> {
        let (train, sources) = settings.training_rows(context, TRAIN_FORM, PromptSource::read)?;
        let (validation, held_out) = settings.held_out_rows(context, VALIDATION_FORM, |row| {
            let turns = RowTurn::read_all(row)?;
            match context.turns_max {
                Some(turns_max) if turns.len() > turns_max => Err(format!(
                    "has {} turns, but rollout.turns_max is {turns_max}; set it to at least {}",
                    turns.len(),
                    turns.len()
                )),
                _ => Ok((row.get("turns").is_some(), turns)),
            }
        })?;
        let texts = held_out.iter().zip(1..);
        let texts = texts.flat_map(|((_, turns), row)| turns.iter().map(move |turn| (row, &*turn.prompt)));
        rows::refuse_overlap((train, sources.iter().map(PromptSource::text)), (validation, texts))?;
        let set = |name: &str, several: bool| {
            let rows = held_out.iter().enumerate().filter(|(_, (turns, _))| *turns == several);
            let problems: Vec<_> =
                rows.map(|(i, (_, turns))| problem(format!("{name}/{i}"), turns)).collect();
            (!problems.is_empty()).then(|| ValidationSet { name: name.to_owned(), problems })
        };
        Ok(Self {
            validation: [set("ifeval", false), set("multi_if", true)].into_iter().flatten().collect(),
            order: EpochOrder::new(sources.len(), Purpose::Shuffle),
            train: sources,
            grading: settings.grading.unwrap_or_default(),
        })
    }

    /// Returns for each turn whether its answer follows the turn's instructions. All are false for a turn
    /// without an answer.
    ///
    /// # Errors
    /// When the problem belongs to another task.
    pub fn verdicts(&self, problem: &Problem, transcript: &Transcript) -> Result<Vec<Vec<bool>>> {
        let turns = problem.answer.as_array().with_context(|| format!("{}: no turns", problem.id))?;
        let mut replies = transcript.messages.split(|message| message.role == Role::User);
        turns
            .iter()
            .map(|turn| {
                let instructions = instructions(&turn["instruction_id_list"], &turn["kwargs"])?;
                let answer = replies.next().and_then(|messages| {
                    let last = messages.iter().rfind(|m| m.channel.as_deref() == Some("final"));
                    last.map(|m| m.content.as_str())
                });
                Ok(check_strictly(&instructions, answer.unwrap_or_default()))
            })
            .collect()
    }
}

impl Task for VerifyIf {
    fn name(&self) -> &str {
        "verify_if"
    }

    fn training_problem(&self, seed: u64, index: u64) -> Problem {
        let row = self.order.row(seed, index);
        let id = format!("verify_if/train/{row}");
        match &self.train[row] {
            PromptSource::Ready(turn) => problem(id, std::slice::from_ref(turn)),
            PromptSource::Question(question) => {
                let composed = compose(question, &mut stream(seed, Purpose::Problem, &[index]));
                let (ids, kwargs) = (json!(composed.instruction_id_list), Value::Array(composed.kwargs));
                problem(id, &[RowTurn { prompt: composed.prompt, ids, kwargs }])
            }
        }
    }

    /// A question gets its instructions when it is drawn, so it must fit with the longest ones.
    fn leave_out_training_problems(&mut self, fits: &dyn Fn(&Problem) -> bool) -> usize {
        self.order.leave_out(|row| match &self.train[row] {
            PromptSource::Ready(turn) => fits(&problem(String::new(), std::slice::from_ref(turn))),
            PromptSource::Question(question) => {
                // A text as long as the longest instructions.
                let instructions = "the ".repeat(INSTRUCTIONS_MAX * INSTRUCTION_CHARS_MAX / 4);
                let messages = vec![Message::user(format!("{question}\n\n{instructions}"))];
                fits(&Problem { id: String::new(), messages, answer: Value::Null })
            }
        })
    }

    fn validation_sets(&self) -> &[ValidationSet] {
        &self.validation
    }

    fn next_user_message(&self, problem: &Problem, transcript: &Transcript) -> Result<Option<Message>> {
        let asked = 1 + transcript.messages.iter().filter(|m| m.role == Role::User).count();
        let turn = problem.answer.get(asked);
        Ok(turn.and_then(|turn| turn["prompt"].as_str()).map(Message::user))
    }

    fn reward(&self, problem: &Problem, transcript: &Transcript) -> Result<Reward> {
        let verdicts = self.verdicts(problem, transcript)?;
        if transcript.outcome != Outcome::Finished {
            return Ok(Reward::new(0.0, false));
        }
        let sum: f32 = verdicts.iter().map(|turn| self.grading.reward(turn)).sum();
        let success = verdicts.last().is_some_and(|turn| turn.iter().all(|&v| v));
        Ok(Reward::new(sum / verdicts.len().max(1) as f32, success))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_row_with_its_own_instructions_needs_its_prompt() {
        let row =
            json!({"question": "Say A.", "instruction_id_list": ["punctuation:no_comma"], "kwargs": [{}]});
        assert!(PromptSource::read(&row).unwrap_err().contains("prompt"));
        assert!(matches!(PromptSource::read(&json!({"question": "Say A."})), Ok(PromptSource::Question(_))));
    }

    /// Such rows had success 0, whatever the model answered.
    #[test]
    fn conversations_longer_than_turns_max_are_refused() {
        let folder = tempfile::tempdir().unwrap();
        let file = |name: &str, row: Value| {
            let path = folder.path().join(name);
            std::fs::write(&path, row.to_string()).unwrap();
            Some(path)
        };
        let turn =
            json!({"prompt": "Say A.", "instruction_id_list": ["punctuation:no_comma"], "kwargs": [{}]});
        let settings = TaskSettings {
            train_file: file("train.jsonl", json!({"question": "Say B."})),
            validation_file: file("held_out.jsonl", json!({"turns": [turn, turn, turn]})),
            ..TaskSettings::default()
        };
        let load =
            |turns_max| VerifyIf::load(&settings, &TaskContext { turns_max, ..TaskContext::default() });
        let error = load(Some(2)).err().unwrap().to_string();
        assert!(error.contains("row 1") && error.contains("rollout.turns_max"), "{error}");
        assert!(load(Some(3)).is_ok() && load(None).is_ok());
    }
}
