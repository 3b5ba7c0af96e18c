//! GSM8K (Cobbe et al. 2021): word problems whose reference answer ends in `#### n`.

use super::answer::rational_values;
use super::boxed_answer::find_last_boxed;
use super::columns::{self, Question};
use super::number::{Number, numbers};
use super::retool::PromptFormat;
use super::rows::{self, EpochOrder};
use super::{
    Demonstration, Problem, Reward, Task, TaskContext, TaskEntry, TaskSettings, Transcript, ValidationSet,
};
use crate::harmony::Message;
use crate::random::Purpose;
use crate::settings::choice;
use crate::trajectory::Outcome;
use anyhow::Result;
use serde_json::Value;

/// Instruction after each question. It has the wording of verl's GSM8K preparation, so that runs are
/// comparable.
const INSTRUCTION: &str = "Let's think step by step and output the final answer after \"####\".";

const FORM: &str = r#####"{"question": "...", "answer": "... #### 42"}"#####;

pub(super) const ENTRY: TaskEntry = TaskEntry {
    name: "gsm8k",
    meaning: "Grade-school word problems from GSM8K's JSONL files, without a tool.",
    reads_files: true,
    data: "gsm8k",
    columns: &["question", "answer"],
    reward_min: 0.0,
    keys: &["columns", "extraction", "prompt"],
    make: |settings, context| Ok(Box::new(Gsm8k::load(settings, context)?)),
};

choice! {
    /// Where the answer's number is read.
    pub enum Extraction default Flexible {
        /// Only after the last `####` before a number, as in verl.
        Strict = "strict",
        /// After `####` or in `\boxed{}`, whichever comes last. If there is neither, the last number. A
        /// heading such as `#### Notes` is no answer.
        Flexible = "flexible",
    }
}

/// A row of the data set.
#[derive(Debug, Clone)]
struct Row {
    question: Question,
    /// The worked solution without calculator annotations and without the `####` line.
    solution: String,
    reference: String,
}

impl Row {
    fn read(row: &Value) -> Result<Self, String> {
        let question = Question::read(row, "question")?;
        let answer = match columns::reference(row) {
            Some(Value::Number(number)) => number.to_string(),
            Some(Value::String(text)) if !text.trim().is_empty() => text.clone(),
            _ => rows::text(row, "answer")?.to_owned(),
        };
        // A number alone has no worked solution.
        let (solution, reference) = match answer.rsplit_once("####") {
            Some(parts) => parts,
            None if whole_number(&answer).is_some() => ("", &*answer),
            None => return Err("`answer` has no `#### <number>` line and is no number".into()),
        };
        let reference = whole_number(reference)
            .ok_or_else(|| format!("`answer` ends in `####{}`, which is not a number", clip(reference)))?;
        Ok(Self {
            question,
            solution: without_annotations(solution).trim().to_owned(),
            reference: reference.to_string(),
        })
    }

    /// Returns the prompt: verl's without a `form`.
    fn prompt(&self, form: Option<PromptFormat>) -> Vec<Message> {
        self.question.messages(|question| match form {
            Some(form) => form.prompt(question),
            None => Message::user(format!("{question} {INSTRUCTION}")),
        })
    }

    fn problem(&self, id: String, form: Option<PromptFormat>) -> Problem {
        Problem { id, messages: self.prompt(form), answer: self.reference.clone().into() }
    }

    fn demonstration(&self, form: Option<PromptFormat>) -> Demonstration {
        let answer = match form {
            Some(form) => form.answer(&self.reference),
            None => format!("#### {}", self.reference),
        };
        let answer = Message::assistant("final", answer);
        let solution = Some(&*self.solution).filter(|text| !text.is_empty());
        let solution = solution.map(|text| Message::assistant("analysis", text));
        Demonstration { messages: self.prompt(form).into_iter().chain(solution).chain([answer]).collect() }
    }
}

/// Returns the first characters of an invalid value, for an error message.
fn clip(text: &str) -> String {
    text.chars().take(40).collect()
}

/// Converts `48/2 = <<48/2=24>>24` to `48/2 = 24`.
fn without_annotations(text: &str) -> String {
    let mut plain = String::with_capacity(text.len());
    let mut rest = text;
    while let Some((before, after)) = rest.split_once("<<") {
        plain.push_str(before);
        match after.split_once(">>") {
            Some((_, after)) => rest = after,
            None => {
                plain.push_str("<<");
                rest = after;
            }
        }
    }
    plain + rest
}

/// Returns the number that `text` as a whole is: `$1,250.00`, `60 \text{ ft}^2`, `n = 84/2`, `25\%`.
fn whole_number(text: &str) -> Option<Number> {
    Number::parse(text)
        .or_else(|| if let [value] = rational_values(text)?.as_slice() { Some(value.into()) } else { None })
}

/// Returns the number in a box. `None` for several numbers.
fn boxed_number(content: &str) -> Option<Number> {
    let value = content.rsplit('=').next().unwrap_or(content);
    let unit = ["\\text", "\\mathrm", "^"].iter().filter_map(|unit| value.find(unit)).min();
    whole_number(content).or_else(|| match rational_values(content) {
        Some(_) => None,
        None => unit.and_then(|unit| Number::last_in(&value[..unit])).or_else(|| Number::last_in(value)),
    })
}

/// Returns the texts after each `####`, with the byte index of the mark. The last comes first.
fn marks(text: &str) -> impl Iterator<Item = (usize, &str)> {
    text.rmatch_indices("####").map(|(at, mark)| (at, &text[at + mark.len()..]))
}

/// Returns the number after a mark as verl reads it: a minus, digits, points and commas.
fn strict_number(after: &str) -> Option<Number> {
    let start = after.strip_prefix(' ').unwrap_or(after);
    let digits = start.strip_prefix('-').unwrap_or(start);
    let end = digits.find(|c: char| !c.is_ascii_digit() && c != '.' && c != ',').unwrap_or(digits.len());
    Number::parse(&start[..start.len() - digits.len() + end].replace(',', ""))
}

/// Returns the number on the line of a mark, if the line begins with it or says that it is the answer.
fn marked_number(after: &str) -> Option<Number> {
    let line = after.trim_start().split(['\n', '#']).next()?;
    let named = line.split_once(':').filter(|(name, _)| name.to_lowercase().contains("answer"));
    let line = named.map_or(line, |(_, answer)| answer);
    let is_mark = |c: char| c.is_whitespace() || "*:([€£¥₹$".contains(c);
    let start = line.trim_start_matches(is_mark).trim_start_matches("\\(").trim_start();
    if Number::starts(start) || Number::starts(line) {
        let sentence = line.trim_end_matches(|c: char| c.is_whitespace() || "!.*".contains(c));
        return whole_number(sentence).or_else(|| numbers(line).next());
    }
    named.and_then(|_| Number::last_in(line))
}

/// Returns the number that `text` gives as its answer.
pub fn extract(text: &str, extraction: Extraction) -> Option<Number> {
    // A mark may also close the answer: `#### 42 ####`.
    let text = text.trim_end_matches(|c: char| c.is_whitespace() || c == '#');
    if extraction == Extraction::Strict {
        return marks(text).find_map(|(_, after)| strict_number(after));
    }
    let marked = marks(text).find_map(|(at, after)| Some((at, marked_number(after)?)));
    match (marked, find_last_boxed(text)) {
        (Some((mark, number)), boxed) if boxed.is_none_or(|(at, _)| at < mark) => Some(number),
        (_, Some((_, content))) => boxed_number(content),
        // The answer follows a heading: `#### Final answer:`.
        _ => {
            let after = marks(text).next().map_or(text, |(_, after)| after.trim_start());
            let later = after.split_once('\n').and_then(|(_, later)| Number::last_in(later));
            later.or_else(|| Number::last_in(after))
        }
    }
}

/// The task `gsm8k`: one turn, reward 1 for the right number and 0 otherwise.
pub struct Gsm8k {
    train: Vec<Row>,
    held_out: Vec<Row>,
    validation: [ValidationSet; 1],
    problems: EpochOrder,
    demonstrations: EpochOrder,
    extraction: Extraction,
    form: Option<PromptFormat>,
}

impl Gsm8k {
    /// Reads both files.
    ///
    /// # Errors
    /// [`crate::error::BadInput`] with the file and every broken row.
    pub fn load(settings: &TaskSettings, context: &TaskContext) -> Result<Self> {
        let (_, train) = settings.training_rows(context, FORM, Row::read)?;
        let (_, held_out) = settings.held_out_rows(context, FORM, Row::read)?;
        let numbered = held_out.iter().enumerate();
        let form = settings.prompt;
        let problems = numbered.map(|(i, row)| row.problem(format!("gsm8k/test/{i}"), form)).collect();
        Ok(Self {
            problems: EpochOrder::new(train.len(), Purpose::Shuffle),
            demonstrations: EpochOrder::new(train.len(), Purpose::Demonstration),
            train,
            held_out,
            validation: [ValidationSet { name: "gsm8k".into(), problems }],
            extraction: settings.extraction.unwrap_or_default(),
            form,
        })
    }
}

fn training_problem(rows: &[Row], row: usize, form: Option<PromptFormat>) -> Problem {
    rows[row].problem(format!("gsm8k/train/{row}"), form)
}

impl Task for Gsm8k {
    fn name(&self) -> &str {
        "gsm8k"
    }

    fn training_problem(&self, seed: u64, index: u64) -> Problem {
        training_problem(&self.train, self.problems.row(seed, index), self.form)
    }

    fn leave_out_training_problems(&mut self, fits: &dyn Fn(&Problem) -> bool) -> usize {
        self.problems.leave_out(|row| fits(&training_problem(&self.train, row, self.form)))
    }

    fn training_rows(&self) -> Option<usize> {
        Some(self.problems.rows())
    }

    fn validation_sets(&self) -> &[ValidationSet] {
        &self.validation
    }

    fn demonstration(&self, seed: u64, index: u64) -> Option<Demonstration> {
        Some(self.train[self.demonstrations.row(seed, index)].demonstration(self.form))
    }

    fn held_out_demonstration(&self, index: u64) -> Option<Demonstration> {
        self.held_out.get(usize::try_from(index).ok()?).map(|row| row.demonstration(self.form))
    }

    fn answer_text(&self, transcript: &Transcript) -> Option<String> {
        transcript.final_text().and_then(|text| extract(text, self.extraction)).map(|n| n.to_string())
    }

    fn reward(&self, problem: &Problem, transcript: &Transcript) -> Result<Reward> {
        let finished = transcript.outcome == Outcome::Finished;
        let answer = transcript.final_text().and_then(|text| extract(text, self.extraction));
        let right = answer.is_some_and(|n| problem.answer.as_str() == Some(&n.to_string()));
        let success = finished && right;
        Ok(Reward::new(if success { 1.0 } else { 0.0 }, success))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn annotations_disappear() {
        assert_eq!(without_annotations("48/2 = <<48/2=24>>24 clips."), "48/2 = 24 clips.");
        assert_eq!(without_annotations("a << b"), "a << b");
    }

    #[test]
    fn the_answer_is_taken_from_the_last_mark() {
        let flexible = |text| extract(text, Extraction::Flexible).map(|n| n.to_string());
        let strict = |text| extract(text, Extraction::Strict).map(|n| n.to_string());
        assert_eq!(flexible("so #### 1,234").as_deref(), Some("1234"));
        assert_eq!(flexible("#### 3\nor rather \\boxed{4}").as_deref(), Some("4"));
        assert_eq!(flexible("\\boxed{4}, so #### 5").as_deref(), Some("5"));
        assert_eq!(flexible("it is 7 of 8").as_deref(), Some("8"));
        assert_eq!(flexible("#### $18.00 dollars in 2 days").as_deref(), Some("18"));
        assert_eq!(flexible("####").as_deref(), None);
        for closed in ["#### 42 ####", "####42####", "#### 42\n####\n"] {
            assert_eq!(
                [flexible(closed), strict(closed)],
                [Some("42".into()), Some("42".into())],
                "{closed}"
            );
        }
        assert_eq!(flexible("#### It costs $50 - ($50 * 0.30) = $50 - $15 = $35.").as_deref(), Some("35"));
        // A heading is no answer.
        assert_eq!(flexible("#### Final answer:\n42").as_deref(), Some("42"));
        assert_eq!(flexible("#### Step 3: add up\nSo she has 42.").as_deref(), Some("42"));
        assert_eq!(flexible("#### The total is 42 apples.").as_deref(), Some("42"));
        assert_eq!(flexible("#### **42**\nof 50").as_deref(), Some("42"));
        assert_eq!(strict("#### Final answer:\n42"), None);
        // A box has units and thousands.
        assert_eq!(flexible("\\boxed{60 \\text{ ft}^2}").as_deref(), Some("60"));
        assert_eq!(flexible("\\boxed{n = 1\\,200}").as_deref(), Some("1200"));
        assert_eq!(flexible("\\boxed{\\text{Answer: }7}").as_deref(), Some("7"));
        assert_eq!(flexible("\\boxed{\\frac{84}{2}}").as_deref(), Some("42"));
        assert_eq!(strict("\\boxed{4}").as_deref(), None);
        assert_eq!(strict("#### -5").as_deref(), Some("-5"));
        assert_eq!(strict("it is 7").as_deref(), None);
    }
}
