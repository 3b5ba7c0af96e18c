//! Tasks on real files.

mod answers_table;
mod command;
mod python;

use super::data;
use crate::cli::{assert_has, bad_input, scratch};
use rloss::harmony::{HarmonyTokenizer, Message, ParseMode, RenderOptions, Role, StreamParser};
use rloss::settings::Choice;
use rloss::tasks::{Task, TaskContext, TaskName, TaskSettings, Transcript, build};
use rloss::trajectory::Outcome;
use std::io::Write;
use std::path::{Path, PathBuf};

#[test]
fn every_made_up_demonstration_fits_the_quickstart_limits_and_reads_back() {
    let tokenizer = HarmonyTokenizer::from_embedded().unwrap();
    for name in ["arithmetic", "arithmetic_single", "format_rules"] {
        let task = build(
            &TaskSettings { name: TaskName::from_name(name).unwrap(), ..Default::default() },
            &TaskContext::default(),
        )
        .unwrap();
        for index in 0..20_000 {
            let messages = task.demonstration(0, index).unwrap().messages;
            let options = RenderOptions { auto_drop_analysis: false };
            let rendered = tokenizer.render_conversation_for_training(&messages, options).unwrap();
            let (total, sampled) = (rendered.tokens.len(), rendered.mask.iter().filter(|&&m| m).count());
            assert!(total <= 160 && sampled <= 72, "{total} {sampled} {messages:?}");
            let mut parser = StreamParser::new(&tokenizer, None, ParseMode::Strict);
            rendered.tokens.iter().for_each(|&token| parser.push(token).unwrap());
            assert_eq!(parser.finish().unwrap(), messages);
        }
    }
}

#[test]
fn demonstrated_tool_replies_are_what_the_interpreter_answers() {
    let task = build(
        &TaskSettings { name: TaskName::from_name("arithmetic").unwrap(), ..Default::default() },
        &TaskContext::default(),
    )
    .unwrap();
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

fn gsm8k(train: &Path, validation: &Path) -> anyhow::Result<Box<dyn Task>> {
    build(
        &TaskSettings {
            name: TaskName::from_name("gsm8k").unwrap(),
            train_file: Some(train.into()),
            validation_file: Some(validation.into()),
            ..Default::default()
        },
        &TaskContext::default(),
    )
}

#[test]
fn gsm8k_vectors_every_gold_solution_earns_the_reward() {
    for data::Folder { path, own } in data::folders("gsm8k") {
        let sizes = if own { (40, 12) } else { (7_473, 1_319) };
        every_gold_solution_earns_the_reward(&path, sizes);
    }
}

/// `sizes`: rows to train on and held-out ones.
fn every_gold_solution_earns_the_reward(folder: &Path, sizes: (u64, usize)) {
    let task = gsm8k(&folder.join("train.jsonl"), &folder.join("test.jsonl")).unwrap();
    let problems = &task.validation_sets()[0].problems;
    assert_eq!(problems.len(), sizes.1);
    for (i, problem) in problems.iter().enumerate() {
        let demonstration = task.held_out_demonstration(i as u64).unwrap();
        assert_eq!(demonstration.messages[0], problem.messages[0]);
        let mut transcript = Transcript::new(&demonstration.messages[1..], Outcome::Finished);
        assert!(task.reward(problem, &transcript).unwrap().success, "{}", problem.id);
        transcript.outcome = Outcome::TruncatedLength;
        assert!(!task.reward(problem, &transcript).unwrap().success);
        let worked = &demonstration.messages[1].content;
        assert!(!worked.contains("<<") && !worked.contains("####"), "{worked}");
        // A wrong number never pays.
        let wrong = [Message::assistant("final", format!("#### 1{}", problem.answer.as_str().unwrap()))];
        let transcript = Transcript::new(&wrong, Outcome::Finished);
        assert_eq!(task.reward(problem, &transcript).unwrap().value, 0.0);
    }
    assert!(task.held_out_demonstration(sizes.1 as u64).is_none());
    let epoch: std::collections::HashSet<_> = (0..sizes.0).map(|i| task.training_problem(0, i).id).collect();
    assert_eq!(epoch.len() as u64, sizes.0);
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
    let (folder, [train, test]) = scratch(["train.jsonl", "test.jsonl"]);
    std::fs::write(&test, format!("{good}\n\n{good}")).unwrap();
    for (row, reason) in broken {
        let mut file = std::fs::File::create(&train).unwrap();
        for line in 1..=20 {
            writeln!(file, "{}", if line == 17 { row } else { good }).unwrap();
        }
        bad_input(gsm8k(&train, &test), &["train.jsonl", "row 17", reason, "Correct or delete"]);
    }
    std::fs::write(&train, vec!["{}"; 25].join("\n")).unwrap();
    let text = gsm8k(&train, &test).err().unwrap().to_string();
    assert!(text.contains("row 10:") && !text.contains("row 11:") && text.contains("15 more"), "{text}");
    std::fs::write(&train, "\n").unwrap();
    assert!(gsm8k(&train, &test).err().unwrap().to_string().contains("no rows"));
    bad_input(gsm8k(&folder.path().join("no.jsonl"), &test), &[]);
}

#[test]
fn retool_files_are_checked_when_read() {
    let folder = tempfile::tempdir().unwrap();
    let file = |name: &str, text: &str| {
        let path = folder.path().join(name);
        std::fs::write(&path, text).unwrap();
        path
    };
    let good = file("good.jsonl", r#"{"problem": "1+1?", "answer": 2}"#);
    let load = |train: Option<PathBuf>, validation: Vec<PathBuf>| {
        let settings = TaskSettings {
            name: TaskName::from_name("retool").unwrap(),
            train_file: train,
            validation_files: validation,
            ..Default::default()
        };
        build(&settings, &TaskContext::default()).map(|task| task.validation_sets().len())
    };
    assert_eq!(load(Some(good.clone()), vec![]).unwrap(), 0);
    let held_out = file("held.jsonl", r#"{"problem": "1+2?", "answer": 3}"#);
    assert_eq!(load(Some(good.clone()), vec![held_out.clone()]).unwrap(), 1);
    let shared =
        file("shared.jsonl", "{\"problem\": \"2?\", \"answer\": 2}\n{\"problem\": \"1 +1?\", \"answer\": 2}");
    let cut = file("cut.jsonl.gz", "no gzip");
    let bad = file("bad.jsonl", r#"{"problem": "1+1?", "answer": [2]}"#);
    let twin = file("held.json", r#"{"problem": "1+2?", "answer": "3"}"#);
    for (train, validation, said) in [
        (None, vec![], "task.train_file: missing"),
        (Some(cut), vec![], "cut.jsonl.gz: cannot read"),
        (Some(bad), vec![], "bad.jsonl: row 1: `answer` is neither"),
        (Some(good.clone()), vec![held_out.clone(), twin], "a second file with the set name `held`"),
        (Some(good), vec![held_out, shared], "good.jsonl: row 1 has the prompt of "),
    ] {
        bad_input(load(train, validation), &[said]);
    }
}

#[test]
fn math_equiv_vectors_meet_the_targets() {
    use crate::answer_texts::{Sources, equivalent_texts};
    use rloss::tasks::answer::{AnswerEquality, ComparisonOptions};
    let rows = data::jsonl_rows("math-equiv");
    let mut counts = [(0, 0); 2];
    let mut misses = Vec::new();
    for (file, row) in &rows {
        let (gold, answer) = (row["gold"].as_str().unwrap(), row["answer"].as_str().unwrap());
        let expected = row["expected"].as_bool().unwrap();
        if file.starts_with("hendrycks") {
            assert_eq!(AnswerEquality::Exact.matches(gold, answer), expected, "{}", row["id"]);
            continue;
        }
        let kind = |name: &str| row["match_types"].as_array().unwrap().iter().any(|t| t == name);
        let sources = Sources { formulas: kind("latex"), numbers: kind("expr") };
        let options = ComparisonOptions {
            decimals: row["precision"].as_u64().unwrap_or(6) as u32,
            relation_for_set: row["allow_set_relation_comp"].as_bool().unwrap_or(false),
        };
        let (right, all) = &mut counts[usize::from(expected)];
        *all += 1;
        if equivalent_texts(gold, answer, sources, &options) == expected {
            *right += 1;
        } else {
            misses.push(format!("{} (expected {expected})", row["id"].as_str().unwrap()));
        }
    }
    eprintln!("{} rows; misses:\n{}", rows.len(), misses.join("\n"));
    for (right, all) in counts {
        eprintln!("{right} of {all}");
    }
    for (right, all) in counts {
        assert!(all > 0 && right * 10 >= all * 9, "{right} of {all}:\n{}", misses.join("\n"));
    }
}

#[test]
fn retool_vectors_every_gold_answer_earns_the_reward() {
    let [dapo, aime, math] = ["dapo-math", "aime", "math"].map(data::folders);
    for ((dapo, aime), math) in dapo.iter().zip(&aime).zip(&math) {
        let (train, sizes) = if dapo.own {
            ("integer-answer-prompts.jsonl", [5, 5, 5])
        } else {
            ("integer-answer-prompts.jsonl.gz", [30, 30, 500])
        };
        every_gold_answer_earns_the_reward(&dapo.path.join(train), &aime.path, &math.path, sizes);
    }
}

fn every_gold_answer_earns_the_reward(train: &Path, aime: &Path, math: &Path, sizes: [usize; 3]) {
    use rloss::tasks::answer::AnswerEquality;
    let files = [aime.join("aime-2025.jsonl"), aime.join("aime-2024.jsonl"), math.join("math-500.jsonl")];
    for answer in [AnswerEquality::Exact, AnswerEquality::Equivalent] {
        let task = build(
            &TaskSettings {
                name: TaskName::from_name("retool").unwrap(),
                train_file: Some(train.into()),
                // The rows after these are AIME's, of which MATH-500 has some.
                train_rows_max: Some(4_701),
                validation_file: Some(files[0].clone()),
                validation_files: files[1..].to_vec(),
                answer: Some(answer),
                ..Default::default()
            },
            &TaskContext::default(),
        )
        .unwrap();
        let sets = task.validation_sets();
        let found: Vec<_> = sets.iter().map(|set| (set.name.as_str(), set.problems.len())).collect();
        assert_eq!(found, [("aime_2025", sizes[0]), ("aime_2024", sizes[1]), ("math_500", sizes[2])]);
        let training = (0..200).map(|i| task.training_problem(0, i));
        for problem in sets.iter().flat_map(|set| set.problems.clone()).chain(training) {
            assert!(problem.messages[0].content.ends_with("\\boxed{'The final answer goes here.'}"));
            let gold = problem.answer.as_str().unwrap();
            let reward = |text: String, calls_answered| {
                let messages = [Message::assistant("final", text)];
                let transcript =
                    Transcript { calls_answered, ..Transcript::new(&messages, Outcome::Finished) };
                task.reward(&problem, &transcript).unwrap()
            };
            assert_eq!(reward(format!("So it is $\\boxed{{{gold}}}$."), 2).value, 1.0, "{}", problem.id);
            let wrong = reward(format!("So it is $\\boxed{{{gold} + 1}}$."), 0);
            assert!(!wrong.success && wrong.value == -1.0, "{}", problem.id);
            assert_eq!(reward(gold.into(), 1).value, -0.9);
            assert_eq!(reward(String::new(), 3).value, -0.7);
            assert_eq!(reward(String::new(), 9).value, -0.6);
        }
    }
}

/// A small model copied the placeholder of ReTool's prompt as its answer.
#[test]
fn a_plain_boxed_prompt_has_no_placeholder() {
    let folder = tempfile::tempdir().unwrap();
    let file = |name: &str, problem: &str| {
        let path = folder.path().join(name);
        std::fs::write(&path, format!("{{\"problem\": \"{problem}\", \"answer\": 42}}\n")).unwrap();
        Some(path)
    };
    let settings = TaskSettings {
        name: TaskName::from_name("retool").unwrap(),
        train_file: file("train.jsonl", "6 * 7?"),
        validation_file: file("held-out.jsonl", "7 * 6?"),
        prompt: Some(rloss::tasks::retool::PromptFormat::BoxedPlain),
        ..Default::default()
    };
    let task = build(&settings, &TaskContext::default()).unwrap();
    let problem = task.training_problem(0, 0);
    assert_eq!(problem.messages[0].content, "6 * 7?\nPut the final answer within \\boxed{}.");
    let messages = [Message::assistant("final", "So it is \\boxed{42}.")];
    let said = Transcript::new(&messages, Outcome::Finished);
    assert_eq!(task.reward(&problem, &said).unwrap().value, 1.0);
}
