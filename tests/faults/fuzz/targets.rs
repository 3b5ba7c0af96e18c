//! The parsers, each with sound examples of what it reads.

use rloss::chat::chatml::TemplateSource;
use rloss::chat::{Chat, ChatFormat, SystemPromptSettings};
use rloss::checkpoint::gguf::GgufModel;
use rloss::checkpoint::tensor_file::TensorFile;
use rloss::harmony::{HarmonyTokenizer, Message};
use rloss::integrity::{ChecksumStatus, Manifest, add_checksum};
use rloss::metrics::Row;
use rloss::model::config::Config;
use rloss::model::names::parameter_specs;
use rloss::ops::packed_weights::PackedFormat;
use rloss::ops::weight::Weight;
use rloss::tasks::answer::AnswerEquality;
use rloss::tasks::instructions::Instruction;
use rloss::tasks::{boxed_answer, gsm8k, number, retool, rows};
use rloss::{checkpoint, mismatch, recipe, report, rollout};
use std::fs;
use std::path::{Path, PathBuf};

pub type Parse = Box<dyn Fn(&[u8])>;

/// A parser, sound examples of what it reads, and how often it is chosen: where an input takes little
/// time, often.
pub struct Target {
    pub name: &'static str,
    pub weight: u32,
    pub examples: Vec<Vec<u8>>,
    pub parse: Parse,
}

fn target<E: AsRef<[u8]>>(
    name: &'static str,
    weight: u32,
    examples: impl IntoIterator<Item = E>,
    parse: Parse,
) -> Target {
    let examples = examples.into_iter().map(|example| example.as_ref().to_vec()).collect();
    Target { name, weight, examples, parse }
}

/// A parser of text. What it returns does not count.
fn text<R>(parse: impl Fn(&str) -> R + 'static) -> Parse {
    Box::new(move |bytes| drop(parse(&String::from_utf8_lossy(bytes))))
}

/// A parser of a file called `name` in a folder of its own.
fn file<R>(scratch: &Path, name: &str, parse: impl Fn(&Path) -> R + 'static) -> Parse {
    let folder = scratch.join(name.replace(['.', '/'], "-"));
    let path = folder.join(name);
    fs::create_dir_all(path.parent().expect("a folder")).expect("a folder");
    Box::new(move |bytes| {
        fs::write(&path, bytes).expect("written");
        drop(parse(&path));
    })
}

fn example(path: &str) -> Vec<u8> {
    fs::read(PathBuf::from(env!("CARGO_MANIFEST_DIR")).join(path)).unwrap_or_else(|e| panic!("{path}: {e}"))
}

/// Every parser of what comes from outside; files are made under `scratch`.
pub fn targets(scratch: &Path) -> Vec<Target> {
    let mut all = recipes(scratch);
    all.extend(model_files(scratch));
    all.extend(run_files(scratch));
    all.extend(data(scratch));
    all.extend(
        [ChatFormat::Harmony, ChatFormat::ChatMl, ChatFormat::ThinkingChatMl]
            .into_iter()
            .flat_map(conversations),
    );
    all.push(chat_templates());
    all.extend(answers());
    all
}

/// Chat templates of models: compiled, probed, and a conversation of two turns.
fn chat_templates() -> Target {
    let names = ["alternating", "dated", "parts", "python", "thoughts", "tools_json", "tools_xml"];
    let examples = names.map(|name| example(&format!("tests/fixtures/templates/{name}.jinja")));
    let vocabulary = ChatFormat::ThinkingChatMl.from_embedded().expect("embedded").vocabulary().clone();
    let messages = [
        Message::user("?"),
        Message::assistant("final", "<|im_end|>"),
        Message::user("!"),
        Message::assistant("final", "2"),
    ];
    let parse = move |input: &str| {
        let source = TemplateSource { default: input.into(), ..TemplateSource::default() };
        let chat = ChatFormat::ThinkingChatMl.with_template(vocabulary.clone(), "a", &source);
        let _ = chat.and_then(|chat| chat.render_training(&messages));
    };
    target("chat_template", 1, examples, text(parse))
}

fn recipes(scratch: &Path) -> Vec<Target> {
    let whole = recipe::resolve(Path::new("a.toml"), "", &[]).expect("defaults").to_toml().into_bytes();
    let texts = [example("recipes/quickstart.toml"), example("tests/faults/tiny.toml"), whole];
    let run = scratch.join("run");
    fs::create_dir_all(&run).expect("a folder");
    vec![
        target(
            "recipe",
            4,
            texts,
            text(|input| recipe::resolve(Path::new("a.toml"), input, &[]).map_err(|e| e.to_string())),
        ),
        target(
            "set",
            4,
            ["train.steps=3", "task.name=\"gsm8k\"", "eval.pass_at=[1, 2]"],
            text(|input| recipe::resolve(Path::new("a.toml"), "", &[input.to_owned()])),
        ),
        target(
            "seal",
            8,
            [add_checksum("[train]\nsteps = 3\n")],
            text(move |input| ChecksumStatus::check(input, &run)),
        ),
    ]
}

fn model_files(scratch: &Path) -> Vec<Target> {
    let parent = |path: &Path| path.parent().expect("a folder").to_owned();
    let vocabularies = [ChatFormat::Harmony, ChatFormat::ChatMl]
        .map(|format| format.from_embedded().expect("embedded").vocabulary().json_bytes().to_vec());
    let configs = ["gpt_oss_yarn", "gpt_oss_plain", "qwen2", "qwen2_tied", "qwen3", "qwen3_moe"]
        .map(|name| example(&format!("tests/fixtures/{name}/config.json")));
    let gguf = example("tests/fixtures/gguf/gpt_oss.gguf");
    let digest = "af1349b9f5f9a1a6a0404dea36dcc9499bcb25c9adc112b7cc9a93cae41f3262";
    vec![
        target(
            "config.json",
            10,
            configs,
            file(scratch, "config.json", move |path| Config::read(&parent(path))),
        ),
        target(
            "tokenizer",
            3,
            vocabularies,
            Box::new(|input| {
                if let Ok(tokenizer) = HarmonyTokenizer::from_bytes(input.to_vec(), "tokenizer.json") {
                    let _ = tokenizer.encode_text("x = 1\n\u{e9}<|end|>");
                }
            }),
        ),
        target(
            "safetensors",
            10,
            [tensors()],
            file(scratch, "a.safetensors", |path| {
                let Ok(file) = TensorFile::open(path) else { return };
                for name in file.metadata.offset_keys() {
                    let _ = file.metadata.info(&name).map(|info| file.read(info));
                }
            }),
        ),
        target(
            "gguf",
            6,
            // The header alone too: most damage to the whole file falls on values.
            [gguf.clone(), gguf[..16_000].to_vec()],
            file(scratch, "a.gguf", |path| {
                let Ok(GgufModel { weights, config, .. }) = GgufModel::open(path) else { return };
                for spec in parameter_specs(&config) {
                    let packed = weights.read_packed(&spec, weights.format_of(&spec));
                    if let Ok(Some(Weight::Packed(matrix))) = packed
                        && matrix.format().block_type().is_some()
                    {
                        let ([_, k, n], mut out) = (matrix.shape(), vec![]);
                        out.resize(n, 0.0);
                        if !matches!(matrix.format(), PackedFormat::BlockRows(_)) {
                            let _ = matrix.forward(0, &mut out, &vec![1.0; k], false);
                        }
                    }
                    let _ = weights.read_values(&spec);
                }
            }),
        ),
        target(
            "manifest",
            6,
            [format!("{digest}  a.json\n")],
            file(scratch, "manifest.b3", move |path| Manifest::read(&parent(path))),
        ),
        target(
            "trainer.json",
            6,
            [format!(
                r#"{{"phase": "rl", "step": 3, "updates": 3, "metrics_bytes": 99, "metrics_digest": "{digest}"}}"#
            )],
            file(scratch, "trainer.json", move |path| checkpoint::read_state(&parent(path))),
        ),
    ]
}

fn run_files(scratch: &Path) -> Vec<Target> {
    let row = r#"{"step": 3, "phase": "rl", "critic/rewards/mean": 0.5, "a": null}"#;
    let trajectory = TRAJECTORY.replace('\n', " ");
    let page = |path: &Path| {
        let run = path.ancestors().find(|folder| folder.ends_with("run")).expect("a run").to_owned();
        fs::write(run.join("recipe.toml"), "[train]\nsteps = 3\n").expect("written");
        if !path.ends_with("metrics.jsonl") {
            fs::write(run.join("metrics.jsonl"), "{\"step\": 1, \"phase\": \"rl\", \"a\": 1}\n")
                .expect("written");
        }
        let _ = report::page(&[run], false);
    };
    vec![
        target("metrics row", 20, [row], text(Row::from_json)),
        target(
            "trajectories",
            8,
            [&trajectory],
            file(scratch, "t.jsonl", |path| {
                let _ = rollout::trajectory_file::read(path, false);
                let _ = rollout::trajectory_file::read(path, true);
            }),
        ),
        target("page, rows", 1, [row], file(scratch, "run/metrics.jsonl", page)),
        target("page, turns", 1, [trajectory], file(scratch, "run/trajectories/step-000001.jsonl", page)),
    ]
}

fn data(scratch: &Path) -> Vec<Target> {
    let problems = "{\"problem\": \"1+1\", \"answer\": \"2\"}\n\n{\"problem\": \"x\", \"answer\": \"3\"}\n";
    let read = |path: &Path| {
        // As many rows as there are: the end of a file may be damaged.
        let _ = rows::read(path, Some(99), "a row", |row| rows::text(row, "problem").map(str::to_owned));
    };
    let tables = Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/fixtures/tables");
    let parquet: Vec<Vec<u8>> = ["pyarrow_zstd", "polars", "numbers"]
        .map(|name| fs::read(tables.join(format!("{name}.parquet"))).expect("a fixture"))
        .into();
    let engines = fs::read_dir(Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/fixtures/engines"));
    let mut engines: Vec<_> =
        engines.expect("fixtures").map(|entry| entry.expect("an entry").path()).collect();
    engines.sort();
    // A few records of each: what is wrong in the first says what the shape's reader does.
    let engines = engines.iter().filter(|path| path.extension().is_some_and(|e| e != "gz") && path.is_file());
    let engines: Vec<Vec<u8>> = engines
        .map(|path| fs::read(path).expect("a file"))
        .map(|bytes| match bytes.iter().position(|&byte| byte == b'\n') {
            Some(end) if bytes.starts_with(b"{\"") => bytes[..end].to_vec(),
            _ => bytes,
        })
        .chain([br#"{"tokens": [1, 5], "logprobs": [null, -0.7], "temperature": 1.0}"#.to_vec()])
        .collect();
    let folder = Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/fixtures/engines/model");
    let config = Config::read(&folder).expect("a config");
    let chat = ChatFormat::Harmony.from_embedded().expect("embedded");
    vec![
        target("rows", 6, [problems], file(scratch, "rows.jsonl", read)),
        target("parquet", 8, parquet, file(scratch, "rows.parquet", read)),
        target("csv", 2, ["q,a\n\"x, \"\"y\"\"\",4\nz,5\n"], file(scratch, "rows.csv", read)),
        target("packed rows", 4, [packed(problems)], file(scratch, "rows.jsonl.gz", read)),
        target(
            "against",
            4,
            engines,
            file(scratch, "against.jsonl", move |path| {
                let reader = mismatch::rows::RowReader::new(&config, 64, chat.vocabulary(), 1.0);
                let _ = reader.read(&[path.to_owned()]);
            }),
        ),
    ]
}

/// Conversations in `format`: of files, as text that was sampled, as ids that were.
fn conversations(format: ChatFormat) -> [Target; 3] {
    let chat = format.from_embedded().expect("embedded");
    let (rendering, sampling) = (chat.clone(), chat.clone());
    let (names, turns) = match format {
        ChatFormat::Harmony => (
            ["messages", "turn", "token ids"],
            [
                "<|channel|>analysis to=python<|message|>print(1)<|call|>",
                "<|channel|>final<|message|>7<|return|>",
            ],
        ),
        ChatFormat::ChatMl => (
            ["ChatML messages", "ChatML turn", "ChatML ids"],
            [
                "7 or so\n<tool_call>\n{\"name\": \"python\", \"arguments\": {\"code\": \"print(1)\\n\"}}\n</tool_call><|im_end|>",
                "It is 7.<|im_end|>",
            ],
        ),
        ChatFormat::ThinkingChatMl => (
            ["ChatML messages with thoughts", "ChatML turn with thoughts", "ChatML ids with thoughts"],
            [
                "<think>\n3*4\n</think>\n\n<tool_call>\n{\"name\": \"python\", \"arguments\": {\"code\": \"1\"}}\n</tool_call><|im_end|>",
                "<think>It is 7.<|im_end|>",
            ],
        ),
    };
    let sampled = move |chat: &Chat, tokens: &mut dyn Iterator<Item = u32>| {
        let mut reader = chat.turn_parser();
        tokens.for_each(|token| {
            let _ = reader.push(token);
        });
        let _ = reader.calls();
        let _ = reader.finish();
    };
    [
        target(
            names[0],
            6,
            [MESSAGES, MORE_MESSAGES],
            text(move |input| {
                let Ok(row) = serde_json::from_str(input) else { return };
                let settings = SystemPromptSettings::default();
                let Ok(messages) = rendering.read_messages(&row, &settings, true) else { return };
                let _ = (rendering.render_prompt(&messages), rendering.render_training(&messages));
            }),
        ),
        target(
            names[1],
            12,
            turns,
            text(move |input| {
                let Ok(tokens) = sampling.vocabulary().encode_with_special(input) else { return };
                sampled(&sampling, &mut tokens.iter().copied());
                let _ = sampling.check(&tokens);
            }),
        ),
        target(
            names[2],
            6,
            [[3, 0, 7, 0, 20, 0, 1, 1, 4, 1]],
            Box::new(move |input| {
                let ids = input.chunks_exact(2).map(|pair| u32::from(u16::from_le_bytes([pair[0], pair[1]])));
                sampled(&chat, &mut ids.clone());
                let _ = chat.check(&ids.collect::<Vec<_>>());
            }),
        ),
    ]
}

fn answers() -> Vec<Target> {
    vec![
        target(
            "answer",
            30,
            [
                r"\frac{1}{2}",
                r"x \in [0, \sqrt{3}) \cup \{5\}",
                "2^{10} + 3i",
                r"1,234.5\%",
                r"\begin{pmatrix} 1 & 2 \\ 3 & 4 \end{pmatrix}",
            ],
            text(|input| {
                for equality in [AnswerEquality::Equivalent, AnswerEquality::Exact] {
                    let _ = equality.matches(input, "3") | equality.matches("x+1", input);
                    let _ = equality.matches(input, input);
                }
            }),
        ),
        target(
            "solution",
            20,
            [
                r"so the final answer is $\boxed{\frac{3}{4}}$.",
                "6*7=<<6*7=42>>42\n#### 42",
                "Answer: 3.50 dollars",
            ],
            text(|input| {
                let _ = boxed_answer::find_last_boxed(input);
                let _ = number::Number::last_in(input);
                let _ = gsm8k::extract(input, gsm8k::Extraction::Flexible);
                let _ = retool::PromptFormat::default().extract(input);
            }),
        ),
        target(
            "instruction",
            10,
            [
                r#"["keywords:existence", {"keywords": ["a", "b"]}, "some a, b"]"#,
                r#"["length_constraints:number_words", {"relation": "at least", "num_words": 3}, "one two"]"#,
                r#"["detectable_format:multiple_sections", {"section_spliter": "Section", "num_sections": 2}, "Section 1"]"#,
            ],
            text(|input| {
                let Ok(serde_json::Value::Array(parts)) = serde_json::from_str(input) else { return };
                let [serde_json::Value::String(id), kwargs, response, ..] = &parts[..] else { return };
                if let Ok(instruction) = Instruction::parse(id, kwargs) {
                    let _ = instruction.is_followed_by(response.as_str().unwrap_or_default());
                }
            }),
        ),
    ]
}

const MESSAGES: &str = r#"{"messages": [{"role": "user", "content": "hi"}, {"role": "assistant", "channel": "final",
"content": [{"type": "text", "text": "x"}]}]}"#;

const MORE_MESSAGES: &str = r#"{"tools": [{"type": "function", "function": {"name": "f", "description": "d", "parameters": {}}}],
"messages": [{"role": "system", "content": "s"}, {"role": "user", "content": "hi"}, {"role": "assistant", "content": "a",
"tool_calls": [{"function": {"name": "f", "arguments": {"x": [1, 2.5e3, null, true]}}}]},
{"role": "tool", "name": "f", "content": "3"}, {"role": "assistant", "content": "3"}]}"#;

const TRAJECTORY: &str = r#"{"phase": "rl", "step": 1, "prompt": 0, "sample": 0, "problem_id": "a/1", "tokens": [1, 2, 3],
"prompt_tokens": 1, "mask": [false, true, true], "logprobs": [0.0, -0.5, -0.25], "turns": [{"start": 1, "end": 3, "calls": []}],
"outcome": "finished", "reward": 1.0, "success": true, "tool_s": 0.0, "messages": [{"role": "user", "content": "hi"}]}"#;

/// A small safetensors file.
fn tensors() -> Vec<u8> {
    let header = br#"{"a":{"dtype":"F32","shape":[2,2],"data_offsets":[0,16]},"b":{"dtype":"U8","shape":[8],"data_offsets":[16,24]}}"#;
    let mut header = header.to_vec();
    header.resize(header.len().next_multiple_of(8), b' ');
    [&(header.len() as u64).to_le_bytes()[..], &header, &[7; 24]].concat()
}

/// `text`, packed.
fn packed(text: &str) -> Vec<u8> {
    use std::io::Write;
    let mut packer = flate2::write::GzEncoder::new(vec![], flate2::Compression::default());
    packer.write_all(text.as_bytes()).expect("packed");
    packer.finish().expect("packed")
}
