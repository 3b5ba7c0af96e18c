//! Starts the program by mpirun, or as torchrun would, in a folder of its own, and reads what it wrote.

use serde_json::Value;
use std::collections::BTreeMap;
use std::fs;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};
use std::sync::Arc;
use std::time::{Duration, Instant};
use tempfile::TempDir;

/// What to start.
#[derive(Clone)]
pub struct Launch {
    command: String,
    recipe: String,
    sets: Vec<String>,
    ranks: usize,
    /// Whether to start it by the script for Slurm, with an `srun` that leaves the others alone when one
    /// process dies.
    survivors: bool,
    /// The command line of the last process, where it is another one.
    last: Option<Vec<String>>,
    place: Arc<TempDir>,
    resume: Option<&'static str>,
}

/// A run under way.
pub struct Going {
    launcher: Child,
    place: Arc<TempDir>,
}

/// A run that ended.
pub struct Done {
    pub folder: PathBuf,
    pub stdout: String,
    pub stderr: String,
    /// The launcher's exit code: that of a process that failed.
    pub code: Option<i32>,
    place: Arc<TempDir>,
}

/// Whether NCCL connects the processes, on the emulated driver's stand-in for it, and not MPI:
/// `RANKS_BY=nccl`.
pub fn by_nccl() -> bool {
    match std::env::var("RANKS_BY").ok().as_deref() {
        Some("nccl") => true,
        None | Some("mpi") => false,
        Some(other) => panic!("RANKS_BY is mpi or nccl, not {other}"),
    }
}

/// The program that the tests start, or the copy of it that `RANKS_PROGRAM` names: others may compile meanwhile.
pub fn program() -> String {
    std::env::var("RANKS_PROGRAM").unwrap_or_else(|_| env!("CARGO_BIN_EXE_rloss").to_owned())
}

impl Done {
    /// The folder of a checkpoint.
    pub fn checkpoint(&self, name: &str) -> PathBuf {
        self.folder.join("checkpoints").join(name)
    }
}

impl Launch {
    /// `rloss train` of the built-in recipe `recipe`.
    pub fn new(recipe: &str, sets: &[&str]) -> Self {
        Self::command("train", recipe, sets)
    }

    /// Another command.
    pub fn command(command: &str, recipe: &str, sets: &[&str]) -> Self {
        Self {
            command: command.to_owned(),
            recipe: recipe.to_owned(),
            sets: sets.iter().map(|set| (*set).to_owned()).collect(),
            ranks: 1,
            survivors: false,
            last: None,
            place: Arc::new(tempfile::tempdir().expect("a folder")),
            resume: None,
        }
    }

    /// Goes on with `done`.
    pub fn resume(done: &Done, sets: &[&str]) -> Self {
        let recipe = done.folder.to_str().expect("UTF-8");
        Self { place: done.place.clone(), resume: Some("--resume"), ..Self::new(recipe, sets) }
    }

    pub fn ranks(self, ranks: usize) -> Self {
        Self { ranks, ..self }
    }

    pub fn survivors(self, survivors: bool) -> Self {
        Self { survivors, ..self }
    }

    /// The run starts or goes on, whichever its folder asks for.
    pub fn auto(self) -> Self {
        Self { resume: Some("--resume=auto"), ..self }
    }

    /// The last rank is started with another command line; to be said when all else is.
    pub fn last(self, change: impl FnOnce(&mut Vec<String>)) -> Self {
        let mut arguments = self.arguments();
        change(&mut arguments);
        Self { last: Some(arguments), ..self }
    }

    pub fn last_differs(self, set: &str) -> Self {
        self.last(|arguments| arguments.extend(["--set".to_owned(), set.to_owned()]))
    }

    fn arguments(&self) -> Vec<String> {
        let mut arguments = vec![program(), self.command.clone(), self.recipe.clone()];
        arguments.extend(["--out".to_owned(), self.place.path().join("run").display().to_string()]);
        self.sets.iter().for_each(|set| arguments.extend(["--set".to_owned(), set.clone()]));
        arguments.extend(self.resume.map(str::to_owned));
        arguments
    }

    /// In one process, without a launcher, to its good end.
    pub fn alone(self) -> Done {
        let arguments = self.arguments();
        let mut command = Command::new(&arguments[0]);
        command.args(&arguments[1..]);
        let done = spawn(command, self.place).wait(Duration::from_secs(600));
        assert_eq!(done.code, Some(0), "{}", done.stderr);
        done
    }

    /// In several processes, to its good end.
    pub fn run(self) -> Done {
        let done = self.start().wait(Duration::from_secs(600));
        assert_eq!(done.code, Some(0), "{}{}", done.stdout, done.stderr);
        assert!(!done.stderr.contains("cuda-emulator:"), "{}", done.stderr);
        done
    }

    /// In several processes.
    pub fn start(self) -> Going {
        let arguments = self.arguments();
        if self.survivors {
            let root = Path::new(env!("CARGO_MANIFEST_DIR"));
            let mut command = Command::new(root.join("scripts/launch.sh"));
            let path = std::env::var("PATH").expect("PATH");
            command.env("PATH", format!("{}:{path}", root.join("tests/ranks").display()));
            command.env("RLOSS", program()).env("SLURM_NTASKS", self.ranks.to_string());
            command.env("RLOSS_RANKS_BY", if by_nccl() { "nccl" } else { "mpi" });
            command.arg("slurm").args(&arguments[1..]);
            return spawn(command, self.place);
        }
        if by_nccl() {
            let stand_in = Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/ranks/torchrun");
            let mut command = Command::new(stand_in);
            command.arg(self.ranks.to_string()).args(&arguments);
            if self.resume == Some("--resume=auto") {
                command.env("MAX_RESTARTS", "1");
            }
            if let Some(last) = &self.last {
                command.arg(":").args(last);
            }
            return spawn(command, self.place);
        }
        let mut command = Command::new("mpirun");
        // More processes than cores, and root in a container.
        command.args(["--oversubscribe", "--allow-run-as-root"]);
        match &self.last {
            None => command.args(["-np", &self.ranks.to_string()]).args(&arguments),
            Some(last) => {
                command.args(["-np", &(self.ranks - 1).to_string()]).args(&arguments);
                command.args([":", "-np", "1"]).args(last)
            }
        };
        spawn(command, self.place)
    }
}

fn spawn(mut command: Command, place: Arc<TempDir>) -> Going {
    let file = |name: &str| fs::File::create(place.path().join(name)).expect("a file");
    let launcher = command
        .stdin(Stdio::null())
        .stdout(file("stdout"))
        .stderr(file("stderr"))
        .spawn()
        .unwrap_or_else(|e| panic!("{:?}: {e}", command.get_program()));
    Going { launcher, place }
}

impl Going {
    /// Until the run has written so many rows of metrics.
    pub fn wait_for_rows(&mut self, rows: usize) {
        let begun = Instant::now();
        let file = self.place.path().join("run/metrics.jsonl");
        while fs::read_to_string(&file).map_or(0, |text| text.lines().count()) < rows {
            assert!(self.launcher.try_wait().expect("the launcher").is_none(), "{}", self.stderr());
            assert!(begun.elapsed() < Duration::from_secs(300), "{}", self.stderr());
            std::thread::sleep(Duration::from_millis(20));
        }
    }

    fn stderr(&self) -> String {
        fs::read_to_string(self.place.path().join("stderr")).unwrap_or_default()
    }

    /// Sends `signal` to the process of that rank.
    pub fn signal_rank(&self, rank: usize, signal: &str) {
        let out = self.place.path().join("run").display().to_string();
        for process in fs::read_dir("/proc").expect("/proc").flatten() {
            let path = process.path();
            let read = |name: &str| fs::read(path.join(name)).unwrap_or_default();
            let line = String::from_utf8_lossy(&read("cmdline")).replace('\0', " ");
            let environment = String::from_utf8_lossy(&read("environ")).into_owned();
            let names = ["OMPI_COMM_WORLD_RANK", "RANK"].map(|name| format!("{name}={rank}"));
            let is_rank = environment.split('\0').any(|entry| names.iter().any(|name| name == entry));
            if line.starts_with(&program()) && line.contains(&out) && is_rank {
                let pid = process.file_name().into_string().expect("a number");
                assert!(
                    Command::new("kill")
                        .args([&format!("-{signal}"), &pid])
                        .status()
                        .expect("kill")
                        .success()
                );
                return;
            }
        }
        panic!("no process of rank {rank}");
    }

    pub fn signal_launcher(&self, signal: &str) {
        let pid = self.launcher.id().to_string();
        assert!(Command::new("kill").args([&format!("-{signal}"), &pid]).status().expect("kill").success());
    }

    pub fn wait(mut self, limit: Duration) -> Done {
        let begun = Instant::now();
        let status = loop {
            if let Some(status) = self.launcher.try_wait().expect("the launcher") {
                break status;
            }
            if begun.elapsed() > limit {
                let _ = self.launcher.kill();
                panic!("not ended after {limit:?}\n{}", self.stderr());
            }
            std::thread::sleep(Duration::from_millis(20));
        };
        let read = |name: &str| fs::read_to_string(self.place.path().join(name)).unwrap_or_default();
        Done {
            folder: self.place.path().join("run"),
            stdout: read("stdout"),
            stderr: read("stderr"),
            code: status.code(),
            place: self.place.clone(),
        }
    }
}

impl Done {
    /// The names of its checkpoints, in order.
    pub fn checkpoints(&self) -> Vec<String> {
        let folder = fs::read_dir(self.folder.join("checkpoints")).expect("checkpoints").flatten();
        let mut names: Vec<String> =
            folder.map(|entry| entry.file_name().into_string().expect("UTF-8")).collect();
        names.sort();
        names
    }
}

/// Every row of metrics: its numbers by name.
pub fn metrics(done: &Done) -> Vec<BTreeMap<String, f64>> {
    let text = fs::read_to_string(done.folder.join("metrics.jsonl")).expect("metrics.jsonl");
    let row = |line: &str| -> BTreeMap<String, f64> {
        let row: serde_json::Value = serde_json::from_str(line).expect("a row");
        let numbers = row.as_object().expect("an object").iter();
        numbers.filter_map(|(key, value)| Some((key.clone(), value.as_f64()?))).collect()
    };
    text.lines().map(row).collect()
}

/// The rows that have `key`.
pub fn rows_with(done: &Done, key: &str) -> Vec<BTreeMap<String, f64>> {
    metrics(done).into_iter().filter(|row| row.contains_key(key)).collect()
}

/// The values of `key`, row by row.
pub fn columns(done: &Done, key: &str) -> Vec<f64> {
    let found: Vec<f64> = metrics(done).iter().filter_map(|row| row.get(key).copied()).collect();
    assert!(!found.is_empty() || key.ends_with("load_balance"), "no {key}");
    found
}

/// The f32 tensors of a checkpoint's model, saved in f32, by name.
pub fn checkpoint_tensors(done: &Done, name: &str) -> BTreeMap<String, Vec<f32>> {
    let bytes = tensors_of(&done.checkpoint(name).join("model.safetensors"));
    let values =
        |bytes: &[u8]| bytes.chunks_exact(4).map(|b| f32::from_le_bytes([b[0], b[1], b[2], b[3]])).collect();
    bytes.into_iter().map(|(name, bytes)| (name, values(&bytes))).collect()
}

/// The bytes of every tensor of a file, by name.
fn tensors_of(file: &Path) -> BTreeMap<String, Vec<u8>> {
    let bytes = fs::read(file).unwrap_or_else(|e| panic!("{}: {e}", file.display()));
    let start = 8 + u64::from_le_bytes(bytes[..8].try_into().expect("8 bytes")) as usize;
    let header: BTreeMap<String, Value> = serde_json::from_slice(&bytes[8..start]).expect("safetensors");
    let at = |info: &Value, end: usize| start + info["data_offsets"][end].as_u64().expect("offsets") as usize;
    let tensors = header.into_iter().filter(|(name, _)| name != "__metadata__");
    tensors.map(|(name, info)| (name, bytes[at(&info, 0)..at(&info, 1)].to_vec())).collect()
}

/// Whether what `several` processes wrote, each into a file of its own that `stem` begins, is what `one`
/// did into one. Returns how many tensors there are.
pub fn assert_same_state(one: &Done, several: &Done, checkpoint: &str, stem: &str, ranks: usize) -> usize {
    let place = format!("{checkpoint}/{stem} of {ranks}");
    let expected = tensors_of(&one.checkpoint(checkpoint).join(format!("{stem}.safetensors")));
    let folder = several.checkpoint(checkpoint);
    let file = |rank: usize| folder.join(format!("{stem}-{:05}-of-{ranks:05}.safetensors", rank + 1));
    let parts: Vec<_> = (0..ranks).map(|rank| tensors_of(&file(rank))).collect();
    assert!(!folder.join(format!("{stem}.safetensors")).exists(), "{place}");
    let names: Vec<&String> = parts.iter().flat_map(BTreeMap::keys).collect();
    assert!(names.iter().all(|name| expected.contains_key(*name)), "{place}");
    for (name, expected) in &expected {
        // Which process has the first piece goes round with the tensor's place.
        let from = |first: usize| -> Vec<u8> {
            let order = (0..ranks).map(|rank| (first + rank) % ranks);
            order.flat_map(|rank| parts[rank].get(name).cloned().unwrap_or_default()).collect()
        };
        assert!((0..ranks).any(|first| from(first) == *expected), "{place}: {name}");
    }
    expected.len()
}
