//! The folder of a run: recipe, metrics, trajectories and lock.

use super::inputs::{INPUTS_FILE, Inputs};
use super::sampling_folder::MARKER_FILE;
use super::symlinks::refuse_symlinks;
use super::trust::{PROGRAMS_FILE, mark_trusted};
use crate::actor::{OptimizerSettings, Schedule};
use crate::atomic_file::write_file;
use crate::bad_input;
use crate::checkpoint::peft::is_adapter_folder;
use crate::checkpoint::{self, BASE_FOLDER, ResumePoint, TrainerState};
use crate::integrity::add_checksum;
use crate::metrics::{
    MetricsFile, Phase, Row, TensorBoard, WARNINGS_FILE, Warning, append_warning, read_rows, read_warnings,
    warnings_text,
};
use crate::recipe::{Plan, RecipeSource, resume_differences};
use crate::trajectory::TrajectoryRow;
use anyhow::{Context, Result};
use serde::Serialize;
use std::fs::{self, File, OpenOptions, TryLockError};
use std::io::{BufWriter, Write};
use std::os::unix::fs::OpenOptionsExt;
use std::path::{Path, PathBuf};

/// Folders that a command creates before its first result.
const INITIAL_FOLDERS: [&str; 3] = ["tensorboard", "trajectories", BASE_FOLDER];

/// The results of `rloss eval`.
pub const EVAL_FILE: &str = "eval.json";

/// Files that a command writes before its first result, and [`EVAL_FILE`].
const INITIAL_FILES: [&str; 13] = [
    "recipe.toml",
    "metrics.jsonl",
    WARNINGS_FILE,
    "model.json",
    EVAL_FILE,
    "sandbox.txt",
    "reference.safetensors",
    MARKER_FILE,
    PROGRAMS_FILE,
    INPUTS_FILE,
    ".under_way",
    ".under_way.partial",
    ".lock",
];

/// A run folder. This process, or rank 0 of its run, has locked it. While it is locked, other programs get an
/// error.
pub struct RunFolder {
    pub path: PathBuf,
    /// The open files. `None` on all ranks but 0, which write nothing.
    files: Option<Files>,
}

/// The files that are written at every step.
struct Files {
    metrics: MetricsFile,
    tensorboard: Option<TensorBoard>,
    _lock: File,
}

impl RunFolder {
    /// Checks that the folder contains neither a run nor files that a run would overwrite or remove.
    ///
    /// # Errors
    /// [`crate::error::BadInput`] when it does.
    pub fn refuse_existing(path: &Path) -> Result<()> {
        if !contains_run(path) {
            return refuse_other_files(path);
        }
        Err(bad_input!(
            "{}: already contains a run; continue it with --resume, or name another folder with --out",
            path.display()
        ))
    }

    /// Returns the run folder for a rank other than 0. Such a rank writes no files.
    pub fn for_other_rank(path: &Path) -> Self {
        Self { path: path.to_owned(), files: None }
    }

    /// Starts a run with `inputs` in `path`.
    ///
    /// # Errors
    /// [`crate::error::BadInput`] when the folder already contains a run. The run is not changed.
    pub fn create(path: &Path, plan: &Plan, inputs: &Inputs) -> Result<Self> {
        Self::refuse_existing(path)?;
        fs::create_dir_all(path).map_err(|e| {
            bad_input!("{}: cannot create the run folder: {e}; name another with --out", path.display())
        })?;
        let lock = lock(path)?;
        // Another process may have created a run here before the lock was taken.
        Self::refuse_existing(path)?;
        let write_first_files = || {
            inputs.write(path, None)?;
            write_recipe(path, plan)?;
            write_warnings(path, plan, None)?;
            MetricsFile::create(&path.join("metrics.jsonl"))
        };
        let metrics = write_first_files().inspect_err(|_| Self::remove_without_results(path))?;
        let tensorboard =
            plan.recipe.logging.tensorboard.then(|| TensorBoard::create(&path.join("tensorboard")));
        Ok(Self { path: path.to_owned(), files: Some(Files { metrics, tensorboard, _lock: lock }) })
    }

    /// Resumes the run in `path` from `point`, the result of [`prepare_resume`]. Without a checkpoint,
    /// resumes from the start. Removes results after that point.
    ///
    /// # Errors
    /// [`crate::error::BadInput`] when the run is in use, or when another process has resumed it after
    /// `point` was read.
    pub fn resume(path: &Path, plan: &Plan, point: Option<&ResumePoint>, inputs: &Inputs) -> Result<Self> {
        let lock = lock(path)?;
        if checkpoint::newest_checkpoint(path)?.as_ref() != point.map(|point| &point.folder) {
            return Err(bad_input!(
                "{}: another process resumed the run meanwhile; repeat the command",
                path.display()
            ));
        }
        checkpoint::remove_partial_checkpoints(path)?;
        // A run that was killed while it saved may have left one old checkpoint too many.
        checkpoint::prune(path, plan.recipe.checkpoint.keep)?;
        let file = path.join("metrics.jsonl");
        let metrics = match (point, file.exists()) {
            (Some(point), _) => MetricsFile::resume(&file, point.state.metrics_bytes)?,
            (None, true) => MetricsFile::resume(&file, 0)?,
            (None, false) => MetricsFile::create(&file)?,
        };
        let tensorboard = match plan.recipe.logging.tensorboard {
            true => Some(TensorBoard::resume(&path.join("tensorboard"), &read_rows(&file)?)?),
            false => None,
        };
        let last = point.filter(|point| point.state.phase == Phase::Rl).map(|point| point.state.step);
        remove_later_trajectories(&path.join("trajectories"), last)?;
        write_recipe(path, plan)?;
        write_warnings(path, plan, point)?;
        inputs.write(path, point)?;
        Ok(Self { path: path.to_owned(), files: Some(Files { metrics, tensorboard, _lock: lock }) })
    }

    /// Removes the files of a run that failed before its first result, so that another run can start in the
    /// folder. A folder with results is not changed.
    pub fn remove_without_results(path: &Path) {
        let has_content = |file: &Path| fs::metadata(file).is_ok_and(|metadata| metadata.len() > 0);
        let trajectories = fs::read_dir(path.join("trajectories")).into_iter().flatten().flatten();
        if has_content(&path.join("metrics.jsonl"))
            || path.join("checkpoints").exists()
            || trajectories.into_iter().any(|entry| has_content(&entry.path()))
        {
            return;
        }
        // Errors are ignored: if a file could not be removed, the next start reports it.
        for name in INITIAL_FOLDERS {
            let _ = fs::remove_dir_all(path.join(name));
        }
        for name in INITIAL_FILES {
            let _ = fs::remove_file(path.join(name));
        }
        let _ = fs::remove_dir(path);
    }

    /// Appends a row of metrics.
    ///
    /// # Errors
    /// When the disk cannot be written.
    pub fn write_metrics(&mut self, row: &Row) -> Result<()> {
        let Some(files) = &mut self.files else { return Ok(()) };
        files.metrics.write(row)?;
        if let Some(tensorboard) = &mut files.tensorboard {
            tensorboard.write(row)?;
        }
        Ok(())
    }

    /// Appends a warning to `warnings.jsonl`.
    ///
    /// # Errors
    /// When the disk cannot be written.
    pub fn write_warning(&self, warning: &Warning) -> Result<()> {
        if self.files.is_some() { append_warning(&self.path, warning) } else { Ok(()) }
    }

    /// Syncs the metrics to disk. Returns their length in bytes and their digest, for the checkpoint.
    ///
    /// # Errors
    /// When the disk cannot be written, or this is not rank 0.
    pub fn sync_metrics(&mut self) -> Result<(u64, blake3::Hash)> {
        let files = self.files.as_mut().context("only rank 0 writes metrics")?;
        Ok((files.metrics.sync()?, files.metrics.digest()))
    }

    /// Returns an error with the reason for the failed write: the folder was moved or removed. If it was not,
    /// returns `error`, the error of the write.
    pub fn explain_write_error(&self, error: anyhow::Error) -> anyhow::Error {
        let path_check = self.files.as_ref().map(|files| files.metrics.check_path());
        path_check.and_then(Result::err).unwrap_or(error)
    }

    /// Writes `trajectories/<name>.jsonl`.
    ///
    /// # Errors
    /// When the disk cannot be written.
    pub fn write_trajectories(&self, name: &str, rows: impl Iterator<Item = TrajectoryRow>) -> Result<()> {
        let Some(files) = &self.files else { return Ok(()) };
        files.metrics.check_path()?;
        write_trajectories(&self.path.join("trajectories"), name, rows)
    }

    /// Returns a warning if the disk has no space for two checkpoints of `bytes` bytes. A new checkpoint is
    /// written before an old one is removed.
    pub fn disk_space_warning(&self, bytes: u64) -> Option<String> {
        let file_system = rustix::fs::statvfs(&self.path).ok()?;
        let free = file_system.f_bavail.saturating_mul(file_system.f_frsize);
        let mib = |bytes: u64| format!("{:.1} MiB", bytes as f64 / f64::from(1 << 20));
        (free < 2 * bytes).then(|| {
            format!(
                "{}: {} are free, and a checkpoint takes about {}; free some disk space, or save with checkpoint.dtype = \"bf16\"",
                self.path.display(),
                mib(free),
                mib(bytes)
            )
        })
    }

    /// Writes the file `name` of one line: `model.json`, or `sandbox.txt` with the description of the Python
    /// tool's sandbox.
    ///
    /// # Errors
    /// When the disk cannot be written.
    pub fn write_line(&self, name: &str, line: &str) -> Result<()> {
        if self.files.is_none() { Ok(()) } else { write_file(&self.path.join(name), &format!("{line}\n")) }
    }

    /// Returns the name of the last device of the run in `path`, as in `RunContext::device_name`.
    pub fn previous_device(path: &Path) -> Option<String> {
        let text = fs::read_to_string(path.join("model.json")).ok()?;
        let model: serde_json::Value = serde_json::from_str(&text).ok()?;
        model["device"].as_str().map(str::to_owned)
    }
}

/// Writes `<name>.jsonl` into `folder`, one trajectory per line.
///
/// # Errors
/// When the disk cannot be written.
pub fn write_trajectories(
    folder: &Path,
    name: &str,
    rows: impl Iterator<Item = TrajectoryRow>,
) -> Result<()> {
    let file = folder.join(format!("{name}.jsonl"));
    let write = || -> Result<()> {
        fs::create_dir_all(folder)?;
        write_rows(&file, rows)
    };
    write().with_context(|| format!("writing {}", file.display()))
}

/// Writes `file`, one row of JSON per line.
pub(super) fn write_rows(file: &Path, rows: impl Iterator<Item = impl Serialize>) -> Result<()> {
    let mut out = BufWriter::new(File::create(file)?);
    for row in rows {
        serde_json::to_writer(&mut out, &row)?;
        out.write_all(b"\n")?;
    }
    Ok(out.flush()?)
}

/// Removes the files of steps and evaluations after step `last` from `folder`; all of them without a step.
/// Their metrics are removed too, so a report must not show them.
fn remove_later_trajectories(folder: &Path, last: Option<u64>) -> Result<()> {
    for entry in fs::read_dir(folder).into_iter().flatten() {
        let path = entry?.path();
        let name = path.file_name().and_then(|name| name.to_str()).unwrap_or_default();
        let number =
            name.strip_suffix(".jsonl").and_then(|name| name.rsplit_once('-')?.1.parse::<u64>().ok());
        let Some(step) = number.filter(|&step| last.is_none_or(|last| step > last)) else { continue };
        let is_ours = name == format!("step-{step:06}.jsonl") || name == format!("eval-{step:06}.jsonl");
        if is_ours && path.is_file() {
            fs::remove_file(&path).with_context(|| format!("removing {}", path.display()))?;
        }
    }
    Ok(())
}

pub fn contains_run(path: &Path) -> bool {
    ["recipe.toml", "metrics.jsonl", "checkpoints"].iter().any(|name| path.join(name).exists())
}

/// Rejects a folder without a run that has a file or folder with a name that this program would overwrite or,
/// after a failed start, remove. Such files are the user's own.
///
/// # Errors
/// [`crate::error::BadInput`] in this case.
pub(super) fn refuse_other_files(path: &Path) -> Result<()> {
    let mut names = INITIAL_FOLDERS.iter().chain(&INITIAL_FILES).filter(|name| !is_internal(name));
    // Symbolic links are refused when the folder is locked.
    let is_file = |name: &&&str| fs::symlink_metadata(path.join(name)).is_ok_and(|file| !file.is_symlink());
    match names.find(is_file) {
        None => Ok(()),
        Some(name) => Err(bad_input!(
            "{}: already exists, and rloss may write there; name another folder with --out",
            path.join(name).display()
        )),
    }
}

/// Returns whether only this program uses the file name. A process that was killed while it started may have
/// left such a file.
fn is_internal(name: &str) -> bool {
    name.starts_with('.') || [PROGRAMS_FILE, INPUTS_FILE].contains(&name)
}

/// Locks a run folder. Rejects a folder that a running process has locked, and a folder with symbolic links
/// at paths that this program writes.
///
/// # Errors
/// [`crate::error::BadInput`] in both cases.
pub fn lock(path: &Path) -> Result<File> {
    refuse_symlinks(path)?;
    let file = path.join(".lock");
    let mut options = OpenOptions::new();
    options.write(true).create(true).truncate(false).custom_flags(libc::O_NOFOLLOW);
    let lock = options.open(&file).map_err(|e| {
        bad_input!("{}: cannot be written: {e}; name another folder with --out", file.display())
    })?;
    match lock.try_lock() {
        Ok(()) => Ok(lock),
        Err(TryLockError::WouldBlock) => Err(bad_input!(
            "{}: another process is running in this folder; wait for it to end, or name another folder with --out",
            path.display()
        )),
        Err(TryLockError::Error(e)) => Err(e).with_context(|| format!("locking {}", file.display())),
    }
}

/// Returns `model.adapter` of a stored recipe. `None` if it has none, or if it cannot be read.
fn stored_adapter(file: &Path) -> Option<PathBuf> {
    let recipe: toml::Table = fs::read_to_string(file).ok()?.parse().ok()?;
    Some(recipe.get("model")?.get("adapter")?.as_str()?.into())
}

/// Returns the run's stored recipe, if there is one. `plan` may differ from it only in keys that may change
/// on resume. If it has no `model.adapter`, it gets that of the stored recipe.
fn stored_plan(path: &Path, plan: &mut Plan) -> Result<Option<Plan>> {
    let file = path.join("recipe.toml");
    if !file.exists() {
        return Ok(None);
    }
    // An adapter's base may have moved since the run started, as may the inputs. Digests identify them.
    let has_adapter = checkpoint::newest_checkpoint(path)?.is_some_and(|newest| is_adapter_folder(&newest));
    let base = plan.recipe.model.path.as_ref().filter(|_| has_adapter);
    let mut overrides = Inputs::overrides(path, &plan.recipe)?;
    overrides.extend(base.map(|base| format!("model.path={}", base.display())));
    let mut stored = RecipeSource::Run(path.to_owned()).resolve(&overrides)?;
    if has_adapter {
        // The override of the base removed the adapter that the run started from. That adapter need not exist
        // any more, because the checkpoint has the trained one.
        stored.recipe.model.adapter = stored_adapter(&file);
        let adapter = &mut plan.recipe.model.adapter;
        *adapter = adapter.take().or_else(|| stored.recipe.model.adapter.clone());
    }
    let differences = resume_differences(&stored, plan);
    if differences.is_empty() {
        return Ok(Some(stored));
    }
    Err(bad_input!(
        "{}: the run was started with other values of {}; --resume may change only device, rollout.sequences_max, train.recompute_layers, train.steps, train.on_bad_step, schedule_steps, eval, checkpoint, logging and parallel keys",
        file.display(),
        differences.join(", ")
    ))
}

/// Prepares `plan` for resuming the run in `path`. The learning-rate schedule keeps its end, even if
/// `train.steps` changed. Returns lines for the console, and the checkpoint to resume from.
///
/// # Errors
/// [`crate::error::BadInput`] when there is no run, when it is damaged, when its recipe differs in a key that
/// must not change, or when more steps are done than `plan` has.
pub fn prepare_resume(path: &Path, plan: &mut Plan) -> Result<(Vec<String>, Option<ResumePoint>)> {
    if !contains_run(path) {
        return Err(bad_input!(
            "{}: contains no run to resume; start the run without --resume, or with --resume=auto",
            path.display()
        ));
    }
    if path.join(MARKER_FILE).exists() {
        return Err(bad_input!(
            "{}: has the samples of `rloss eval` or `rloss rollout`; name another folder with --out",
            path.display()
        ));
    }
    let stored = stored_plan(path, plan)?;
    let point = checkpoint::newest_intact_checkpoint(path)?;
    let mut lines = vec![resume_line(path, plan, point.as_ref())?];
    let Some(stored) = stored else { return Ok((lines, point)) };
    let (old_steps, steps) = (stored.recipe.train.steps, plan.recipe.train.steps);
    let (old, new) = (&stored.recipe.train.optimizer, &mut plan.recipe.train.optimizer);
    lines.extend(keep_schedule_end("train", old, new, (old_steps, steps)));
    if let (Some(old), Some(new)) = (&stored.recipe.critic, &mut plan.recipe.critic) {
        lines.extend(keep_schedule_end("critic", &old.optimizer, &mut new.optimizer, (old_steps, steps)));
    }
    Ok((lines, point))
}

/// Returns the console's line about where the run in `path` resumes.
fn resume_line(path: &Path, plan: &Plan, point: Option<&ResumePoint>) -> Result<String> {
    let run = path.display();
    let Some(ResumePoint { state: TrainerState { phase, step: done, .. }, .. }) = point else {
        return Ok(format!("resuming {run} from the start, because it has no checkpoint yet"));
    };
    if *phase != Phase::Rl {
        let steps = plan.recipe.cold_start.steps;
        return Ok(format!("resuming {run} after step {done} of {steps} of the SFT warm-up"));
    }
    let steps = plan.recipe.train.steps;
    if steps < *done {
        let reason = format!(
            "{steps} is less than the {done} steps that {run} has done; give {done} or more, or start another run with --out"
        );
        return Err(plan.mistake("train.steps", reason).into());
    }
    Ok(match *done == steps {
        true => {
            let all =
                if steps == 1 { "the one step is".to_owned() } else { format!("all {steps} steps are") };
            format!("resuming {run}: {all} done; for more steps, add --set train.steps=N")
        }
        false => format!("resuming {run} after step {done} of {steps}"),
    })
}

/// Keeps the end of the learning-rate schedule, unless the user set another end. Returns a line for the
/// console if the user set another end, or if the kept end differs from the last step.
fn keep_schedule_end(
    table: &str,
    old: &OptimizerSettings,
    new: &mut OptimizerSettings,
    (old_steps, steps): (u64, u64),
) -> Option<String> {
    let end = old.schedule_steps.unwrap_or(old_steps);
    if new.schedule == Schedule::Constant || end == 0 {
        return None;
    }
    if new.schedule_steps.is_some_and(|requested| requested != end) {
        let requested = new.schedule_steps.unwrap_or(end);
        return Some(format!(
            "the learning rate changes to another schedule: {table}.optimizer.schedule_steps is now {requested}, and was {end}"
        ));
    }
    if end == steps {
        return None;
    }
    new.schedule_steps = Some(end);
    Some(format!(
        "the learning-rate schedule, {}, still ends at step {end}: {table}.optimizer.schedule_steps = {end}",
        new.schedule
    ))
}

/// Writes `warnings.jsonl` for a run that starts, or that resumes from `point`: the warnings of `plan`, and
/// the warnings of steps before `point`.
fn write_warnings(path: &Path, plan: &Plan, point: Option<&ResumePoint>) -> Result<()> {
    let before = point.map_or(vec![], |_| read_warnings(path));
    let stands =
        |warning: &Warning| point.is_some_and(|point| warning.precedes(point.state.phase, point.state.step));
    let all = plan.warnings.iter().cloned().map(Warning::for_run).chain(before.into_iter().filter(stands));
    let all: Vec<Warning> = all.collect();
    let file = path.join(WARNINGS_FILE);
    if all.is_empty() && !file.exists() { Ok(()) } else { write_file(&file, &warnings_text(&all)?) }
}

fn write_recipe(path: &Path, plan: &Plan) -> Result<()> {
    mark_trusted(path, &plan.recipe)?;
    write_file(&path.join("recipe.toml"), &add_checksum(&plan.to_toml()))
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::recipe::resolve;

    #[test]
    fn a_disk_without_space_for_two_checkpoints_is_reported() {
        let folder = tempfile::tempdir().unwrap();
        let plan = resolve(Path::new("a.toml"), "[logging]\ntensorboard = false\n", &[]).unwrap();
        let run = RunFolder::create(&folder.path().join("run"), &plan, &Inputs::default()).unwrap();
        assert_eq!(run.disk_space_warning(0), None);
        let lack = run.disk_space_warning(u64::MAX / 2).expect("no disk has as much");
        assert!(lack.contains("MiB are free") && lack.contains("free some disk space"), "{lack}");
    }
}
