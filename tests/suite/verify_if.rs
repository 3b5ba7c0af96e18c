//! The task `verify_if`: rows, grading, several turns, and files that must not overlap.

use crate::data;
use rloss::error::BadInput;
use rloss::harmony::Message;
use rloss::settings::Choice;
use rloss::tasks::verify_if::Grading;
use rloss::tasks::{Problem, Reward, Task, TaskContext, TaskName, TaskSettings, Transcript, VerifyIf};
use rloss::trajectory::Outcome;
use std::path::{Path, PathBuf};

const COMMAS: &str =
    r#""instruction_id_list": ["punctuation:no_comma", "startend:quotation"], "kwargs": [{}, null]"#;

fn file(folder: &Path, name: &str, lines: &[String]) -> PathBuf {
    let path = folder.join(name);
    std::fs::write(&path, lines.join("\n")).unwrap();
    path
}

fn row(prompt: &str) -> String {
    format!(r#"{{"prompt": "{prompt}", {COMMAS}}}"#)
}

fn load(train: &[String], validation: &[String], grading: Grading) -> anyhow::Result<VerifyIf> {
    let folder = tempfile::tempdir().unwrap();
    let (train, validation) =
        (file(folder.path(), "train.jsonl", train), file(folder.path(), "held.jsonl", validation));
    open(&train, &validation, grading)
}

fn open(train: &Path, validation: &Path, grading: Grading) -> anyhow::Result<VerifyIf> {
    let settings = TaskSettings {
        name: TaskName::from_name("verify_if").unwrap(),
        train_file: Some(train.to_owned()),
        validation_file: Some(validation.to_owned()),
        grading: Some(grading),
        ..TaskSettings::default()
    };
    VerifyIf::load(&settings, &TaskContext::default())
}

fn reward(task: &VerifyIf, problem: &Problem, messages: &[Message], outcome: Outcome) -> (f32, bool) {
    let Reward { value, success, .. } = task.reward(problem, &Transcript::new(messages, outcome)).unwrap();
    (value, success)
}

fn answer(text: &str) -> Message {
    Message::assistant("final", text)
}

#[test]
fn a_row_is_graded_by_share_or_all() {
    for (grading, half) in [(Grading::Share, 0.5), (Grading::All, 0.0)] {
        let task = load(&[row("Say A.")], &[row("Say B.")], grading).unwrap();
        let problem = task.training_problem(1, 0);
        assert_eq!(problem.messages, [Message::user("Say A.")]);
        let graded = |text, outcome| {
            let thought = Message::assistant("analysis", "\"x\"");
            reward(&task, &problem, &[thought, answer(text)], outcome)
        };
        assert_eq!(graded("\"fine\"", Outcome::Finished), (1.0, true));
        assert_eq!(graded("fine", Outcome::Finished), (half, false));
        assert_eq!(graded("a, b", Outcome::Finished), (0.0, false));
        assert_eq!(graded("\"fine\"", Outcome::TruncatedLength), (0.0, false));
        assert_eq!(reward(&task, &problem, &[], Outcome::Finished), (0.0, false));
    }
}

#[test]
fn questions_get_instructions_that_are_a_function_of_seed_and_index() {
    let questions = [
        r#"{"question": "What is 2 + 2?", "answer": "4"}"#,
        r#"{"problem": "What is 3 + 3?", "answer": "6"}"#,
    ];
    let task = load(&questions.map(str::to_owned), &[row("Say B.")], Grading::Share).unwrap();
    let mut prompts = std::collections::BTreeSet::new();
    for index in 0..50 {
        let problem = task.training_problem(7, index);
        assert_eq!(problem, task.training_problem(7, index));
        let prompt = problem.messages[0].content.clone();
        assert!(prompt.starts_with("What is ") && prompt.contains("?\n\n"), "{prompt}");
        assert!((0.0..=1.0).contains(&reward(&task, &problem, &[answer("It is 4.")], Outcome::Finished).0));
        prompts.insert(prompt);
    }
    assert!(prompts.len() > 40, "new instructions each epoch");
}

#[test]
fn several_turns_are_asked_in_order_and_graded_each_on_its_own_list() {
    let turns = r#"{"turns": [
        {"prompt": "One", "instruction_id_list": ["punctuation:no_comma"], "kwargs": [{}]},
        {"prompt": "Two", "instruction_id_list": ["punctuation:no_comma", "startend:quotation"], "kwargs": [{}, {}]}]}"#;
    let held_out = [turns.replace('\n', " "), row("Say B.")];
    let task = load(&[row("Say A.")], &held_out, Grading::Share).unwrap();
    let sets: Vec<_> = task.validation_sets().iter().map(|set| (&*set.name, set.problems.len())).collect();
    assert_eq!(sets, [("ifeval", 1), ("multi_if", 1)]);
    let problem = &task.validation_sets()[1].problems[0];
    assert_eq!(problem.messages, [Message::user("One")]);
    let mut messages = vec![answer("a, b")];
    let next = |messages: &[Message]| {
        let transcript = Transcript::new(messages, Outcome::Finished);
        task.next_user_message(problem, &transcript).unwrap()
    };
    assert_eq!(next(&messages), Some(Message::user("Two")));
    messages.extend([Message::user("Two"), answer("\"fine\"")]);
    assert_eq!(next(&messages), None);
    // The first answer has a comma; the last follows its whole list.
    assert_eq!(reward(&task, problem, &messages, Outcome::Finished), (0.5, true));
    messages.pop();
    assert_eq!(reward(&task, problem, &messages, Outcome::Finished), (0.0, false));
}

#[test]
fn files_that_share_a_prompt_are_refused_by_the_first_pair() {
    let turns = format!(r#"{{"turns": [{}, {}]}}"#, row("One"), row("Two"));
    let train = [row("Zero"), row(" Two\\n"), row("One")];
    let error = load(&train, &[row("B"), turns], Grading::Share).err().expect("refused");
    assert!(error.is::<BadInput>());
    let text = error.to_string();
    for part in ["train.jsonl: row 2", "held.jsonl: row 2", "Two"] {
        assert!(text.contains(part), "{text}");
    }
    let question = [r#"{"question": "Two"}"#.to_owned()];
    assert!(load(&question, &[row("Two")], Grading::Share).is_err());
}

#[test]
fn broken_rows_are_refused_by_row_and_reason() {
    for (broken, reason) in [
        (r#"{"prompt": "A"}"#, "`instruction_id_list`"),
        (r#"{"prompt": "A", "instruction_id_list": [], "kwargs": []}"#, "0 entries"),
        (r#"{"prompt": "A", "instruction_id_list": ["punctuation:no_comma"], "kwargs": []}"#, "1 entries"),
        (
            r#"{"prompt": "A", "instruction_id_list": ["punctuation:no_coma"], "kwargs": [{}]}"#,
            "punctuation:no_comma",
        ),
        (r#"{"instruction_id_list": ["punctuation:no_comma"], "kwargs": [{}]}"#, "`prompt` is missing"),
        (r#"{"question": 3}"#, "`question`"),
    ] {
        let error = load(&[row("C"), broken.to_owned()], &[row("B")], Grading::Share).err().expect(broken);
        assert!(error.is::<BadInput>());
        assert!(error.to_string().contains("row 2") && error.to_string().contains(reason), "{error}");
    }
    let empty = [r#"{"turns": []}"#.to_owned()];
    assert!(load(&[row("C")], &empty, Grading::Share).err().unwrap().to_string().contains("`turns`"));
}

#[test]
fn the_published_validation_vectors_load_and_never_train() {
    let [ifeval, multi, gsm8k] = ["ifeval", "multi-if", "gsm8k"].map(data::folders);
    for ((ifeval, multi), gsm8k) in ifeval.iter().zip(&multi).zip(&gsm8k) {
        let sizes = if ifeval.own { (25, 4) } else { (541, 909) };
        validation_loads_and_never_trains(&ifeval.path, &multi.path, &gsm8k.path, sizes);
    }
}

/// `sizes`: IFEval's prompts and Multi-IF's conversations.
fn validation_loads_and_never_trains(ifeval: &Path, multi: &Path, gsm8k: &Path, sizes: (usize, usize)) {
    let (ifeval, multi) = (ifeval.join("input_data.jsonl"), multi.join("multi-if-english.jsonl"));
    let task = open(&gsm8k.join("train.jsonl"), &multi, Grading::Share).unwrap();
    assert_eq!(task.validation_sets()[0].problems.len(), sizes.1);
    let task = open(&gsm8k.join("train.jsonl"), &ifeval, Grading::All).unwrap();
    assert_eq!(
        (&*task.validation_sets()[0].name, task.validation_sets()[0].problems.len()),
        ("ifeval", sizes.0)
    );
    // IFEval's prompts are Multi-IF's first turns.
    let error = open(&ifeval, &multi, Grading::Share).err().expect("refused");
    assert!(error.to_string().contains("row"), "{error}");
}
