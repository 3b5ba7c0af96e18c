//! Saved and exported models name the tokens with which training teaches them to end a turn.

use super::*;
use rloss::chat::{Chat, ChatFormat};
use rloss::checkpoint::gguf::GgufFile;
use rloss::checkpoint::save::{CompanionFiles, name_ends};
use serde::Deserialize;
use serde_json::Map;

/// What transformers reads of a folder: the ids of config.json and generation_config.json, and the end token
/// of the tokenizer.
fn ends(folder: &Path) -> (Value, Value, Value) {
    let of = |file: &str, key: &str| json_of(folder.join(file))[key].clone();
    (
        of("config.json", "eos_token_id"),
        of("generation_config.json", "eos_token_id"),
        of("tokenizer_config.json", "eos_token"),
    )
}

/// A row of `tests/fixtures/companion_ends.jsonl`: the report, the chat format, a file with its content, and
/// the keys that it must have afterwards. In `chatml` 0 is <|endoftext|> and 2 is <|im_end|>; in `harmony` 6
/// is <|return|> and 5 is <|call|>. Authority: transformers stops at any id of the generation config, and
/// vLLM also at the end token of the tokenizer. transformers 48708 puts the token of the chat first and keeps
/// the others. Qwen2.5-Instruct and GPT-OSS are published with these ids.
#[derive(Deserialize)]
struct CompanionFile {
    source: String,
    format: String,
    file: String,
    before: Value,
    after: Value,
}

#[test]
fn companion_files_of_a_base_model_name_the_ends_of_the_chat_and_keep_their_other_keys() {
    let rows = include_str!("../../fixtures/companion_ends.jsonl").lines();
    let rows: Vec<CompanionFile> = rows.map(|row| serde_json::from_str(row).unwrap()).collect();
    assert_eq!(rows.len(), 18);
    let mut failed = vec![];
    for CompanionFile { source, format, file: name, before, after } in rows {
        let format = if format == "chatml" { ChatFormat::ChatMl } else { ChatFormat::Harmony };
        let chat = format.from_embedded().unwrap();
        let (from, to) = (TempDir::new().unwrap(), TempDir::new().unwrap());
        let mut config = crate::tiny::config(false);
        name_ends(&mut config, &chat);
        fs::write(from.path().join("tokenizer.json"), chat.vocabulary().json_bytes()).unwrap();
        fs::write(from.path().join(&name), before.to_string()).unwrap();
        let files = CompanionFiles::read(from.path(), &chat).unwrap().with_generation_config(&config, &chat);
        files.write(to.path(), &config, &mut Default::default()).unwrap();
        let found = json_of(to.path().join(name));
        if found != after {
            failed.push(format!("{source}: {found}"));
        }
    }
    assert!(failed.is_empty(), "{}", failed.join("\n"));
}

#[test]
fn a_config_begins_with_the_end_of_the_chat() {
    let chats: [Chat; 2] =
        [ChatFormat::ChatMl, ChatFormat::Harmony].map(|format| format.from_embedded().unwrap());
    // QwenLM/Qwen3 927 (base, instruct), meta-llama/llama-cookbook 640 (a list that begins with the text's
    // end), ggml-org/llama.cpp 6745 (the first id is the one that GGUF has), openai/gpt-oss.
    let rows: [(usize, &[u32], &[u32]); 7] = [
        (0, &[0], &[2, 0]),
        (0, &[2], &[2]),
        (0, &[], &[2]),
        (0, &[0, 2], &[2, 0]),
        (1, &[6], &[6, 5]),
        (1, &[6, 5], &[6, 5]),
        (1, &[5, 6, 9], &[6, 5, 9]),
    ];
    for (chat, before, after) in rows {
        let mut config = crate::tiny::config(false);
        config.eos_token_ids = before.to_vec();
        name_ends(&mut config, &chats[chat]);
        assert_eq!(config.eos_token_ids, after, "{before:?}");
    }
}

/// A base model of the family of `recipe`, whose files say that a text ends with the token `end`.
fn base(folder: &Path, recipe: &str, end: (u32, &str)) -> PathBuf {
    let (run, model) = (folder.join("first"), folder.join("model"));
    let recipe = in_repository("recipes").join(recipe);
    let sets = ["cold_start.steps=1", "train.steps=0", "cold_start.batch_size=2", "parallel.threads=2"];
    done(rloss().arg("train").arg(recipe).arg("--out").arg(&run).sets(sets));
    copy_model(&first_checkpoint(&run), &model);
    let set = |name: &str, key: &str, value: Value| {
        let mut json: Map<String, Value> =
            serde_json::from_slice(&fs::read(model.join(name)).unwrap()).unwrap();
        json.insert(key.to_owned(), value);
        fs::write(model.join(name), Value::from(json).to_string()).unwrap();
    };
    set("config.json", "eos_token_id", json!(end.0));
    set("generation_config.json", "eos_token_id", json!(end.0));
    set("generation_config.json", "temperature", json!(0.5));
    set("tokenizer_config.json", "eos_token", json!(end.1));
    model
}

fn gguf_ends(file: &Path) -> String {
    let metadata = GgufFile::open(file).unwrap().metadata;
    let of = |key: &str| format!("{:?}", metadata.get(&format!("tokenizer.ggml.{key}")));
    format!("{} {}", of("eos_token_id"), of("eos_token_ids"))
}

/// Their answers went on after the end for every other program (hiyouga/LlamaFactory 7454, vllm-project/vllm
/// 792, ggml-org/llama.cpp 6745, unslothai/unsloth 468).
#[test]
fn bug_a_trained_base_model_named_the_end_of_texts() {
    let row = |end: &str| {
        let message = |role: &str, text: &str| json!({"role": role, "content": text, "channel": "final"});
        let mut messages = [message("user", "2?"), message("assistant", "2")];
        if end != "<|return|>" {
            messages.iter_mut().for_each(|message| {
                message.as_object_mut().unwrap().remove("channel");
            });
        } else {
            messages[0].as_object_mut().unwrap().remove("channel");
        }
        json!({ "messages": messages }).to_string()
    };
    type Family = (&'static str, (u32, &'static str), (Value, Value, Value), &'static str);
    let families: [Family; 2] = [
        (
            "quickstart_dense.toml",
            (0, "<|endoftext|>"),
            (json!([2, 0]), json!([2, 0]), json!("<|im_end|>")),
            "Some(Integer(2)) Some(Integers([2, 0]))",
        ),
        (
            "quickstart.toml",
            (0, "<|pad|>"),
            (json!([6, 5, 0]), json!([6, 5, 0]), json!("<|return|>")),
            "Some(Integer(6)) Some(Integers([6, 5, 0]))",
        ),
    ];
    for (recipe, end, expected, in_gguf) in families {
        let folder = TempDir::new().unwrap();
        let at = |name: &str| folder.path().join(name);
        let model = base(folder.path(), recipe, end);
        assert_eq!(ends(&model).0, json!(end.0));
        fs::write(at("rows.jsonl"), row(expected.2.as_str().unwrap())).unwrap();
        let sft = |out: &str, sets: &[&str]| {
            let sets = [&["cold_start.steps=1", "parallel.threads=2"], sets].concat();
            let mut command = rloss();
            command.arg("sft").arg(&model).arg("--data").arg(at("rows.jsonl")).arg("--out").arg(at(out));
            done(command.sets(&sets));
            at(out).join("checkpoints").join(&checkpoints(&at(out))[0])
        };
        let export = |run: &str, arguments: &[&str], out: &str| {
            done(rloss().arg("export").arg(at(run)).args(arguments).arg(at(out)));
            at(out)
        };
        // SFT of all weights, and RL from the result.
        let tuned = sft("full", &[]);
        assert_eq!(ends(&tuned), expected, "{recipe}: SFT");
        assert_eq!(json_of(tuned.join("generation_config.json"))["temperature"], 0.5);
        assert_eq!(gguf_ends(&export("full", &["--gguf"], "full.gguf")), in_gguf, "{recipe}");
        let sets = [
            &model_path(&model),
            "cold_start.steps=0",
            "train.steps=1",
            "eval.before_training=false",
            "rollout.prompts_per_step=1",
            "rollout.samples_per_prompt=2",
            "parallel.threads=2",
        ];
        let recipe_file = in_repository("recipes").join(recipe);
        let mut rl = rloss();
        rl.arg("train").arg(recipe_file).arg("--out").arg(at("rl"));
        done(rl.sets(sets));
        assert_eq!(ends(&first_checkpoint(&at("rl"))), expected, "{recipe}: RL");
        // An adapter: its checkpoint, and its three exports.
        let adapted = sft("lora", &["adapter.rank=2", "adapter.alpha=4"]);
        assert_eq!(ends(&adapted), expected, "{recipe}: the adapter's checkpoint");
        assert_eq!(ends(&export("lora", &["--merged", "--out"], "merged")), expected, "{recipe}: merged");
        assert_eq!(gguf_ends(&export("lora", &["--merged", "--gguf"], "lora.gguf")), in_gguf, "{recipe}");
        let peft = export("lora", &["--out"], "peft");
        assert!(!peft.join("config.json").exists(), "PEFT reads the config of the base");
        assert_eq!(json_of(peft.join("generation_config.json"))["eos_token_id"], expected.1, "{recipe}");
        assert_eq!(json_of(peft.join("tokenizer_config.json"))["eos_token"], expected.2, "{recipe}");
        assert!(peft.join("tokenizer.json").is_file() && peft.join("chat_template.jinja").is_file());
        done(rloss().arg("verify").arg(&peft));
    }
}
