//! ReTool (Feng et al. 2025): competition mathematics with the Python tool.
//!
//! The training problems have integer answers (format of DAPO-Math-17k). Validation is on AIME or MATH files.

use super::answer::{self, AnswerEquality};
use super::boxed_answer::find_last_boxed;
use super::columns::{self, Question};
use super::number::Number;
use super::rows::{self, EpochOrder};
use super::{Problem, Reward, Task, TaskContext, TaskEntry, TaskSettings, Transcript, ValidationSet};
use crate::bad_input;
use crate::harmony::Message;
use crate::random::Purpose;
use crate::settings::choice;
use anyhow::Result;
use serde_json::Value;
use std::path::Path;

const FORM: &str = r#"{"problem": "...", "answer": 42}"#;

/// Number of bytes that are read from the end of the final message.
const END_BYTES: usize = 8_000;
/// Maximum number of characters after the answer, which must be near the end of the message.
const AFTER_CHARS_MAX: usize = 100;

/// Bits of the integers that a float holds exactly. Only such a float is read as a reference.
const FLOAT_BITS: u64 = 53;

pub(super) const ENTRY: TaskEntry = TaskEntry {
    name: "retool",
    meaning: "Competition mathematics with the Python tool, as in ReTool.",
    reads_files: true,
    data: "dapo-math aime",
    columns: &["problem", "answer"],
    reward_min: -1.0,
    keys: &["columns", "validation_files", "answer", "prompt"],
    make: |settings, context| Ok(Box::new(Retool::load(settings, context)?)),
};

choice! {
    /// How the prompt asks for the answer.
    pub enum PromptFormat default Boxed {
        /// ReTool's suffix. The answer is the last `\boxed{}`, near the end.
        Boxed = "boxed",
        /// A suffix without a placeholder, because small models copy the placeholder. The answer is read as
        /// in `boxed`.
        BoxedPlain = "boxed_plain",
        /// DAPO's text around the problem. The answer is on the last line, after `Answer:`.
        AnswerLine = "answer_line",
    }
}

impl PromptFormat {
    /// Returns the prompt of a problem.
    pub fn prompt(self, problem: &str) -> Message {
        Message::user(match self {
            PromptFormat::Boxed => {
                format!("{problem}\nThe answer format must be: \\boxed{{'The final answer goes here.'}}")
            }
            PromptFormat::BoxedPlain => format!("{problem}\nPut the final answer within \\boxed{{}}."),
            PromptFormat::AnswerLine => format!(
                "Solve the following math problem step by step. The last line of your response should be of the \
                 form Answer: $Answer (without quotes) where $Answer is the answer to the problem.\n\n{problem}\n\n\
                 Remember to put your answer on its own line after \"Answer:\"."
            ),
        })
    }

    /// Returns `answer` in the words that the prompt asks for.
    pub fn answer(self, answer: &str) -> String {
        match self {
            PromptFormat::Boxed | PromptFormat::BoxedPlain => format!("\\boxed{{{answer}}}"),
            PromptFormat::AnswerLine => format!("Answer: {answer}"),
        }
    }

    /// Returns the answer from the end of a final message.
    pub fn extract(self, text: &str) -> Option<&str> {
        let text = text.trim_end();
        let end = &text[text.ceil_char_boundary(text.len().saturating_sub(END_BYTES))..];
        let near = |after: &str| after.chars().nth(AFTER_CHARS_MAX).is_none();
        match self {
            PromptFormat::Boxed | PromptFormat::BoxedPlain => {
                let (start, content) = find_last_boxed(end)?;
                let after = end[start..].split_once(content).map_or("", |(_, after)| after);
                near(after).then_some(content)
            }
            PromptFormat::AnswerLine => {
                // ASCII lower case keeps byte positions.
                let lower = end.to_ascii_lowercase();
                let start = lower.rmatch_indices("answer").find_map(|(at, word)| {
                    let after = &lower[at + word.len()..];
                    let line = after.trim_start_matches([' ', '*']).strip_prefix(':')?;
                    Some(lower.len() - line.len())
                })?;
                let mark = |c: char| c.is_whitespace() || matches!(c, '*' | '$');
                // The answer may also be on the line below.
                let rest = end[start..].trim_start_matches(mark);
                let line = rest.lines().next().unwrap_or("");
                let answer = find_last_boxed(line).map_or(line, |(_, content)| content);
                let answer = answer.trim_start_matches(mark).trim_end_matches(|c| mark(c) || c == '.');
                let answer = answer.strip_prefix("\\(").unwrap_or(answer);
                let answer = answer.strip_suffix("\\)").unwrap_or(answer).trim();
                (near(&rest[line.len()..]) && !answer.is_empty()).then_some(answer)
            }
        }
    }
}

/// A row of a file.
#[derive(Debug, Clone)]
struct Row {
    id: Option<String>,
    problem: Question,
    answer: String,
}

impl Row {
    fn read(row: &Value, equality: AnswerEquality) -> Result<Self, String> {
        let answer = match columns::reference(row) {
            Some(Value::Number(number)) => exact_number(&number.to_string())?,
            Some(Value::String(text)) if !text.trim().is_empty() => text.trim().to_owned(),
            Some(Value::String(_)) => return Err("`answer` is empty".into()),
            Some(_) => return Err("`answer` is neither a number nor a string".into()),
            None => return Err("`answer` is missing".into()),
        };
        if let Some(reason) = equality.refusal(&answer) {
            let start: String = answer.chars().take(40).collect();
            return Err(format!("`answer` {start:?} {reason}"));
        }
        let id = ["id", "unique_id", "index"].iter().find_map(|key| match row.get(key)? {
            Value::String(id) => Some(id.clone()),
            Value::Number(id) => Some(id.to_string()),
            _ => None,
        });
        Ok(Self { id, problem: Question::read(row, "problem")?, answer })
    }

    fn problem(&self, set: &str, row: usize, form: PromptFormat) -> Problem {
        let id = self.id.clone().unwrap_or_else(|| row.to_string());
        Problem {
            id: format!("{set}/{id}"),
            messages: self.problem.messages(|problem| form.prompt(problem)),
            answer: self.answer.clone().into(),
        }
    }
}

/// Returns a JSON number as a decimal: of `42.0`, which columns with a gap have, it is 42.
///
/// # Errors
/// When the number is written as a float and so large that a float may have lost digits.
fn exact_number(text: &str) -> Result<String, String> {
    let float = text.contains(['.', 'e', 'E']);
    match answer::rational_values(text).as_deref() {
        _ if !float => Ok(text.to_owned()),
        Some([value]) if value.to_integer().bits() <= FLOAT_BITS => Ok(Number::from(value).to_string()),
        _ => {
            Err(format!("`answer` {text} is a float that may have lost digits; write it as a text in quotes"))
        }
    }
}

/// Returns the set's name, such as `aime_2025` for `data/aime/aime-2025.jsonl`.
fn set_name(path: &Path) -> String {
    let name = path.file_name().unwrap_or_default().to_string_lossy();
    let stem = name.split('.').next().unwrap_or_default();
    stem.chars().map(|c| if c.is_alphanumeric() { c } else { '_' }).collect()
}

/// The task `retool`.
///
/// The reward is +1 for the right answer, otherwise min(−0.6, −1 + 0.1 · answered tool calls). The published
/// rule counts turns with calls instead of calls. Tool calls thus give a small bonus, but a wrong answer
/// never gets more than −0.6.
pub struct Retool {
    train: Vec<Row>,
    train_name: String,
    order: EpochOrder,
    validation: Vec<ValidationSet>,
    equality: AnswerEquality,
    form: PromptFormat,
}

impl Retool {
    /// Reads the training file and the validation files.
    ///
    /// # Errors
    /// [`crate::error::BadInput`] with the file and every broken row. Also for two validation files of the
    /// same name, and for a problem in both the training file and a validation file.
    pub fn load(settings: &TaskSettings, context: &TaskContext) -> Result<Self> {
        let form = settings.prompt.unwrap_or_default();
        let equality = settings.answer.unwrap_or_default();
        let read = |row: &Value| Row::read(row, equality);
        let (train, training) = settings.training_rows(context, FORM, read)?;
        let mut sets: Vec<ValidationSet> = Vec::new();
        let files = settings.validation_file.iter().chain(&settings.validation_files);
        for path in files.filter(|_| context.reads_held_out) {
            let name = set_name(path);
            if sets.iter().any(|set| set.name == name) {
                let path_text = path.display();
                return Err(bad_input!(
                    "task.validation_files: {path_text} is a second file with the set name `{name}`; rename one of the files"
                ));
            }
            let rows = settings.read_rows(path, settings.validation_rows_max, FORM, read)?;
            let held_out = rows.iter().zip(1..).map(|(row, number)| (number, row.problem.text()));
            rows::refuse_overlap((train, training.iter().map(|row| row.problem.text())), (path, held_out))?;
            let problems = rows.iter().enumerate().map(|(i, row)| row.problem(&name, i, form)).collect();
            sets.push(ValidationSet { name, problems });
        }
        Ok(Self {
            order: EpochOrder::new(training.len(), Purpose::Shuffle),
            train: training,
            train_name: set_name(train),
            validation: sets,
            equality,
            form,
        })
    }
}

impl Task for Retool {
    fn name(&self) -> &str {
        "retool"
    }

    fn training_problem(&self, seed: u64, index: u64) -> Problem {
        let row = self.order.row(seed, index);
        self.train[row].problem(&self.train_name, row, self.form)
    }

    fn leave_out_training_problems(&mut self, fits: &dyn Fn(&Problem) -> bool) -> usize {
        self.order.leave_out(|row| fits(&self.train[row].problem(&self.train_name, row, self.form)))
    }

    fn training_rows(&self) -> Option<usize> {
        Some(self.order.rows())
    }

    fn validation_sets(&self) -> &[ValidationSet] {
        &self.validation
    }

    fn uses_python(&self) -> bool {
        true
    }

    fn answer_text(&self, transcript: &Transcript) -> Option<String> {
        transcript.final_text().and_then(|text| self.form.extract(text)).map(str::to_owned)
    }

    fn same_answer(&self, a: &str, b: &str) -> bool {
        a == b || self.equality.matches(a, b)
    }

    fn reward(&self, problem: &Problem, transcript: &Transcript) -> Result<Reward> {
        let answer = transcript.final_text().and_then(|text| self.form.extract(text));
        let reference = problem.answer.as_str().unwrap_or_default();
        let success = answer.is_some_and(|answer| self.equality.matches(reference, answer));
        let tried = -1.0 + 0.1 * transcript.calls_answered as f32;
        Ok(Reward::new(if success { 1.0 } else { tried.min(-0.6) }, success))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_box_must_stand_near_the_end() {
        let boxed = |text: &str| PromptFormat::Boxed.extract(text).map(str::to_owned);
        assert_eq!(boxed("So \\boxed{\\frac{1}{2}}.").as_deref(), Some("\\frac{1}{2}"));
        assert_eq!(boxed("\\boxed{1} no, \\boxed{2}").as_deref(), Some("2"));
        assert_eq!(boxed(&format!("\\boxed{{7}}{}", "é".repeat(99))).as_deref(), Some("7"));
        assert_eq!(boxed(&format!("\\boxed{{7}}{}", "é".repeat(101))), None);
        assert_eq!(boxed("7"), None);
    }

    #[test]
    fn the_answer_line_is_the_last_one() {
        let line = |text: &str| PromptFormat::AnswerLine.extract(text).map(str::to_owned);
        assert_eq!(line("Answer: 3\nBut no.\n**Answer:** $42$.").as_deref(), Some("42"));
        assert_eq!(line("answer: \\boxed{42}").as_deref(), Some("42"));
        assert_eq!(line("Answer : \\(42\\)").as_deref(), Some("42"));
        assert_eq!(line("**Answer**: 7").as_deref(), Some("7"));
        assert_eq!(line("Answer:"), None);
        assert_eq!(line("**Answer:**\n\n42").as_deref(), Some("42"));
        assert_eq!(line(&format!("Answer:\n42{}", "\nfor".repeat(99))), None);
        assert_eq!(line("42"), None);
    }

    /// Tables write whole numbers of a column with gaps as 42.0, which no answer matched.
    #[test]
    fn a_whole_float_is_a_whole_number() {
        let answer = |value: Value| {
            Row::read(&serde_json::json!({"problem": "6*7?", "answer": value}), AnswerEquality::Exact)
                .unwrap()
                .answer
        };
        assert_eq!(answer(serde_json::json!(42.0)), "42");
        assert_eq!(answer(serde_json::json!(42)), "42");
        assert_eq!(answer(serde_json::json!(0.5)), "0.5");
    }

    #[test]
    fn validation_sets_are_named_after_their_files() {
        assert_eq!(set_name(Path::new("data/aime/aime-2025.jsonl")), "aime_2025");
        assert_eq!(set_name(Path::new("x/math-500.jsonl.gz")), "math_500");
    }
}
