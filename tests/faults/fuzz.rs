//! Every parser of what comes from outside, fed with damaged inputs: none may panic, hang or run out of stack.
//!
//! ```text
//! cargo test --release --test fuzz                                  a few thousand inputs, always the same
//! cargo test --release --test fuzz -- --inputs 1000000 --seed 7     as many as asked for
//! cargo test --release --test fuzz -- --target recipe --at 1234     one input again, printed
//! ```
//!
//! An input is a function of the seed and its number: a sound example, damaged a few times.

use rand::seq::{IndexedRandom, SliceRandom};
use rand::{Rng, SeedableRng};
use rand_chacha::ChaCha8Rng;
use rloss::harmony::{HarmonyTokenizer, Role, TurnParser, messages_from_json};
use rloss::integrity::{Manifest, Seal, sealed};
use rloss::metrics::Row;
use rloss::model::config::Config;
use rloss::model::tensor_file::TensorFile;
use rloss::tasks::answer::AnswerEquality;
use rloss::tasks::instructions::Instruction;
use rloss::tasks::{boxed, gsm8k, number, retool, rows};
use rloss::{mismatch, recipe, rollout, train};
use std::fs;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::path::{Path, PathBuf};
use std::process::exit;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Duration;

const INPUTS: u64 = 4_000;
const SEED: u64 = 20;
/// An input takes milliseconds; a machine may be busy.
const HANG_S: u64 = 120;

type Parse = Box<dyn Fn(&[u8])>;

/// A parser, sound examples of what it reads, and how often it is chosen.
struct Target {
    name: &'static str,
    weight: u32,
    examples: Vec<Vec<u8>>,
    parse: Parse,
}

fn main() {
    let (mut inputs, mut seed, mut only, mut at) = (INPUTS, SEED, None, None);
    let mut arguments = std::env::args().skip(1);
    while let Some(argument) = arguments.next() {
        let mut number = || arguments.next().and_then(|text| text.parse().ok());
        match argument.as_str() {
            "--inputs" => inputs = number().expect("--inputs N"),
            "--seed" => seed = number().expect("--seed N"),
            "--at" => at = number(),
            "--target" => only = arguments.next(),
            // What `cargo test` passes to tests of the usual kind.
            _ => {}
        }
    }
    // Those that are caught where they belong are silent, others are told.
    rloss::panics::tell_in_one_line();
    let scratch = tempfile::tempdir().expect("a folder");
    let mut targets = targets(scratch.path());
    if let Some(only) = &only {
        targets.retain(|target| target.name == only);
        assert!(!targets.is_empty(), "no target {only}");
    }
    println!("fuzz: {inputs} inputs, seed {seed}");
    let now = &*Box::leak(Box::new(AtomicU64::new(0)));
    std::thread::spawn(move || watch(now, seed));
    let mut counts = vec![0u64; targets.len()];
    for number in at.map_or(0..inputs, |at| at..at + 1) {
        now.store(number, Ordering::Relaxed);
        let mut random = ChaCha8Rng::seed_from_u64(seed ^ number.wrapping_mul(0x9e37_79b9_7f4a_7c15));
        let weights = targets.iter().map(|target| target.weight);
        let mut left = random.random_range(0..weights.sum());
        let index = targets
            .iter()
            .position(|t| {
                left < t.weight || {
                    left -= t.weight;
                    false
                }
            })
            .expect("one");
        let target = &targets[index];
        let input = damaged(target, &mut random);
        if at.is_some() {
            println!("{}: {}", target.name, input.escape_ascii());
        }
        counts[index] += 1;
        if catch_unwind(AssertUnwindSafe(|| (target.parse)(&input))).is_err() {
            println!("PANIC in {} at input {number}, seed {seed}: {}", target.name, input.escape_ascii());
            exit(1);
        }
    }
    for (target, count) in targets.iter().zip(counts) {
        println!("{:>14} {count}", target.name);
    }
    println!("no panic, no hang");
}

/// Ends the process when one input takes too long.
fn watch(now: &AtomicU64, seed: u64) {
    let mut before = None;
    loop {
        std::thread::sleep(Duration::from_secs(HANG_S));
        let number = now.load(Ordering::Relaxed);
        if before == Some(number) {
            println!("HANG at input {number}, seed {seed}");
            exit(1);
        }
        before = Some(number);
    }
}

/// An example, damaged: bits, bytes, pieces of itself and of another, words that mean something, depth and length.
fn damaged(target: &Target, random: &mut ChaCha8Rng) -> Vec<u8> {
    const WORDS: [&str; 28] = [
        "{",
        "}",
        "[",
        "]",
        "[[",
        "\"",
        "\\",
        ",",
        ":",
        "=",
        "\n",
        "null",
        "NaN",
        "-1",
        "1e999",
        "18446744073709551616",
        "0.1",
        "\u{0}",
        "\u{feff}",
        "é",
        "<|start|>",
        "<|call|>",
        "\\frac{",
        "\\boxed{",
        "\\ud800",
        "(",
        "^",
        "../",
    ];
    let mut bytes = target.examples.choose(random).expect("an example").clone();
    for _ in 0..random.random_range(0..6) {
        let at = random.random_range(0..=bytes.len());
        let to = random.random_range(at..=bytes.len().min(at + 64));
        match random.random_range(0..10) {
            0 | 1 if at < bytes.len() => bytes[at] ^= 1 << random.random_range(0..8),
            2 if at < bytes.len() => bytes[at] = random.random(),
            3 => drop(bytes.drain(at..to)),
            4 => bytes.truncate(at),
            5 => {
                let piece = bytes[at..to].to_vec();
                let place = random.random_range(0..=bytes.len());
                bytes.splice(place..place, piece);
            }
            6 => {
                let other = target.examples.choose(random).expect("an example");
                let from = random.random_range(0..=other.len());
                bytes.truncate(at);
                bytes.extend_from_slice(&other[from..]);
            }
            7 if random.random_bool(0.1) => {
                // Deep, or long.
                let word = WORDS.choose(random).expect("a word").repeat(random.random_range(1..20_000));
                bytes.splice(at..at, word.into_bytes());
            }
            8 if to > at => bytes[at..to].shuffle(random),
            _ => drop(bytes.splice(at..at, WORDS.choose(random).expect("a word").bytes())),
        }
    }
    bytes
}

/// A parser of text.
fn text(parse: impl Fn(&str) + 'static) -> Parse {
    Box::new(move |bytes| parse(&String::from_utf8_lossy(bytes)))
}

/// A parser of a file called `name`, alone in its folder.
fn file(scratch: &Path, name: &str, parse: impl Fn(&Path) + 'static) -> Parse {
    let folder = scratch.join(name.replace('.', "-"));
    fs::create_dir_all(&folder).expect("a folder");
    let path = folder.join(name);
    Box::new(move |bytes| {
        fs::write(&path, bytes).expect("written");
        parse(&path);
    })
}

fn example(path: &str) -> Vec<u8> {
    fs::read(PathBuf::from(env!("CARGO_MANIFEST_DIR")).join(path)).unwrap_or_else(|e| panic!("{path}: {e}"))
}

fn targets(scratch: &Path) -> Vec<Target> {
    let target = |name, weight, examples: &[&[u8]], parse| {
        let examples = examples.iter().map(|example| example.to_vec()).collect();
        Target { name, weight, examples, parse }
    };
    let embedded = HarmonyTokenizer::embedded().expect("the embedded tokenizer");
    let (rendering, turns) = (embedded.clone(), embedded.clone());
    let vocabulary = embedded.json_bytes().to_vec();
    let (quickstart, tiny) = (example("recipes/quickstart.toml"), example("tests/faults/tiny.toml"));
    let whole = recipe::resolve(Path::new("a.toml"), "", &[]).expect("defaults").to_toml();
    let run = scratch.join("run");
    fs::create_dir_all(&run).expect("a folder");
    vec![
        target("recipe", 4, &[&quickstart, &tiny, whole.as_bytes()], text(|input| {
            let _ = recipe::resolve(Path::new("a.toml"), input, &[]).map_err(|e| e.to_string());
        })),
        target("set", 4, &[b"train.steps=3", b"task.name=\"gsm8k\"", b"eval.pass_at=[1, 2]"], text(|input| {
            let _ = recipe::resolve(Path::new("a.toml"), "", &[input.to_owned()]);
        })),
        target("seal", 8, &[sealed("[train]\nsteps = 3\n").as_bytes()], text(move |input| {
            let _ = Seal::of(input, &run);
        })),
        target("manifest", 6, &[b"af1349b9f5f9a1a6a0404dea36dcc9499bcb25c9adc112b7cc9a93cae41f3262  a.json\n"],
            file(scratch, "manifest.b3", |path| {
                let _ = Manifest::read(path.parent().expect("a folder"));
            })),
        target("trainer.json", 6, &[br#"{"phase": "rl", "step": 3, "updates": 3, "metrics_bytes": 99, "metrics_digest": "af1349"}"#],
            file(scratch, "trainer.json", |path| {
                let _ = train::checkpoint::read_state(path.parent().expect("a folder"));
            })),
        target("config.json", 10, &[CONFIG.as_bytes()], file(scratch, "config.json", |path| {
            let _ = Config::read(path.parent().expect("a folder"));
        })),
        target("tokenizer", 3, &[&vocabulary], Box::new(|input| {
            if let Ok(tokenizer) = HarmonyTokenizer::from_bytes(input.to_vec(), "tokenizer.json") {
                let _ = tokenizer.encode_text("x = 1\n\u{e9}<|end|>");
            }
        })),
        target("safetensors", 10, &[&tensors()], file(scratch, "a.safetensors", |path| {
            let Ok(file) = TensorFile::open(path) else { return };
            for name in file.metadata.offset_keys() {
                let _ = file.metadata.info(&name).map(|info| file.read(info));
            }
        })),
        target("metrics row", 20, &[br#"{"step": 3, "phase": "rl", "critic/rewards/mean": 0.5, "a": null}"#], text(|input| {
            let _ = Row::from_json(input);
        })),
        target("trajectories", 8, &[TRAJECTORY.replace('\n', " ").as_bytes()], file(scratch, "t.jsonl", |path| {
            let _ = rollout::stored::read(path, false);
            let _ = rollout::stored::read(path, true);
        })),
        target("against", 8, &[br#"{"tokens": [1, 5], "logprobs": [null, -0.7], "temperature": 1.0}"#],
            file(scratch, "against.jsonl", |path| {
                let _ = mismatch::against::read(path, 272, 64);
            })),
        target("rows", 6, &[b"{\"problem\": \"1+1\", \"answer\": \"2\"}\n\n{\"problem\": \"x\", \"answer\": \"3\"}\n"],
            file(scratch, "rows.jsonl", |path| {
                let _ = rows::read(path, Some(9), "a row", |row| rows::text(row, "problem").map(str::to_owned));
            })),
        target("packed rows", 4, &[&packed()], file(scratch, "rows.jsonl.gz", |path| {
            let _ = rows::read(path, Some(9), "a row", |row| rows::text(row, "problem").map(str::to_owned));
        })),
        target("messages", 8, &[br#"[{"role": "user", "content": "hi"}, {"role": "assistant", "channel": "final", "content": [{"type": "text", "text": "x"}]}]"#],
            text(move |input| {
                let Ok(value) = serde_json::from_str(input) else { return };
                let Ok(messages) = messages_from_json(&value, "row 1") else { return };
                let options = rloss::harmony::RenderOptions::default();
                let _ = rendering.render_conversation_for_completion(&messages, Role::Assistant, options);
            })),
        target("turn", 20, &[b"<|channel|>analysis to=python<|message|>print(1)<|call|>", b"<|channel|>final<|message|>7<|return|>"],
            text(move |input| {
                let Ok(tokens) = turns.encode_with_special(input) else { return };
                let mut parser = TurnParser::new(&turns);
                for token in tokens {
                    let _ = parser.push(token);
                }
                let _ = parser.problem().map(|problem| problem.reply());
                let _ = parser.finish();
            })),
        target("token ids", 10, &[&[3, 0, 7, 0, 20, 0, 1, 1, 4, 1]], Box::new(move |input| {
            let mut parser = TurnParser::new(&embedded);
            for pair in input.chunks_exact(2) {
                let _ = parser.push(u32::from(u16::from_le_bytes([pair[0], pair[1]])));
            }
            let _ = parser.finish();
        })),
        target("answer", 30, &[br"\frac{1}{2}", br"x \in [0, \sqrt{3}) \cup \{5\}", b"2^{10} + 3i", b"1,234.5\\%", br"\begin{pmatrix} 1 & 2 \\ 3 & 4 \end{pmatrix}"],
            text(|input| {
                for equality in [AnswerEquality::Equivalent, AnswerEquality::Exact] {
                    let _ = equality.holds(input, "3") | equality.holds("x+1", input) | equality.holds(input, input);
                }
            })),
        target("solution", 20, &[br"so the final answer is $\boxed{\frac{3}{4}}$.", b"6*7=<<6*7=42>>42\n#### 42", b"Answer: 3.50 dollars"],
            text(|input| {
                let _ = boxed::last_boxed(input);
                let _ = number::Number::last_in(input);
                let _ = gsm8k::extract(input, gsm8k::Extraction::Flexible);
                let _ = retool::PromptForm::default().extract(input);
            })),
        target("instruction", 10, &[br#"["keywords:existence", {"keywords": ["a", "b"]}, "some a, b"]"#, br#"["length_constraints:number_words", {"relation": "at least", "num_words": 3}, "one two"]"#, br#"["detectable_format:multiple_sections", {"section_spliter": "Section", "num_sections": 2}, "Section 1"]"#],
            text(|input| {
                let Ok(serde_json::Value::Array(parts)) = serde_json::from_str(input) else { return };
                let [serde_json::Value::String(id), kwargs, response, ..] = &parts[..] else { return };
                if let Ok(instruction) = Instruction::parse(id, kwargs) {
                    let _ = instruction.follows(response.as_str().unwrap_or_default());
                }
            })),
    ]
}

const CONFIG: &str = r#"{"model_type": "gpt_oss", "vocab_size": 272, "hidden_size": 32, "num_hidden_layers": 2,
"num_attention_heads": 2, "num_key_value_heads": 1, "head_dim": 16, "intermediate_size": 32, "num_local_experts": 2,
"num_experts_per_tok": 1, "sliding_window": 32, "layer_types": ["sliding_attention", "full_attention"],
"rope_theta": 10000.0, "rope_scaling": {"rope_type": "yarn", "factor": 2.0, "original_max_position_embeddings": 64,
"beta_fast": 32.0, "beta_slow": 1.0, "truncate": false}, "rms_norm_eps": 1e-5, "swiglu_limit": 7.0,
"max_position_embeddings": 160, "eos_token_id": [3, 5], "pad_token_id": 0, "hidden_act": "silu", "attention_bias": true}"#;

const TRAJECTORY: &str = r#"{"phase": "rl", "step": 1, "prompt": 0, "sample": 0, "problem_id": "a/1", "tokens": [1, 2, 3],
"prompt_tokens": 1, "mask": [false, true, true], "logprobs": [0.0, -0.5, -0.25], "turns": [{"start": 1, "end": 3, "call": null}],
"outcome": "finished", "reward": 1.0, "success": true, "tool_s": 0.0, "messages": [{"role": "user", "content": "hi"}]}"#;

/// A small safetensors file.
fn tensors() -> Vec<u8> {
    let mut header = br#"{"a":{"dtype":"F32","shape":[2,2],"data_offsets":[0,16]},"b":{"dtype":"U8","shape":[8],"data_offsets":[16,24]}}"#.to_vec();
    header.resize(header.len().next_multiple_of(8), b' ');
    [&(header.len() as u64).to_le_bytes()[..], &header, &[7; 24]].concat()
}

/// Two packed rows.
fn packed() -> Vec<u8> {
    use std::io::Write;
    let mut packer = flate2::write::GzEncoder::new(vec![], flate2::Compression::default());
    packer.write_all(b"{\"problem\": \"1+1\"}\n{\"problem\": \"2+2\"}\n").expect("packed");
    packer.finish().expect("packed")
}
