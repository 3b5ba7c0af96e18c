//! What a new user types first: `init`, recipes inside the binary, `chat`, completions, a page that
//! follows a run.

use super::*;
use crate::skips;
use std::io::{BufRead, BufReader, Read, Write};
use std::net::TcpStream;
use std::os::fd::FromRawFd;
use std::os::unix::process::CommandExt;
use std::ptr::{null, null_mut};

fn text(bytes: &[u8]) -> String {
    String::from_utf8_lossy(bytes).into_owned()
}

#[test]
fn what_init_writes_runs_as_it_is_and_stays() {
    let Some(()) = skips::python3() else { return };
    let folder = TempDir::new().unwrap();
    let mut init = rloss();
    init.current_dir(&folder).args(["init", "first"]);
    assert_has(&done(&mut init).stdout, &["train first.toml"]);
    let sets = ["cold_start.steps=2", "train.steps=2", "eval.problems_max=8"];
    ended(rloss().current_dir(&folder).args(["train", "first.toml"]).sets(sets), 0, &["task     doubling"]);
    let run = folder.path().join("runs/first");
    assert_eq!(phase(&rows(&run), "rl").count(), 2);
    // The run's program is found from any folder.
    let elsewhere = TempDir::new().unwrap();
    done(rloss().current_dir(&elsewhere).arg("eval").arg(&run));
    done(rloss().current_dir(&elsewhere).arg("chat").arg(&run));
    done(rloss().current_dir(&elsewhere).arg("train").arg(&run).args(["--resume", "--set", "train.steps=3"]));
    assert_eq!(phase(&rows(&run), "rl").count(), 3);
    // From another folder the files are not found, and the cure is told.
    let mut train = rloss();
    train.current_dir(&elsewhere).arg("train").arg(folder.path().join("first.toml"));
    let told = format!("but the file is in {}; run from that folder", folder.path().display());
    assert_has(&output(&mut train).stderr, &[&told]);
    // A file that is there stays, and then none is written.
    fs::remove_file(folder.path().join("first.py")).unwrap();
    refused(&mut init, &["first.toml already exists"]);
    assert!(!folder.path().join("first.py").exists());
    for name in ["", "a b", "../x", "-x", "ä"] {
        refused(rloss().current_dir(&folder).args(["init", "--", name]), &["is not a valid name"]);
    }
}

#[test]
fn the_program_that_init_writes_grades_as_it_says() {
    let Some(()) = skips::python3() else { return };
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
    let replies = Ended::from(child.wait_with_output().unwrap()).stdout;
    let rewards: Vec<bool> = replies.lines().skip(2).map(|line| line.contains("\"reward\": 1.0")).collect();
    assert_eq!(rewards, [true, false, false], "{replies}");
    // Its demonstrations: one answer in three is right.
    let rows = text_of(folder.path().join("mine.jsonl"));
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
    let lines = done(rloss().current_dir(&folder).args(["train", "quickstart"]).args(&sets)).stderr;
    assert!(lines.contains("done: runs/quickstart\n"), "{lines}");
    for slip in ["quikstart", "recipes/quickstart.toml"] {
        refused(rloss().current_dir(&folder).args(["train", slip]), &["did you mean quickstart?"]);
    }
    for command in ["train", "eval", "rollout", "check", "chat"] {
        let help =
            done(rloss().args([command, "--help"])).stdout.split_whitespace().collect::<Vec<_>>().join(" ");
        assert_has(&help, &["quickstart, quickstart_cuda, quickstart_dense, ", "a checkpoint of a run"]);
    }
    // The data set is named that the recipe needs.
    let refused = output(rloss().current_dir(&folder).args(["train", "retool"])).stderr;
    assert!(refused.contains("rloss fetch dapo-math aime"), "{refused}");
}

#[test]
fn every_recipe_of_the_tree_is_inside_the_binary() {
    let folder = in_repository("recipes");
    let files = fs::read_dir(folder).unwrap().map(|entry| entry.unwrap().path());
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
        assert!(!said.stderr.contains("base"), "{name}: {}", said.stderr);
        assert!(!based || name != "quickstart_cuda" || said.code == Some(0), "{}", said.stderr);
    }
}

#[test]
fn a_script_without_numpy_says_what_to_install() {
    let Some(()) = skips::python3() else { return };
    let script = in_repository("scripts/random_checkpoint.py");
    let alone = ["-E", "-S"];
    let refused = output(std::process::Command::new("python3").args(alone).arg(script));
    let text = refused.stderr;
    assert_eq!((refused.code, text.lines().count()), (Some(2), 1), "{text}");
    assert!(text.contains("pip install numpy"), "{text}");
}

#[test]
fn a_text_that_is_no_recipe_is_one_mistake() {
    for page in ["README.md", "docs/TASKS.md"] {
        let page = Path::new(env!("CARGO_MANIFEST_DIR")).join(page);
        let refused = output(rloss().arg("train").arg(&page));
        let text = refused.stderr;
        assert_eq!((refused.code, text.lines().count()), (Some(2), 1), "{text}");
        assert!(text.contains("is this a recipe?") && text.contains("[model]"), "{text}");
    }
}

/// What `rloss chat` says to `lines`.
#[track_caller]
fn chat(code: i32, arguments: &[&str], lines: &str) -> Ended {
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
    let ended = Ended::from(child.wait_with_output().unwrap());
    assert_eq!(ended.code, Some(code), "{}", ended.stderr);
    ended
}

#[test]
fn a_trained_model_answers_with_its_tool_and_stops_at_the_limit() {
    let run = warm_model().display().to_string();
    let task = rloss::tasks::build(&Default::default(), &Default::default()).unwrap();
    let problem = task.training_problem(0, 0);
    let (question, answer) = (&problem.messages[0].content, problem.answer.as_str().unwrap());
    // The warm model knows one conversation with the tool by heart, and one without: one of several
    // samples has each.
    let asked = format!("{question}\n/new\n").repeat(12);
    let said = chat(0, &[&run], &asked);
    assert_has(&said.stderr, &["the Python tool: "]);
    assert_has(&said.stdout, &["to python", "\npython, ", &format!("\n  {answer}\n")]);
    // A model that never ends its turn.
    let cut = chat(0, &[&run, "--set", "rollout.response_tokens_max=4"], &format!("{question}\n"));
    assert_has(&cut.stdout, &["cut off after 4 tokens, by rollout.response_tokens_max = 4"]);
    // What does not fit is said, and the conversation goes on.
    let long = format!("{}\n{}", "x".repeat(500), format!("{question}\n").repeat(6));
    let shown = chat(0, &[&run], &long).stdout;
    assert_has(&shown, &["the model's context has 160, so no token can be sampled", "it starts again"]);
    assert!(shown.chars().all(|c| c == '\n' || !c.is_control()), "{shown:?}");
}

/// A chat on a pseudo-terminal, with what it has written so far.
struct TerminalChat {
    child: KilledOnDrop,
    terminal: fs::File,
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
        let [terminal, other] = [parent, child_end].map(|end| unsafe { fs::File::from_raw_fd(end) });
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
        let child = KilledOnDrop(command.spawn().unwrap());
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
    let (_folder, [model]) = scratch(["model"]);
    copy_model(&first_checkpoint(warm_model()), &model);
    let model = model.display().to_string();
    // A folder just talks, without a tool. The tiny model's context has no room for a system message.
    let short = ["--set", "rollout.response_tokens_max=4", "--set", "chat.system_message=false"];
    let said = chat(0, &[&[&*model], &short[..]].concat(), "1+1?\n");
    assert_has(&said.stdout, &["cut off after 4 tokens"]);
    assert!(!said.stderr.contains("Python tool"), "{}", said.stderr);
    // A bug: a GGUF file was read as a recipe.
    let file = in_repository("tests/fixtures/gguf/gpt_oss.gguf").display().to_string();
    chat(0, &[&[&*file], &short[..], &["--set", "rollout.prompt_tokens_max=256"]].concat(), "1+1?\n");
    // A recipe's data is not read, nor are keys of training.
    let path = format!("model.path={model}");
    let sets = [path.as_str(), "task.train_file=none", "train.minibatches=100000", "eval.samples=4"];
    let sets: Vec<&str> =
        sets.into_iter().chain(["eval.temperature=0"]).flat_map(|set| ["--set", set]).collect();
    chat(0, &[&["gsm8k"], &sets[..]].concat(), "/quit\n");
}

#[test]
fn init_writes_a_recipe_with_sizes_for_a_model_and_this_machine() {
    let (folder, [model]) = scratch(["a model"]);
    copy_model(&first_checkpoint(warm_model()), &model);
    let mut init = rloss();
    init.current_dir(&folder).args(["init", "mine", "--from", "quickstart_lora", "--model"]).arg(&model);
    done(&mut init);
    let recipe = text_of(folder.path().join("mine.toml"));
    assert_has(&recipe, &["base = \"quickstart_lora\"", "training takes "]);
    assert!(recipe.contains("prompts_per_step = 8") && !recipe.contains("[adapter]"), "{recipe}");
    let shown = done(rloss().current_dir(&folder).args(["check", "mine.toml"])).stdout;
    assert_has(&shown, &["a model", "adapter.rank = 8"]);
    assert_has(&output(&mut init).stderr, &["mine.toml already exists"]);
    refused(rloss().args(["init", "x", "--from", "quickstart"]), &[]);
}

/// The response was shortened and the data missing without a word.
#[test]
fn init_says_what_it_shortens_and_which_data_is_missing() {
    let (folder, [model]) = scratch(["model"]);
    copy_model(&first_checkpoint(warm_model()), &model);
    fs::write(
        folder.path().join("long.toml"),
        "base = \"gsm8k\"\n[rollout]\nprompts_per_step = 1000\nsamples_per_prompt = 64\nresponse_tokens_max = 16000000\n",
    )
    .unwrap();
    let init = |name: &str, base: &str, more: &[&str]| {
        let mut command = rloss();
        command.current_dir(&folder).args(["init", name, "--from", base, "--model"]).arg(&model).args(more);
        (done(&mut command).stdout, text_of(folder.path().join(name).with_extension("toml")))
    };
    let (told, recipe) = init("mine", "long.toml", &[]);
    assert_has(&told, &["no data at ", " fetch gsm8k\n"]);
    assert_has(&told, &[" tokens (16000000 in ", "rollout.response_tokens_max\n"]);
    assert_has(&recipe, &["# Fetch its data with: rloss fetch gsm8k\n# Or name files of yours"]);
    assert_has(&recipe, &[" # 16000000 in the base: longer answers are truncated\n"]);
    // The user's own files.
    let (told, _) = init("half", "long.toml", &["--train-file", "a.jsonl"]);
    assert_has(&told, &["The validation problems stay those of "]);
    for (name, answer) in [("a.jsonl", 1), ("b.jsonl", 2)] {
        let row = format!("{{\"question\": \"?\", \"answer\": \"#### {answer}\"}}\n");
        fs::write(folder.path().join(name), row).unwrap();
    }
    let (told, recipe) =
        init("own", "long.toml", &["--train-file", "a.jsonl", "--validation-file", "b.jsonl"]);
    assert!(!told.contains("data"), "{told}");
    let [train, validation] = ["a.jsonl", "b.jsonl"].map(|name| folder.path().join(name));
    let task = format!("\n[task]\ntrain_file = {train:?}\nvalidation_file = {validation:?}\n");
    assert!(recipe.contains(&task) && !recipe.contains("# Fetch"), "{recipe}");
    // With a vocabulary of bytes there is no system message, which the context would not hold.
    let check = done(rloss().current_dir(&folder).args(["check", "own.toml"])).stdout;
    assert_has(&check, &["\n<|start|>user<|message|>? Let's think"]);
    // They take the place of a base's several files.
    let several = "[task]\nname = \"retool\"\nvalidation_files = [\"gone.jsonl\"]\n";
    fs::write(folder.path().join("several.toml"), several).unwrap();
    for name in ["c.jsonl", "d.jsonl"] {
        let row = format!("{{\"problem\": \"{name}?\", \"answer\": 1}}\n");
        fs::write(folder.path().join(name), row).unwrap();
    }
    let (_, recipe) =
        init("one", "several.toml", &["--train-file", "c.jsonl", "--validation-file", "d.jsonl"]);
    let validation = folder.path().join("d.jsonl");
    assert_has(&recipe, &[&format!("validation_files = [{validation:?}]\n")]);
}

#[test]
fn a_run_folder_trained_without_resume_says_that_it_starts_afresh() {
    let (_folder, [out]) = scratch(["again"]);
    let mut train = rloss();
    train.arg("train").arg(baseline()).arg("--out").arg(&out);
    let sets = ["cold_start.steps=0", "train.steps=0", "eval.problems_max=4"];
    assert_has(&done(train.sets(sets)).stderr, &["from the start", "--resume continues that run"]);
}

#[test]
fn fetch_names_what_it_knows_and_says_in_one_line_that_there_is_no_network() {
    refused(rloss().args(["fetch", "nothing"]), &["gsm8k", "qwen2.5-0.5b-instruct"]);
    // A proxy where nobody listens stands for a machine without a network.
    let folder = TempDir::new().unwrap();
    let mut fetch = rloss();
    fetch.current_dir(&folder).args(["fetch", "gsm8k"]).env("https_proxy", "http://127.0.0.1:9");
    let said = output(fetch.env_remove("DATA").env_remove("NO_PROXY").env_remove("no_proxy"));
    assert_eq!((said.code, said.stderr.lines().count()), (Some(1), 1), "{}", said.stderr);
    assert!(said.stderr.contains("error: no network reaches https://raw.githubusercontent.com/"));
    assert_eq!(fs::read_dir(folder.path().join("data/gsm8k")).unwrap().count(), 0);
}

#[test]
fn chat_shows_no_control_sequence_and_refuses_what_it_cannot_open() {
    let run = warm_model().display().to_string();
    let said = chat(0, &[&run, "--set", "eval.temperature=2"], "\u{1b}[2J\u{7}\n/help\n/quit\nnot read\n");
    let told = "/help is not a command when input is not a terminal; it is sent as a message";
    assert_has(&said.stderr, &[told]);
    assert!(!said.stdout.contains('\u{1b}') && !said.stderr.contains('\u{1b}'));
    chat(2, &["nowhere"], "hello\n");
}

#[test]
fn completions_and_version() {
    for (shell, part) in
        [("bash", "complete -F _rloss"), ("zsh", "#compdef rloss"), ("fish", "complete -c rloss")]
    {
        let said = done(rloss().args(["completions", shell]));
        let script = said.stdout;
        assert!(script.contains(part) && script.contains("check-mismatch"), "{shell}");
    }
    let version = done(rloss().arg("--version")).stdout;
    assert!(version.starts_with(concat!("rloss ", env!("CARGO_PKG_VERSION"), " (features: ")), "{version}");
    assert!(!version.contains("commit"), "a build of every day does not know its commit: {version}");
}

/// A follower of the baseline's page, and its address.
pub(super) struct Follower(pub KilledOnDrop, String);

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
        Self(KilledOnDrop(child), line.trim().to_owned())
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
    refused(
        rloss().args(["report", "--follow", "--port", port]).arg(baseline()),
        &[&format!("port {port} is not available"), "--port "],
    );
    // Two followers do not share a token.
    assert_ne!(Follower::start("0").place().1, path);
}

#[test]
fn a_followed_page_tells_when_the_run_went_on() {
    let (_folder, [run]) = scratch(["run"]);
    fs::create_dir(&run).unwrap();
    let row = |step: u64| format!("{{\"step\":{step},\"phase\":\"rl\",\"critic/rewards/mean\":0.5}}\n");
    fs::write(run.join("metrics.jsonl"), row(1)).unwrap();
    let before = rloss::report::state_digest(std::slice::from_ref(&run));
    assert_eq!(before, rloss::report::state_digest(std::slice::from_ref(&run)));
    fs::write(run.join("metrics.jsonl"), row(1) + &row(2)).unwrap();
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
