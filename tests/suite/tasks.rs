//! Tasks on real files.

use super::data;
use rloss::error::BadInput;
use rloss::harmony::{Message, Role};
use rloss::tasks::{Task, TaskSettings, Transcript, build};
use rloss::trajectory::Outcome;
use std::io::Write;

/// Tokens of a message over a vocabulary of bytes, control tokens and whole header words.
fn byte_level_tokens(message: &Message) -> usize {
    // start, role or tool name, message, closing token; recipient one token; channel two.
    let header = 4 + usize::from(message.recipient.is_some()) + 2 * usize::from(message.channel.is_some());
    header + message.content.len()
}

#[test]
fn every_arithmetic_demonstration_fits_the_quickstart_limits() {
    for name in ["arithmetic", "arithmetic_single"] {
        let task = build(&TaskSettings { name: name.into(), ..Default::default() }).unwrap();
        for index in 0..20_000 {
            let demonstration = task.demonstration(0, index).unwrap();
            let total: usize = demonstration.messages.iter().map(byte_level_tokens).sum();
            let sampled = demonstration.messages.iter().filter(|m| m.role == Role::Assistant);
            // `<|start|>assistant` is inserted, not sampled.
            let sampled: usize = sampled.map(|m| byte_level_tokens(m) - 2).sum();
            assert!(total <= 160 && sampled <= 72, "{total} {sampled} {demonstration:?}");
        }
    }
}

#[test]
fn demonstrated_tool_replies_are_what_the_interpreter_answers() {
    let task = build(&TaskSettings { name: "arithmetic".into(), ..Default::default() }).unwrap();
    let answer = |code: &str| {
        let run = monty::MontyRun::new(code.to_owned(), "call", vec![], Default::default());
        match run.and_then(|run| run.run_no_limits(vec![])) {
            Ok(value) => value.py_repr(),
            Err(error) => error.summary(),
        }
    };
    for index in 0..2_000 {
        let messages = task.demonstration(1, index).unwrap().messages;
        for pair in messages.windows(2).filter(|pair| pair[1].role == Role::Tool) {
            assert_eq!(answer(&pair[0].content), pair[1].content, "{}", pair[0].content);
        }
    }
}

fn gsm8k(train: &std::path::Path, validation: &std::path::Path) -> anyhow::Result<Box<dyn Task>> {
    build(&TaskSettings {
        name: "gsm8k".into(),
        train_file: Some(train.into()),
        validation_file: Some(validation.into()),
        ..Default::default()
    })
}

#[test]
fn gsm8k_vectors_every_gold_solution_earns_the_reward() {
    let Some(folder) = data::folder("gsm8k") else { return };
    let task = gsm8k(&folder.join("train.jsonl"), &folder.join("test.jsonl")).unwrap();
    let problems = &task.validation_sets()[0].problems;
    assert_eq!(problems.len(), 1_319);
    for (i, problem) in problems.iter().enumerate() {
        let demonstration = task.held_out_demonstration(i as u64).unwrap();
        assert_eq!(demonstration.messages[0], problem.messages[0]);
        let mut transcript = Transcript {
            messages: &demonstration.messages[1..],
            outcome: Outcome::Finished,
            calls_answered: 0,
        };
        assert!(task.reward(problem, &transcript).unwrap().success, "{}", problem.id);
        transcript.outcome = Outcome::TruncatedLength;
        assert!(!task.reward(problem, &transcript).unwrap().success);
        let worked = &demonstration.messages[1].content;
        assert!(!worked.contains("<<") && !worked.contains("####"), "{worked}");
        // A wrong number never pays.
        let wrong = [Message::assistant("final", format!("#### 1{}", problem.answer.as_str().unwrap()))];
        let transcript = Transcript { messages: &wrong, outcome: Outcome::Finished, calls_answered: 0 };
        assert_eq!(task.reward(problem, &transcript).unwrap().value, 0.0);
    }
    assert!(task.held_out_demonstration(1_319).is_none());
    let epoch: std::collections::HashSet<_> = (0..7_473).map(|i| task.training_problem(0, i).id).collect();
    assert_eq!(epoch.len(), 7_473);
}

#[test]
fn broken_rows_are_named_with_the_remedy() {
    let good = r#"{"question": "1+1?", "answer": "1+1=<<1+1=2>>2\n#### 2"}"#;
    let broken = [
        (r#"{"question": "1+1?"}"#, "`answer` is missing"),
        (r#"{"question": "1+1?", "answer": "two"}"#, "no `#### <number>`"),
        (r#"{"question": "1+1?", "answer": "\n#### two"}"#, "not a number"),
        (r#"{"question": 7, "answer": "\n#### 2"}"#, "`question` is not a string"),
        (r#"{"question": " ", "answer": "\n#### 2"}"#, "`question` is empty"),
        (r#"{"question": "1+1?", "answer": "2""#, "not JSON"),
    ];
    let folder = tempfile::tempdir().unwrap();
    let (train, test) = (folder.path().join("train.jsonl"), folder.path().join("test.jsonl"));
    std::fs::write(&test, format!("{good}\n\n{good}")).unwrap();
    for (row, reason) in broken {
        let mut file = std::fs::File::create(&train).unwrap();
        for line in 1..=20 {
            writeln!(file, "{}", if line == 17 { row } else { good }).unwrap();
        }
        let error = gsm8k(&train, &test).err().expect("an error");
        let text = error.downcast_ref::<BadInput>().expect("bad input").0.clone();
        for part in ["train.jsonl", "row 17", reason, "Correct or delete"] {
            assert!(text.contains(part), "{part} in {text}");
        }
    }
    std::fs::write(&train, vec!["{}"; 25].join("\n")).unwrap();
    let text = gsm8k(&train, &test).err().unwrap().to_string();
    assert!(text.contains("row 10:") && !text.contains("row 11:") && text.contains("15 more"), "{text}");
    std::fs::write(&train, "\n").unwrap();
    assert!(gsm8k(&train, &test).err().unwrap().to_string().contains("no rows"));
    assert!(gsm8k(&folder.path().join("no.jsonl"), &test).err().unwrap().is::<BadInput>());
    let unknown = build(&TaskSettings { name: "gsm9k".into(), ..Default::default() }).err().unwrap();
    assert!(unknown.is::<BadInput>() && unknown.to_string().contains("arithmetic_single"));
}
