//! The rules that a reader relies on and no compiler checks: who imports whom, where unsafe code lives,
//! how long files get, and that the commands in the README, the justfile and CI are the same.

use std::collections::BTreeMap;
use std::fs;
use std::path::{Path, PathBuf};

/// Aim at 400 lines; a file beyond this bound is two ideas.
const FILE_LINES_MAX: usize = 600;
const FILE_LINES_AIM: usize = 400;

/// The only places with unsafe code: the calls of MPI and of NCCL, the system calls for the processes of
/// the Python tool and of a task's own program, two seams of the tensor ops that the borrow checker cannot
/// follow, vectors over packed weights, over tiles of a product and over few rows of one, launches on a
/// GPU, fresh buffers that are not cleared, the allocator, a hint to the cache, and one
/// environment variable set before any thread starts.
const UNSAFE_PLACES: [&str; 16] = [
    "src/allocator",
    "src/dist/mpi.rs",
    "src/dist/nccl.rs",
    "src/interpreter/",
    "src/main.rs",
    "src/ops/buffer.rs",
    "src/ops/cuda/",
    "src/ops/skinny_gemm.rs",
    "src/ops/packed_weights/blocks/",
    "src/ops/packed_weights/kernels",
    "src/ops/prefetch.rs",
    "src/ops/product.rs",
    "src/ops/sink_attention/rows.rs",
    "src/ops/tiles",
    "src/process_group.rs",
    "src/tasks/process.rs",
];

fn root() -> &'static Path {
    Path::new(env!("CARGO_MANIFEST_DIR"))
}

fn read(path: &str) -> String {
    fs::read_to_string(root().join(path)).unwrap_or_else(|e| panic!("{path}: {e}"))
}

/// Files below the folder `start`, as (path from the root, text), in order; what is not text is left out.
fn texts(start: &str) -> Vec<(String, String)> {
    let mut folders = vec![root().join(start)];
    let mut files: Vec<PathBuf> = vec![];
    while let Some(folder) = folders.pop() {
        for entry in fs::read_dir(&folder).unwrap_or_else(|e| panic!("{}: {e}", folder.display())) {
            let path = entry.expect("entry").path();
            if path.is_dir() { folders.push(path) } else { files.push(path) }
        }
    }
    files.sort();
    let name = |path: &Path| path.strip_prefix(root()).expect("below the root").display().to_string();
    files.iter().filter_map(|path| Some((name(path), fs::read_to_string(path).ok()?))).collect()
}

fn rust(start: &str) -> Vec<(String, String)> {
    texts(start).into_iter().filter(|(path, _)| path.ends_with(".rs")).collect()
}

/// Rust text without line comments. A `//` in a string cuts too much, which hides nothing looked for here.
fn code(text: &str) -> String {
    text.lines().map(|line| line.split("//").next().unwrap_or("")).collect::<Vec<_>>().join("\n")
}

fn identifier(text: &str) -> String {
    text.chars().take_while(|c| c.is_alphanumeric() || *c == '_').collect()
}

/// The modules that `code` names after `crate::`, braces included. The macro `bad_input!` belongs to `error`.
fn imports(code: &str) -> Vec<String> {
    let mut modules = vec![];
    for (at, matched) in code.match_indices("crate::") {
        let rest = &code[at + matched.len()..];
        if let Some(group) = rest.strip_prefix('{') {
            let (mut depth, mut first) = (0, true);
            for (i, c) in group.char_indices() {
                match c {
                    '}' if depth == 0 => break,
                    '{' => depth += 1,
                    '}' => depth -= 1,
                    ',' if depth == 0 => first = true,
                    c if first && !c.is_whitespace() => {
                        modules.push(identifier(&group[i..]));
                        first = false;
                    }
                    _ => {}
                }
            }
        } else {
            modules.push(identifier(rest));
        }
    }
    modules.into_iter().map(|module| if module == "bad_input" { "error".into() } else { module }).collect()
}

/// The table of `docs/ARCHITECTURE.md`: rows "| level | `module` | ...".
fn levels() -> BTreeMap<String, u32> {
    let page = read("docs/ARCHITECTURE.md");
    let mut levels = BTreeMap::new();
    for line in page.lines() {
        let cells: Vec<&str> = line.split('|').map(str::trim).collect();
        let [_, level, module, _, ..] = cells[..] else { continue };
        let Ok(level) = level.parse() else { continue };
        let module = module.trim_matches('`').trim_end_matches('/').trim_end_matches(".rs");
        assert!(levels.insert(module.to_owned(), level).is_none(), "{module} is in the table twice");
    }
    levels
}

/// The module of a file below `src/`.
fn module(path: &str) -> &str {
    let inside = path.strip_prefix("src/").expect("src/");
    inside.split('/').next().expect("a name").trim_end_matches(".rs")
}

#[test]
fn imports_go_strictly_downward() {
    let levels = levels();
    let mut seen = BTreeMap::new();
    let mut wrong = vec![];
    for (path, text) in rust("src") {
        let from = module(&path);
        if ["lib", "main"].contains(&from) {
            continue;
        }
        let level = *levels.get(from).unwrap_or_else(|| panic!("{path}: {from} is not in the table"));
        seen.insert(from.to_owned(), level);
        for to in imports(&code(&text)) {
            let known = levels.get(&to);
            if to != from && known.is_none_or(|&below| below >= level) {
                wrong.push(format!("{path} (level {level}) imports {to} (level {known:?})"));
            }
        }
    }
    assert!(wrong.is_empty(), "see docs/ARCHITECTURE.md:\n{}", wrong.join("\n"));
    assert_eq!(seen, levels, "modules in src/, modules in the table");
}

#[test]
fn imports_are_found_in_every_form() {
    let text =
        "use crate::{a::{b, c}, bad_input,\n    d};\nuse crate::e::f; // crate::g\nlet h = crate::i::j();";
    assert_eq!(imports(&code(text)), ["a", "error", "d", "e", "i"]);
}

#[test]
fn files_stay_short() {
    let mut long = vec![];
    for (path, text) in rust("src").into_iter().chain(rust("tests")) {
        let lines = text.lines().count();
        if lines > FILE_LINES_AIM {
            println!("{path}: {lines} lines, over the aim of {FILE_LINES_AIM}");
        }
        if lines > FILE_LINES_MAX {
            long.push(format!("{path}: {lines}"));
        }
    }
    assert!(long.is_empty(), "over {FILE_LINES_MAX} lines: {long:?}");
}

#[test]
fn unsafe_code_stays_in_its_places() {
    let mut found = vec![];
    for (path, text) in rust("src") {
        let words = ["unsafe {", "unsafe impl", "unsafe fn", "unsafe extern"];
        if words.iter().any(|word| code(&text).contains(word)) {
            found.push(path);
        }
    }
    for path in &found {
        assert!(UNSAFE_PLACES.iter().any(|place| path.starts_with(place)), "{path} has unsafe code");
    }
    for place in UNSAFE_PLACES {
        assert!(found.iter().any(|path| path.starts_with(place)), "{place} has no unsafe code any more");
    }
}

/// A path of the machine that a file was written on works nowhere else.
#[test]
fn no_file_names_this_machine() {
    let home = std::env::var("HOME").unwrap_or_default();
    let here = root().display().to_string();
    let places: Vec<String> =
        [here, format!("{home}/")].into_iter().filter(|place| place.len() > "/tmp/".len()).collect();
    let folders = ["src", "kernels", "tests", "docs", "recipes", "scripts", ".ci"];
    let tops = ["README.md", "Cargo.toml", "justfile", "clippy.toml"].map(|f| (f.to_owned(), read(f)));
    for (path, text) in folders.iter().flat_map(|folder| texts(folder)).chain(tops) {
        for place in &places {
            assert!(!text.contains(place.as_str()), "{path} names {place}");
        }
    }
}

/// The lines of the page's `sh` blocks.
fn readme_commands() -> Vec<String> {
    let page = read("README.md");
    let blocks = page.split("```sh\n").skip(1).map(|rest| rest.split("```").next().unwrap_or(""));
    blocks.flat_map(str::lines).map(|line| line.split(" #").next().unwrap_or("").trim().to_owned()).collect()
}

#[test]
fn the_readme_begins_with_a_run_and_the_tests_that_ci_runs() {
    let commands = readme_commands();
    assert_eq!(commands[0], "cargo run --release -- train recipes/quickstart.toml");
    assert_eq!(commands[1], "cargo test --release");
    let ci = read(".ci/run");
    let last = ci.lines().rfind(|line| !line.trim().is_empty()).expect("a command");
    assert_eq!(last, commands[1], "CI ends with the README's test command");
    assert!(ci.lines().any(|line| line.starts_with(&commands[0])), "CI runs the start of the quickstart");
}

#[test]
fn every_command_of_the_readme_exists() {
    let help = |arguments: &[&str]| {
        let output = std::process::Command::new(env!("CARGO_BIN_EXE_rloss")).args(arguments).output();
        output.expect("rloss starts").status.success()
    };
    let mut subcommands = vec![];
    for command in readme_commands() {
        if let Some((_, after)) = command.split_once("cargo run --release -- ") {
            subcommands.push(identifier_with_dashes(after));
        }
    }
    assert!(subcommands.len() >= 2, "{subcommands:?}");
    for subcommand in subcommands {
        assert!(help(&[&subcommand, "--help"]), "the README runs {subcommand}, which rloss does not know");
    }
}

fn identifier_with_dashes(text: &str) -> String {
    text.chars().take_while(|c| c.is_alphanumeric() || *c == '-').collect()
}

/// A justfile's recipes: a name and colon, then indented lines.
#[test]
fn the_justfile_checks_what_ci_checks() {
    let (justfile, ci) = (read("justfile"), read(".ci/run"));
    let mut checked = 0;
    for target in ["check:", "test:"] {
        let body = justfile.lines().skip_while(|line| *line != target).skip(1);
        for command in body.take_while(|line| line.starts_with("    ")) {
            assert!(ci.lines().any(|line| line == command.trim()), "CI does not run: {}", command.trim());
            checked += 1;
        }
    }
    assert!(checked >= 3, "check and test are in the justfile");
}

/// The modules that the file at `path` declares, as the files they may lie in.
fn declared(path: &str, text: &str) -> Vec<String> {
    let (folder, file) = path.rsplit_once('/').expect("a folder");
    let stem = file.trim_end_matches(".rs");
    let own =
        if ["mod", "lib", "main"].contains(&stem) { folder.to_owned() } else { format!("{folder}/{stem}") };
    let mut files = vec![];
    for line in code(text).lines() {
        let words: Vec<&str> = line.split_whitespace().collect();
        if let Some(name) = line.trim().strip_suffix(';').and_then(|_| words.iter().position(|w| *w == "mod"))
        {
            let name = words.get(name + 1).map_or("", |word| word.trim_end_matches(';'));
            files.extend([format!("{own}/{name}.rs"), format!("{own}/{name}/mod.rs")]);
        }
        // `#[path = "x.rs"]`, alone or behind a condition, counts from the folder of the file.
        if let Some((_, rest)) = line.split_once("path = \"") {
            files.push(format!("{folder}/{}", rest.split('"').next().unwrap_or("")));
        }
    }
    files
}

/// A file that no module declares is compiled by nobody, and looks as if it were.
#[test]
fn every_source_file_is_a_module_of_another() {
    let (mut declared_files, mut all) = (vec![], vec![]);
    for (path, text) in ["src", "tests/suite"].iter().flat_map(|folder| rust(folder)) {
        declared_files.extend(declared(&path, &text));
        all.push(path);
    }
    let roots = ["src/lib.rs", "src/main.rs", "tests/suite/main.rs"];
    all.retain(|path| !roots.contains(&path.as_str()) && !declared_files.contains(path));
    assert!(all.is_empty(), "no one declares {all:?}");
}

/// What two files may call the same: twins, of which a build compiles one.
const TWINS: [&str; 2] = ["_unsupported.rs", "/cuda/"];

/// A reader who searches a type's name finds one thing. (What no command uses, the compiler says: feature
/// `whole`.)
#[test]
fn no_two_public_types_share_a_name() {
    let mut places: BTreeMap<String, Vec<String>> = BTreeMap::new();
    for (path, text) in
        rust("src").into_iter().filter(|(path, _)| !TWINS.iter().any(|twin| path.contains(twin)))
    {
        for line in code(&text).lines() {
            let words: Vec<&str> = line.split_whitespace().collect();
            // A macro's `$name` is none yet.
            if let ["pub", "struct" | "enum" | "trait" | "type", name, ..] = words[..]
                && !name.starts_with('$')
            {
                places.entry(identifier(name)).or_default().push(path.clone());
            }
        }
    }
    places.retain(|_, files| files.len() > 1);
    assert!(places.is_empty(), "one name, one thing: {places:#?}");
}

/// The rules of comments: no line over [`COMMENT_COLUMNS_MAX`] columns, links and tables aside, and no doc
/// comment that begins with one of [`DOC_STARTS_REFUSED`] instead of what the item is.
const COMMENT_COLUMNS_MAX: usize = 110;
const DOC_STARTS_REFUSED: [&str; 3] = ["What", "The same", "So many"];

/// Violations in the text of a file: line number and reason.
fn comment_violations(text: &str) -> Vec<(usize, String)> {
    let (mut violations, mut mark_before) = (vec![], None);
    for (number, line) in text.lines().enumerate().map(|(i, line)| (i + 1, line)) {
        let comment = line.trim_start();
        let mark = ["///", "//!", "//"].into_iter().find(|mark| comment.starts_with(mark));
        let Some(words) = mark.map(|mark| comment[mark.len()..].trim_start()) else {
            mark_before = None;
            continue;
        };
        let exempt = words.starts_with('|') || words.contains("](") || words.contains("http");
        if line.chars().count() > COMMENT_COLUMNS_MAX && !exempt {
            violations.push((number, format!("over {COMMENT_COLUMNS_MAX} columns")));
        }
        let begins = |start: &&str| {
            let rest = words.strip_prefix(*start);
            rest.is_some_and(|rest| !rest.starts_with(|c: char| c.is_alphanumeric() || c == '_'))
        };
        if mark != Some("//") && mark != mark_before {
            let start = DOC_STARTS_REFUSED.iter().find(|start| begins(start));
            violations.extend(start.map(|start| (number, format!("a doc comment begins with {start:?}"))));
        }
        mark_before = mark;
    }
    violations
}

#[test]
fn comments_follow_the_rules() {
    let mut wrong = vec![];
    for (path, text) in rust("src") {
        for (line, reason) in comment_violations(&text) {
            wrong.push(format!("{path}:{line}: {reason}"));
        }
    }
    assert!(wrong.is_empty(), "{wrong:#?}");
}

#[test]
fn a_comment_that_breaks_a_rule_is_found() {
    let long = "x".repeat(COMMENT_COLUMNS_MAX);
    let text = format!(
        "/// What it is.\n/// The same, again.\nfn a() {{}} // {long}\n    /// So many.\n/// Whatever.\n\
         // What is no doc comment.\n// {long}\n// [{long}](x)\n//! | {long} |\n"
    );
    let lines: Vec<usize> = comment_violations(&text).into_iter().map(|(line, _)| line).collect();
    assert_eq!(lines, [1, 4, 7]);
}

/// Lines of a Markdown page over [`COMMENT_COLUMNS_MAX`] columns; tables, code and links aside.
fn long_lines_of_prose(text: &str) -> Vec<usize> {
    let (mut long, mut in_code) = (vec![], false);
    for (number, line) in text.lines().enumerate().map(|(i, line)| (i + 1, line)) {
        let words = line.trim_start();
        in_code ^= words.starts_with("```");
        let exempt = in_code || words.starts_with('|') || words.contains("](") || words.contains("http");
        if line.chars().count() > COMMENT_COLUMNS_MAX && !exempt {
            long.push(number);
        }
    }
    long
}

#[test]
fn pages_stay_within_the_columns() {
    let mut wrong = vec![];
    let mut pages: Vec<_> = ["docs", "tests"].into_iter().flat_map(texts).collect();
    for entry in fs::read_dir(root()).expect("the root") {
        let path = entry.expect("entry").path();
        if path.extension().is_some_and(|extension| extension == "md") {
            pages.push((path.display().to_string(), fs::read_to_string(&path).expect("a page")));
        }
    }
    for (path, text) in pages.into_iter().filter(|(path, _)| path.ends_with(".md")) {
        wrong.extend(long_lines_of_prose(&text).into_iter().map(|line| format!("{path}:{line}")));
    }
    assert!(wrong.is_empty(), "{wrong:#?}");
    let long = "x ".repeat(COMMENT_COLUMNS_MAX);
    assert_eq!(long_lines_of_prose(&format!("{long}\n| {long}\n```sh\n{long}\n```\n{long}")), [1, 6]);
}
