//! Samples into a folder, resumable per problem. `rloss eval` and `rloss rollout` share this code.
//!
//! ```text
//! OUT/recipe.toml            the resolved recipe, with model.path set to the folder that was read
//! OUT/sampling.json          command, step and model files; resuming with other values is an error
//! OUT/trajectories/NAME.jsonl.partial   one line per finished trajectory, in the order in which they finish
//! OUT/trajectories/NAME.jsonl           all trajectories in order, written after the last one has finished
//! ```

use super::header;
use super::memory::ModelCommand;
use super::run_folder::{RunFolder, contains_run, lock, refuse_other_files, write_rows};
use super::sampling::Sampling;
use super::signals::StopFlag;
use super::startup::Started;
use super::symlinks::refuse_symlink;
use super::trust::mark_trusted;
use crate::atomic_file::{replace_file, write_file};
use crate::bad_input;
use crate::bounded_file::{self, SMALL_FILE_BYTES_MAX};
use crate::checkpoint::gguf::{self, is_gguf};
use crate::engine::Engine;
use crate::integrity::add_checksum;
use crate::metrics::{Console, Phase, WARNINGS_FILE, Warning, warnings_text};
use crate::recipe::{Plan, RecipeSource};
use crate::rollout::{Prompt, RolloutPlan, RolloutProgress, trajectory_file};
use crate::settings::Entry;
use crate::table_file;
use crate::tasks::TaskSettings;
use crate::trajectory::{Trajectory, TrajectoryRow};
use anyhow::{Context, Result, bail};
use serde::{Deserialize, Serialize};
use std::collections::BTreeMap;
use std::fs::{self, File, OpenOptions};
use std::io::Write;
use std::path::{Path, PathBuf};
use std::sync::{Mutex, PoisonError};

/// Returns the folder for results if `--out` is not given. For a run or checkpoint, the folder is
/// `<run>/<kind>/<checkpoint>`; otherwise it is `runs/<recipe>-<kind>`. [`SamplingFolder::open`] appends a
/// number if the folder is in use.
fn default_out(plan: &Plan, source: &RecipeSource, kind: &str) -> PathBuf {
    let model = &plan.recipe.model;
    let checkpoint = model.adapter.as_deref().or(model.path.as_deref()).and_then(Path::file_name);
    match (source, checkpoint) {
        (RecipeSource::Run(run) | RecipeSource::Checkpoint { run, .. }, Some(checkpoint)) => {
            run.join(kind).join(checkpoint)
        }
        _ => PathBuf::from("runs").join(format!("{}-{kind}", source.stem())),
    }
}

pub(super) const MARKER_FILE: &str = "sampling.json";

/// The contents of `sampling.json`.
#[derive(Debug, PartialEq, Serialize, Deserialize)]
struct Marker {
    /// `eval` or `rollout`.
    kind: String,
    step: u64,
    /// Name, length in bytes and modification time in nanoseconds of each of the model's files.
    model_files: Vec<(String, u64, u128)>,
    /// Those of the task's data files and program. `None` in folders of earlier builds.
    #[serde(default)]
    task_files: Option<Vec<(String, u64, u128)>>,
}

impl Marker {
    fn new((kind, step): (&str, u64), plan: &Plan) -> Self {
        let model = &plan.recipe.model;
        let folders = model.path.iter().chain(&model.adapter);
        Self {
            kind: kind.to_owned(),
            step,
            model_files: folders.flat_map(|folder| model_files(folder)).collect(),
            task_files: Some(task_files(&plan.recipe.task)),
        }
    }
}

/// Refuses `--out` before the model is read, if the folder belongs to another command, model or task.
///
/// # Errors
/// [`crate::error::BadInput`] when the folder has other contents.
pub fn refuse_other_results(out: Option<&Path>, plan: &Plan, command: (&str, u64)) -> Result<()> {
    out.map_or(Ok(()), |out| check_marker(out, &Marker::new(command, plan)).map(drop))
}

/// A folder for the samples of one command, locked by this process. When dropped, it is removed if it has no
/// results.
pub struct SamplingFolder<'a> {
    sampling: Sampling<'a>,
    pub path: PathBuf,
    _lock: File,
}

impl<'a> SamplingFolder<'a> {
    /// Starts or resumes `command`: `eval` or `rollout`, and the training step after which it samples. The
    /// results go to `out`. Without `out`, they go to the default folder of the recipe's source; a number is
    /// appended if that folder has other results.
    ///
    /// # Errors
    /// [`crate::error::BadInput`] when the folder has other contents. The contents are not changed.
    pub fn open(
        sampling: Sampling<'a>,
        source: &RecipeSource,
        out: Option<&Path>,
        command: (&str, u64),
    ) -> Result<Self> {
        let plan = &sampling.environment.plan;
        let marker = Marker::new(command, plan);
        if let Some(out) = out {
            return Self::open_at(sampling, out, &marker);
        }
        let first = default_out(plan, source, &marker.kind);
        let numbered = (2..).map(|n| PathBuf::from(format!("{}-{n}", first.display())));
        let is_in_run = matches!(source, RecipeSource::Run(_) | RecipeSource::Checkpoint { .. });
        if let (Some(parent), true) = (first.parent(), is_in_run) {
            refuse_symlink(parent)?;
        }
        for path in std::iter::once(first.clone()).chain(numbered) {
            if is_in_run {
                refuse_symlink(&path)?;
            }
            if !path.exists() || check_folder(&path, &marker, plan).is_ok() {
                return Self::open_at(sampling, &path, &marker);
            }
        }
        Err(bad_input!("{}: all numbers are in use; name another folder with --out", first.display()))
    }

    fn open_at(sampling: Sampling<'a>, path: &Path, marker: &Marker) -> Result<Self> {
        let environment = sampling.environment;
        let plan = &environment.plan;
        check_folder(path, marker, plan)?;
        fs::create_dir_all(path).map_err(|e| {
            bad_input!("{}: cannot create the folder: {e}; name another with --out", path.display())
        })?;
        let lock = lock(path)?;
        // Another process may have started here before the lock was taken.
        check_folder(path, marker, plan)?;
        let folder = Self { sampling, path: path.to_owned(), _lock: lock };
        if !path.join(MARKER_FILE).is_file() {
            write_file(&path.join(MARKER_FILE), &(serde_json::to_string_pretty(marker)? + "\n"))?;
        }
        if !path.join("recipe.toml").is_file() {
            mark_trusted(path, &plan.recipe)?;
            write_file(&path.join("recipe.toml"), &add_checksum(&plan.to_toml()))?;
        }
        if let Some(confinement) = environment.sandbox_description() {
            write_file(&path.join("sandbox.txt"), &format!("{confinement}\n"))?;
        }
        Ok(folder)
    }

    /// Prints the header and the warnings of `command`, and listens for signals.
    ///
    /// # Errors
    /// When no signal handler or thread can be created.
    pub fn announce(&self, started: &Started, command: ModelCommand, console: &Console) -> Result<StopFlag> {
        let Started { loaded, environment, resources } = started;
        let lines = header::lines(loaded, environment, &resources.device_name, command, &self.path);
        lines.iter().for_each(|line| console.print(line));
        environment.plan.warnings.iter().for_each(|warning| console.print(&format!("warning: {warning}")));
        let stop = StopFlag::listen()?;
        let console = console.clone();
        stop.on_request(move || {
            console.print("stopping: finished samples are kept; a second signal stops immediately")
        })?;
        Ok(stop)
    }

    /// Returns the path of the file `name` for finished trajectories.
    pub fn trajectories_file(&self, name: &str) -> PathBuf {
        self.path.join("trajectories").join(format!("{name}.jsonl"))
    }

    /// Samples the `prompts` that the file `name` does not have yet. Returns the rows of every prompt, in
    /// sample order. Returns `None` if `stop` returned true; the finished trajectories stay in the file.
    ///
    /// # Errors
    /// [`crate::error::BadInput`] when the file has other prompts. Also when the rollout fails, or when the
    /// disk cannot be written.
    #[allow(clippy::too_many_arguments)]
    pub fn sample(
        &self,
        name: &str,
        phase: Phase,
        engine: &Engine,
        (plan, samples): (&RolloutPlan, usize),
        prompts: &[Prompt],
        console: &Console,
        stop: &(dyn Fn() -> bool + Sync),
    ) -> Result<Option<Vec<Vec<TrajectoryRow>>>> {
        let (finished_file, partial) =
            (self.trajectories_file(name), self.path.join(format!("trajectories/{name}.jsonl.partial")));
        if finished_file.is_file() {
            console.print(&format!(
                "nothing to sample: {} has all samples; for new ones name another folder with --out",
                finished_file.display()
            ));
            let rows = trajectory_file::read(&finished_file, false)?.0;
            let groups = group_by_prompt(rows, prompts, samples, &finished_file)?;
            return groups.into_iter().collect::<Option<_>>().map(Some).ok_or_else(|| {
                bad_input!(
                    "{}: trajectories are missing; restore the file, or name another folder with --out",
                    finished_file.display()
                )
            });
        }
        fs::create_dir_all(self.path.join("trajectories"))?;
        let mut groups: Vec<Option<Vec<TrajectoryRow>>> = vec![None; prompts.len()];
        let mut bytes = 0;
        if partial.is_file() {
            let (rows, length) = trajectory_file::read(&partial, true)?;
            (groups, bytes) = (group_by_prompt(rows, prompts, samples, &partial)?, length);
        }
        let missing: Vec<Prompt> =
            prompts.iter().zip(&groups).filter(|(_, rows)| rows.is_none()).map(|(p, _)| p.clone()).collect();
        let file = OpenOptions::new().create(true).append(true).open(&partial);
        let file = file.with_context(|| format!("{}", partial.display()))?;
        // A killed process may leave an incomplete last line. It is removed.
        file.set_len(bytes).with_context(|| format!("{}", partial.display()))?;
        let all = (prompts.len() * samples) as u64;
        let stage = console.start_item_stage(name, all, all - (missing.len() * samples) as u64);
        if let Some(new) =
            self.sample_missing(&file, phase, engine, (plan, samples), &missing, &stage, stop)?
        {
            let mut new = new.into_iter();
            groups.iter_mut().filter(|rows| rows.is_none()).for_each(|rows| *rows = new.next());
        }
        stage.finish();
        if let Some(failures) = console.take_failure_warning() {
            console.print(&format!("warning: {failures}"));
        }
        let Some(rows) = groups.into_iter().collect::<Option<Vec<_>>>() else { return Ok(None) };
        self.finish(&finished_file, &partial, &rows)?;
        Ok(Some(rows))
    }

    /// Samples `prompts` and appends each trajectory to `file` as it finishes.
    #[allow(clippy::too_many_arguments)]
    fn sample_missing(
        &self,
        file: &File,
        phase: Phase,
        engine: &Engine,
        (plan, samples): (&RolloutPlan, usize),
        prompts: &[Prompt],
        stage: &crate::metrics::Progress,
        stop: &(dyn Fn() -> bool + Sync),
    ) -> Result<Option<Vec<Vec<TrajectoryRow>>>> {
        if prompts.is_empty() {
            return Ok(Some(vec![]));
        }
        let failure = Mutex::new(None);
        let on_finished = |trajectory: &Trajectory, messages: &[_]| {
            let problem = prompts.iter().find(|prompt| prompt.index == trajectory.prompt);
            let row = TrajectoryRow {
                phase,
                trajectory: trajectory.clone(),
                messages: messages.to_vec(),
                answer: problem.map(|prompt| prompt.problem.answer.clone()).unwrap_or_default(),
                token_stats: None,
            };
            let mut failure = failure.lock().unwrap_or_else(PoisonError::into_inner);
            if failure.is_none() {
                *failure = append_row(file, &row).err();
            }
        };
        let has_failed = || failure.lock().unwrap_or_else(PoisonError::into_inner).is_some();
        let rollouts = self.sampling.sample_groups(
            engine,
            plan,
            (prompts, samples),
            &RolloutProgress::show_on(stage),
            Some(&on_finished),
            &|| stop() || has_failed(),
        )?;
        if let Some(error) = failure.into_inner().unwrap_or_else(PoisonError::into_inner) {
            return Err(error.context(format!("writing trajectories into {}", self.path.display())));
        }
        let Some(rollouts) = rollouts else { return Ok(None) };
        let mut rows = rollouts.rows(phase);
        Ok(Some(prompts.iter().map(|_| rows.by_ref().take(samples).collect()).collect()))
    }

    /// Prints warnings about the samples, and stores them for the report page.
    ///
    /// # Errors
    /// When the disk cannot be written.
    pub fn warn(&self, causes: Vec<String>, phase: Phase, step: u64, console: &Console) -> Result<()> {
        causes.iter().for_each(|cause| console.print(&format!("warning: {cause}")));
        let of_step = |cause| Warning::for_step(phase, step, cause);
        let of_run = self.sampling.environment.plan.warnings.iter().cloned().map(Warning::for_run);
        let all: Vec<Warning> = of_run.chain(causes.into_iter().map(of_step)).collect();
        write_file(&self.path.join(WARNINGS_FILE), &warnings_text(&all)?)
    }

    /// Writes all rows in order to `finished_file`, atomically. Then removes the partial file.
    fn finish(&self, finished_file: &Path, partial: &Path, rows: &[Vec<TrajectoryRow>]) -> Result<()> {
        replace_file(finished_file, |temporary| write_rows(temporary, rows.iter().flatten()))?;
        fs::remove_file(partial).with_context(|| format!("removing {}", partial.display()))
    }
}

impl Drop for SamplingFolder<'_> {
    fn drop(&mut self) {
        RunFolder::remove_without_results(&self.path);
    }
}

/// Counts the failed trajectories of `rows` and calls [`report_failures`].
///
/// # Errors
/// The errors of [`report_failures`].
pub fn check_failures<'r>(rows: impl Iterator<Item = &'r TrajectoryRow>, console: &Console) -> Result<()> {
    let failed: Vec<bool> = rows.map(|row| row.trajectory.has_failure()).collect();
    report_failures((failed.iter().filter(|failed| **failed).count(), failed.len()), console)
}

/// Prints on `console` how many trajectories failed for reasons outside the policy, if there are any.
///
/// # Errors
/// When most trajectories failed. The rewards then say little about the policy.
pub fn report_failures((failed, count): (usize, usize), console: &Console) -> Result<()> {
    let message = format!("{failed} of {count} trajectories failed for reasons outside the policy");
    if failed * 2 > count {
        bail!(
            "{message}: the task's program or the tool's workers, see the failures above; rloss check RECIPE tests the program \
             again"
        );
    }
    if failed > 0 {
        let place = if console.failure_count() > 0 {
            "the first failures are printed above"
        } else {
            "see trajectories/"
        };
        console.print(&format!(
            "warning: {message} (outcome/task_failed and tool/worker_died count them); {place}"
        ));
    }
    Ok(())
}

/// Prints `text` to standard output. A closed pipe is not an error.
///
/// # Errors
/// When standard output cannot be written, for example a file on a full disk.
pub fn print_text(text: &str) -> Result<()> {
    let mut out = std::io::stdout();
    match out.write_all(text.as_bytes()).and_then(|()| out.flush()) {
        Err(e) if e.kind() != std::io::ErrorKind::BrokenPipe => Err(e).context("writing to standard output"),
        _ => Ok(()),
    }
}

/// Appends a line in a single write. If the process is killed, only the last line can be incomplete.
fn append_row(mut file: &File, row: &TrajectoryRow) -> Result<()> {
    let mut line = serde_json::to_vec(row)?;
    line.push(b'\n');
    Ok(file.write_all(&line)?)
}

/// Groups `rows` by prompt, in sample order. A prompt with missing samples gets `None`. If a sample has
/// several rows, they are equal, because the recipe determines them.
fn group_by_prompt(
    rows: Vec<TrajectoryRow>,
    prompts: &[Prompt],
    samples: usize,
    file: &Path,
) -> Result<Vec<Option<Vec<TrajectoryRow>>>> {
    let mut rows_by_sample = BTreeMap::new();
    for (row, line) in rows.into_iter().zip(1..) {
        let t = &row.trajectory;
        let (prompt, sample) = (t.prompt, t.sample);
        let problem = prompts.iter().find(|p| p.index == prompt).map(|p| &p.problem.id);
        if problem != Some(&t.problem_id) || sample >= samples as u64 {
            return Err(bad_input!(
                "{}: line {line}: sample {sample} of problem {} was not requested; the data has changed; name another folder with --out",
                file.display(),
                t.problem_id
            ));
        }
        rows_by_sample.insert((prompt, sample), row);
    }
    let group = |prompt: &Prompt| {
        (0..samples as u64)
            .map(|sample| rows_by_sample.remove(&(prompt.index, sample)))
            .collect::<Option<Vec<_>>>()
    };
    Ok(prompts.iter().map(group).collect())
}

/// Lists the model's files with their lengths and modification times. A later comparison shows whether the
/// files were changed.
fn model_files(model: &Path) -> Vec<(String, u64, u128)> {
    let paths: Vec<PathBuf> = match fs::read_dir(model) {
        Ok(entries) => entries.filter_map(|entry| Some(entry.ok()?.path())).collect(),
        Err(_) => gguf::files(model).unwrap_or_default(),
    };
    let file = |path: PathBuf| {
        let name = path.file_name()?.to_string_lossy();
        let read = name.ends_with(".safetensors") || name.ends_with(".json") || is_gguf(model);
        read.then(|| file_state(&path)).flatten()
    };
    let mut files: Vec<_> = paths.into_iter().filter_map(file).collect();
    files.sort();
    files
}

/// Lists the task's data files and the files of its program, as [`model_files`] does. A program's own imports
/// are not among them.
fn task_files(task: &TaskSettings) -> Vec<(String, u64, u128)> {
    let data =
        task.train_file.iter().chain(&task.validation_file).chain(&task.validation_files).chain(&task.file);
    let data = data.flat_map(|path| table_file::files(path).unwrap_or_default());
    data.chain(task.command.iter().map(PathBuf::from)).filter_map(|path| file_state(&path)).collect()
}

/// Returns the name of a file, its length, and the time of its last change.
fn file_state(path: &Path) -> Option<(String, u64, u128)> {
    let name = path.file_name()?.to_string_lossy().into_owned();
    let metadata = fs::metadata(path).ok().filter(|metadata| metadata.is_file())?;
    let changed = metadata.modified().ok()?.duration_since(std::time::UNIX_EPOCH).ok()?;
    Some((name, metadata.len(), changed.as_nanos()))
}

/// Rejects a folder that has other contents than this command's samples.
fn check_folder(path: &Path, marker: &Marker, plan: &Plan) -> Result<()> {
    let has_results = check_marker(path, marker)?;
    if has_results && path.join("recipe.toml").exists() { check_recipe(path, plan) } else { Ok(()) }
}

/// Returns whether the folder has results of the command that `marker` describes.
///
/// # Errors
/// [`crate::error::BadInput`] when the folder has other contents.
fn check_marker(path: &Path, marker: &Marker) -> Result<bool> {
    let file = path.join(MARKER_FILE);
    let path_text = file.display();
    let text = match bounded_file::read_text(&file, SMALL_FILE_BYTES_MAX) {
        Ok(text) => text,
        Err(e) if e.kind() != std::io::ErrorKind::NotFound => {
            return Err(bad_input!("{path_text}: cannot be read: {e}; name another folder with --out"));
        }
        Err(_) if contains_run(path) => {
            return Err(bad_input!(
                "{}: already contains a run; name another folder with --out",
                path.display()
            ));
        }
        Err(_) => return refuse_other_files(path).map(|()| false),
    };
    let stored: Marker = serde_json::from_str(&text).map_err(|e| {
        bad_input!("{path_text}: damaged: {e}; remove the folder, or name another with --out")
    })?;
    let error = |contents: &str| {
        bad_input!("{path_text}: the folder contains {contents}; name another folder with --out")
    };
    if stored.kind != marker.kind {
        return Err(error(&format!("the results of rloss {}", stored.kind)));
    }
    if stored.step != marker.step || stored.model_files != marker.model_files {
        return Err(error("results of another model, or of this model before its files were changed"));
    }
    if stored.task_files.is_some() && stored.task_files != marker.task_files {
        return Err(error("results of the task before its data files or its program were changed"));
    }
    Ok(true)
}

/// Rejects a stored recipe that differs in a key on which the samples depend.
fn check_recipe(folder: &Path, plan: &Plan) -> Result<()> {
    let may_differ = |key: &str| {
        ["parallel.", "logging.", "checkpoint."].iter().any(|table| key.starts_with(table))
            || ["eval.pass_at", "eval.every_steps", "eval.before_training", "train.steps"].contains(&key)
    };
    let stored = RecipeSource::Run(folder.to_owned()).resolve_for(plan.scope, &[])?;
    let pairs = stored.recipe.entries().into_iter().zip(plan.recipe.entries());
    let differences: Vec<String> = pairs
        .filter(|(old, new)| matches!(old, Entry::Key { .. }) && old != new && !may_differ(old.path()))
        .map(|(old, _)| old.path().to_owned())
        .collect();
    if differences.is_empty() {
        return Ok(());
    }
    Err(bad_input!(
        "{}: the folder contains results with other values of {}; name another folder with --out",
        folder.join("recipe.toml").display(),
        differences.join(", ")
    ))
}
