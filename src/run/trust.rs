//! Trust in the programs that a run folder names. Another user may have made the folder.
//!
//! If this user made the run folder, its file `programs.b3` has one digest per program, keyed with the user's
//! key.

use crate::atomic_file::write_file;
use crate::bad_input;
use crate::bounded_file::{self, SMALL_FILE_BYTES_MAX};
use crate::error::shell_quote;
use crate::interpreter::{InterpreterKind, InterpreterSettings};
use crate::metrics::{Console, sanitize_line, sanitize_terminal};
use crate::recipe::{Recipe, RecipeSource, override_key};
use crate::settings::Entry;
use crate::user_key::{key_folder, user_key};
use anyhow::Result;
use std::io::{IsTerminal, Write};
use std::path::Path;

pub(super) const PROGRAMS_FILE: &str = "programs.b3";

/// Name of the file that has the key of the digests.
const KEY_FILE: &str = "runs.key";

/// A recipe key that starts a program or disables the sandbox.
struct Program {
    key: &'static str,
    /// The key with its value, as in a recipe.
    text: String,
}

impl Program {
    /// Returns the keyed digest of the program. `None` if this user has no key.
    fn digest(&self) -> Option<String> {
        let key = user_key(&key_folder()?, KEY_FILE).ok()?;
        Some(blake3::keyed_hash(&key, self.text.as_bytes()).to_hex().to_string())
    }
}

/// Lists the programs that run with the user's rights: the task's program, a Python other than the default,
/// and the model's code if it runs without a sandbox.
fn programs(recipe: &Recipe) -> Vec<Program> {
    let interpreter = &recipe.interpreter;
    let other_python = interpreter.kind == InterpreterKind::CPython
        && interpreter.python != InterpreterSettings::default().python;
    let keys = [
        ("task.command", recipe.task.name.keys.contains(&"command")),
        ("task.file", recipe.task.name.keys.contains(&"file")),
        ("tools.mcp.command", recipe.tools.is_some()),
        ("interpreter.python", other_python),
        ("interpreter.dangerously_allow_unsandboxed", interpreter.dangerously_allow_unsandboxed),
    ];
    let entries = recipe.entries();
    let value = |key: &str| {
        entries.iter().find_map(|entry| match entry {
            Entry::Key { path, value: Some(value), .. } if path == key => Some(value.clone()),
            _ => None,
        })
    };
    let used_keys = keys.into_iter().filter(|(_, is_used)| *is_used);
    used_keys.filter_map(|(key, _)| Some(Program { key, text: format!("{key} = {}", value(key)?) })).collect()
}

/// Returns lines that show which programs `recipe` starts.
pub fn program_lines(recipe: &Recipe) -> Vec<String> {
    programs(recipe)
        .iter()
        .map(|program| sanitize_line(&format!("starts   {}", program.text)).into())
        .collect()
}

/// Prints the programs of `recipe` before they start. If another user's run folder names them, the user must
/// trust them: with `trust`, or with an answer at the terminal. Programs that the user set with `sets` are
/// trusted.
///
/// # Errors
/// [`crate::error::BadInput`] if the user does not trust them.
pub fn ask_consent(
    source: &RecipeSource,
    recipe: &Recipe,
    sets: &[String],
    trust: bool,
    console: &Console,
) -> Result<()> {
    program_lines(recipe).iter().for_each(|line| console.print(line));
    let (RecipeSource::Run(run) | RecipeSource::Checkpoint { run, .. }) = source else { return Ok(()) };
    let trusted = bounded_file::read_text(&run.join(PROGRAMS_FILE), SMALL_FILE_BYTES_MAX).unwrap_or_default();
    let needs_trust = |program: &Program| {
        let is_set = sets.iter().any(|set| override_key(set) == Some(program.key));
        let is_trusted = || program.digest().is_some_and(|digest| trusted.lines().any(|line| line == digest));
        !is_set && !is_trusted()
    };
    if trust || !programs(recipe).iter().any(needs_trust) {
        return Ok(());
    }
    if std::io::stdin().is_terminal() && std::io::stderr().is_terminal() && ask_user(run)? {
        // If the folder cannot be written, the user is asked again next time.
        let _ = mark_trusted(run, recipe);
        return Ok(());
    }
    let path_text = run.display();
    Err(bad_input!(
        "{path_text}: this user did not make this run, and it starts {}; rloss check --no-run {} shows the recipe and starts \
         nothing; to start it, add --trust",
        programs(recipe).iter().map(|program| program.text.as_str()).collect::<Vec<_>>().join(" and "),
        shell_quote(&path_text.to_string())
    ))
}

/// Asks the user at the terminal. Returns whether the answer is yes.
fn ask_user(run: &Path) -> Result<bool> {
    let question = format!("{}: this user did not make this run. Start its programs? [y/N] ", run.display());
    let mut stderr = std::io::stderr();
    write!(stderr, "{}", sanitize_terminal(&question))?;
    stderr.flush()?;
    let mut answer = String::new();
    std::io::stdin().read_line(&mut answer)?;
    Ok(["y", "yes"].contains(&answer.trim().to_lowercase().as_str()))
}

/// Marks the programs of `recipe` as trusted in the run folder `folder`. Does nothing if this user has no
/// key.
///
/// # Errors
/// When the disk cannot be written.
pub(super) fn mark_trusted(folder: &Path, recipe: &Recipe) -> Result<()> {
    let digests: String =
        programs(recipe).iter().filter_map(|program| Some(program.digest()? + "\n")).collect();
    if digests.is_empty() { Ok(()) } else { write_file(&folder.join(PROGRAMS_FILE), &digests) }
}
