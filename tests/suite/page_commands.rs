//! Every command that a page shows is run, or listed in [`LISTED`] with the reason why not. Pages are
//! README.md, CONTRIBUTING.md, docs/*.md, tests/cuda_*/README.md, and the comments of recipes/*.toml and
//! examples/*/*.toml.
//!
//! `stand_ins` makes the models, data and runs that commands name, all tiny, and shortens training to two
//! steps.

mod check;
mod extract;
mod stand_ins;

use crate::cli::text_of;
use crate::skips;
use check::{listed_recipe, mistakes, root};
use extract::{Shown, code_block, shown_commands};
use stand_ins::{PageFolder, StandIns, fill_placeholders};
use std::collections::BTreeSet;

/// Beginnings of the commands that are run.
const RUN: [&str; 7] =
    ["rloss ", "printf ", "head ", "tail ", "curl ", "source <(rloss ", "scripts/gsm8k_tool.py problems "];

const DOWNLOAD: &str = "needs a download";
const GPU: &str = "needs a GPU";
const PROCESSES: &str = "needs MPI or a second machine; tests/ranks runs several processes";
const MINUTES: &str = "takes minutes; CI runs what belongs to every change";
const PACKAGES: &str = "needs Python packages or another program";

/// Commands that are not run: beginnings, or whole commands that end in `$`. The lines of `rloss` among them
/// are parsed and their recipes resolved.
const LISTED: &[(&str, &str)] = &[
    ("rloss fetch ", DOWNLOAD),
    ("hf download ", DOWNLOAD),
    ("pip install ", DOWNLOAD),
    ("python3 -m venv ", PACKAGES),
    ("eval \"$(scripts/setup_cuda.sh", DOWNLOAD),
    ("scripts/check_kernels.sh", DOWNLOAD),
    ("scripts/roofline.py", DOWNLOAD),
    ("eval \"$(tests/cuda_driver/setup.sh", MINUTES),
    ("cargo ", MINUTES),
    ("just ", MINUTES),
    ("bash .ci/run", MINUTES),
    (".ci/", MINUTES),
    ("tests/", MINUTES),
    ("scripts/reproduce_figures.sh", MINUTES),
    ("scripts/package.sh", MINUTES),
    ("rloss train recipes/results/", MINUTES),
    ("rloss eval runs/gsm8k_short_lora ", MINUTES),
    ("rloss rollout recipes/results/", MINUTES),
    ("rloss eval runs/gsm8k_tool ", MINUTES),
    ("scripts/gsm8k_tool.py rows ", MINUTES),
    ("scripts/gsm8k_tool.py task ", MINUTES),
    ("scripts/gsm8k_tool.py init_tokens ", PACKAGES),
    ("scripts/bench_", PACKAGES),
    ("scripts/parity.py ", PACKAGES),
    ("scripts/trainer_parity.py ", PACKAGES),
    ("scripts/llama_cpp.py ", PACKAGES),
    ("scripts/tinker_sdk.py ", PACKAGES),
    ("TINKER_BASE_URL=", PACKAGES),
    ("scripts/random_checkpoint.py", PACKAGES),
    ("rloss train examples/agents/verifiers_classic.toml", PACKAGES),
    ("rloss report runs/shop$", PACKAGES),
    ("nvidia-smi$", GPU),
    ("export LD_LIBRARY_PATH=", GPU),
    ("scripts/gpu_check.sh", GPU),
    ("rloss train quickstart_cuda$", GPU),
    ("rloss check-mismatch runs/quickstart_cuda$", GPU),
    ("rloss train recipes/retool.toml --set model.path=FOLDER --set device=cuda$", GPU),
    ("torchrun ", GPU),
    ("scripts/launch.sh ", PROCESSES),
    ("sbatch ", PROCESSES),
];

/// Program blocks of pages that the page's commands expect in a file: page, file, a text of the block.
const BLOCKS_AS_FILES: [(&str, &str, &str); 3] = [
    ("README.md", "rewards.py", "def correct"),
    ("README.md", "mine.toml", "rewards.py"),
    ("docs/AGENTS.md", "mine.toml", "my_env"),
];

/// Returns whether a command is run; false if it is listed.
///
/// # Errors
/// It is neither run nor listed.
fn is_run(command: &str) -> Result<bool, String> {
    let is_listed = LISTED.iter().any(|(pattern, _)| match pattern.strip_suffix('$') {
        Some(whole) => command == whole,
        None => command.starts_with(pattern),
    });
    let is_run = !is_listed && RUN.iter().any(|program| command.starts_with(program));
    if is_run || is_listed { Ok(is_run) } else { Err("neither run nor listed".to_owned()) }
}

/// Returns every page: path from the root, text. `extension` selects files of `folder`.
fn pages() -> Vec<(String, String)> {
    let singles =
        ["README.md", "CONTRIBUTING.md", "tests/cuda_driver/README.md", "tests/cuda_host/README.md"];
    let mut paths: Vec<String> = singles.map(str::to_owned).to_vec();
    let folders =
        [("docs", "md"), ("recipes", "toml"), ("examples/agents", "toml"), ("examples/tasks", "toml")];
    for (folder, extension) in folders {
        let files = std::fs::read_dir(root().join(folder)).unwrap().map(|entry| entry.unwrap().path());
        let files = files.filter(|path| path.extension().is_some_and(|found| found == extension));
        let mut files: Vec<String> =
            files.map(|path| path.strip_prefix(root()).unwrap().display().to_string()).collect();
        files.sort();
        paths.append(&mut files);
    }
    let read = |path: &String| text_of(root().join(path));
    paths.iter().map(|path| (path.clone(), read(path))).collect()
}

/// Applies `check` to every command and expects no findings.
fn expect_none(check: impl Fn(&Shown) -> Vec<String>) {
    let mut wrong = vec![];
    for (page, text) in pages() {
        for shown in shown_commands(&page, &text) {
            let findings = check(&shown).into_iter();
            wrong.extend(findings.map(|finding| format!("{page}:{}: {}: {finding}", shown.line, shown.text)));
        }
    }
    assert!(wrong.is_empty(), "{wrong:#?}");
}

#[test]
fn every_command_of_a_page_is_run_or_listed() {
    expect_none(|shown| is_run(&shown.text).err().into_iter().collect());
}

#[test]
fn commands_of_pages_name_options_targets_and_files_that_exist() {
    expect_none(|shown| mistakes(&fill_placeholders(&shown.text)));
}

/// Runs the commands of one page in the page's order, and returns what failed.
fn run_page(stand_ins: &StandIns, has_curl: bool, page: &str, text: &str) -> Vec<String> {
    let mut folder = PageFolder::new(stand_ins);
    for (_, file, part) in BLOCKS_AS_FILES.iter().filter(|(of, ..)| *of == page) {
        folder.write(file, code_block(text, part).unwrap_or_else(|| panic!("{page}: no block with {part}")));
    }
    let mut wrong = vec![];
    let mut already_run = BTreeSet::new();
    for Shown { line, text } in shown_commands(page, text) {
        let command = fill_placeholders(&text);
        let command = match is_run(&text) {
            Ok(true) => Some(command).filter(|command| has_curl || !command.starts_with("curl ")),
            // Its recipe is resolved at least.
            Ok(false) => listed_recipe(&command),
            // Another test reports it.
            Err(_) => None,
        };
        if let Some(command) = command
            && already_run.insert(command.clone())
            && let Err(finding) = folder.run(&command)
        {
            wrong.push(format!("{page}:{line}: {text}: {finding}"));
        }
    }
    wrong
}

#[test]
fn commands_of_pages_run_on_tiny_stand_ins() {
    // Tasks of some pages are Python programs.
    let Some(()) = skips::python3() else { return };
    let has_curl = skips::curl();
    let stand_ins = StandIns::new();
    let pages = pages();
    let (even, odd): (Vec<_>, Vec<_>) = pages.iter().enumerate().partition(|(index, _)| index % 2 == 0);
    let run = |pages: &[(usize, &(String, String))]| -> Vec<String> {
        pages.iter().flat_map(|(_, (page, text))| run_page(&stand_ins, has_curl, page, text)).collect()
    };
    let wrong = std::thread::scope(|scope| {
        let other = scope.spawn(|| run(&odd));
        let mut wrong = run(&even);
        wrong.append(&mut other.join().unwrap());
        wrong
    });
    assert!(wrong.is_empty(), "{wrong:#?}");
}

#[test]
fn commands_are_found_in_pages_and_wrong_ones_are_reported() {
    let page = "Say `rloss train`, `rloss check --no-run` and `rloss chat\nRUN`; `rloss.toml` and `word` are none.\n\n\
                ```sh\nrloss train quickstart \\\n    --set a=\"b # c\"   # a comment\n# only a comment\n```\n\
                ```text\n$ just none\noutput\n```\n| `scripts/none.sh --now` |\n";
    let found = shown_commands("page.md", page);
    let found: Vec<(usize, &str)> = found.iter().map(|shown| (shown.line, shown.text.as_str())).collect();
    assert_eq!(
        found,
        [
            (1, "rloss train --help"),
            (1, "rloss check --help | grep -e --no-run"),
            (1, "rloss chat RUN"),
            (5, "rloss train quickstart --set a=\"b # c\""),
            (10, "just none"),
            (13, "scripts/none.sh --now"),
        ]
    );
    let recipe = "# Text: rloss train x --out y\n#   --set a=1\n#   --set b=2   # more\n\
                  # and `rloss check x`\nkey = 1\n";
    let found: Vec<String> =
        shown_commands("recipes/x.toml", recipe).into_iter().map(|shown| shown.text).collect();
    assert_eq!(
        found,
        ["rloss train x --out y", "rloss check recipes/x.toml --set a=1 --set b=2", "rloss check x"]
    );

    for (command, part) in [
        ("rloss train quickstart --sets a=1", "--sets"),
        ("rloss trian quickstart", "trian"),
        ("rloss check recipes/none.toml", "recipes/none.toml does not exist"),
        ("just none", "the justfile has no none"),
        ("cargo bench --bench none", "Cargo.toml has no \"none\""),
        ("cargo test --release no_such_name", "no test is named"),
        ("scripts/parity.py --none", "has no --none"),
    ] {
        let found = mistakes(command);
        assert!(found.len() == 1 && found[0].contains(part), "{command}: {found:?}");
    }
    assert_eq!(is_run("rm -r x"), Err("neither run nor listed".to_owned()));
    assert_eq!(is_run("rloss train quickstart_cuda"), Ok(false));
    assert_eq!(is_run("rloss train quickstart_cuda --set device=cpu"), Ok(true));
    assert_eq!(
        listed_recipe("rloss train quickstart_cuda").as_deref(),
        Some("rloss check --no-run quickstart_cuda --set device=cpu")
    );
}
