//! A run's folder: its recipe, metrics, trajectories and lock.

use crate::atomic_file::write_file;
use crate::bad_input;
use crate::integrity::sealed;
use crate::metrics::{MetricsFile, Row, TensorBoard, read_rows};
use crate::recipe::{Plan, RecipeSource, resume_differences};
use crate::train::checkpoint::{self, ResumePoint};
use crate::trajectory::TrajectoryRow;
use anyhow::{Context, Result};
use std::fs::{self, File, TryLockError};
use std::io::{BufWriter, Write};
use std::path::{Path, PathBuf};

/// A run folder that this process holds; others that try are refused until it ends.
pub struct RunFolder {
    pub path: PathBuf,
    metrics: MetricsFile,
    tensorboard: Option<TensorBoard>,
    _lock: File,
}

impl RunFolder {
    /// Refuses a folder that already holds a run.
    ///
    /// # Errors
    /// [`crate::error::BadInput`] when it does.
    pub fn refuse_existing(path: &Path) -> Result<()> {
        if !holds_run(path) {
            return Ok(());
        }
        Err(bad_input!(
            "{}: already holds a run; go on with --resume, or name another folder with --out",
            path.display()
        ))
    }

    /// Starts a run in `path`.
    ///
    /// # Errors
    /// [`crate::error::BadInput`] when a run is already there; nothing of it is touched.
    pub fn create(path: &Path, plan: &Plan) -> Result<Self> {
        Self::refuse_existing(path)?;
        fs::create_dir_all(path).map_err(|e| {
            bad_input!("{}: cannot make the run folder: {e}; name another with --out", path.display())
        })?;
        let lock = lock(path)?;
        // Another process may have made and ended a run here in the meantime.
        Self::refuse_existing(path)?;
        write_recipe(path, plan)?;
        let metrics = MetricsFile::create(&path.join("metrics.jsonl"))?;
        let tensorboard =
            plan.recipe.logging.tensorboard.then(|| TensorBoard::create(&path.join("tensorboard")));
        Ok(Self { path: path.to_owned(), metrics, tensorboard, _lock: lock })
    }

    /// Goes on with the run in `path` from its last checkpoint, or from the start when it has none yet:
    /// what lies after that point is cut away.
    ///
    /// # Errors
    /// [`crate::error::BadInput`] when there is no run, it is in use or damaged, or its recipe differs in a key that may not
    /// change.
    pub fn resume(path: &Path, plan: &Plan) -> Result<(Self, Option<ResumePoint>)> {
        if !holds_run(path) {
            return Err(bad_input!("{}: holds no run to resume; start it without --resume", path.display()));
        }
        let lock = lock(path)?;
        check_recipe(path, plan)?;
        checkpoint::clear_partial(path)?;
        let point = checkpoint::newest(path)?;
        // A kill may have come between the newest checkpoint and the end of an old one.
        checkpoint::prune(path, plan.recipe.checkpoint.keep)?;
        let file = path.join("metrics.jsonl");
        let metrics = match (&point, file.exists()) {
            (Some(point), _) => MetricsFile::resume(&file, point.state.metrics_bytes)?,
            (None, true) => MetricsFile::resume(&file, 0)?,
            (None, false) => MetricsFile::create(&file)?,
        };
        let tensorboard = match plan.recipe.logging.tensorboard {
            true => Some(TensorBoard::resume(&path.join("tensorboard"), &read_rows(&file)?)?),
            false => None,
        };
        write_recipe(path, plan)?;
        Ok((Self { path: path.to_owned(), metrics, tensorboard, _lock: lock }, point))
    }

    /// Appends a row of metrics.
    ///
    /// # Errors
    /// When the disk refuses.
    pub fn write_metrics(&mut self, row: &Row) -> Result<()> {
        self.metrics.write(row)?;
        if let Some(tensorboard) = &mut self.tensorboard {
            tensorboard.write(row)?;
        }
        Ok(())
    }

    /// Makes the metrics durable and returns their length, bytes, and digest: a checkpoint keeps both.
    ///
    /// # Errors
    /// When the disk refuses.
    pub fn sync_metrics(&mut self) -> Result<(u64, blake3::Hash)> {
        Ok((self.metrics.sync()?, self.metrics.digest()))
    }

    /// Writes `trajectories/<name>.jsonl`.
    ///
    /// # Errors
    /// When the disk refuses.
    pub fn write_trajectories(&self, name: &str, rows: impl Iterator<Item = TrajectoryRow>) -> Result<()> {
        self.metrics.check_in_place()?;
        write_trajectories(&self.path.join("trajectories"), name, rows)
    }

    /// What to say when two checkpoints of `bytes` do not fit what is free; one is written before another is removed.
    pub fn lacks_space(&self, bytes: u64) -> Option<String> {
        let about = rustix::fs::statvfs(&self.path).ok()?;
        let free = about.f_bavail.saturating_mul(about.f_frsize);
        let mib = |bytes: u64| format!("{:.1} MiB", bytes as f64 / f64::from(1 << 20));
        (free < 2 * bytes).then(|| {
            format!(
                "{}: {} are free and a checkpoint takes about {}; make room, or save with checkpoint.dtype = \"bf16\"",
                self.path.display(),
                mib(free),
                mib(bytes)
            )
        })
    }

    /// Records what confines the Python tool.
    ///
    /// # Errors
    /// When the disk refuses.
    pub fn write_confinement(&self, confinement: &str) -> Result<()> {
        write_file(&self.path.join("sandbox.txt"), &format!("{confinement}\n"))
    }
}

/// Writes `<name>.jsonl` into `folder`, one trajectory a line.
///
/// # Errors
/// When the disk refuses.
pub fn write_trajectories(
    folder: &Path,
    name: &str,
    rows: impl Iterator<Item = TrajectoryRow>,
) -> Result<()> {
    let file = folder.join(format!("{name}.jsonl"));
    let write = || -> Result<()> {
        fs::create_dir_all(folder)?;
        let mut out = BufWriter::new(File::create(&file)?);
        for row in rows {
            serde_json::to_writer(&mut out, &row)?;
            out.write_all(b"\n")?;
        }
        Ok(out.flush()?)
    };
    write().with_context(|| format!("writing {}", file.display()))
}

pub fn holds_run(path: &Path) -> bool {
    ["recipe.toml", "metrics.jsonl", "checkpoints"].iter().any(|name| path.join(name).exists())
}

/// Refuses a folder that a live process works in.
pub fn lock(path: &Path) -> Result<File> {
    let file = path.join(".lock");
    let lock = File::create(&file).map_err(|e| {
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

/// The stored recipe may differ only in keys that leave the run what it is.
fn check_recipe(path: &Path, plan: &Plan) -> Result<()> {
    let file = path.join("recipe.toml");
    if !file.exists() {
        return Ok(());
    }
    let stored = RecipeSource::Run(path.to_owned()).resolve(&[])?;
    let differences = resume_differences(&stored, plan);
    if differences.is_empty() {
        return Ok(());
    }
    Err(bad_input!(
        "{}: the run was started with other values of {}; --resume may change only train.steps, eval, checkpoint, logging and parallel keys",
        file.display(),
        differences.join(", ")
    ))
}

fn write_recipe(path: &Path, plan: &Plan) -> Result<()> {
    write_file(&path.join("recipe.toml"), &sealed(&plan.to_toml()))
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::recipe::resolve;

    #[test]
    fn a_disk_without_room_for_two_checkpoints_is_said() {
        let place = tempfile::tempdir().unwrap();
        let plan = resolve(Path::new("a.toml"), "[logging]\ntensorboard = false\n", &[]).unwrap();
        let run = RunFolder::create(&place.path().join("run"), &plan).unwrap();
        assert_eq!(run.lacks_space(0), None);
        let lack = run.lacks_space(u64::MAX / 2).expect("no disk has as much");
        assert!(lack.contains("MiB are free") && lack.contains("make room"), "{lack}");
    }
}
