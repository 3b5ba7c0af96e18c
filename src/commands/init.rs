//! `rloss init NAME`: writes a recipe with comments, either with a task program that runs without changes, or
//! for a given model.

use crate::bad_input;
use crate::checkpoint::hub;
use crate::commands::arguments::absolute_path_text;
use crate::recipe::{KeyScope, RecipeSource, locate, resolve_for};
use crate::run::header::command_line;
use crate::run::sampling_folder::print_text;
use crate::run::sizing::propose_sizes;
use crate::table_file;
use crate::tasks::{TaskSettings, propose_columns, with_columns};
use anyhow::Result;
use clap::Args;
use serde_json::json;
use std::borrow::Cow;
use std::collections::BTreeMap;
use std::fs::OpenOptions;
use std::io::Write;
use std::path::{Path, PathBuf};

const RECIPE: &str = include_str!("init/recipe.toml");
const PROGRAM: &str = include_str!("init/task.py");

/// Number of demonstration prompts. Each asks to double a number, and has several answers.
const NUMBERS: u32 = 100;
/// Error of each answer: the first answer is right, the others are wrong.
const ANSWERS: [i64; 3] = [0, 1, -2];

/// Arguments of `rloss init`.
#[derive(Args, Debug, Clone)]
pub struct InitArgs {
    /// Name of the task to learn: NAME.toml, NAME.py and NAME.jsonl are written here; with --from, only
    /// NAME.toml
    name: String,
    /// Write a recipe with sizes for this machine, based on RECIPE: a file or a built-in recipe
    #[arg(long, value_name = "RECIPE", requires = "model")]
    from: Option<PathBuf>,
    /// The model to train: a folder with config.json, tokenizer.json and *.safetensors, a GGUF file, or the
    /// hub's name
    #[arg(long, value_name = "FOLDER", requires = "from")]
    model: Option<PathBuf>,
    /// The training problems, in the format of RECIPE's task
    #[arg(long, value_name = "FILE", requires = "from")]
    train_file: Option<PathBuf>,
    /// The held-out problems, in the same format
    #[arg(long, value_name = "FILE", requires = "from")]
    validation_file: Option<PathBuf>,
}

/// Writes the files and prints the next steps. If one of the files exists, writes none.
///
/// # Errors
/// [`crate::error::BadInput`] for an invalid name, and for a file that exists or cannot be written.
pub fn run(args: &InitArgs) -> Result<()> {
    let name = &args.name;
    let allowed = |c: char| c.is_ascii_alphanumeric() || c == '_' || c == '-';
    if name.is_empty() || name.starts_with('-') || !name.chars().all(allowed) {
        return Err(bad_input!("init: {name:?} is not a valid name; use only letters, digits, _ and -"));
    }
    if let (Some(from), Some(model)) = (&args.from, &args.model) {
        return write_derived_recipe(args, from, model);
    }
    let [recipe, program, demonstrations] = ["toml", "py", "jsonl"].map(|kind| format!("{name}.{kind}"));
    let fill = |text: &str| {
        let text = text.replace("{recipe}", &recipe).replace("{program}", &program);
        text.replace("{demonstrations}", &demonstrations)
    };
    let files = [(&recipe, fill(RECIPE)), (&program, fill(PROGRAM)), (&demonstrations, rows())];
    for (file, _) in &files {
        refuse_existing(file)?;
    }
    let mut output = String::new();
    for ((file, text), what) in
        files.iter().zip(["the recipe", "the task: problems and rewards", "demonstrations"])
    {
        write(Path::new(file), text)?;
        output += &format!("{file:<24} {what}\n");
    }
    output += &format!("\nnext: {}\n", command_line(&["train", &recipe]));
    print_text(&output)
}

fn refuse_existing(file: &str) -> Result<()> {
    match Path::new(file).exists() {
        true => Err(bad_input!("init: {file} already exists and is not changed; choose another name")),
        false => Ok(()),
    }
}

/// Writes a recipe that is based on `from` and trains `model` with sizes for this machine, on the data files
/// of `args`.
fn write_derived_recipe(args: &InitArgs, from: &Path, model: &Path) -> Result<()> {
    let file = format!("{}.toml", args.name);
    refuse_existing(&file)?;
    let source = locate(from)?;
    let base = match &source {
        RecipeSource::BuiltIn { name, .. } => (*name).to_owned(),
        source => absolute_path_text(&source.recipe_file(), "folder")?,
    };
    if !model.exists() && hub::find(model).is_none() {
        return Err(bad_input!(
            "--model: no folder and no GGUF file at {}{}; name a folder with config.json, tokenizer.json and *.safetensors",
            model.display(),
            hub::advice(model)
        ));
    }
    // A name of the hub stays one, so that the recipe works elsewhere.
    let model = match hub::name(model) {
        Some(name) => toml::Value::String(name).to_string(),
        None => path_value(model)?,
    };
    let base_text = toml::Value::String(base.clone());
    let mut tables = format!("base = {base_text}\n\n[model]\npath = {model}\n");
    // The file takes the place of the base's files.
    let base_plan = resolve_for(KeyScope::Export, Path::new(&file), &tables, &[])?;
    let task = &base_plan.recipe.task;
    if (args.train_file.is_some() || args.validation_file.is_some())
        && !task.name.reads_files
        && !task.is_agent()
    {
        return Err(bad_input!(
            "--train-file, --validation-file: the task {} of {base} generates its problems; leave them out, or start from \
             another recipe",
            task.name
        ));
    }
    let has_several = !task.validation_files.is_empty();
    let data_files = [("train_file", &args.train_file), ("validation_file", &args.validation_file)];
    if data_files.iter().any(|(_, file)| file.is_some()) {
        tables += "\n[task]\n";
    }
    if let Some(file) = args.train_file.as_ref().or(args.validation_file.as_ref()) {
        let columns = propose_columns_of(file, task)?;
        if !columns.is_empty() {
            let columns =
                columns.iter().map(|(name, path)| format!("{name} = {}", toml::Value::from(&**path)));
            tables += &format!("columns = {{ {} }}\n", columns.collect::<Vec<_>>().join(", "));
        }
    }
    for (key, file) in data_files {
        let Some(file) = file else { continue };
        let file = path_value(file)?;
        tables += &match key {
            "validation_file" if has_several => format!("validation_files = [{file}]\n"),
            key => format!("{key} = {file}\n"),
        };
    }
    let sizing = propose_sizes(Path::new(&file), &tables)?;
    let (missing, fetched) = &sizing.missing_data;
    let missing: Vec<String> = missing.iter().map(|file| file.display().to_string()).collect();
    let data = match (missing.is_empty(), fetched.is_empty()) {
        (true, _) => String::new(),
        (false, true) => "# Its data files are missing: name yours in [task].\n".to_owned(),
        (false, false) => format!(
            "# Fetch its data with: rloss fetch {fetched}\n\
             # Or name files of yours: [task], train_file = \"FILE\", validation_file = \"FILE\"\n"
        ),
    };
    let mut text = format!(
        "# {base} with sizes for {}: training takes {}.\n\
         #   rloss check {file}         the prompt, the memory and the keys that differ; --all shows every key\n\
         #   rloss train {file}\n\
         # Aim at steps of minutes. More prompts and samples per step make training steadier, and a step longer.\n\
         {data}{tables}",
        sizing.machine, sizing.memory,
    );
    let mut table = "";
    let mut changes = sizing.changes;
    changes.sort_by_key(|(key, ..)| key.rsplit_once('.').map(|(table, _)| table));
    for (key, value, remark) in &changes {
        let (around, key) = key.rsplit_once('.').unwrap_or(("", key));
        if around != table {
            text += &format!("\n[{around}]\n");
            table = around;
        }
        let line = format!("{key} = {value}");
        text += &if remark.is_empty() { format!("{line}\n") } else { format!("{line:<31} # {remark}\n") };
    }
    write(Path::new(&file), &text)?;
    let mut output = format!("{file:<24} the recipe\n");
    if let Some((response, before)) = sizing.shorter_response {
        output += &format!(
            "\nAnswers are truncated at {response} tokens ({before} in {base}), so that a step takes minutes on this machine: \
             rollout.response_tokens_max\n"
        );
    }
    if args.train_file.is_some() && args.validation_file.is_none() {
        output += &match has_several || task.validation_file.is_some() {
            true => {
                format!("\nThe validation problems stay those of {base}; --validation-file names yours.\n")
            }
            false => "\nThere are no validation problems; --validation-file names yours.\n".to_owned(),
        };
    }
    if !missing.is_empty() {
        output += &format!("\nno data at {}\n", missing.join(", "));
        let words = ["fetch"].into_iter().chain(fetched.split_whitespace());
        output += &match fetched.is_empty() {
            true => "name the files in [task] of the recipe\n".to_owned(),
            false => format!(
                "fetch it: {}\nor name files of yours in {file}: [task], train_file and validation_file\n",
                command_line(&words.collect::<Vec<_>>())
            ),
        };
    }
    if !sizing.fits {
        output += &format!(
            "\nThis takes {}, more than is free on this machine; rloss check names what helps.\n",
            sizing.memory
        );
    }
    output += &format!("\nnext: {}\n", command_line(&["check", &file]));
    print_text(&output)
}

/// Returns the columns that `task` needs, beside its own, to read the rows of `path`.
fn propose_columns_of(path: &Path, task: &TaskSettings) -> Result<BTreeMap<String, String>> {
    let names = task.name.columns;
    let unreadable =
        |e: std::io::Error| bad_input!("{}: cannot read the rows: {e}; name a file of rows", path.display());
    // The data may come later.
    if names.is_empty() || !path.exists() && table_file::files(path).is_err() {
        return Ok(BTreeMap::new());
    }
    let files = table_file::files(path).map_err(unreadable)?;
    let Some(file) = files.first().filter(|file| file.exists()) else { return Ok(BTreeMap::new()) };
    let first = table_file::open(file).map_err(unreadable)?.next().transpose().map_err(unreadable)?;
    let Some(row) = first else { return Err(bad_input!("{}: no rows; name a file of rows", path.display())) };
    // Columns that the base names stay, if the rows have them.
    let columns = row.value.and_then(|row| {
        let row = with_columns(&row, &task.columns).unwrap_or(Cow::Borrowed(&row));
        propose_columns(&row, names)
    });
    columns.map_err(|why| {
        bad_input!(
            "{}: row {}: {why}; write a recipe with [task], columns = {{ {} = \"COLUMN\" }}, and name it with --from",
            path.display(),
            row.number,
            names[0]
        )
    })
}

/// Returns the absolute path of `path` as a TOML string.
fn path_value(path: &Path) -> Result<String> {
    Ok(toml::Value::String(absolute_path_text(path, "folder")?).to_string())
}

/// Returns conversations in JSON lines. One answer in three is right.
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
        bad_input!("init: {}: cannot be written: {e}; run it in a folder that you can write", path.display())
    })
}
