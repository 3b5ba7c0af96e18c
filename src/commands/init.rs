//! `rloss init NAME`: writes a commented recipe and a task program that run without changes.

use crate::bad_input;
use crate::error::EXIT_DONE;
use crate::run::header::command_line;
use crate::run::sampling_folder::print_text;
use anyhow::Result;
use clap::Args;
use serde_json::json;
use std::fs::OpenOptions;
use std::io::Write;
use std::path::Path;

const RECIPE: &str = include_str!("init/recipe.toml");
const PROGRAM: &str = include_str!("init/task.py");

/// Number of demonstration prompts, each a number to double. Each has several answers: the first is right,
/// the others are wrong.
const NUMBERS: u32 = 100;
const ANSWERS: [i64; 3] = [0, 1, -2];

/// Arguments of `rloss init`.
#[derive(Args, Debug, Clone)]
pub struct InitArgs {
    /// Name of the task to learn: NAME.toml, NAME.py and NAME.jsonl are written here
    name: String,
}

/// Writes the files and prints the next steps. If one of the files exists, none is written.
///
/// # Errors
/// [`crate::error::BadInput`] for an invalid name, and for a file that exists or cannot be written.
pub fn run(args: &InitArgs) -> Result<u8> {
    let name = &args.name;
    let allowed = |c: char| c.is_ascii_alphanumeric() || c == '_' || c == '-';
    if name.is_empty() || name.starts_with('-') || !name.chars().all(allowed) {
        return Err(bad_input!("init: {name:?} is not a valid name; use only letters, digits, _ and -"));
    }
    let [recipe, program, demonstrations] = ["toml", "py", "jsonl"].map(|kind| format!("{name}.{kind}"));
    let fill = |text: &str| {
        let text = text.replace("{recipe}", &recipe).replace("{program}", &program);
        text.replace("{demonstrations}", &demonstrations)
    };
    let files = [(&recipe, fill(RECIPE)), (&program, fill(PROGRAM)), (&demonstrations, rows())];
    if let Some((file, _)) = files.iter().find(|(file, _)| Path::new(file).exists()) {
        return Err(bad_input!("init: {file} already exists and stays unchanged; choose another name"));
    }
    let mut said = String::new();
    for ((file, text), what) in
        files.iter().zip(["the recipe", "the task: problems and rewards", "demonstrations"])
    {
        write(Path::new(file), text)?;
        said += &format!("{file:<24} {what}\n");
    }
    said += &format!("\nnext: {}\n", command_line(&["train", &recipe]));
    print_text(&said)?;
    Ok(EXIT_DONE)
}

/// Returns conversations in which one answer of three is right.
fn rows() -> String {
    let message = |role: &str, channel: Option<&str>, content: String| match channel {
        Some(channel) => json!({"role": role, "channel": channel, "content": content}),
        None => json!({"role": role, "content": content}),
    };
    let row = |n: u32, off: i64| {
        let answer = (i64::from(2 * n) + off).max(0).to_string();
        json!({"messages": [message("user", None, format!("2*{n}?")), message("assistant", Some("final"), answer)]})
    };
    (0..NUMBERS).flat_map(|n| ANSWERS.map(|off| format!("{}\n", row(n, off)))).collect()
}

fn write(path: &Path, text: &str) -> Result<()> {
    let made = OpenOptions::new().write(true).create_new(true).open(path);
    made.and_then(|mut file| file.write_all(text.as_bytes())).map_err(|e| {
        bad_input!("init: {}: cannot be written: {e}; run it in a folder where you can write", path.display())
    })
}
