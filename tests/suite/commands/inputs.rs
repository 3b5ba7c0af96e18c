//! What a run reads is the same after a resume, or the change is said: data, programs, templates.

use super::*;
use crate::cli::bad_input;
use crate::skips;
use Expected::{Refused, RefusedWith, Resumes, ResumesWith};
use flate2::Compression;
use flate2::write::GzEncoder;
use rloss::metrics::Console;
use rloss::recipe::resolve;
use rloss::run::inputs::Inputs;
use std::io::Write;

/// Settings of every run here: one step a stage, and nothing that a test does not need.
const SETS: &[&str] = &[
    "cold_start.steps=1",
    "cold_start.batch_size=2",
    "train.steps=1",
    "eval.every_steps=0",
    "eval.before_training=false",
    "eval.problems_max=2",
    "checkpoint.every_steps=1",
    "rollout.prompts_per_step=2",
    "rollout.samples_per_prompt=2",
    "rollout.response_tokens_max=8",
    "rollout.prompt_tokens_max=1500",
    "parallel.threads=2",
];

/// A task that answers every request, and writes to the file of its argument.
const TASK: &str = r#"
import json, sys
open(sys.argv[1], "a").write("started\n")
for line in sys.stdin:
    ask = json.loads(line)
    reply = {"describe": {"version": 2, "name": "mine", "validation_problems": 1}, "reward": {"reward": 1.0}}
    reply = reply.get(ask["request"], {"prompt": "2 * 3?", "answer": 6})
    print(json.dumps(reply | {"request_id": ask["request_id"]}), flush=True)
"#;

fn problems(first: usize, count: usize) -> String {
    let row = |n| json!({"question": format!("{n} + 1?"), "answer": format!("#### {}", n + 1)});
    (first..first + count).map(|n| format!("{}\n", row(n))).collect()
}

fn conversations(answer: &str) -> String {
    let row = |n| json!({"messages": [{"role": "user", "content": format!("{n}?")}, {"role": "assistant", "channel": "final", "content": answer}]});
    (0..4).map(|n| format!("{}\n", row(n))).collect()
}

fn pack(text: &str, level: u32) -> Vec<u8> {
    let mut packed = GzEncoder::new(vec![], Compression::new(level));
    packed.write_all(text.as_bytes()).unwrap();
    packed.finish().unwrap()
}

/// A folder with inputs, and a run that has read them.
struct Lab {
    folder: TempDir,
    sets: Vec<String>,
}

impl Lab {
    /// A folder with a tiny model of a long context.
    fn new() -> Self {
        let lab = Self { folder: TempDir::new().unwrap(), sets: vec![] };
        let sets = ["train.steps=0", "model.architecture.max_position_embeddings=2048"];
        done(train(&lab.at("first")).sets(sets));
        copy_model(&first_checkpoint(&lab.at("first")), &lab.at("model"));
        lab
    }

    fn at(&self, name: &str) -> PathBuf {
        self.folder.path().join(name)
    }

    fn write(&self, name: &str, content: impl AsRef<[u8]>) {
        fs::write(self.at(name), content).unwrap();
    }

    fn edit(&self, name: &str, from: &str, to: &str) {
        let text = text_of(self.at(name));
        assert!(text.contains(from), "{from:?} is not in {name}");
        self.write(name, text.replace(from, to));
    }

    /// The run in `run`, from its recipe, with more `sets`.
    fn train(&self, run: &str, sets: &[&str]) -> Command {
        let mut command = train(&self.at(run));
        command.args(["--set", &format!("model.path={}", self.at("model").display())]);
        command.args(
            self.sets.iter().map(String::as_str).chain(sets.iter().copied()).flat_map(|set| ["--set", set]),
        );
        command
    }

    /// A run of gsm8k with SFT rows and tools of an MCP server.
    fn with_every_file() -> Self {
        let mut lab = Self::new();
        lab.write("train.jsonl", problems(0, 8));
        lab.write("held.jsonl", problems(100, 4));
        lab.write("rows.jsonl.gz", pack(&conversations("yes"), 6));
        lab.write("held_rows.jsonl", conversations("no"));
        fs::copy(in_repository("tests/fixtures/mcp_server.py"), lab.at("server.py")).unwrap();
        let file = |key: &str, name: &str| format!("{key}={}", lab.at(name).display());
        lab.sets = vec![
            "task.name=gsm8k".into(),
            "task.train_rows_max=4".into(),
            file("task.train_file", "train.jsonl"),
            file("task.validation_file", "held.jsonl"),
            file("cold_start.train_file", "rows.jsonl.gz"),
            file("cold_start.validation_file", "held_rows.jsonl"),
            format!("tools.mcp.command=[\"python3\", {:?}]", lab.at("server.py")),
        ];
        done(&mut lab.train("run", &[]));
        lab
    }
}

fn train(out: &Path) -> Command {
    let mut command = rloss();
    command.arg("train").arg(quickstart()).arg("--out").arg(out);
    command.sets(SETS);
    command
}

fn warnings(run: &Path) -> Vec<Value> {
    let text = fs::read_to_string(run.join("warnings.jsonl")).unwrap_or_default();
    text.lines().map(|line| serde_json::from_str(line).unwrap()).collect()
}

fn copy_all(from: &Path, to: &Path) {
    assert!(Command::new("cp").arg("-r").arg(from).arg(to).status().unwrap().success());
}

/// Settings of a resume.
type MoreSets = fn(&Lab) -> Vec<String>;

/// What a row expects of a resume: to be refused with these words or to go on, perhaps with more settings.
enum Expected {
    Refused(&'static [&'static str]),
    RefusedWith(MoreSets, &'static [&'static str]),
    Resumes,
    ResumesWith(MoreSets),
}

/// One situation: the report that tells of it, the change, and what is right. The authority is
/// docs/RELIABILITY.md: a resume continues to the same end. So equal content is equal, whatever its place and
/// time, and other content is said.
type Row = (&'static str, fn(&Lab), Expected);

#[test]
fn a_resume_with_other_inputs_is_refused_by_name_and_with_the_same_it_goes_on() {
    let Some(()) = skips::python3() else { return };
    let lab = Lab::with_every_file();
    let moved: MoreSets = |lab| vec![format!("task.train_file={}", lab.at("elsewhere.jsonl").display())];
    let rows: &[Row] = &[
        (
            "instructlab/sdg 245: answers were corrected while the run stood still",
            |lab| lab.edit("train.jsonl", "#### 3\"", "#### 4\""),
            Refused(&["task.train_file (", "train.jsonl)", "--accept-changes", "--out"]),
        ),
        (
            "sambanova/generative_data_prep 64: an edit that keeps length and times",
            |lab| {
                let path = lab.at("train.jsonl");
                let time = fs::metadata(&path).unwrap().modified().unwrap();
                lab.edit("train.jsonl", "#### 3\"", "#### 5\"");
                fs::File::options().write(true).open(&path).unwrap().set_modified(time).unwrap();
            },
            Refused(&["task.train_file"]),
        ),
        (
            "TensorAuto/OpenTau 502: more rows at the same place, after those that are read",
            |lab| lab.write("train.jsonl", problems(0, 9)),
            Refused(&["task.train_file"]),
        ),
        (
            "huggingface/transformers 40691: the same rows in another order",
            |lab| {
                let text = text_of(lab.at("train.jsonl"));
                lab.write(
                    "train.jsonl",
                    text.lines().rev().map(|line| format!("{line}\n")).collect::<String>(),
                );
            },
            Refused(&["task.train_file"]),
        ),
        (
            "TensorAuto/OpenTau 502: held-out problems changed, so later metrics compare with nothing",
            |lab| lab.write("held.jsonl", problems(200, 4)),
            Refused(&["task.validation_file (", "held.jsonl)"]),
        ),
        (
            "huggingface/datasets 2956: a compressed file was replaced",
            |lab| lab.write("rows.jsonl.gz", pack(&conversations("maybe"), 6)),
            Refused(&["cold_start.train_file (", "rows.jsonl.gz)"]),
        ),
        (
            "huggingface/datasets 2956: the same rows, compressed again; the file's own bytes decide",
            |lab| lab.write("rows.jsonl.gz", pack(&conversations("yes"), 1)),
            Refused(&["cold_start.train_file"]),
        ),
        (
            "georgian-io/LLM-Finetuning-Toolkit 97: a line was added to the held-out rows",
            |lab| lab.write("held_rows.jsonl", conversations("no") + &conversations("no")),
            Refused(&["cold_start.validation_file"]),
        ),
        (
            "IBM/unitxt 7: the program of a tool was changed",
            |lab| lab.edit("server.py", "The sum of two numbers.", "The product of two numbers."),
            Refused(&["tools.mcp.command[1] (", "server.py)"]),
        ),
        (
            "hiyouga/LlamaFactory 7785: another chat template in the model's folder",
            |lab| lab.write("model/chat_template.jinja", "{{ messages }}"),
            Refused(&["chat_template.jinja ("]),
        ),
        (
            "hiyouga/LlamaFactory 8399: the chat template is gone",
            |lab| fs::remove_file(lab.at("model/chat_template.jinja")).unwrap(),
            Refused(&["chat_template.jinja (removed)"]),
        ),
        (
            "dhruvdcoder/xlm-core 50: another tokenizer under the same name",
            |lab| {
                let text = text_of(lab.at("model/tokenizer.json"));
                lab.write("model/tokenizer.json", text + "\n");
            },
            Refused(&["tokenizer.json ("]),
        ),
        (
            "nvidia-cosmos/cosmos-rl 756: each of two changes is named",
            |lab| {
                lab.write("held.jsonl", problems(300, 4));
                lab.edit("train.jsonl", "#### 3\"", "#### 4\"");
            },
            Refused(&["task.train_file", ", task.validation_file ("]),
        ),
        (
            "sambanova/generative_data_prep 64, turned: only the time is new",
            |lab| lab.write("train.jsonl", problems(0, 8)),
            Resumes,
        ),
        (
            "ray-project/ray 28082: the data moved, with its content",
            |lab| fs::rename(lab.at("train.jsonl"), lab.at("elsewhere.jsonl")).unwrap(),
            ResumesWith(moved),
        ),
        (
            "tensorflow/tensorflow 9146: a link took the place of a file",
            |lab| {
                fs::rename(lab.at("train.jsonl"), lab.at("elsewhere.jsonl")).unwrap();
                std::os::unix::fs::symlink(lab.at("elsewhere.jsonl"), lab.at("train.jsonl")).unwrap();
            },
            Resumes,
        ),
        (
            "NVIDIA-NeMo/RL 2519: the resume names other data",
            |lab| lab.write("elsewhere.jsonl", problems(50, 8)),
            RefusedWith(moved, &["task.train_file (", "elsewhere.jsonl)"]),
        ),
        (
            "ray-project/ray 28082, of a program: its place is part of the recipe",
            |lab| fs::rename(lab.at("server.py"), lab.at("moved.py")).unwrap(),
            RefusedWith(
                |lab| vec![format!("tools.mcp.command=[\"python3\", {:?}]", lab.at("moved.py"))],
                &["other values of tools.mcp.command"],
            ),
        ),
        (
            "benchflow-ai/posttrainarena 31: a tool's program got another argument",
            |_| {},
            RefusedWith(
                |lab| vec![format!("tools.mcp.command=[\"python3\", {:?}, \"-v\"]", lab.at("server.py"))],
                &["other values of tools.mcp.command"],
            ),
        ),
        (
            "AOSSIE-Org/OpenVerifiableLLM 89: the digests themselves are damaged",
            |lab| lab.edit("run/inputs.b3", "  task.train_file", "  task.train_fire"),
            Refused(&["inputs.b3: damaged", "remove it to resume without a comparison"]),
        ),
        ("pykeen/pykeen 1022: nothing changed", |_| {}, Resumes),
    ];
    let mut failed = vec![];
    let kept = TempDir::new().unwrap();
    copy_all(&lab.at("."), &kept.path().join("all"));
    for (source, change, expected) in rows {
        change(&lab);
        let (more, words) = match expected {
            Refused(words) => (vec![], Some(words)),
            RefusedWith(sets, words) => (sets(&lab), Some(words)),
            Resumes => (vec![], None),
            ResumesWith(sets) => (sets(&lab), None),
        };
        let mut command = lab.train("run", &[&texts(&more)[..], &["train.steps=2"]].concat());
        let output = output(command.arg("--resume"));
        let text = output.stderr;
        let is_right = match words {
            Some(words) => output.code == Some(2) && words.iter().all(|word| text.contains(word)),
            None => output.code == Some(0) && !text.contains("inputs"),
        };
        if !is_right {
            failed.push(format!("{source}: {text}"));
        }
        // The next row starts from the same files.
        for entry in fs::read_dir(lab.folder.path()).unwrap() {
            let path = entry.unwrap().path();
            if path.is_dir() { fs::remove_dir_all(path).unwrap() } else { fs::remove_file(path).unwrap() }
        }
        copy_all(&kept.path().join("all/."), lab.folder.path());
    }
    assert!(failed.is_empty(), "{}", failed.join("\n"));
}

/// The run learned from other answers, and nobody could tell from its folder.
#[test]
fn an_accepted_change_is_recorded_and_asked_once() {
    let mut lab = Lab::new();
    lab.write("train.jsonl", problems(0, 8));
    lab.write("held.jsonl", problems(100, 4));
    lab.sets = ["train", "held"]
        .iter()
        .zip(["task.train_file", "task.validation_file"])
        .map(|(name, key)| format!("{key}={}", lab.at(&format!("{name}.jsonl")).display()))
        .chain(["task.name=gsm8k".into()])
        .collect();
    done(&mut lab.train("run", &[]));
    let run = lab.at("run");
    let digests = text_of(run.join("inputs.b3"));
    assert_has(&digests, &["  task.train_file\n", "  chat_template.jinja\n"]);
    lab.edit("train.jsonl", "#### 3\"", "#### 4\"");
    let resume = |steps: &str, more: &[&str]| {
        let mut command = lab.train("run", &[steps]);
        command.arg("--resume").args(more);
        command
    };
    refused(&mut resume("train.steps=2", &[]), &["task.train_file"]);
    assert_eq!(text_of(run.join("inputs.b3")), digests, "a refusal writes nothing");
    let text = done(&mut resume("train.steps=2", &["--accept-changes"])).stderr;
    assert!(text.contains("warning: resumed with changed inputs: task.train_file ("), "{text}");
    assert_ne!(text_of(run.join("inputs.b3")), digests);
    done(&mut resume("train.steps=3", &[]));
    let recorded = warnings(&run);
    let record = recorded.iter().find(|warning| warning["text"].as_str().unwrap().contains("changed inputs"));
    assert_eq!(
        (&record.unwrap()["phase"], &record.unwrap()["step"]),
        (&json!("rl"), &json!(1)),
        "{recorded:?}"
    );
    done(rloss().arg("verify").arg(&run));

    // A folder of an older version.
    fs::remove_file(run.join("inputs.b3")).unwrap();
    let text = done(&mut resume("train.steps=4", &[])).stderr;
    assert_eq!(text.matches("the run had no inputs.b3").count(), 1, "{text}");
    assert!(
        warnings(&run)
            .iter()
            .any(|warning| warning["text"].as_str().unwrap().contains("the run had no inputs.b3"))
    );
    let text = done(&mut resume("train.steps=5", &[])).stderr;
    assert!(!text.contains("inputs.b3"), "{text}");
    assert!(warnings(&run).iter().any(|warning| warning["step"] == 3), "the record stays");
    lab.edit("train.jsonl", "#### 4\"", "#### 3\"");
    refused(&mut resume("train.steps=6", &[]), &["task.train_file"]);

    refused(lab.train("other", &[]).arg("--accept-changes"), &["--resume"]);
}

/// The program of a task decided about rewards, and another one took its place (doors 07).
/// A file that the program itself writes is no reason to refuse: a job that restarts by itself would end.
#[test]
fn bug_the_program_of_a_task_was_changed_in_silence() {
    let Some(()) = skips::python3() else { return };
    let mut lab = Lab::new();
    lab.write("task.py", TASK);
    lab.write("log", "");
    let folder = lab.folder.path().to_owned();
    let command = |log: &str| {
        format!("task.command=[\"python3\", {:?}, {:?}]", folder.join("task.py"), folder.join(log))
    };
    let own = command("log");
    let sets = ["cold_start.steps=0", "task.name=command", "task.command_processes=1", &own];
    lab.sets = sets.map(String::from).into();
    done(&mut lab.train("run", &[]));
    let resume = |sets: &[&str]| {
        let mut command = lab.train("run", &[sets, &["train.steps=2"]].concat());
        command.arg("--resume");
        command
    };
    refused(&mut resume(&[&command("other")]), &["other values of task.command"]);
    lab.edit("task.py", "1.0", "-5.0");
    refused(&mut resume(&[]), &["task.command[1] (", "task.py)"]);
    lab.edit("task.py", "-5.0", "1.0");
    assert!(text_of(lab.at("log")).starts_with("started\n"));
    ended(&mut resume(&[]), 0, &["warning: resumed with changed inputs: task.command[2] argument ("]);
}

/// SFT went on with other rows, or refused with the number of steps that more rows make.
#[test]
fn bug_sft_rows_were_changed_in_silence() {
    let lab = Lab::new();
    let run = lab.at("run");
    lab.write("rows.jsonl", conversations("yes"));
    let sft = |more: &[&str]| {
        let mut command = rloss();
        command
            .arg("sft")
            .arg(lab.at("model"))
            .arg("--data")
            .arg(lab.at("rows.jsonl"))
            .arg("--out")
            .arg(&run);
        let sets = ["cold_start.batch_size=2", "checkpoint.every_steps=1", "parallel.threads=2"];
        command.sets(sets).args(["--epochs", "2"]).args(more);
        command
    };
    done(&mut sft(&[]));
    assert_eq!(rows(&run).len(), 4);
    fs::remove_dir_all(run.join("checkpoints/cold-start-000004")).unwrap();
    lab.edit("rows.jsonl", "yes", "no");
    let words = ["cold_start.train_file (", "rows.jsonl)", "--accept-changes"];
    refused(&mut sft(&["--resume"]), &words);
    lab.write("rows.jsonl", conversations("no") + &conversations("no"));
    refused(&mut sft(&["--resume"]), &words);
    let text = done(&mut sft(&["--resume", "--accept-changes"])).stderr;
    assert!(text.contains("resumed with changed inputs: cold_start.train_file"), "{text}");
    assert!(run.join("checkpoints/cold-start-000004").is_dir());
    assert_eq!(rows(&run).len(), 4, "the run has as many steps as before");
    assert!(warnings(&run).iter().any(|warning| warning["phase"] == "cold_start" && warning["step"] == 3));
}

/// A file was replaced between its digest and its reading (sdg_hub 481: any change of data is an error).
#[test]
fn a_file_that_changes_while_the_run_starts_is_named_as_each_file_of_a_list() {
    let folder = TempDir::new().unwrap();
    let at = |name: &str| folder.path().join(name);
    for name in ["train.jsonl", "one.jsonl", "two.jsonl"] {
        fs::write(at(name), "{}\n").unwrap();
    }
    let text = format!(
        "[task]\nname = \"retool\"\ntrain_file = {:?}\nvalidation_files = [{:?}, {:?}]\n",
        at("train.jsonl"),
        at("one.jsonl"),
        at("two.jsonl")
    );
    let recipe = resolve(Path::new("r.toml"), &text, &[]).unwrap().recipe;
    let inputs = Inputs::read(&recipe, &Console::silent()).unwrap();
    inputs.check_unchanged(&recipe, &Console::silent()).unwrap();
    for (name, key) in [
        ("train.jsonl", "task.train_file ("),
        ("one.jsonl", "task.validation_files[0] ("),
        ("two.jsonl", "task.validation_files[1] ("),
    ] {
        fs::write(at(name), "[]\n").unwrap();
        bad_input(inputs.check_unchanged(&recipe, &Console::silent()), &[key]);
        fs::write(at(name), "{}\n").unwrap();
    }
    inputs.check_unchanged(&recipe, &Console::silent()).unwrap();
}
