//! The checkpoints of a run: their order, their state, and the check that they are intact.

use super::{BASE_FOLDER, STATE_FILE, TrainerState, peft, reference};
use crate::atomic_file::is_partial;
use crate::bad_input;
use crate::bounded_file::{self, SMALL_FILE_BYTES_MAX};
use crate::error::{BadInput, shell_quote};
use crate::integrity::{MANIFEST_FILE, Manifest, file_digest};
use crate::metrics::Phase;
use anyhow::{Context, Result};
use std::fs;
use std::io::ErrorKind;
use std::path::{Path, PathBuf};

/// The remedy for a damaged checkpoint.
pub const DAMAGE_REMEDY: &str = "remove this checkpoint to continue from the previous one";
/// The file name of the metrics of a run.
const METRICS_FILE: &str = "metrics.jsonl";

/// Returns the folder name of a checkpoint: `step-NNNNNN`, or `cold-start-NNNNNN` during SFT warm-up.
pub fn folder_name(phase: Phase, step: u64) -> String {
    let stem = if phase == Phase::SftWarmUp { "cold-start" } else { "step" };
    format!("{stem}-{step:06}")
}

/// Returns the sort key of the checkpoint with the folder name `name`. Checkpoints of SFT warm-up come before
/// those of reinforcement learning.
fn checkpoint_order(name: &str) -> Option<(bool, u64)> {
    let (stem, step) = name.rsplit_once('-')?;
    let phase = match stem {
        "cold-start" => Phase::SftWarmUp,
        "step" => Phase::Rl,
        _ => return None,
    };
    let step = step.parse().ok()?;
    (folder_name(phase, step) == name).then_some((phase == Phase::Rl, step))
}

/// Reads the progress of the run from the checkpoint `folder`.
///
/// # Errors
/// [`BadInput`] when the file is missing or damaged.
pub fn read_state(folder: &Path) -> Result<TrainerState> {
    let path = folder.join(STATE_FILE);
    let text = bounded_file::read_text(&path, SMALL_FILE_BYTES_MAX)
        .map_err(|e| bad_input!("{}: cannot be read: {e}", path.display()))?;
    serde_json::from_str(&text).map_err(|e| bad_input!("{}: damaged: {e}; {DAMAGE_REMEDY}", path.display()))
}

/// Returns the folders of all checkpoints of `run`, oldest first. Uses only folder names, so damaged files
/// have no effect.
pub(super) fn checkpoint_folders(run: &Path) -> Result<Vec<PathBuf>> {
    let mut found = vec![];
    let Ok(entries) = fs::read_dir(run.join("checkpoints")) else { return Ok(vec![]) };
    for entry in entries {
        let folder = entry.with_context(|| format!("{}", run.display()))?.path();
        let order = folder.file_name().and_then(|name| checkpoint_order(name.to_str()?));
        if let (Some(order), true) = (order, is_checkpoint(&folder)) {
            found.push((order, folder));
        }
    }
    found.sort();
    Ok(found.into_iter().map(|(_, folder)| folder).collect())
}

/// Returns whether `folder` is a checkpoint of a run. A folder with only a model is not a checkpoint.
pub fn is_checkpoint(folder: &Path) -> bool {
    [STATE_FILE, super::RECIPE_FILE].iter().any(|name| folder.join(name).is_file())
}

/// Returns the last checkpoint of the run folder `run`, if the run has one. Does not check its files.
///
/// # Errors
/// When the folder cannot be read.
pub fn newest_checkpoint(run: &Path) -> Result<Option<PathBuf>> {
    Ok(checkpoint_folders(run)?.pop())
}

/// An intact checkpoint.
#[derive(Debug, Clone)]
pub struct ResumePoint {
    pub folder: PathBuf,
    pub state: TrainerState,
    /// False if the checkpoint has no manifest. Then its integrity cannot be verified.
    pub is_verified: bool,
}

/// Returns the last checkpoint of the run folder `run`, if the run has one. The files of the checkpoint, the
/// reference, and the metrics before the checkpoint must be intact.
///
/// # Errors
/// [`BadInput`] when a file is not intact. The message names the newest intact checkpoint, and the command
/// that continues from it.
pub fn newest_intact_checkpoint(run: &Path) -> Result<Option<ResumePoint>> {
    let folders = checkpoint_folders(run)?;
    let Some((newest, older)) = folders.split_last() else { return Ok(None) };
    let error = match check_in_run(run, newest) {
        Ok(checkpoint) => return Ok(Some(checkpoint)),
        Err(error) => error,
    };
    let mut damaged = vec![newest];
    for folder in older.iter().rev() {
        if let Ok(intact) = check_in_run(run, folder) {
            return Err(add_recovery_hint(error, run, &damaged, &intact.folder));
        }
        damaged.push(folder);
    }
    Err(bad_input!(
        "{error:#}. All checkpoints of the run are damaged; restore the files, or start a new run in another folder"
    ))
}

/// Checks every checkpoint of `run`, and the files of the run that the checkpoint depends on. Returns the
/// results, oldest first.
///
/// # Errors
/// When the folder cannot be read.
pub fn check_all_checkpoints(run: &Path) -> Result<Vec<(PathBuf, Result<ResumePoint>)>> {
    let folders = checkpoint_folders(run)?.into_iter();
    Ok(folders.map(|folder| (folder.clone(), check_in_run(run, &folder))).collect())
}

/// Checks the files of the checkpoint or model `folder`. Returns whether the folder has a manifest.
///
/// # Errors
/// [`BadInput`] when a file was changed. For a checkpoint of a run, the message names the newest intact
/// checkpoint, and the command that continues from it.
pub fn verify_folder(folder: &Path) -> Result<bool> {
    let error = match check_folder(folder) {
        Ok(verified) => return Ok(verified),
        Err(error) => error,
    };
    let full = std::path::absolute(folder).unwrap_or_else(|_| folder.to_owned());
    let Some(run) = full.parent().and_then(Path::parent) else { return Err(error) };
    let folders = checkpoint_folders(run)?;
    let older: Vec<&PathBuf> = folders.iter().take_while(|other| **other != full).collect();
    if older.len() == folders.len() {
        return Err(error);
    }
    match older.into_iter().rev().find(|folder| check_folder(folder).is_ok()) {
        Some(intact) => {
            let damaged: Vec<&PathBuf> =
                folders.iter().skip_while(|other| *other != intact).skip(1).collect();
            Err(add_recovery_hint(error, run, &damaged, intact))
        }
        None => Err(bad_input!("{error:#}. All older checkpoints of the run are damaged")),
    }
}

/// Checks the files of `folder` against its manifest, and its state against its name. Returns whether the
/// folder has a manifest.
fn check_folder(folder: &Path) -> Result<bool> {
    let verified = Manifest::check(folder)?;
    if !folder.join(STATE_FILE).is_file() {
        return Ok(verified);
    }
    let state = read_state(folder)?;
    if !verified && state.metrics_digest.is_some() {
        return Err(bad_input!("{}: is missing", folder.join(MANIFEST_FILE).display()));
    }
    let name = folder.file_name().unwrap_or_default().to_string_lossy();
    let written = folder_name(state.phase, state.step);
    if checkpoint_order(&name).is_some() && name != written {
        let file = folder.join(STATE_FILE);
        return Err(bad_input!("{}: damaged: it belongs to {written}", file.display()));
    }
    Ok(verified)
}

/// Checks the checkpoint `folder` of `run`, and the files of the run that the checkpoint depends on.
fn check_in_run(run: &Path, folder: &Path) -> Result<ResumePoint> {
    let is_verified = check_folder(folder)?;
    let state = read_state(folder)?;
    check_metrics(&run.join(METRICS_FILE), folder, &state)?;
    let base = run.join(BASE_FOLDER);
    if peft::is_adapter_folder(folder) && base.is_dir() {
        Manifest::check(&base)?;
    }
    if let Some(digest) = state.reference_digest {
        reference::check(run, digest)?;
    }
    Ok(ResumePoint { folder: folder.to_owned(), state, is_verified })
}

/// Checks that the metrics before the checkpoint are unchanged.
fn check_metrics(file: &Path, folder: &Path, state: &TrainerState) -> Result<()> {
    let (path_text, bytes) = (file.display(), state.metrics_bytes);
    let length = match fs::metadata(file) {
        Ok(metadata) => metadata.len(),
        Err(e) if e.kind() == ErrorKind::NotFound && bytes > 0 => {
            let model = std::path::absolute(folder).unwrap_or_else(|_| folder.to_owned());
            return Err(bad_input!(
                "{path_text}: is missing, but it had {bytes} bytes when the checkpoint was written. Restore the file, or start a new run \
                 from the weights: --out ANOTHER_FOLDER --set model.path={} --set cold_start.steps=0, without --resume",
                model.display()
            ));
        }
        Err(e) if e.kind() == ErrorKind::NotFound => return Ok(()),
        Err(e) => return Err(bad_input!("{path_text}: cannot be read: {e}")),
    };
    if length < bytes {
        return Err(bad_input!(
            "{path_text}: has {length} bytes, but it had {bytes} when the checkpoint was written. The file was changed since then: restore it"
        ));
    }
    let Some(digest) = state.metrics_digest else { return Ok(()) };
    let found = file_digest(file, Some(bytes)).map_err(|e| bad_input!("{path_text}: cannot be read: {e}"))?;
    if found != digest {
        return Err(bad_input!(
            "{path_text}: damaged: its first {bytes} bytes were changed after the checkpoint was written. Restore the file"
        ));
    }
    Ok(())
}

/// Adds to `error` the name of the newest intact checkpoint, and the command that continues from it.
fn add_recovery_hint(error: anyhow::Error, run: &Path, damaged: &[&PathBuf], intact: &Path) -> anyhow::Error {
    let shell = |path: &Path| shell_quote(&path.display().to_string());
    let damaged_folder = run.join("damaged");
    let folders: Vec<String> = damaged.iter().rev().map(|folder| shell(folder)).collect();
    let name = intact.file_name().unwrap_or_default().to_string_lossy();
    let target = shell(&damaged_folder);
    BadInput(format!(
        "{error:#}. The newest intact checkpoint is {name}; to continue from it, move the newer checkpoints away and run the same \
         command again: mkdir -p {target} && mv {} {target}/",
        folders.join(" ")
    ))
    .into()
}

/// Removes partial checkpoints that a killed process left in the run folder `run`.
///
/// # Errors
/// When a folder cannot be removed.
pub fn remove_partial_checkpoints(run: &Path) -> Result<()> {
    let Ok(entries) = fs::read_dir(run.join("checkpoints")) else { return Ok(()) };
    for entry in entries {
        let folder = entry.with_context(|| format!("{}", run.display()))?.path();
        if folder.file_name().is_some_and(is_partial) {
            fs::remove_dir_all(&folder).with_context(|| format!("removing {}", folder.display()))?;
        }
    }
    Ok(())
}

/// Serialises a digest as hexadecimal digits, for `trainer.json`.
pub(super) mod hexadecimal {
    use blake3::Hash;
    use serde::{Deserialize, Deserializer, Serialize, Serializer, de::Error};

    pub fn serialize<S: Serializer>(digest: &Option<Hash>, to: S) -> Result<S::Ok, S::Error> {
        digest.map(|digest| digest.to_hex().to_string()).serialize(to)
    }

    pub fn deserialize<'de, D: Deserializer<'de>>(from: D) -> Result<Option<Hash>, D::Error> {
        let text: Option<String> = Option::deserialize(from)?;
        text.map(|hex| Hash::from_hex(hex).map_err(D::Error::custom)).transpose()
    }
}
