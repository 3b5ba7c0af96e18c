//! `rloss verify FOLDER`: verifies the integrity of a run or a model.

use crate::atomic_file::write_file;
use crate::bad_input;
use crate::bounded_file::{self, TOML_BYTES_MAX};
use crate::checkpoint;
use crate::error::{EXIT_BAD_INPUT, EXIT_SUCCESS};
use crate::integrity::{ChecksumStatus, MANIFEST_FILE, Manifest, add_checksum, remove_checksum};
use crate::metrics::{format_count, read_rows, sanitize_terminal};
use crate::recipe::{KeyScope, resolve_run_recipe};
use crate::run::run_folder::lock;
use crate::run::sampling_folder::print_text;
use anyhow::Result;
use clap::Args;
use std::path::{Path, PathBuf};

/// Arguments of `rloss verify`.
#[derive(Args, Debug, Clone)]
pub struct VerifyArgs {
    /// A run folder, a checkpoint or a model folder
    folder: PathBuf,
    /// Accept the current files: write a new checksum for an edited recipe.toml of a run, or a new manifest
    /// for a model or checkpoint
    #[arg(long)]
    accept: bool,
}

/// Prints one line per check. The exit code is 2 if a file is damaged. Without `--accept`, nothing is
/// changed.
///
/// # Errors
/// [`crate::error::BadInput`] when the folder is neither a run nor a model.
pub fn run(args: &VerifyArgs) -> Result<u8> {
    let folder = &args.folder;
    let is_run = folder.join("recipe.toml").exists() || folder.join("checkpoints").is_dir();
    if !is_run && !folder.join("config.json").exists() && !folder.join(MANIFEST_FILE).exists() {
        return Err(bad_input!(
            "{}: neither a run folder nor a model; name a folder with a recipe.toml or a config.json",
            folder.display()
        ));
    }
    let findings = match (is_run, args.accept) {
        (true, true) => vec![accept_recipe(folder)?],
        (false, true) => vec![accept_files(folder)?],
        (true, false) => check_run(folder)?,
        (false, false) => vec![model_finding(folder)],
    };
    let lines = findings.iter().map(|finding| match finding {
        Ok(text) => format!("{text}\n"),
        Err(text) => format!("DAMAGED: {text}\n"),
    });
    print_text(&sanitize_terminal(&lines.collect::<String>()))?;
    Ok(if findings.iter().any(Result::is_err) { EXIT_BAD_INPUT } else { EXIT_SUCCESS })
}

/// Result of a check. `Ok`: the file is intact, or cannot be verified. `Err`: the file is damaged.
type Finding = Result<String, String>;

fn check_run(run: &Path) -> Result<Vec<Finding>> {
    let recipe = run.join("recipe.toml");
    let text = bounded_file::read_text(&recipe, TOML_BYTES_MAX);
    let path_text = recipe.display();
    let mut findings = vec![match text.map(|text| ChecksumStatus::check(&text, run)) {
        Ok(ChecksumStatus::Valid) => Ok(format!("{path_text}: intact")),
        Ok(ChecksumStatus::Missing) => {
            Ok(format!("{path_text}: cannot be verified, because it has no checksum"))
        }
        Ok(ChecksumStatus::Invalid) => Err(format!(
            "{path_text}: it was truncated or changed; restore it (each checkpoint has a copy, trainer.toml), or after a deliberate edit: \
             rloss verify --accept {}",
            run.display()
        )),
        Err(e) => Err(format!("{path_text}: cannot be read: {e}")),
    }];
    let checkpoints = checkpoint::check_all_checkpoints(run)?;
    for (folder, found) in &checkpoints {
        let path_text = folder.display();
        findings.push(match found {
            Ok(check) if check.is_verified => Ok(format!("{path_text}: intact, with the metrics before it")),
            Ok(_) => Ok(format!("{path_text}: cannot be verified, because it has no manifest")),
            Err(error) => Err(format!("{error:#}")),
        });
    }
    let metrics = run.join("metrics.jsonl");
    if metrics.exists() {
        let path_text = metrics.display();
        findings.push(match read_rows(&metrics) {
            Ok(rows) => Ok(format!("{path_text}: {} can be read", format_count(rows.len() as u64, "row"))),
            Err(error) => Err(format!("{error:#}")),
        });
    }
    let newest = checkpoints.iter().rev().find(|(_, found)| found.is_ok());
    if let (Some((newest, _)), true) = (newest, checkpoints.last().is_some_and(|(_, found)| found.is_err())) {
        findings.push(Ok(format!("{}: the newest intact checkpoint", newest.display())));
    }
    Ok(findings)
}

fn model_finding(folder: &Path) -> Finding {
    let path_text = folder.display();
    match checkpoint::verify_folder(folder) {
        Ok(true) => Ok(format!("{path_text}: intact")),
        Ok(false) => Ok(format!(
            "{path_text}: cannot be verified, because it has no {MANIFEST_FILE}; --accept writes one"
        )),
        Err(error) => Err(format!("{error:#}")),
    }
}

fn accept_recipe(run: &Path) -> Result<Finding> {
    let _lock = lock(run)?;
    let file = run.join("recipe.toml");
    let text = bounded_file::read_text(&file, TOML_BYTES_MAX)
        .map_err(|e| bad_input!("{}: cannot be read: {e}; restore it", file.display()))?;
    let text = remove_checksum(&text);
    resolve_run_recipe(KeyScope::Export, &file, &text, &[])?;
    write_file(&file, &add_checksum(&text))?;
    Ok(Ok(format!("{}: new checksum written", file.display())))
}

fn accept_files(folder: &Path) -> Result<Finding> {
    let manifest = Manifest::from_folder(folder)?;
    manifest.write(folder)?;
    Ok(Ok(format!("{}: written for the current files", folder.join(MANIFEST_FILE).display())))
}
