//! Checks of a command that do not run it.

use super::extract::shell_words;
use std::path::Path;

/// Folders of the repository whose files commands name.
const FOLDERS: [&str; 7] = ["recipes/", "scripts/", "examples/", "tests/", "docs/", "benches/", ".ci/"];

pub fn root() -> &'static Path {
    Path::new(env!("CARGO_MANIFEST_DIR"))
}

fn read(path: &str) -> String {
    std::fs::read_to_string(root().join(path)).unwrap_or_default()
}

/// Returns what is wrong with a command: files that do not exist, options that `rloss` or a script does not
/// have, unknown recipes of just, unknown targets, features and tests of cargo.
pub fn mistakes(command: &str) -> Vec<String> {
    let words = shell_words(command);
    let mut mistakes: Vec<String> = paths(&words)
        .filter(|path| !root().join(path).exists())
        .map(|path| format!("{path} does not exist"))
        .collect();
    match words.first().map(String::as_str) {
        Some("rloss") => mistakes.extend(parse(&words).err()),
        Some("cargo") => mistakes.append(&mut mistakes_of_cargo(&words)),
        Some("just") => {
            let name = &words[1];
            let is_name =
                |line: &str| line.strip_prefix(name).is_some_and(|rest| rest.starts_with([':', ' ']));
            mistakes.extend(
                (!read("justfile").lines().any(is_name)).then(|| format!("the justfile has no {name}")),
            );
        }
        Some(script) if script.ends_with(".py") || script.ends_with(".sh") => {
            let text = read(script);
            for option in
                words.iter().map(|word| word.trim_matches(['[', ']'])).filter(|word| word.starts_with("--"))
            {
                let option = option.split('=').next().unwrap_or(option);
                mistakes.extend((!text.contains(option)).then(|| format!("{script} has no {option}")));
            }
        }
        _ => {}
    }
    mistakes
}

/// Returns the words that are files of the repository, without what a shell writes around them.
fn paths(words: &[String]) -> impl Iterator<Item = &str> {
    words
        .iter()
        .flat_map(|word| word.split([' ', '(', ')']))
        .filter(|word| FOLDERS.iter().any(|folder| word.starts_with(folder)))
}

/// Parses a command line of `rloss` as the program does.
fn parse(words: &[String]) -> Result<clap::ArgMatches, String> {
    let words = words.split(|word| [">", "|"].contains(&word.as_str())).next().unwrap_or_default();
    rloss::cli::command().try_get_matches_from(words).or_else(|error| match error.kind() {
        clap::error::ErrorKind::DisplayHelp => Ok(clap::ArgMatches::default()),
        _ => Err(error.to_string()),
    })
}

/// Returns the command that resolves the recipe of `command`, with its `--set`; `None` if it has no recipe,
/// or one of a run.
pub fn listed_recipe(command: &str) -> Option<String> {
    let words = shell_words(command);
    if words.first()? != "rloss" {
        return None;
    }
    let matches = parse(&words).ok()?;
    let (_, arguments) = matches.subcommand()?;
    let recipe = arguments.try_get_one::<std::path::PathBuf>("recipe").ok()??.display().to_string();
    let sets = arguments.try_get_many::<String>("sets").ok()?.unwrap_or_default();
    let sets: String = sets.map(|set| format!(" --set '{set}'")).collect();
    (!recipe.starts_with("runs/")).then(|| format!("rloss check --no-run {recipe}{sets} --set device=cpu"))
}

/// Checks targets and features against Cargo.toml, and a filter of `cargo test` against the sources.
fn mistakes_of_cargo(words: &[String]) -> Vec<String> {
    let manifest = read("Cargo.toml");
    let mut mistakes = vec![];
    for pair in
        words.windows(2).filter(|pair| ["--bench", "--test", "--example", "--features"].contains(&&*pair[0]))
    {
        for name in pair[1].split(',') {
            let is_known = match pair[0].as_str() {
                "--features" => manifest.lines().any(|line| line.starts_with(&format!("{name} = ["))),
                "--example" if root().join(format!("examples/{name}.rs")).exists() => true,
                _ => manifest.contains(&format!("name = \"{name}\"")),
            };
            mistakes.extend((!is_known).then(|| format!("Cargo.toml has no {name:?}")));
        }
    }
    let has_value =
        |option: &str| option.starts_with("--") && !["--release", "--lib", "--bins"].contains(&option);
    let filter = words.windows(2).skip(1).find(|pair| !has_value(&pair[0]) && !pair[1].starts_with('-'));
    if let Some([_, filter]) = filter.filter(|_| words[1] == "test") {
        let name = filter.rsplit("::").next().unwrap_or(filter);
        let mut grep = std::process::Command::new("grep");
        let found =
            grep.args(["-rqE", &format!("(fn|mod) \\w*{name}"), "src", "tests/suite"]).current_dir(root());
        mistakes.extend((!found.status().unwrap().success()).then(|| format!("no test is named {filter}")));
    }
    mistakes
}
