//! What the commands of pages name: models, data and runs, all tiny, and the folder in which they run.

use super::check::root;
use super::extract::shell_words;
use crate::cli::KilledOnDrop;
use std::collections::BTreeMap;
use std::fs;
use std::io::{BufRead, BufReader};
use std::os::unix::fs::symlink;
use std::path::Path;
use std::process::{Command, Stdio};
use tempfile::TempDir;

const QWEN: &str = "models/Qwen2.5-0.5B-Instruct";
const GPT_OSS: &str = "models/gpt-oss-20b";

/// Placeholders of pages: a part of the command, the placeholder, and what it stands for here. The first line
/// that fits a placeholder counts.
const PLACEHOLDERS: &[(&str, &str, &str)] = &[
    ("rloss sft", "rows.jsonl", "conversations.jsonl"),
    ("rloss sft", "held_out.jsonl", "held_out_conversations.jsonl"),
    ("rloss sft", "FOLDER", QWEN),
    ("rloss verify", "FOLDER", "runs/quickstart"),
    ("qwen", "FOLDER", QWEN),
    ("gsm8k_lora", "FOLDER", QWEN),
    ("gsm8k_programs", "FOLDER", QWEN),
    ("gsm8k_tool", "FOLDER-calls", QWEN),
    ("", "FOLDER", GPT_OSS),
    ("", "TINY", GPT_OSS),
    ("", "FILE.gguf", "qwen.gguf"),
    ("", "qwen2.5-0.5b-instruct-q8_0.gguf", "qwen.gguf"),
    ("--against", "FILE...", "rows.jsonl"),
    ("train_file", "FILE", "conversations.jsonl"),
    ("--from", "RECIPE", "gsm8k"),
    ("--resume", "RECIPE", "runs/quickstart"),
    ("", "RECIPE", "recipes/quickstart.toml"),
    ("", "RUN RUN", "runs/quickstart runs/quickstart_lora"),
    ("", "RUN", "runs/quickstart"),
    ("", "NAME", "named"),
    ("", "COMMAND", "train"),
    ("", "N", "2"),
];

/// Two short steps, whatever the recipe says. The recipes with an SFT warm-up get two steps of that too.
const SHORT: &str = " --set train.steps=2 --set rollout.prompts_per_step=2 --set rollout.samples_per_prompt=2 \
                     --set rollout.response_tokens_max=16 --set eval.problems_max=4";
/// For recipes with long prompts: a token of the stand-ins is a byte. So few samples are one minibatch.
const LONG_PROMPTS: &str = " --set rollout.prompt_tokens_max=4096 --set train.minibatches=1";
const SHORT_WARM_UP: &str = " --set cold_start.steps=2";
const MODEL_ALONE: &str = " --set train.steps=0 --set cold_start.steps=1 --set eval.problems_max=4 \
                           --set model.architecture.max_position_embeddings=131072";

/// Replaces the placeholders of a command by what [`StandIns`] makes.
pub fn fill_placeholders(command: &str) -> String {
    let mut filled = command.to_owned();
    for (part, placeholder, value) in PLACEHOLDERS {
        if !command.contains(part) {
            continue;
        }
        let is_word = |c: Option<char>| c.is_some_and(|c| c.is_alphanumeric() || c == '_' || c == '-');
        let mut rest = std::mem::take(&mut filled);
        while let Some(at) = rest.find(placeholder) {
            let after = rest.split_off(at + placeholder.len());
            let is_whole = !is_word(rest[..at].chars().next_back()) && !is_word(after.chars().next());
            filled += &rest[..at];
            filled += if is_whole { value } else { placeholder };
            rest = after;
        }
        filled += &rest;
    }
    filled
}

/// Returns a command with the options that make it short.
fn shortened(command: &str) -> String {
    let has_warm_up = ["quickstart", "first", "format_rules"].iter().any(|name| command.contains(name));
    let warm_up = if has_warm_up { SHORT_WARM_UP } else { "" };
    let long_prompts = if command.contains("retool") { LONG_PROMPTS } else { "" };
    let sets = match shell_words(command).get(1).map(String::as_str) {
        _ if command.contains("--help") => String::new(),
        // A resumed run keeps its settings, and makes one step more.
        Some("train") if command.contains("--resume") => " --set train.steps=3".to_owned(),
        Some("train") => format!("{SHORT}{warm_up}{long_prompts}"),
        Some("sft") => SHORT_WARM_UP.to_owned(),
        Some("check") => long_prompts.to_owned(),
        Some("eval") => " --set eval.problems_max=4 --set rollout.response_tokens_max=16".to_owned(),
        _ => String::new(),
    };
    format!("{command}{sets}")
}

/// A folder with everything that commands of pages name.
pub struct StandIns(TempDir);

impl StandIns {
    pub fn new() -> Self {
        let stand_ins = Self(TempDir::new().unwrap());
        let folder = stand_ins.0.path();
        for name in ["recipes", "scripts", "examples", "tests", "docs"] {
            symlink(root().join(name), folder.join(name)).unwrap();
        }
        fs::create_dir_all(folder.join("data/dapo-math")).unwrap();
        let vectors = root().join("tests/fixtures/vectors");
        for name in ["gsm8k", "aime", "ifeval"] {
            symlink(vectors.join(name), folder.join("data").join(name)).unwrap();
        }
        let rows = fs::File::create(folder.join("data/dapo-math/integer-answer-prompts.jsonl.gz")).unwrap();
        let mut rows = flate2::write::GzEncoder::new(rows, Default::default());
        let source = fs::File::open(vectors.join("dapo-math/integer-answer-prompts.jsonl"));
        std::io::copy(&mut source.unwrap(), &mut rows).unwrap();
        rows.finish().unwrap();

        let conversation = |a: usize| {
            format!(
                "{{\"messages\": [{{\"role\": \"user\", \"content\": \"2*{a}?\"}}, \
                 {{\"role\": \"assistant\", \"content\": \"{}\"}}]}}\n",
                2 * a
            )
        };
        let conversations = |range: std::ops::Range<usize>| range.map(conversation).collect::<String>();
        fs::write(folder.join("conversations.jsonl"), conversations(0..20)).unwrap();
        fs::write(folder.join("gsm8k-calls.jsonl"), conversations(0..4)).unwrap();
        fs::write(folder.join("held_out_conversations.jsonl"), conversations(20..24)).unwrap();

        for (recipe, model) in [("quickstart", GPT_OSS), ("quickstart_dense", QWEN)] {
            let run = format!("made/{recipe}");
            bash(folder, &format!("rloss train {recipe} --out {run}{MODEL_ALONE}")).unwrap();
            fs::create_dir_all(folder.join(model)).unwrap();
            // The model alone, as if from elsewhere.
            for name in ["config.json", "model.safetensors", "tokenizer.json", "tokenizer_config.json"] {
                let from = folder.join(&run).join("checkpoints/cold-start-000001").join(name);
                fs::copy(from, folder.join(model).join(name)).unwrap();
            }
        }
        for command in [
            format!("rloss train quickstart{SHORT}{SHORT_WARM_UP}"),
            format!("rloss train quickstart_lora{SHORT}{SHORT_WARM_UP}"),
            format!("rloss init mine --from gsm8k_qwen_lora --model {QWEN}"),
            format!("rloss train mine.toml{SHORT}"),
            "rloss export made/quickstart_dense --gguf qwen.gguf".to_owned(),
            format!("mkdir -p toy/Qwen && cp -r {QWEN} toy/Qwen/Qwen3-4B-Instruct-2507"),
            "rloss rollout released --out made/rows --set rollout.response_tokens_max=16".to_owned(),
            "cp made/rows/trajectories/step-000001.jsonl rows.jsonl".to_owned(),
        ] {
            bash(folder, &command).unwrap();
        }
        stand_ins
    }
}

/// Runs a command by bash in `folder`, with the binary under test as `rloss`.
///
/// # Errors
/// The end of what it said, when its exit code is not 0.
fn bash(folder: &Path, command: &str) -> Result<(), String> {
    let output = shell(folder, command).output().expect("bash starts");
    let code = output.status.code();
    if code == Some(0) {
        return Ok(());
    }
    let said =
        String::from_utf8_lossy(&output.stderr).into_owned() + &String::from_utf8_lossy(&output.stdout);
    let end: Vec<&str> = said.lines().rev().take(3).collect();
    Err(format!("{command}: exit code {code:?}: {}", end.into_iter().rev().collect::<Vec<_>>().join("\n")))
}

fn shell(folder: &Path, command: &str) -> Command {
    let binary = Path::new(env!("CARGO_BIN_EXE_rloss")).parent().unwrap().display();
    let path = format!("{binary}:{}", std::env::var("PATH").unwrap_or_default());
    let mut shell = Command::new("bash");
    shell.args(["-c", command]).current_dir(folder).stdin(Stdio::null()).env("PATH", path);
    shell.env("XDG_CONFIG_HOME", env!("CARGO_TARGET_TMPDIR"));
    shell
}

/// The folder in which the commands of one page run.
pub struct PageFolder {
    folder: TempDir,
    servers: Vec<KilledOnDrop>,
    /// Port that the page names → address of the server.
    addresses: BTreeMap<String, String>,
}

impl PageFolder {
    pub fn new(stand_ins: &StandIns) -> Self {
        let folder = TempDir::new().unwrap();
        let copy = Command::new("cp").arg("-a").arg(stand_ins.0.path().join(".")).arg(folder.path()).status();
        assert!(copy.unwrap().success());
        Self { folder, servers: vec![], addresses: BTreeMap::new() }
    }

    pub fn write(&self, file: &str, text: &str) {
        fs::write(self.folder.path().join(file), text).unwrap();
    }

    /// Runs a command, shortened. A server goes on until the page ends.
    ///
    /// # Errors
    /// What the command said when it failed.
    pub fn run(&mut self, command: &str) -> Result<(), String> {
        let words = shell_words(command);
        let is_server = words.get(1).is_some_and(|name| name == "serve") || command.contains("--follow");
        if is_server && !command.contains("--help") {
            return self.serve(command, &words);
        }
        self.remove_results(&words);
        let mut command = shortened(command);
        if words[0] == "curl" {
            for (port, address) in &self.addresses {
                command = command.replace(&format!("127.0.0.1:{port}"), address);
            }
            command += " --fail --silent --show-error";
        }
        bash(self.folder.path(), &command)
    }

    /// Removes what an earlier command left where this one writes.
    fn remove_results(&self, words: &[String]) {
        let after = |option: &str| {
            let at = words.iter().position(|word| word == option)?;
            words.get(at + 1).cloned()
        };
        let mut paths: Vec<String> = ["--out", "--gguf"].iter().filter_map(|option| after(option)).collect();
        match words.iter().map(String::as_str).collect::<Vec<_>>().as_slice() {
            ["rloss", "train", recipe, rest @ ..]
                if !rest.iter().any(|word| word.starts_with("--resume")) =>
            {
                let stem = Path::new(recipe).file_stem().unwrap().to_string_lossy();
                paths.extend(after("--out").is_none().then(|| format!("runs/{stem}")));
            }
            ["rloss", "sft", model, ..] => {
                let name = Path::new(model).file_name().unwrap().to_string_lossy();
                paths.push(format!("runs/{name}-sft"));
            }
            ["rloss", "init", name, ..] => {
                paths.extend(["toml", "py", "jsonl"].map(|end| format!("{name}.{end}")))
            }
            _ => {}
        }
        for path in paths.iter().map(|path| self.folder.path().join(path)) {
            let _ = if path.is_dir() { fs::remove_dir_all(path) } else { fs::remove_file(path) };
        }
    }

    /// Starts a server on a free port, and waits for its address.
    fn serve(&mut self, command: &str, words: &[String]) -> Result<(), String> {
        let named = words.iter().position(|word| word == "--port").map(|at| words[at + 1].clone());
        let port = named.clone().unwrap_or_else(|| "8000".to_owned());
        let command = command.replace(&format!(" --port {port}"), "");
        let mut server = shell(self.folder.path(), &format!("exec {command} --port 0"));
        let mut child = server.stderr(Stdio::piped()).stdout(Stdio::null()).spawn().unwrap();
        let mut lines = BufReader::new(child.stderr.take().unwrap()).lines();
        let mut said = String::new();
        let address = lines.by_ref().map_while(Result::ok).find_map(|line| {
            said = line;
            said.split_once("http://")?.1.split('/').next().map(str::to_owned)
        });
        // What it says later must find a reader.
        std::thread::spawn(move || lines.for_each(drop));
        self.servers.push(KilledOnDrop(child));
        self.addresses.insert(port, address.ok_or(said)?);
        Ok(())
    }
}
