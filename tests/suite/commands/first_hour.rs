//! What a new user types first: `init`, recipes inside the binary, `chat`, completions, a page that
//! follows a run.

use super::{baseline, done, output, phase, rloss, rows, stderr};
use crate::skips;
use std::io::{BufRead, BufReader, Read, Write};
use std::net::TcpStream;
use std::os::fd::FromRawFd;
use std::os::unix::process::CommandExt;
use std::path::Path;
use std::process::{Child, Output, Stdio};
use std::ptr::{null, null_mut};
use tempfile::TempDir;

fn text(bytes: &[u8]) -> String {
    String::from_utf8_lossy(bytes).into_owned()
}

#[test]
fn what_init_writes_runs_as_it_is_and_stays() {
    if !skips::python3() {
        return;
    }
    let folder = TempDir::new().unwrap();
    let init = |name: &str| output(rloss().current_dir(&folder).args(["init", name]));
    let said = init("first");
    assert_eq!(said.status.code(), Some(0), "{}", stderr(&said));
    assert!(text(&said.stdout).contains("train first.toml"), "{}", text(&said.stdout));
    let mut train = rloss();
    train.current_dir(&folder).args(["train", "first.toml"]);
    for set in ["cold_start.steps=2", "train.steps=2", "eval.problems_max=8"] {
        train.args(["--set", set]);
    }
    let lines = stderr(&done(&mut train));
    assert!(lines.contains("task     doubling"), "{lines}");
    let run = folder.path().join("runs/first");
    assert_eq!(phase(&rows(&run), "rl").count(), 2);
    // The run's program is found from any folder.
    let elsewhere = TempDir::new().unwrap();
    done(rloss().current_dir(&elsewhere).arg("eval").arg(&run));
    done(rloss().current_dir(&elsewhere).arg("chat").arg(&run));
    done(rloss().current_dir(&elsewhere).arg("train").arg(&run).args(["--resume", "--set", "train.steps=3"]));
    assert_eq!(phase(&rows(&run), "rl").count(), 3);
    // From another folder the files are not found, and the cure is told.
    let from_elsewhere =
        output(rloss().current_dir(&elsewhere).arg("train").arg(folder.path().join("first.toml")));
    let told = format!("but the file is in {}; run from that folder", folder.path().display());
    assert!(stderr(&from_elsewhere).contains(&told), "{}", stderr(&from_elsewhere));
    // A file that is there stays, and then none is written.
    std::fs::remove_file(folder.path().join("first.py")).unwrap();
    let again = init("first");
    assert_eq!(again.status.code(), Some(2));
    assert!(stderr(&again).contains("first.toml already exists"), "{}", stderr(&again));
    assert!(!folder.path().join("first.py").exists());
    for name in ["", "a b", "../x", "-x", "ä"] {
        let refused = output(rloss().current_dir(&folder).args(["init", "--", name]));
        assert_eq!(refused.status.code(), Some(2), "{name:?}");
        assert!(stderr(&refused).contains("is not a valid name"), "{}", stderr(&refused));
    }
}

#[test]
fn the_program_that_init_writes_grades_as_it_says() {
    if !skips::python3() {
        return;
    }
    let folder = TempDir::new().unwrap();
    done(rloss().current_dir(&folder).args(["init", "mine"]));
    let asks = [
        r#"{"request_id": "a", "request": "describe"}"#,
        r#"{"request_id": "b", "request": "problem", "split": "train", "seed": 0, "index": 3}"#,
        r#"{"request_id": "c", "request": "reward", "answer": 8, "messages": [{"role": "assistant", "channel": "final", "content": " 8"}]}"#,
        r#"{"request_id": "c", "request": "reward", "answer": 8, "messages": [{"role": "assistant", "channel": "analysis", "content": "8"}]}"#,
        r#"{"request_id": "c", "request": "reward", "answer": 8, "messages": []}"#,
    ];
    let mut child = std::process::Command::new("python3")
        .current_dir(&folder)
        .arg("mine.py")
        .stdin(Stdio::piped())
        .stdout(Stdio::piped())
        .spawn()
        .unwrap();
    child.stdin.take().unwrap().write_all((asks.join("\n") + "\n").as_bytes()).unwrap();
    let replies = text(&child.wait_with_output().unwrap().stdout);
    let rewards: Vec<bool> = replies.lines().skip(2).map(|line| line.contains("\"reward\": 1.0")).collect();
    assert_eq!(rewards, [true, false, false], "{replies}");
    // Its demonstrations: one answer in three is right.
    let rows = std::fs::read_to_string(folder.path().join("mine.jsonl")).unwrap();
    let right = rows.lines().filter(|line| {
        let row: serde_json::Value = serde_json::from_str(line).unwrap();
        let number = |text: &serde_json::Value| {
            text.as_str()
                .unwrap()
                .trim_matches(|c| "?".contains(c))
                .trim_start_matches("2*")
                .parse::<u64>()
                .unwrap()
        };
        2 * number(&row["messages"][0]["content"]) == number(&row["messages"][1]["content"])
    });
    let (right, all) = (right.count(), rows.lines().count());
    assert!(all == 300 && (100..=102).contains(&right), "{right} of {all}");
}

#[test]
fn recipes_are_inside_the_binary_and_a_name_that_is_none_lists_them() {
    let folder = TempDir::new().unwrap();
    let sets =
        ["cold_start.steps=1", "train.steps=1", "eval.problems_max=4"].map(|set| ["--set", set]).concat();
    let lines = stderr(&done(rloss().current_dir(&folder).args(["train", "quickstart"]).args(&sets)));
    assert!(lines.contains("done: runs/quickstart\n"), "{lines}");
    for slip in ["quikstart", "recipes/quickstart.toml"] {
        let refused = output(rloss().current_dir(&folder).args(["train", slip]));
        assert_eq!(refused.status.code(), Some(2));
        assert!(stderr(&refused).contains("did you mean quickstart?"), "{}", stderr(&refused));
    }
    for command in ["train", "eval", "rollout", "check", "chat"] {
        let help = text(&done(rloss().args([command, "--help"])).stdout)
            .split_whitespace()
            .collect::<Vec<_>>()
            .join(" ");
        assert!(
            help.contains("quickstart, quickstart_cuda, quickstart_dense, ")
                && help.contains("a checkpoint of a run"),
            "{help}"
        );
    }
    // The data set is named that the recipe needs.
    let refused = stderr(&output(rloss().current_dir(&folder).args(["train", "retool"])));
    assert!(refused.contains("rloss fetch dapo-math aime"), "{refused}");
}

#[test]
fn every_recipe_of_the_tree_is_inside_the_binary() {
    let folder = Path::new(env!("CARGO_MANIFEST_DIR")).join("recipes");
    let files = std::fs::read_dir(folder).unwrap().map(|entry| entry.unwrap().path());
    let mut names: Vec<String> = files
        .filter(|path| path.extension().is_some_and(|extension| extension == "toml"))
        .map(|path| path.file_stem().unwrap().to_str().unwrap().to_owned())
        .collect();
    let mut built_in = rloss::recipe::BUILT_IN.map(|(name, _)| name.to_owned()).to_vec();
    names.sort();
    built_in.sort();
    assert_eq!(names, built_in);
}

/// A bug: `gsm8k_qwen`, `retool_qwen` and `quickstart_cuda` looked for their base in the working directory.
#[test]
fn a_recipe_inside_the_binary_finds_its_base_there() {
    let folder = TempDir::new().unwrap();
    for (name, text) in rloss::recipe::BUILT_IN {
        let based = text.lines().any(|line| line.starts_with("base = "));
        let said = output(rloss().current_dir(&folder).args(["check", name, "--set", "device=cpu"]));
        assert!(!stderr(&said).contains("base"), "{name}: {}", stderr(&said));
        assert!(!based || name != "quickstart_cuda" || said.status.success(), "{}", stderr(&said));
    }
}

#[test]
fn a_script_without_numpy_says_what_to_install() {
    if !skips::python3() {
        return;
    }
    let script = Path::new(env!("CARGO_MANIFEST_DIR")).join("scripts/random_checkpoint.py");
    let alone = ["-E", "-S"];
    let refused = output(std::process::Command::new("python3").args(alone).arg(script));
    let text = stderr(&refused);
    assert_eq!((refused.status.code(), text.lines().count()), (Some(2), 1), "{text}");
    assert!(text.contains("pip install numpy"), "{text}");
}

#[test]
fn a_text_that_is_no_recipe_is_one_mistake() {
    for page in ["README.md", "docs/TASKS.md"] {
        let page = Path::new(env!("CARGO_MANIFEST_DIR")).join(page);
        let refused = output(rloss().arg("train").arg(&page));
        let text = stderr(&refused);
        assert_eq!((refused.status.code(), text.lines().count()), (Some(2), 1), "{text}");
        assert!(text.contains("is this a recipe?") && text.contains("[model]"), "{text}");
    }
}

/// What `rloss chat` says to `lines`.
fn chat(arguments: &[&str], lines: &str) -> Output {
    let mut child = rloss()
        .arg("chat")
        .args(arguments)
        .stdin(Stdio::piped())
        .stdout(Stdio::piped())
        .stderr(Stdio::piped())
        .spawn()
        .unwrap();
    // One that was refused reads none of it.
    let _ = child.stdin.take().unwrap().write_all(lines.as_bytes());
    child.wait_with_output().unwrap()
}

#[test]
fn a_trained_model_answers_with_its_tool_and_stops_at_the_limit() {
    let run = super::warm_model().display().to_string();
    let task = rloss::tasks::build(&Default::default(), &Default::default()).unwrap();
    let problem = task.training_problem(0, 0);
    let (question, answer) = (&problem.messages[0].content, problem.answer.as_str().unwrap());
    // The warm model knows one conversation with the tool by heart, and one without: one of several
    // samples has each.
    let asked = format!("{question}\n/new\n").repeat(12);
    let said = chat(&[&run], &asked);
    assert_eq!(said.status.code(), Some(0), "{}", stderr(&said));
    let shown = text(&said.stdout);
    assert!(stderr(&said).contains("the Python tool: "), "{}", stderr(&said));
    assert!(shown.contains("to python") && shown.contains("\npython, "), "{shown}");
    assert!(shown.contains(&format!("\n  {answer}\n")), "{shown}");
    // A model that never ends its turn.
    let cut = chat(&[&run, "--set", "rollout.response_tokens_max=4"], &format!("{question}\n"));
    assert_eq!(cut.status.code(), Some(0));
    let shown = text(&cut.stdout);
    assert!(shown.contains("cut off after 4 tokens, by rollout.response_tokens_max = 4"), "{shown}");
    // What does not fit is said, and the conversation goes on.
    let long = chat(&[&run], &format!("{}\n{}", "x".repeat(500), format!("{question}\n").repeat(6)));
    let shown = text(&long.stdout);
    assert_eq!(long.status.code(), Some(0));
    assert!(shown.contains("the model's context has 160, so no token can be sampled"), "{shown}");
    assert!(shown.contains("it starts again"), "{shown}");
    assert!(shown.chars().all(|c| c == '\n' || !c.is_control()), "{shown:?}");
}

/// A chat on a pseudo-terminal, with what it has written so far.
struct TerminalChat {
    child: Child,
    terminal: std::fs::File,
    written: String,
    /// End of what was waited for, in bytes of `written`.
    seen: usize,
}

impl TerminalChat {
    fn start(arguments: &[&str]) -> Self {
        let (mut parent, mut child_end) = (0, 0);
        // SAFETY: both ends are written; the other arguments may be null.
        assert_eq!(unsafe { libc::openpty(&mut parent, &mut child_end, null_mut(), null(), null()) }, 0);
        // SAFETY: openpty made both, and nothing else owns them.
        let [terminal, other] = [parent, child_end].map(|end| unsafe { std::fs::File::from_raw_fd(end) });
        let mut command = rloss();
        command.arg("chat").args(arguments);
        command.stdin(other.try_clone().unwrap()).stdout(other.try_clone().unwrap()).stderr(other);
        let controls = || {
            // SAFETY: plain system calls. Ctrl-C then comes from the terminal, as for a user.
            match unsafe { libc::setsid() < 0 || libc::ioctl(0, libc::TIOCSCTTY, 0) != 0 } {
                true => Err(std::io::Error::last_os_error()),
                false => Ok(()),
            }
        };
        // SAFETY: between fork and exec it makes system calls alone.
        unsafe { command.pre_exec(controls) };
        let child = command.spawn().unwrap();
        drop(command);
        Self { child, terminal, written: String::new(), seen: 0 }
    }

    fn type_in(&mut self, keys: &str) {
        self.terminal.write_all(keys.as_bytes()).unwrap();
    }

    /// Reads until `part` is written after what was waited for before.
    fn wait_for(&mut self, part: &str) {
        let mut bytes = [0; 4096];
        loop {
            let fresh = &self.written[self.seen..];
            assert!(!fresh.contains("as written"), "the answer ended by itself: {:?}", self.written);
            if let Some(at) = fresh.find(part) {
                self.seen += at + part.len();
                return;
            }
            let count = self.terminal.read(&mut bytes).unwrap_or(0);
            assert!(count > 0, "{part:?} is not in {:?}", self.written);
            self.written.push_str(&String::from_utf8_lossy(&bytes[..count]));
        }
    }
}

impl Drop for TerminalChat {
    fn drop(&mut self) {
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}

/// It ended the program without a word.
#[test]
fn ctrl_c_ends_an_answer_and_at_the_prompt_the_chat() {
    // Random weights that run in circles at temperature 0, without an end.
    let sets = [
        "model.architecture.max_position_embeddings=1000000",
        "rollout.response_tokens_max=900000",
        "eval.temperature=0",
        "train.seed=1",
    ];
    let sets: Vec<&str> = sets.into_iter().flat_map(|set| ["--set", set]).collect();
    let arguments = [&["quickstart_dense"], &sets[..]].concat();
    let mut chat = TerminalChat::start(&arguments);
    chat.wait_for("\n> ");
    chat.type_in("1+1?\n");
    chat.wait_for("assistant");
    chat.type_in("\u{3}");
    chat.wait_for("(ended; your message is forgotten. Ctrl-C at the prompt, or Ctrl-D, leaves the chat)");
    chat.wait_for("\n> ");
    chat.type_in("2+2?\n");
    chat.wait_for("assistant");
    chat.type_in("\u{3}");
    chat.wait_for("(ended)\r\n\r\n> ");
    chat.type_in("\u{4}");
    assert_eq!(chat.child.wait().unwrap().code(), Some(0), "Ctrl-D: {}", chat.written);
    let mut chat = TerminalChat::start(&arguments);
    chat.wait_for("\n> ");
    chat.type_in("\u{3}");
    assert_eq!(chat.child.wait().unwrap().code(), Some(130));
}

#[test]
fn chat_needs_a_model_alone() {
    let folder = TempDir::new().unwrap();
    let model = folder.path().join("model");
    super::copy_model(&super::first_checkpoint(super::warm_model()), &model);
    let model = model.display().to_string();
    // A folder just talks, without a tool. The tiny model's context has no room for a system message.
    let short = ["--set", "rollout.response_tokens_max=4", "--set", "chat.system_message=false"];
    let said = chat(&[&[&*model], &short[..]].concat(), "1+1?\n");
    assert_eq!(said.status.code(), Some(0), "{}", stderr(&said));
    assert!(text(&said.stdout).contains("cut off after 4 tokens"), "{}", text(&said.stdout));
    assert!(!stderr(&said).contains("Python tool"), "{}", stderr(&said));
    // A bug: a GGUF file was read as a recipe.
    let file = Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/fixtures/gguf/gpt_oss.gguf");
    let file = file.display().to_string();
    let said = chat(&[&[&*file], &short[..], &["--set", "rollout.prompt_tokens_max=256"]].concat(), "1+1?\n");
    assert_eq!(said.status.code(), Some(0), "{}", stderr(&said));
    // A recipe's data is not read, nor are keys of training.
    let path = format!("model.path={model}");
    let sets = [path.as_str(), "task.train_file=none", "train.minibatches=100000", "eval.samples=4"];
    let sets: Vec<&str> =
        sets.into_iter().chain(["eval.temperature=0"]).flat_map(|set| ["--set", set]).collect();
    let said = chat(&[&["gsm8k"], &sets[..]].concat(), "/quit\n");
    assert_eq!(said.status.code(), Some(0), "{}", stderr(&said));
}

#[test]
fn init_writes_a_recipe_with_sizes_for_a_model_and_this_machine() {
    let folder = TempDir::new().unwrap();
    let model = folder.path().join("a model");
    super::copy_model(&super::first_checkpoint(super::warm_model()), &model);
    let init = |name: &str| {
        let mut command = rloss();
        command.current_dir(&folder).args(["init", name, "--from", "quickstart_lora", "--model"]);
        output(command.arg(&model))
    };
    let said = init("mine");
    assert_eq!(said.status.code(), Some(0), "{}", stderr(&said));
    let recipe = std::fs::read_to_string(folder.path().join("mine.toml")).unwrap();
    assert!(recipe.contains("base = \"quickstart_lora\"") && recipe.contains("training takes "), "{recipe}");
    assert!(recipe.contains("prompts_per_step = 8") && !recipe.contains("[adapter]"), "{recipe}");
    let shown = text(&done(rloss().current_dir(&folder).args(["check", "mine.toml"])).stdout);
    assert!(shown.contains("a model") && shown.contains("adapter.rank = 8"), "{shown}");
    assert!(stderr(&init("mine")).contains("mine.toml already exists"));
    assert_eq!(output(rloss().args(["init", "x", "--from", "quickstart"])).status.code(), Some(2));
}

/// The response was shortened and the data missing without a word.
#[test]
fn init_says_what_it_shortens_and_which_data_is_missing() {
    let folder = TempDir::new().unwrap();
    let model = folder.path().join("model");
    super::copy_model(&super::first_checkpoint(super::warm_model()), &model);
    std::fs::write(
        folder.path().join("long.toml"),
        "base = \"gsm8k\"\n[rollout]\nprompts_per_step = 1000\nsamples_per_prompt = 64\nresponse_tokens_max = 16000000\n",
    )
    .unwrap();
    let mut init = rloss();
    init.current_dir(&folder).args(["init", "mine", "--from", "long.toml", "--model"]).arg(&model);
    let said = output(&mut init);
    let (told, recipe) = (text(&said.stdout), std::fs::read_to_string(folder.path().join("mine.toml")));
    assert!(told.contains("no data at ") && told.contains(" fetch gsm8k\n"), "{told} {}", stderr(&said));
    let recipe = recipe.unwrap();
    assert!(
        recipe.contains("# Fetch its data with: rloss fetch gsm8k\n# Or name files of yours"),
        "{recipe}"
    );
    assert!(recipe.contains(" # 16000000 in the base: longer answers are truncated\n"), "{recipe}");
    assert!(
        told.contains(" tokens (16000000 in ") && told.contains("rollout.response_tokens_max\n"),
        "{told}"
    );
    // The user's own files.
    let mut init = rloss();
    init.current_dir(&folder).args(["init", "half", "--from", "long.toml", "--model"]).arg(&model);
    let said = text(&done(init.args(["--train-file", "a.jsonl"])).stdout);
    assert!(said.contains("The validation problems stay those of "), "{said}");
    for (name, answer) in [("a.jsonl", 1), ("b.jsonl", 2)] {
        let row = format!("{{\"question\": \"?\", \"answer\": \"#### {answer}\"}}\n");
        std::fs::write(folder.path().join(name), row).unwrap();
    }
    let mut init = rloss();
    init.current_dir(&folder).args(["init", "own", "--from", "long.toml", "--model"]).arg(&model);
    let said = done(init.args(["--train-file", "a.jsonl", "--validation-file", "b.jsonl"]));
    assert!(!text(&said.stdout).contains("data"), "{}", text(&said.stdout));
    let recipe = std::fs::read_to_string(folder.path().join("own.toml")).unwrap();
    let [train, validation] = ["a.jsonl", "b.jsonl"].map(|name| folder.path().join(name));
    let task = format!("\n[task]\ntrain_file = {train:?}\nvalidation_file = {validation:?}\n");
    assert!(recipe.contains(&task) && !recipe.contains("# Fetch"), "{recipe}");
    // With a vocabulary of bytes there is no system message, which the context would not hold.
    let check = text(&done(rloss().current_dir(&folder).args(["check", "own.toml"])).stdout);
    assert!(check.contains("\n<|start|>user<|message|>? Let's think"), "{check}");
    // They take the place of a base's several files.
    let several = "[task]\nname = \"retool\"\nvalidation_files = [\"gone.jsonl\"]\n";
    std::fs::write(folder.path().join("several.toml"), several).unwrap();
    for name in ["c.jsonl", "d.jsonl"] {
        let row = format!("{{\"problem\": \"{name}?\", \"answer\": 1}}\n");
        std::fs::write(folder.path().join(name), row).unwrap();
    }
    let mut init = rloss();
    init.current_dir(&folder).args(["init", "one", "--from", "several.toml", "--model"]).arg(&model);
    done(init.args(["--train-file", "c.jsonl", "--validation-file", "d.jsonl"]));
    let recipe = std::fs::read_to_string(folder.path().join("one.toml")).unwrap();
    let validation = folder.path().join("d.jsonl");
    assert!(recipe.contains(&format!("validation_files = [{validation:?}]\n")), "{recipe}");
}

#[test]
fn a_run_folder_trained_without_resume_says_that_it_starts_afresh() {
    let folder = TempDir::new().unwrap();
    let out = folder.path().join("again");
    let mut train = rloss();
    train.arg("train").arg(baseline()).arg("--out").arg(&out);
    let sets = ["cold_start.steps=0", "train.steps=0", "eval.problems_max=4"];
    let said = stderr(&done(train.args(sets.map(|set| ["--set", set]).concat())));
    assert!(said.contains("from the start") && said.contains("--resume continues that run"), "{said}");
}

#[test]
fn fetch_names_what_it_knows_and_says_in_one_line_that_there_is_no_network() {
    let refused = output(rloss().args(["fetch", "nothing"]));
    assert_eq!(refused.status.code(), Some(2));
    assert!(stderr(&refused).contains("gsm8k") && stderr(&refused).contains("qwen2.5-0.5b-instruct"));
    // A proxy where nobody listens stands for a machine without a network.
    let folder = TempDir::new().unwrap();
    let mut fetch = rloss();
    fetch.current_dir(&folder).args(["fetch", "gsm8k"]).env("https_proxy", "http://127.0.0.1:9");
    let said = output(fetch.env_remove("DATA").env_remove("NO_PROXY").env_remove("no_proxy"));
    assert_eq!((said.status.code(), stderr(&said).lines().count()), (Some(1), 1), "{}", stderr(&said));
    assert!(stderr(&said).contains("error: no network reaches https://raw.githubusercontent.com/"));
    assert_eq!(std::fs::read_dir(folder.path().join("data/gsm8k")).unwrap().count(), 0);
}

#[test]
fn chat_shows_no_control_sequence_and_refuses_what_it_cannot_open() {
    let run = super::warm_model().display().to_string();
    let said = chat(&[&run, "--set", "eval.temperature=2"], "\u{1b}[2J\u{7}\n/help\n/quit\nnot read\n");
    assert_eq!(said.status.code(), Some(0));
    let told = "/help is not a command when input is not a terminal; it is sent as a message";
    assert!(stderr(&said).contains(told), "{}", stderr(&said));
    assert!(!said.stdout.contains(&0x1b) && !said.stderr.contains(&0x1b));
    let refused = chat(&["nowhere"], "hello\n");
    assert_eq!(refused.status.code(), Some(2));
}

#[test]
fn completions_and_version() {
    for (shell, part) in
        [("bash", "complete -F _rloss"), ("zsh", "#compdef rloss"), ("fish", "complete -c rloss")]
    {
        let said = done(rloss().args(["completions", shell]));
        let script = text(&said.stdout);
        assert!(script.contains(part) && script.contains("check-mismatch"), "{shell}");
    }
    let version = text(&done(rloss().arg("--version")).stdout);
    assert!(version.starts_with(concat!("rloss ", env!("CARGO_PKG_VERSION"), " (features: ")), "{version}");
    assert!(!version.contains("commit"), "a build of every day does not know its commit: {version}");
}

/// A follower of the baseline's page, and its address.
pub(super) struct Follower(pub Child, String);

impl Follower {
    pub fn start(port: &str) -> Self {
        let mut child = rloss()
            .args(["report", "--follow", "--port", port])
            .arg(baseline())
            .stderr(Stdio::piped())
            .spawn()
            .unwrap();
        let mut line = String::new();
        BufReader::new(child.stderr.take().unwrap()).read_line(&mut line).unwrap();
        Self(child, line.trim().to_owned())
    }

    /// `127.0.0.1:PORT` and the path below it.
    pub fn place(&self) -> (&str, String) {
        let (host, path) = self.1.strip_prefix("http://").unwrap().split_once('/').unwrap();
        (host, format!("/{path}"))
    }

    pub fn ask(&self, request: &str) -> String {
        let mut stream = TcpStream::connect(self.place().0).unwrap();
        stream.write_all(format!("{request}\r\nConnection: close\r\n\r\n").as_bytes()).unwrap();
        let mut answer = Vec::new();
        stream.read_to_end(&mut answer).unwrap();
        text(&answer)
    }
}

impl Drop for Follower {
    fn drop(&mut self) {
        let _ = self.0.kill();
        let _ = self.0.wait();
    }
}

#[test]
fn a_followed_page_is_served_to_its_own_address_alone() {
    let follower = Follower::start("0");
    let (host, path) = follower.place();
    let get = |path: &str, host: &str| follower.ask(&format!("GET {path} HTTP/1.1\r\nHost: {host}"));
    let page = get(&path, host);
    assert!(page.starts_with("HTTP/1.1 200"), "{page}");
    assert!(page.contains("<html lang=\"en\" data-served>"));
    let policy = |page: &str| {
        page.split("Content-Security-Policy\" content=\"")
            .nth(1)
            .unwrap()
            .split('"')
            .next()
            .unwrap()
            .to_owned()
    };
    let written = rloss::report::page(&[baseline().to_owned()], false).unwrap();
    let without_script = |policy: &str| {
        let mut parts: Vec<_> = policy.split("; ").map(str::to_owned).collect();
        parts.retain(|part| !part.starts_with("script-src 'sha256-"));
        parts.join("; ")
    };
    assert!(!policy(&page).contains("unsafe"), "{}", policy(&page));
    let served = format!("{}; connect-src 'self'", without_script(&policy(&written)));
    assert_eq!(without_script(&policy(&page)), served, "and nothing else");
    assert!(!written.contains("data-served") && !written.contains("fetch("));
    let state = get(&format!("{path}state"), host);
    assert!(state.starts_with("HTTP/1.1 200") && state.trim().len() > 8, "{state}");
    let port = host.rsplit(':').next().unwrap();
    assert!(get(&path, &format!("localhost:{port}")).starts_with("HTTP/1.1 200"));
    for (path, host, code) in [
        (path.as_str(), "evil.example", 403),
        (path.as_str(), "127.0.0.1", 403),
        ("/", host, 404),
        ("/0123456789abcdef0123456789abcdef/", host, 404),
        (&format!("{path}../../../etc/passwd"), host, 404),
        (&format!("{path}metrics.jsonl"), host, 404),
        (&format!("{path}?x"), host, 404),
    ] {
        let answer = get(path, host);
        assert!(answer.starts_with(&format!("HTTP/1.1 {code}")), "{path} {host}: {answer}");
        assert!(!answer.contains("critic/rewards"), "{answer}");
    }
    let post = follower.ask(&format!("POST {path} HTTP/1.1\r\nHost: {host}\r\nContent-Length: 0"));
    assert!(post.starts_with("HTTP/1.1 405"), "{post}");
    // Another one's port is refused, and a free one named.
    let refused = output(rloss().args(["report", "--follow", "--port", port]).arg(baseline()));
    let text = stderr(&refused);
    assert_eq!(refused.status.code(), Some(2), "{text}");
    assert!(text.contains(&format!("port {port} is not available")) && text.contains("--port "), "{text}");
    // Two followers do not share a token.
    assert_ne!(Follower::start("0").place().1, path);
}

#[test]
fn a_followed_page_tells_when_the_run_went_on() {
    let folder = TempDir::new().unwrap();
    let run = folder.path().join("run");
    std::fs::create_dir(&run).unwrap();
    let row = |step: u64| format!("{{\"step\":{step},\"phase\":\"rl\",\"critic/rewards/mean\":0.5}}\n");
    std::fs::write(run.join("metrics.jsonl"), row(1)).unwrap();
    let before = rloss::report::state_digest(std::slice::from_ref(&run));
    assert_eq!(before, rloss::report::state_digest(std::slice::from_ref(&run)));
    std::fs::write(run.join("metrics.jsonl"), row(1) + &row(2)).unwrap();
    assert_ne!(before, rloss::report::state_digest(std::slice::from_ref(&run)));
    // The stage under way is told while a process works on the run.
    let stages = || rloss::report::stages_under_way(std::slice::from_ref(&run));
    assert!(stages().is_empty());
    let console = rloss::metrics::Console::silent();
    console.start_status_file(&run);
    let _stage = console.start_stage("cold start", 8, 2);
    let seen = (0..600).any(|_| {
        std::thread::sleep(std::time::Duration::from_millis(20));
        stages().first().is_some_and(|stage| stage.starts_with("cold start 2/8"))
    });
    assert!(seen, "{:?}", stages());
    console.remove_status_file();
    assert!(stages().is_empty());
}
