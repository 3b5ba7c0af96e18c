//! Consent to the programs that a run folder of somebody else names.

use super::*;
use crate::skips;

/// A task that leaves a mark when it starts.
const TASK: &str = r#"
import json, sys
open(sys.argv[1], "w").close()
for line in sys.stdin:
    ask = json.loads(line)
    reply = {"describe": {"version": 2, "name": "mine", "validation_problems": 2}, "reward": {"reward": 1}}
    reply = reply.get(ask["request"], {"prompt": "2 * 3?", "answer": 6})
    print(json.dumps(reply | {"request_id": ask["request_id"]}), flush=True)
"#;

/// A run whose task is a program, and the mark of its start.
struct Made {
    folder: TempDir,
    run: PathBuf,
    mark: PathBuf,
}

impl Made {
    fn new() -> Self {
        let folder = TempDir::new().unwrap();
        let place = |name: &str| folder.path().join(name);
        fs::write(place("task.py"), TASK).unwrap();
        let recipe = format!(
            "base = {:?}\n[task]\nname = \"command\"\ncommand = [\"python3\", {:?}, {:?}]\ncommand_processes = 1\n",
            quickstart(),
            place("task.py"),
            place("mark")
        );
        fs::write(place("recipe.toml"), recipe).unwrap();
        let (run, mark) = (place("run"), place("mark"));
        let mut train = rloss();
        train.arg("train").arg(place("recipe.toml")).arg("--out").arg(&run);
        train.sets([
            "cold_start.steps=0",
            "train.steps=1",
            "eval.every_steps=0",
            "rollout.prompts_per_step=1",
        ]);
        let said = done(&mut train).stderr;
        let (told, header) = (said.find("starts   task.command = [\"python3\""), said.find("model    "));
        assert!(told.is_some() && told < header, "the program is named before anything starts: {said}");
        fs::remove_file(&mark).unwrap();
        Self { folder, run, mark }
    }

    /// `rloss ARGUMENTS`; `by_another` user, who has another key.
    fn command(&self, arguments: &[&str], by_another: bool) -> Command {
        let mut command = rloss();
        if by_another {
            command.env("XDG_CONFIG_HOME", self.folder.path().join("other"));
        }
        command.current_dir(&self.folder).args(arguments);
        command
    }

    /// Whether the program started since the last call.
    fn has_started(&self) -> bool {
        fs::remove_file(&self.mark).is_ok()
    }

    fn refused(&self, mut command: Command) {
        let words = [
            "this user did not make this run, and it starts task.command",
            "--trust",
            "rloss check --no-run",
        ];
        refused(&mut command, &words);
        assert!(!self.has_started());
    }
}

#[test]
fn a_run_folder_of_somebody_else_starts_nothing_without_consent() {
    let Some(()) = skips::python3() else { return };
    let made = Made::new();
    let checkpoint = "run/checkpoints/step-000001";
    for arguments in [
        &["eval", "run"][..],
        &["chat", "run"],
        &["rollout", checkpoint],
        &["check", "run"],
        &["check-mismatch", checkpoint, "--out", "out"],
        &["train", "run", "--out", "other-run"],
        &["train", "run", "--resume", "--set", "train.steps=2"],
    ] {
        made.refused(made.command(arguments, true));
    }
    let shown = done(&mut made.command(&["check", "--no-run", "run"], true));
    assert_has(&shown.stdout, &["starts   task.command = ", "Keys that differ from the defaults"]);
    assert!(!made.has_started());
    // The user's own run, and a run that the user trusts.
    done(&mut made.command(&["chat", "run"], false));
    assert!(made.has_started());
    done(&mut made.command(&["chat", "run", "--trust"], true));
    assert!(made.has_started());
    // A program of the command line is the user's own.
    let own = format!("task.command=[\"python3\", \"task.py\", \"{}\"]", made.mark.display());
    done(&mut made.command(&["chat", "run", "--set", &own], true));
    assert!(made.has_started());
    // An edited program is not the one that was approved.
    let file = made.run.join("recipe.toml");
    let text = text_of(&file);
    fs::write(&file, text.replace("task.py\", ", "task.py\", \"-x\", ")).unwrap();
    done(&mut made.command(&["verify", "--accept", "run"], false));
    made.refused(made.command(&["chat", "run"], false));
}

#[test]
fn a_server_that_was_added_to_a_run_does_not_start_without_consent() {
    let Some(()) = skips::python3() else { return };
    let made = Made::new();
    let file = made.run.join("recipe.toml");
    let text = text_of(&file) + "\n[tools.mcp]\ncommand = [\"no-such-server\"]\n";
    fs::write(&file, text).unwrap();
    done(&mut made.command(&["verify", "--accept", "run"], false));
    made.refused(made.command(&["chat", "run"], false));
    let said = output(&mut made.command(&["chat", "run"], false)).stderr;
    assert!(said.contains(" and tools.mcp.command = [\"no-such-server\"]; rloss check"), "{said}");
}

/// It started the task's program without consent.
#[test]
fn an_export_starts_no_program() {
    let Some(()) = skips::python3() else { return };
    let made = Made::new();
    done(&mut made.command(&["export", "run", "--gguf", "model.gguf"], true));
    assert!(!made.has_started() && made.folder.path().join("model.gguf").is_file());
}

/// Runs the command line at a terminal that answers `answer`.
fn at_terminal(command: &Command, answer: &str) -> (i32, String) {
    let script = r#"
import os, pty, sys
process, terminal = pty.fork()
if process == 0:
    os.execv(sys.argv[2], sys.argv[2:])
said = b""
while True:
    try:
        part = os.read(terminal, 4096)
    except OSError:
        break
    if not part:
        break
    said += part
    if said.endswith(b"[y/N] "):
        os.write(terminal, sys.argv[1].encode() + b"\n")
print(said.decode())
sys.exit(os.waitstatus_to_exitcode(os.waitpid(process, 0)[1]))
"#;
    let mut python = Command::new("python3");
    python.args(["-c", script, answer]).arg(command.get_program()).args(command.get_args());
    let variables = command.get_envs().filter_map(|(name, value)| Some((name, value?)));
    python.envs(variables).current_dir(command.get_current_dir().unwrap_or(Path::new(".")));
    let output = output(&mut python);
    (output.code.unwrap(), output.stdout)
}

#[test]
fn a_terminal_is_asked_once() {
    let Some(()) = skips::python3() else { return };
    let made = Made::new();
    let check = made.command(&["check", "run"], true);
    let (code, said) = at_terminal(&check, "");
    assert!(code == 2 && said.contains("Start its programs? [y/N]") && !made.has_started(), "{code}: {said}");
    let (code, said) = at_terminal(&check, "y");
    assert!(code == 0 && said.contains("Start its programs?") && made.has_started(), "{code}: {said}");
    done(&mut made.command(&["check", "run"], true));
    assert!(made.has_started(), "the answer is kept");
}
