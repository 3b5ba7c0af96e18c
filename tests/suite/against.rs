//! `check-mismatch --against`: every engine's shape is read as the same rows, bad rows are named,
//! reference cases made with transformers get the verdict that they should, and the exit code says it.

use crate::cli::{assert_has, in_repository, scratch, text_of};
use crate::tiny::load;
use rloss::chat::Chat;
use rloss::chat::ChatFormat;
use rloss::harmony::HarmonyTokenizer;
use rloss::metrics::Console;
use rloss::mismatch::causes::causes;
use rloss::mismatch::diagnose::{UnmodifiedModel, Verdict};
use rloss::mismatch::external_engine;
use rloss::mismatch::rows::{RowReader, TokenRow, TokenRows};
use rloss::mismatch::search::SearchSettings;
use rloss::model::config::Config;
use rloss::model::forward::{ForwardOptions, Model};
use rloss::model::parameters::Parameters;
use rloss::model::policy_view::PolicyView;
use rloss::ops::threads::Threads;
use serde_json::Value;
use std::collections::BTreeMap;
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};

fn fixtures() -> PathBuf {
    in_repository("tests/fixtures/engines")
}

fn config() -> Config {
    Config::read(&fixtures().join("model")).unwrap()
}

fn read(files: &[PathBuf]) -> anyhow::Result<TokenRows> {
    let (config, tokenizer) = (config(), HarmonyTokenizer::from_embedded().unwrap());
    RowReader::new(&config, 256, &tokenizer, 1.0).read(files)
}

/// Writes `text` and reads it.
fn read_text(text: &str) -> anyhow::Result<TokenRows> {
    let (_folder, [file]) = scratch(["rows.jsonl"]);
    std::fs::write(&file, text).unwrap();
    read(&[file])
}

/// The tiny model of the fixtures.
struct Fixture {
    threads: Threads,
    model: Model,
    parameters: Parameters,
    chat: Chat,
}

impl Fixture {
    fn new() -> Self {
        let config = config();
        let parameters =
            crate::tiny::parameters(&config, load(&fixtures().join("model"), &config).unwrap()).unwrap();
        Self {
            threads: Threads::new(2).unwrap(),
            model: Model::new(config, 256),
            parameters,
            chat: ChatFormat::Harmony.from_embedded().unwrap(),
        }
    }

    fn policy(&self) -> PolicyView<'_> {
        PolicyView::without_ablations(&self.model, &self.parameters).unwrap()
    }

    /// Its own log-probs of `row`'s tokens.
    fn log_probs(&self, row: &TokenRow, temperature: f64) -> Vec<Option<f32>> {
        let found = self.policy().prefill(&[&row.tokens], temperature).unwrap().remove(0);
        [None].into_iter().chain(found.into_iter().map(Some)).collect()
    }

    fn compare(&self, rows: &[TokenRow]) -> external_engine::Comparison {
        self.compare_by(rows, &SearchSettings::silent())
    }

    fn compare_by(&self, rows: &[TokenRow], search: &SearchSettings) -> external_engine::Comparison {
        let Self { threads, model, parameters, chat } = self;
        let console = &Console::silent();
        let reference = UnmodifiedModel { threads, model, parameters, earlier_weights: None, console };
        external_engine::compare(reference, chat, rows, 1000, (0.2, 0.2), search).unwrap()
    }
}

#[test]
fn every_engines_shape_is_read_as_the_same_rows() {
    let own = read(&[fixtures().join("rows.jsonl")]).unwrap();
    assert_eq!((own.rows.len(), own.bad_rows.len()), (3, 0));
    // With the prompt's log-probs, or without them: the first four tokens are the prompt.
    for (file, with_prompt, routes) in [
        ("vllm_completions.jsonl", true, true),
        ("vllm_chat.json", true, false),
        ("llama_cpp_python.jsonl", true, false),
        ("sglang.json", true, true),
        ("llama_cpp.jsonl", false, false),
        ("prime_rl.jsonl", false, false),
        ("verifiers.jsonl.gz", false, false),
        ("slime.jsonl", false, true),
        ("verl.jsonl", false, false),
    ] {
        let found = read(&[fixtures().join(file)]).unwrap();
        assert_eq!(found.bad_rows, [] as [&str; 0], "{file}");
        assert_eq!(found.rows.len(), own.rows.len(), "{file}");
        for (row, own) in found.rows.iter().zip(&own.rows) {
            assert_eq!(row.tokens, own.tokens, "{file}");
            let first = if with_prompt { 1 } else { 4 };
            assert_eq!(row.log_probs[first..], own.log_probs[first..], "{file}");
            assert!(row.log_probs[..first].iter().all(Option::is_none), "{file}");
            assert_eq!(row.routed_experts.is_some(), routes, "{file}");
            assert_eq!(row.trainer_log_probs.is_some(), file.starts_with("prime_rl"), "{file}");
        }
    }
    let formats = read(&[fixtures().join("llama_cpp_python.jsonl")]).unwrap().formats;
    assert!(formats[0].contains("; 3 rows have a text without ids"), "{formats:?}");
}

/// The response of a scoring request is one token without a log-prob; it ends the row.
#[test]
fn the_answer_to_a_scoring_request_of_vllm_is_read() {
    let own = read(&[fixtures().join("rows.jsonl")]).unwrap();
    for file in ["vllm_scoring.jsonl", "vllm_chat_scoring.jsonl"] {
        let found = read(&[fixtures().join(file)]).unwrap();
        assert_eq!((found.rows.len(), found.bad_rows), (own.rows.len(), vec![]), "{file}");
        for (row, own) in found.rows.iter().zip(&own.rows) {
            assert_eq!(row.tokens, [&own.tokens[..], &[3]].concat(), "{file}");
            assert_eq!(row.log_probs, [&own.log_probs[..], &[None]].concat(), "{file}");
            assert_eq!(row.raw_tokens, own.tokens.len(), "{file}: raw log-probs of a prompt");
        }
    }
    let without_ids =
        r#"{"choices": [{"logprobs": null, "prompt_logprobs": [null, {"5": {"logprob": -1}}]}]}"#;
    let error = read_text(without_ids).unwrap_err().to_string();
    assert!(error.contains("return_token_ids"), "{error}");
}

#[test]
fn routes_are_compared_with_ours() {
    let fixture = Fixture::new();
    let mut rows = read(&[fixtures().join("sglang.json")]).unwrap().rows;
    let routes = fixture.compare(&rows).routed_experts.unwrap();
    assert_eq!((routes.targets, routes.differing_share), (220, 0.0));
    for expert in rows[0].routed_experts.as_mut().unwrap().experts.iter_mut().step_by(2) {
        *expert = (*expert + 1) % 4;
    }
    let routes = fixture.compare(&rows).routed_experts.unwrap();
    assert!(
        routes.differing_share > 0.1 && routes.differing_by_layer.iter().all(|share| *share > 0.0),
        "{routes:?}"
    );
}

/// A panic: a division by the number of experts.
#[test]
fn bug_routed_experts_for_a_model_without_experts_are_bad_rows() {
    let (mut config, tokenizer) = (config(), HarmonyTokenizer::from_embedded().unwrap());
    (config.num_local_experts, config.num_experts_per_tok) = (0, 0);
    let read = RowReader::new(&config, 256, &tokenizer, 1.0).read(&[fixtures().join("sglang.json")]);
    let error = format!("{:#}", read.unwrap_err());
    assert!(error.contains("this model has no experts"), "{error}");
}

#[test]
fn bad_rows_are_named_and_the_others_are_compared() {
    let rows = [
        r#"{"tokens": [1, 5], "logprobs": [null, -1]}"#,
        r#"{"tokens": [1, 272], "logprobs": [null, -1]}"#,
        r#"{"tokens": [1, 2, 3], "logprobs": [null, -1]}"#,
        r#"{"tokens": [1, 2], "logprobs": [null, NaN]}"#,
        r#"{"tokens": [], "logprobs": []}"#,
        r#"{"tokens": [1, -2], "logprobs": [null, -1]}"#,
        r#"{"tokens": [1, 2], "logprobs": [null, 0.5]}"#,
        r#"{"tokens": [1, 2], "logprobs": [null, -1], "temperature": 0}"#,
        "nonsense",
        r#"{"tokens": [1, 2], "logprobs": [null, null]}"#,
        r#"{"prompt_ids": [1], "response_ids": [5], "response_logprobs": [-1]}"#,
        r#"{"input": "a", "output": "b", "score": 1}"#,
        r#"{"tokens": [1, 7, 2, 40, 4], "logprobs": [0, -1, -2, null, -3], "temperature": 0.5}"#,
    ];
    let found = read_text(&rows.join("\n")).unwrap();
    assert_eq!(found.rows.iter().map(|row| row.name.as_str()).collect::<Vec<_>>(), ["1", "13"]);
    assert_eq!(found.bad_rows.len(), 11);
    for (bad_rows, (row, what)) in found.bad_rows.iter().zip([
        (2, "token 1 is 272, but vocab_size = 272"),
        (3, "3 tokens but 2 logprobs"),
        (4, "NaN"),
        (5, "no tokens"),
        (6, "not a row"),
        (7, "which is not the logarithm of a probability"),
        (8, "temperature = 0"),
        (9, "not a row"),
        (10, "all log-probs after the first are null"),
        (11, "a record of verl's agent-loop rows, but the file began with rows of tokens and logprobs"),
        (12, "only text"),
    ]) {
        assert!(bad_rows.contains(&format!("row {row}: ")) && bad_rows.contains(what), "{bad_rows}");
    }
    let error = read_text("{}\n").unwrap_err();
    assert!(error.is::<rloss::error::BadInput>() && error.to_string().contains("row 1"), "{error}");
}

#[test]
fn of_many_bad_rows_the_first_are_told_and_the_rest_counted() {
    let refused = read_text(&"nonsense\n".repeat(30)).unwrap_err().to_string();
    assert_eq!(refused.matches("not a row").count(), 10, "{refused}");
    assert!(refused.contains("\n20 more rows are bad\n"), "{refused}");
    let good = "{\"tokens\": [1, 7], \"logprobs\": [null, -1]}\n";
    let found = read_text(&(good.to_owned() + &"nonsense\n".repeat(10))).unwrap();
    assert_eq!((found.bad_rows.len(), found.bad_row_messages()), (10, found.bad_rows));
}

#[test]
fn another_tokenizer_and_a_missing_prompt_are_named() {
    let choice = |token: &str, more: &str| {
        format!(
            r#"{{"choices": [{{"logprobs": {{"tokens": ["a", "{token}"], "token_logprobs": [-1, -1]}}, "token_ids": [113, 114]{more}}}]}}"#
        )
    };
    let prompt = r#", "prompt_token_ids": [1, 2]"#;
    assert_eq!(read_text(&choice("b", prompt)).unwrap().rows.len(), 1);
    for (text, what) in [
        (choice("x", prompt), "another tokenizer"),
        (choice("b", ""), "return_token_ids"),
        (
            r#"{"text": "a", "meta_info": {"output_token_logprobs": [[-1, 5, null]]}}"#.into(),
            "logprob_start_len",
        ),
        (r#"{"prompt": "a", "completion": "b", "advantage": 1}"#.into(), "only text"),
    ] {
        let error = read_text(&text).unwrap_err().to_string();
        assert!(error.contains(what), "{error}");
    }
    let (_folder, [file]) = scratch(["rollout.pt"]);
    std::fs::write(&file, b"PK\x03\x04").unwrap();
    assert!(read(&[file]).unwrap_err().to_string().contains("torch.load"));
}

/// As llama.cpp's server does: bytes of a token that ends within a character go to the next entry.
#[test]
fn a_token_without_an_entry_of_llama_cpp_has_no_log_prob() {
    let row = |tokens: &str| {
        let entries = r#"[{"id": 113, "token": "a", "bytes": [97], "logprob": -1},
            {"id": 185, "token": "é", "bytes": [195, 169], "logprob": -2}]"#;
        let more = r#""prompt": [1, 5], "tokens_evaluated": 2"#;
        format!(r#"{{"completion_probabilities": {entries}, "tokens": {tokens}, {more}}}"#).replace('\n', "")
    };
    let found = read_text(&row("[113, 211, 185]")).unwrap();
    assert_eq!(found.rows[0].tokens, [1, 5, 113, 211, 185]);
    assert_eq!(found.rows[0].log_probs, [None, None, Some(-1.0), None, Some(-2.0)]);
    // A special token in between is written as no text: such a row was refused.
    let found = read_text(&row("[113, 211, 0, 185]")).unwrap();
    assert_eq!(found.rows[0].log_probs, [None, None, Some(-1.0), None, None, Some(-2.0)]);
    let error = read_text(&row("[]")).unwrap_err().to_string();
    assert!(error.contains("return_tokens"), "{error}");
    // A chat's answer was refused: the prompt is in the server's own response within it.
    let choices = r#"{"choices": [{"message": {}, "logprobs": {"content": []}}]"#;
    let chat = read_text(&format!(r#"{choices}, "__verbose": {}}}"#, row("[113, 211, 185]"))).unwrap();
    assert_eq!(chat.rows[0].log_probs, [None, None, Some(-1.0), None, Some(-2.0)]);
    assert!(read_text(&format!("{choices}}}")).unwrap_err().to_string().contains("\"verbose\": true"));
}

#[test]
fn zero_log_probs_of_tokens_that_were_not_sampled_are_not_compared() {
    let row =
        r#"{"tokens": [1, 7, 2], "logprobs": [0, 0, -2], "mask": [false, false, true], "messages": ["NaN"]}"#;
    assert_eq!(read_text(row).unwrap().rows[0].log_probs, [None, None, Some(-2.0)]);
}

/// What transformers computed under a mistake, and what is said of it: the campaign's sample.
#[test]
fn reference_cases_get_their_verdict() {
    let fixture = Fixture::new();
    let text = text_of(fixtures().join("cases.jsonl"));
    let mut cases: Vec<(String, Vec<&str>)> = vec![];
    for line in text.lines() {
        let value: Value = serde_json::from_str(line).unwrap();
        let name = format!("{}, {}", value["kind"].as_str().unwrap(), value["dtype"].as_str().unwrap());
        match cases.last_mut() {
            Some((last, lines)) if *last == name => lines.push(line),
            _ => cases.push((name, vec![line])),
        }
    }
    assert_eq!(cases.len(), 23);
    let mut wrong = vec![];
    for (name, lines) in &cases {
        let rows = read_text(&lines.join("\n")).unwrap().rows;
        let comparison = fixture.compare(&rows);
        let found = comparison.diagnosis;
        if let Verdict::Explained(cause) = &found.verdict {
            let remedy = format!(" Remedy: {}.", cause.remedy().unwrap());
            assert!(comparison.answer.contains(&remedy), "{name}: {}", comparison.answer);
        }
        let kind = name.split(", ").next().unwrap();
        let names =
            |verdict: &Verdict| -> Vec<&str> { verdict.causes().iter().map(|cause| cause.name).collect() };
        let right = match (kind, &found.verdict) {
            ("none", verdict) => !verdict.differs(),
            (partial, verdict) if partial.contains("of the") || partial == "one expert" => {
                matches!(verdict, Verdict::Unknown(_))
            }
            (_, verdict @ (Verdict::Explained(_) | Verdict::OneOf(_))) => names(verdict).contains(&kind),
            // Too small to be told from rounding: never another cause.
            (_, Verdict::Rounding) => true,
            _ => false,
        };
        if !right {
            wrong.push(format!("{name}: {} {:?}", found.verdict.to_text(), names(&found.verdict)));
        }
    }
    assert!(wrong.is_empty(), "{} of {}:\n{}", wrong.len(), cases.len(), wrong.join("\n"));
}

/// Rows of one case of the campaign.
fn case(kind: &str, dtype: &str) -> Vec<TokenRow> {
    let text = text_of(fixtures().join("cases.jsonl"));
    let start = format!("\"kind\":\"{kind}\",\"dtype\":\"{dtype}\"");
    let lines: Vec<&str> = text.lines().filter(|line| line.contains(&start)).collect();
    read_text(&lines.join("\n")).unwrap().rows
}

/// The verdict is announced before the search; a limit of 0 leaves the verdict alone.
#[test]
fn a_time_limit_ends_the_search_with_the_verdict() {
    let fixture = Fixture::new();
    let found = |rows: &[TokenRow]| {
        let announced = std::cell::RefCell::new(vec![]);
        let announce = |text: &str| {
            announced.borrow_mut().push(text.to_owned());
            Ok(())
        };
        let limit = Some(std::time::Duration::ZERO);
        let search = SearchSettings { limit, announce: &announce, ..SearchSettings::silent() };
        let compared = fixture.compare_by(rows, &search);
        (compared.diagnosis.verdict.clone(), compared.answer, announced.into_inner())
    };
    let (verdict, answer, announced) = found(&case("sinks missing", "float32"));
    assert_eq!(verdict, Verdict::Unfinished(vec![]));
    assert!(verdict.differs() && answer.contains(" No cause was searched for."), "{answer}");
    assert!(announced.len() == 1 && announced[0].starts_with("Verdict: differs."), "{announced:?}");
    let (verdict, answer, announced) = found(&case("none", "bfloat16"));
    assert_eq!(verdict, Verdict::Rounding);
    assert!(answer.contains(" No cause was searched for."), "{answer}");
    assert!(announced.len() == 1 && announced[0].starts_with("Verdict: rounding"), "{announced:?}");
    let (verdict, _, announced) = found(&read(&[fixtures().join("rows.jsonl")]).unwrap().rows);
    assert_eq!((verdict, announced), (Verdict::Agrees, vec![]));
}

/// A larger model's rounding and causes are computed on a part of the rows; the verdict is about all rows.
#[test]
fn a_cause_found_on_a_part_of_the_rows_must_hold_on_all() {
    let fixture = Fixture::new();
    let token = |row: usize, at: usize| ((row * 31 + at * at * 7 + at) % 200) as u32;
    let forward = ForwardOptions { sinks: false, ..ForwardOptions::default() };
    let policy = PolicyView { forward, ..fixture.policy() };
    let mut rows: Vec<TokenRow> = (0..8)
        .map(|row| {
            let tokens: Vec<u32> = (0..240).map(|at| token(row, at)).collect();
            let found = policy.prefill(&[&tokens], 1.0).unwrap().remove(0);
            let log_probs = [None].into_iter().chain(found.into_iter().map(Some)).collect();
            let name = row.to_string();
            let (trainer_log_probs, routed_experts) = (None, None);
            TokenRow {
                name,
                tokens,
                log_probs,
                trainer_log_probs,
                temperature: 1.0,
                raw_tokens: 0,
                routed_experts,
                kept_tokens: vec![],
            }
        })
        .collect();
    let search = SearchSettings { whole_rows_parameters_max: 0, ..SearchSettings::silent() };
    let found = fixture.compare_by(&rows, &search);
    let Verdict::Explained(cause) = &found.diagnosis.verdict else { panic!("{:?}", found.answer) };
    assert_eq!((cause.name, found.diagnosis.differences.len()), ("sinks missing", 8 * 239));
    let left = found.diagnosis.remaining.unwrap();
    assert!(left.max < 2e-5, "{left:?}");
    // The last row, outside the part, has another mistake too.
    rows[7].log_probs[100] = rows[7].log_probs[100].map(|log_prob| log_prob - 3.0);
    let found = fixture.compare_by(&rows, &search);
    assert_eq!(found.diagnosis.verdict, Verdict::Unknown(vec![cause.clone()]), "{}", found.answer);
    // A file that agrees there differs on all rows.
    for row in &mut rows {
        row.log_probs = fixture.log_probs(row, 1.0);
    }
    assert_eq!(fixture.compare_by(&rows, &search).diagnosis.verdict, Verdict::Agrees);
    rows[7].log_probs[100] = rows[7].log_probs[100].map(|log_prob| log_prob - 3.0);
    let found = fixture.compare_by(&rows, &search);
    assert_eq!(found.diagnosis.verdict, Verdict::Unknown(vec![]), "{}", found.answer);
}

/// vLLM and SGLang give a prompt's log-probs at temperature 1 whatever the response was sampled at.
#[test]
fn a_prompts_log_probs_are_raw_whatever_the_sampler_did() {
    let fixture = Fixture::new();
    for file in ["vllm_completions.jsonl", "sglang.json"] {
        let mut rows = read(&[fixtures().join(file)]).unwrap().rows;
        for row in &mut rows {
            assert_eq!(row.raw_tokens, 4, "{file}");
            let processed = fixture.log_probs(row, 0.7);
            row.log_probs[4..].copy_from_slice(&processed[4..]);
        }
        let found = fixture.compare(&rows).diagnosis.verdict;
        let Verdict::Explained(cause) = &found else { panic!("{file}: {found:?}") };
        let words = "another temperature: the log-probs have 0.700 times the stated temperature";
        assert_eq!(cause.description(), words, "{file}");
        rows.iter_mut().for_each(|row| row.temperature = 0.7);
        assert_eq!(fixture.compare(&rows).diagnosis.verdict, Verdict::Agrees, "{file}");
    }
}

/// A gap that bf16 could make, on tokens of a file that bf16 did not make.
#[test]
fn a_few_tokens_moved_in_a_file_of_f32_are_not_called_rounding() {
    let fixture = Fixture::new();
    let mut rows = read(&[fixtures().join("rows.jsonl")]).unwrap().rows;
    let yard = fixture.compare(&rows).diagnosis.bf16_bound;
    let every_tenth = rows.iter_mut().flat_map(|row| row.log_probs.iter_mut().skip(1).step_by(10));
    every_tenth.for_each(|log_prob| *log_prob = log_prob.map(|l| l - yard.p90 as f32));
    let found = fixture.compare(&rows);
    assert!(found.diagnosis.within_bf16);
    assert_eq!(found.diagnosis.verdict, Verdict::Unknown(vec![]));
    assert_eq!(found.location_result.differing, 22);
}

/// Two experts score alike to the last bit but one, and the engine's rounding takes the other.
#[test]
fn a_reader_that_leaves_early_is_no_panic() {
    let folder = tempfile::tempdir().unwrap();
    let recipe = recipe_of_fixture(folder.path());
    let out = folder.path().join("out");
    let mut command = Command::new(env!("CARGO_BIN_EXE_rloss"));
    command.arg("check-mismatch").arg(&recipe).arg("--out").arg(&out);
    command.arg("--against").arg(fixtures().join("rows.jsonl"));
    let mut child = command.stdout(Stdio::piped()).stderr(Stdio::piped()).spawn().unwrap();
    drop(child.stdout.take());
    let output = child.wait_with_output().unwrap();
    let stderr = String::from_utf8_lossy(&output.stderr);
    assert_eq!(output.status.code(), Some(0), "{stderr}");
    assert!(!stderr.contains("panicked") && out.join("mismatch.json").exists(), "{stderr}");
}

/// A recipe in `folder` whose model is the fixtures'.
fn recipe_of_fixture(folder: &Path) -> PathBuf {
    let model = folder.join("model");
    std::fs::create_dir(&model).unwrap();
    for name in ["config.json", "model.safetensors"] {
        std::fs::copy(fixtures().join("model").join(name), model.join(name)).unwrap();
    }
    std::fs::write(model.join("tokenizer.json"), HarmonyTokenizer::from_embedded().unwrap().json_bytes())
        .unwrap();
    let recipe = folder.join("recipe.toml");
    std::fs::write(&recipe, format!("[model]\npath = {:?}\n", model.display().to_string())).unwrap();
    recipe
}

#[test]
fn the_exit_code_says_whether_they_differ() {
    let folder = tempfile::tempdir().unwrap();
    let recipe = recipe_of_fixture(folder.path());
    let out = folder.path().join("out");
    let code = |file: &Path| {
        let mut command = Command::new(env!("CARGO_BIN_EXE_rloss"));
        command.arg("check-mismatch").arg(&recipe).arg("--out").arg(&out).arg("--against").arg(file);
        let output = command.output().unwrap();
        let file = text_of(out.join("mismatch.json"));
        let found: Value = serde_json::from_str(&file).unwrap();
        (output.status.code().unwrap(), found["diagnosis"].clone())
    };
    let (status, found) = code(&fixtures().join("rows.jsonl"));
    assert_eq!((status, found["verdict"].as_str()), (0, Some("agrees")));
    assert_has(&text_of(out.join("mismatch.md")), &["Agrees: 220 tokens"]);
    assert!(text_of(out.join("mismatch.svg")).ends_with("</svg>\n"));
    let table = text_of(out.join("mismatch.csv"));
    assert_eq!(table.lines().next(), Some("row,token,id,text,engine,model,difference"));
    let mut places = vec![];
    for record in csv::Reader::from_reader(table.as_bytes()).records() {
        let record = record.unwrap();
        let number = |column: usize| record[column].parse::<f64>().unwrap();
        assert!((number(4) - number(5) - number(6)).abs() <= 1e-3 * number(6).abs() + 1e-6, "{record:?}");
        places.push((record[0].parse::<usize>().unwrap(), number(1) as usize));
    }
    assert_eq!(places.len(), 220);
    assert!(places.is_sorted());

    let (status, found) = code(&fixtures().join("prime_rl.jsonl"));
    assert_eq!((status, found["trainer"]["verdict"].as_str()), (0, Some("agrees")));

    let text = text_of(fixtures().join("cases.jsonl"));
    let of = |kind: &str| -> Vec<&str> {
        text.lines()
            .filter(|line| line.contains(&format!("\"kind\":\"{kind}\",\"dtype\":\"float32\"")))
            .collect()
    };
    let file = folder.path().join("case.jsonl");
    std::fs::write(&file, of("sinks missing").join("\n")).unwrap();
    assert_eq!(code(&file).0, 3);
    let mut command = Command::new(env!("CARGO_BIN_EXE_rloss"));
    // The model's folder is enough.
    command
        .arg("check-mismatch")
        .arg(folder.path().join("model"))
        .arg("--out")
        .arg(&out)
        .arg("--against")
        .arg(&file);
    let output = command.args(["--search-minutes", "0"]).output().unwrap();
    let stdout = String::from_utf8_lossy(&output.stdout);
    assert_eq!(output.status.code(), Some(3), "{stdout}");
    assert!(
        stdout.starts_with("Verdict: differs.") && stdout.contains("\nThe log-probs differ by more"),
        "{stdout}"
    );
    std::fs::write(&file, [of("sinks missing"), vec!["nonsense"]].concat().join("\n")).unwrap();
    assert_eq!(code(&file).0, 2);
}

/// The page for users has a remedy for every cause.
#[test]
fn every_cause_has_a_remedy() {
    let remedies: BTreeMap<&str, Option<&str>> =
        causes(&config(), true).iter().map(|cause| (cause.name, cause.remedy())).collect();
    assert!(remedies.len() > 25 && remedies.values().all(|remedy| remedy.is_some()), "{remedies:?}");
    assert!(remedies["other RoPE base"].unwrap().contains("--rope-freq-base"), "{remedies:?}");
}
