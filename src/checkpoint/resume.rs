//! The checkpoints of a run: their order, their state, and whether they are intact.

use super::{BASE_FOLDER, STATE_FILE, TrainerState, peft, reference};
use crate::atomic_file::is_partial;
use crate::bad_input;
use crate::bounded_file::{self, JSON_BYTES_MAX};
use crate::error::{BadInput, shell_quote};
use crate::integrity::{MANIFEST_FILE, Manifest, file_digest};
use crate::metrics::Phase;
use anyhow::{Context, Result};
use std::fs;
use std::io::ErrorKind;
use std::path::{Path, PathBuf};

/// The remedy for a damaged checkpoint.
pub(super) const DAMAGE_REMEDY: &str = "remove this checkpoint to continue from the one before";
/// The file of a run's metrics.
const METRICS_FILE: &str = "metrics.jsonl";

/// Returns the folder name of a checkpoint: `step-NNNNNN`, or `cold-start-NNNNNN` during SFT warm-up.
pub fn folder_name(phase: Phase, step: u64) -> String {
    let stem = if phase == Phase::SftWarmUp { "cold-start" } else { "step" };
    format!("{stem}-{step:06}")
}

/// Returns the order of the checkpoint called `name` in its run: SFT warm-up comes before reinforcement
/// learning.
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
    let text = bounded_file::read_text(&path, JSON_BYTES_MAX)
        .map_err(|e| bad_input!("{}: cannot be read: {e}", path.display()))?;
    serde_json::from_str(&text).map_err(|e| bad_input!("{}: damaged: {e}; {DAMAGE_REMEDY}", path.display()))
}

/// Returns every checkpoint of `run`, oldest first. It goes by folder names, so damaged files do not
/// matter.
pub(super) fn checkpoint_folders(run: &Path) -> Result<Vec<PathBuf>> {
    let mut found = vec![];
    let Ok(entries) = fs::read_dir(run.join("checkpoints")) else { return Ok(vec![]) };
    for entry in entries {
        let folder = entry.with_context(|| format!("{}", run.display()))?.path();
        let place = folder.file_name().and_then(|name| checkpoint_order(name.to_str()?));
        if let (Some(place), true) = (place, has_state(&folder)) {
            found.push((place, folder));
        }
    }
    found.sort();
    Ok(found.into_iter().map(|(_, folder)| folder).collect())
}

/// Whether `folder` is a checkpoint of a run, and not only a model.
pub fn has_state(folder: &Path) -> bool {
    [STATE_FILE, super::RECIPE_FILE].iter().any(|name| folder.join(name).is_file())
}

/// Returns the last checkpoint of the run folder `run`, unchecked, if there is one.
///
/// # Errors
/// When the folder cannot be read.
pub fn newest_folder(run: &Path) -> Result<Option<PathBuf>> {
    Ok(checkpoint_folders(run)?.pop())
}

/// An intact checkpoint.
#[derive(Debug, Clone)]
pub struct ResumePoint {
    pub folder: PathBuf,
    pub state: TrainerState,
    /// False without a manifest: its integrity cannot be verified.
    pub verified: bool,
}

/// Returns the last checkpoint of the run folder `run`, if there is one. Its files, the reference, and the
/// metrics up to its length must be intact.
///
/// # Errors
/// [`BadInput`] when they are not. The message names the newest intact checkpoint and how to continue from
/// it.
pub fn newest_intact_checkpoint(run: &Path) -> Result<Option<ResumePoint>> {
    let folders = checkpoint_folders(run)?;
    let Some((newest, older)) = folders.split_last() else { return Ok(None) };
    let flaw = match check_in_run(run, newest) {
        Ok(checkpoint) => return Ok(Some(checkpoint)),
        Err(flaw) => flaw,
    };
    let mut damaged = vec![newest];
    for folder in older.iter().rev() {
        if let Ok(sound) = check_in_run(run, folder) {
            return Err(add_recovery_hint(flaw, run, &damaged, &sound.folder));
        }
        damaged.push(folder);
    }
    Err(bad_input!(
        "{flaw:#}. No checkpoint of the run is sound; restore the files, or start it again in another folder"
    ))
}

/// Checks every checkpoint of `run` with the files that it depends on, oldest first.
///
/// # Errors
/// When the folder cannot be read.
pub fn check_all(run: &Path) -> Result<Vec<(PathBuf, Result<ResumePoint>)>> {
    Ok(checkpoint_folders(run)?
        .into_iter()
        .map(|folder| (folder.clone(), check_in_run(run, &folder)))
        .collect())
}

/// Checks the checkpoint or model `folder`. Returns whether it has a manifest.
///
/// # Errors
/// [`BadInput`] when a file was changed. For a run's checkpoint, the message names the newest intact one
/// and how to continue from it.
pub fn verify_folder(folder: &Path) -> Result<bool> {
    let flaw = match check_folder(folder) {
        Ok(verified) => return Ok(verified),
        Err(flaw) => flaw,
    };
    let full = std::path::absolute(folder).unwrap_or_else(|_| folder.to_owned());
    let Some(run) = full.parent().and_then(Path::parent) else { return Err(flaw) };
    let folders = checkpoint_folders(run)?;
    let older: Vec<&PathBuf> = folders.iter().take_while(|other| **other != full).collect();
    if older.len() == folders.len() {
        return Err(flaw);
    }
    match older.into_iter().rev().find(|folder| check_folder(folder).is_ok()) {
        Some(sound) => {
            let damaged: Vec<&PathBuf> = folders.iter().skip_while(|other| *other != sound).skip(1).collect();
            Err(add_recovery_hint(flaw, run, &damaged, sound))
        }
        None => Err(bad_input!("{flaw:#}. No older checkpoint of the run is sound")),
    }
}

/// Checks the files of `folder` against its manifest and its name. Returns whether it has a manifest.
fn check_folder(folder: &Path) -> Result<bool> {
    let verified = Manifest::check(folder)?;
    if !folder.join(STATE_FILE).is_file() {
        return Ok(verified);
    }
    let state = read_state(folder)?;
    if !verified && state.metrics_digest.is_some() {
        return Err(bad_input!("{}: is gone", folder.join(MANIFEST_FILE).display()));
    }
    let name = folder.file_name().unwrap_or_default().to_string_lossy();
    let written = folder_name(state.phase, state.step);
    if checkpoint_order(&name).is_some() && name != written {
        let file = folder.join(STATE_FILE);
        return Err(bad_input!("{}: damaged: it is the state of {written}", file.display()));
    }
    Ok(verified)
}

/// Checks the checkpoint `folder` of `run`, and the files of the run that it depends on.
fn check_in_run(run: &Path, folder: &Path) -> Result<ResumePoint> {
    let verified = check_folder(folder)?;
    let state = read_state(folder)?;
    check_metrics(&run.join(METRICS_FILE), folder, &state)?;
    let base = run.join(BASE_FOLDER);
    if peft::is_adapter_folder(folder) && base.is_dir() {
        Manifest::check(&base)?;
    }
    if let Some(digest) = state.reference_digest {
        reference::check(run, digest)?;
    }
    Ok(ResumePoint { folder: folder.to_owned(), state, verified })
}

/// Checks that the metrics up to the checkpoint are the bytes that its digest covers.
fn check_metrics(file: &Path, folder: &Path, state: &TrainerState) -> Result<()> {
    let (shown, bytes) = (file.display(), state.metrics_bytes);
    let length = match fs::metadata(file) {
        Ok(about) => about.len(),
        Err(e) if e.kind() == ErrorKind::NotFound && bytes > 0 => {
            let model = std::path::absolute(folder).unwrap_or_else(|_| folder.to_owned());
            return Err(bad_input!(
                "{shown}: is gone, and the checkpoint was written after {bytes} bytes of it. Restore it; or begin a new run \
                 from the weights: --out ANOTHER_FOLDER --set model.path={} --set cold_start.steps=0, without --resume",
                model.display()
            ));
        }
        Err(e) if e.kind() == ErrorKind::NotFound => return Ok(()),
        Err(e) => return Err(bad_input!("{shown}: cannot be read: {e}")),
    };
    if length < bytes {
        return Err(bad_input!(
            "{shown}: has {length} bytes, but the checkpoint was written after {bytes}. The file was changed since: restore it"
        ));
    }
    let Some(digest) = state.metrics_digest else { return Ok(()) };
    let found = file_digest(file, Some(bytes)).map_err(|e| bad_input!("{shown}: cannot be read: {e}"))?;
    if found != digest {
        return Err(bad_input!(
            "{shown}: damaged: its first {bytes} bytes are not those that the checkpoint was written after. Restore it"
        ));
    }
    Ok(())
}

/// Adds to `flaw` the newest intact checkpoint, and the command that continues from it.
fn add_recovery_hint(flaw: anyhow::Error, run: &Path, damaged: &[&PathBuf], sound: &Path) -> anyhow::Error {
    let shell = |path: &Path| shell_quote(&path.display().to_string());
    let aside = run.join("damaged");
    let folders: Vec<String> = damaged.iter().rev().map(|folder| shell(folder)).collect();
    let name = sound.file_name().unwrap_or_default().to_string_lossy();
    let place = shell(&aside);
    BadInput(format!(
        "{flaw:#}. The newest sound checkpoint is {name}; to go on from it, move the newer ones away and run the same command \
         again: mkdir -p {place} && mv {} {place}/",
        folders.join(" ")
    ))
    .into()
}

/// Removes partial checkpoints that a kill left in the run folder `run`.
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

/// Serialises a digest in `trainer.json` as hexadecimal digits.
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
