//! Recipes: what is read, what is refused and how, and that the documentation says the same as the types.

mod page;
mod refused;
mod slips;
mod stale;

use crate::cli::{bad_input, scratch};
use rloss::learner::CriticSettings;
use rloss::model::settings::AdapterSettings;
use rloss::model::settings::{Dtype, Tokenizer, Yarn};
use rloss::policy::Aggregation;
use rloss::recipe::{Plan, Recipe, RecipeSource, locate, resolve, resume_differences};
use rloss::settings::{Entry, SourceLocation};
use rloss::tasks::ToolsSettings;
use std::path::{Path, PathBuf};

fn root() -> &'static Path {
    Path::new(env!("CARGO_MANIFEST_DIR"))
}

fn read(text: &str, sets: &[&str]) -> Plan {
    let sets: Vec<String> = sets.iter().map(|set| set.to_string()).collect();
    resolve(Path::new("r.toml"), text, &sets).unwrap_or_else(|mistakes| panic!("{mistakes}"))
}

fn paths(recipe: &Recipe, tables: bool) -> Vec<String> {
    let entries = recipe.entries().into_iter();
    entries.filter(|e| matches!(e, Entry::Table { .. }) == tables).map(|e| e.path().to_owned()).collect()
}

#[test]
fn an_empty_recipe_is_the_defaults_with_the_embedded_model() {
    let recipe = read("", &[]).recipe;
    assert_eq!(recipe.model.architecture, Some(Default::default()));
    assert_eq!(recipe.model.tokenizer, Some(Tokenizer::Embedded));
    assert_eq!(recipe.chat.system_message, Some(false), "a byte is a token there");
    let chat = recipe.chat.clone();
    assert_eq!(recipe, Recipe { model: recipe.model.clone(), chat, ..Recipe::default() });
}

#[test]
fn recipes_page_is_what_the_types_say() {
    let file = root().join("docs/recipes.md");
    if std::env::var_os("UPDATE_EXPECT").is_some() {
        std::fs::write(&file, page::document()).expect("write docs/recipes.md");
    }
    let page = std::fs::read_to_string(&file).expect("docs/recipes.md");
    let first_difference = page.lines().zip(page::document().lines()).position(|(page, types)| page != types);
    assert!(
        page == page::document(),
        "docs/recipes.md differs from line {:?}: run UPDATE_EXPECT=1 cargo test --release recipes_page",
        first_difference.map(|line| line + 1)
    );
}

#[test]
fn every_key_and_every_table_is_documented() {
    let page = page::document().replace('\n', " ");
    for entry in Recipe::default().entries() {
        let (Entry::Table { path, doc, .. } | Entry::Key { path, doc, .. }) = &entry;
        assert!(doc.len() > 10 && doc.ends_with('.'), "{path}: {doc:?}");
        assert!(page.contains(doc.split('|').next().unwrap()), "{path} is not in the page");
    }
}

#[test]
fn sub_tables_come_after_keys_so_that_the_written_recipe_reads_back() {
    let entries = Recipe::default().entries();
    let mut table = "";
    for entry in &entries {
        match entry {
            Entry::Table { path, .. } => table = path,
            Entry::Key { path, .. } => {
                assert_eq!(path.rsplit_once('.').map_or("", |(around, _)| around), table)
            }
        }
    }
}

/// Keys of `[task]` that the task of [`EVERYTHING`] does not read.
const OTHER_TASKS: [&str; 13] = [
    "task.file",
    "task.rewards",
    "task.success",
    "task.level",
    "task.extraction",
    "task.grading",
    "task.command",
    "task.command_timeout_s",
    "task.command_processes",
    "task.command_output_chars_max",
    "task.serve_on",
    "task.episode_timeout_s",
    "task.episodes_at_once",
];

/// A recipe in which no key has its default, but for those that have only one value.
const EVERYTHING: &str = include_str!("recipe/everything.toml");

#[test]
fn the_resolved_recipe_resolves_to_itself() {
    let distill = "[policy.distill]\nteacher = \"src\"\ncoefficient = 2\nsystem_prompt = \"x\"";
    for text in ["", EVERYTHING, distill, "model.path = \"src\"", "[train]\nsteps = 3"] {
        let plan = read(text, &[]);
        let written = plan.to_toml();
        let again = read(&written, &[]);
        assert_eq!(again.recipe, plan.recipe);
        assert_eq!(again.to_toml(), written);
        assert!(resume_differences(&plan, &again).is_empty());
        toml::from_str::<toml::Table>(&written).expect("TOML for any reader");
    }
}

#[test]
fn the_resolved_recipe_holds_every_key_that_applies() {
    let written: toml::Table = read(EVERYTHING, &[]).to_toml().parse().expect("TOML");
    for path in paths(&Recipe::default(), false) {
        let found = path
            .split('.')
            .try_fold(&toml::Value::Table(written.clone()), |table, key| table.get(key))
            .is_some();
        // An empty list is written out, whatever the task.
        let absent = [
            "model.path",
            "model.adapter",
            // In place of train.steps.
            "train.data_epochs",
            "cold_start.optimizer.schedule_steps",
            "critic.optimizer.schedule_steps",
        ]
        .contains(&&*path)
            || path.starts_with("policy.distill.")
            || OTHER_TASKS.contains(&&*path)
                && !["task.command", "task.rewards", "task.success"].contains(&&*path);
        assert_eq!(found, !absent, "{path}");
    }
    let with_folder = read("model.path = \"src\"", &[]).to_toml();
    assert!(
        !with_folder.contains("[model.architecture]") && !with_folder.contains("tokenizer"),
        "{with_folder}"
    );
}

#[test]
fn no_key_of_the_full_recipe_is_lost_in_reading() {
    // Equal to the default there means: not read.
    let only_one_value = ["model.path", "model.adapter", "adapter.dropout", "train.optimizer.muon_momentum"];
    let not_set = "schedule schedule_steps lr_final_fraction warmup_steps beta1 beta2 eps momentum muon_momentum \
                   weight_decay grad_norm_max";
    let is_not_set = |path: &str| {
        let key = ["cold_start", "critic"].map(|table| path.strip_prefix(&format!("{table}.optimizer.")));
        key.into_iter().flatten().any(|key| not_set.split(' ').any(|name| name == key))
    };
    let mut defaults = read("", &[]).recipe;
    defaults.critic = Some(CriticSettings::default());
    defaults.adapter = Some(AdapterSettings::default());
    defaults.tools = Some(ToolsSettings::default());
    defaults.model.architecture.as_mut().expect("filled in").yarn = Some(Yarn::default());
    for (full, default) in read(EVERYTHING, &[]).recipe.entries().iter().zip(defaults.entries()) {
        let same = matches!(full, Entry::Key { .. }) && *full == default;
        let expected = only_one_value.contains(&full.path())
            // Refused beside train.trajectories.
            || ["rollout.resample_rounds_max", "rollout.lag_steps", "rollout.step_tokens_max"]
                .contains(&full.path())
            // Refused beside another loss, or beside `rollout.top_p`.
            || ["policy.distill.", "policy.sapo.", "policy.vespo.", "policy.clip_cov.", "policy.kl_cov."]
                .iter().any(|table| full.path().starts_with(table))
            || OTHER_TASKS.contains(&full.path())
            || full.path() == "train.data_epochs"
            || is_not_set(full.path());
        assert_eq!(same, expected, "{full:?}");
    }
}

/// A relative path of the Python stayed relative, so a run resumed elsewhere did not find it.
#[test]
fn the_path_of_python_becomes_absolute() {
    let (_folder, [file]) = scratch(["a.toml"]);
    let python = |word: &str| {
        std::fs::write(&file, format!("[interpreter]\nkind = \"cpython\"\npython = \"{word}\"\n")).unwrap();
        RecipeSource::File(file.clone()).resolve(&[]).unwrap().recipe.interpreter.python
    };
    assert_eq!(python("python3"), "python3");
    assert_eq!(Path::new(&python("scripts/words.py")), root().join("scripts/words.py"));
}

#[test]
fn paths_become_absolute_from_the_working_directory() {
    let recipe = read(EVERYTHING, &[]).recipe;
    let here = std::env::current_dir().expect("a working directory");
    assert_eq!(recipe.task.validation_file, Some(here.join("Cargo.lock")));
    assert_eq!(recipe.model.tokenizer, Some(Tokenizer::Path(here.join("Cargo.toml"))));
}

#[test]
fn sets_read_strings_numbers_arrays_and_tables_over_the_file() {
    let sets = [
        "train.seed=3",
        " train.steps = 5 ",
        "train.seed=4",
        "train.optimizer.lr=1e-3",
        "task.name=arithmetic_single",
        "chat.current_date=2025-06-28",
        "chat.model_identity=You are 3.5, a = b # model.",
        "chat.developer_instructions=12",
        "train.freeze=[\"a*\", 'b']",
        "eval.pass_at=[1,2]",
        "eval.samples=2",
        "model.architecture.yarn={factor=4.0, truncate=true}",
        "model.architecture.yarn.beta_fast=20",
        "logging.tensorboard=false",
        "model.dtype=\"bf16\"",
    ];
    let recipe = read("[train]\nseed = 1\nsteps = 2\n[policy]\naggregation = \"constant\"", &sets).recipe;
    assert_eq!((recipe.train.seed, recipe.train.steps), (4, 5));
    assert_eq!(recipe.train.optimizer.lr, 1e-3);
    assert_eq!(recipe.task.name.name, "arithmetic_single");
    assert_eq!(recipe.chat.current_date.as_deref(), Some("2025-06-28"));
    assert_eq!(recipe.chat.model_identity.as_deref(), Some("You are 3.5, a = b # model."));
    assert_eq!(recipe.chat.developer_instructions.as_deref(), Some("12"));
    assert_eq!(recipe.train.freeze, ["a*", "b"]);
    assert_eq!(recipe.eval.pass_at, [1, 2]);
    let yarn = recipe.model.architecture.and_then(|architecture| architecture.yarn).expect("yarn");
    assert_eq!((yarn.factor, yarn.beta_fast, yarn.truncate), (4.0, 20.0, true));
    assert!(!recipe.logging.tensorboard);
    assert_eq!(recipe.model.dtype, Dtype::Bf16);
    assert_eq!(recipe.policy.aggregation, Aggregation::Constant);
}

#[test]
fn gae_brings_a_critic_and_no_other_advantage_does() {
    assert_eq!(read("policy.advantage = \"gae\"", &[]).recipe.critic, Some(CriticSettings::default()));
    assert_eq!(read("policy.advantage = \"grpo\"", &[]).recipe.critic, None);
}

#[test]
fn a_later_mistake_is_placed_where_the_key_was_written() {
    let plan = read("[train]\nfreeze = [\"x\"]\n[rollout]\n", &["rollout.turns_max=4"]);
    let place = |key| plan.mistake(key, "…".to_owned()).location;
    let line = |line| SourceLocation::File { path: PathBuf::from("r.toml"), line };
    assert_eq!(place("train.freeze"), line(Some(2)));
    assert_eq!(place("train.steps"), line(Some(1)));
    assert_eq!(place("rollout.turns_max"), SourceLocation::Set(0));
    assert_eq!(place("eval.samples"), line(None));
}

#[test]
fn what_is_likely_not_meant_is_a_warning() {
    let warnings = |text: &str| read(text, &[]).warnings;
    assert_eq!(warnings(""), Vec::<String>::new());
    assert!(warnings("train.optimizer.warmup_steps = 80")[0].contains("but train.steps is only 80"));
    let gae = "policy.advantage = \"gae\"\n";
    assert_eq!(warnings(&format!("{gae}rollout.samples_per_prompt = 1")).len(), 0);
    assert!(warnings(&format!("{gae}critic.warmup_steps = 80"))[0].contains("the policy is never trained"));
    assert!(warnings("arms.no_train_sinks = true")[0].contains("this ablation is enabled"));
}

#[test]
fn a_resumed_run_may_differ_only_in_length_looks_and_memory() {
    let old = read("", &[]);
    let differences = |sets: &[&str]| resume_differences(&old, &read("", sets));
    let allowed = [
        "train.steps=90",
        "eval.samples=2",
        "logging.tensorboard=false",
        "parallel.threads=2",
        "checkpoint.keep=5",
        "rollout.sequences_max=3",
        "train.recompute_layers=true",
    ];
    assert!(differences(&allowed).is_empty());
    assert_eq!(
        differences(&[
            "train.seed=1",
            "train.optimizer.lr=1",
            "train.steps=2",
            "model.architecture.yarn.factor=2"
        ]),
        [
            "model.architecture.yarn.factor",
            "model.architecture.yarn.original_max_position_embeddings",
            "model.architecture.yarn.beta_fast",
            "model.architecture.yarn.beta_slow",
            "model.architecture.yarn.truncate",
            "train.seed",
            "train.optimizer.lr"
        ]
    );
    assert_eq!(differences(&["rollout.temperature=1"]), Vec::<String>::new());
}

#[test]
fn the_shipped_recipes_resolve() {
    let folders = ["", "figures", "objectives", "results"].map(|folder| root().join("recipes").join(folder));
    let mut files: Vec<PathBuf> = folders
        .iter()
        .flat_map(|folder| std::fs::read_dir(folder).expect("recipes/"))
        .map(|entry| entry.expect("entry").path())
        // Not a recipe: which of them make which figure.
        .filter(|path| !path.ends_with("figures.toml"))
        .filter(|path| path.extension().is_some_and(|extension| extension == "toml"))
        .collect();
    files.sort();
    assert!(files.len() >= 2, "{files:?}");
    for file in files {
        let text = std::fs::read_to_string(&file).expect("read");
        let Err(mistakes) = resolve(&file, &text, &[]) else { continue };
        // What the user brings: the model and the fetched data.
        for mistake in mistakes.listed {
            let keys = [
                "model.path",
                "task.train_file",
                "task.validation_file",
                "task.validation_files",
                "cold_start.train_file",
            ];
            let brought = keys.contains(&mistake.key.as_str());
            assert!(brought && mistake.message.starts_with("no f"), "{mistake}");
        }
    }
}

#[test]
fn the_gsm8k_recipe_needs_only_a_model_and_the_data() {
    let source = RecipeSource::File(root().join("recipes/gsm8k.toml"));
    let message = source.resolve(&[]).expect_err("no model is shipped").to_string();
    assert!(message.contains("set model.path to a folder"), "{message}");
    let sets = ["model.path=src", "task.train_file=Cargo.toml", "task.validation_file=Cargo.toml"];
    let plan = source.resolve(&sets.map(str::to_owned)).expect("resolves");
    assert_eq!(plan.warnings, Vec::<String>::new());
    assert_eq!((plan.recipe.rollout.prompts_per_step, plan.recipe.rollout.samples_per_prompt), (256, 5));
}

#[test]
fn the_quickstart_is_the_measured_configuration() {
    let source = RecipeSource::File(root().join("recipes/quickstart.toml"));
    let plan = source.resolve(&[]).expect("resolves");
    assert_eq!(plan.warnings, Vec::<String>::new());
    let recipe = &plan.recipe;
    assert_eq!((recipe.cold_start.steps, recipe.cold_start.batch_size), (1000, 16));
    assert_eq!(
        (recipe.train.steps, recipe.rollout.prompts_per_step, recipe.rollout.samples_per_prompt),
        (80, 8, 8)
    );
    assert_eq!((recipe.train.optimizer.lr, recipe.train.optimizer.lr_final_fraction), (7e-4, 0.1));
    assert_eq!((recipe.cold_start.optimizer.beta2, recipe.train.optimizer.beta2), (0.98, 0.99));
    assert_eq!((recipe.eval.problems_max, recipe.eval.every_steps), (512, 10));
    assert_eq!(recipe.model.tokenizer, Some(Tokenizer::Embedded));
}

#[test]
fn the_format_rules_recipe_is_the_quickstart_with_another_task() {
    let resolved = |name: &str, sets: &[&str]| {
        let source = RecipeSource::File(root().join("recipes").join(name));
        let plan =
            source.resolve(&sets.iter().map(|&set| set.to_owned()).collect::<Vec<_>>()).expect("resolves");
        assert_eq!(plan.warnings, Vec::<String>::new());
        plan.recipe
    };
    let quickstart = resolved("quickstart.toml", &["task.name=format_rules", "rollout.turns_max=1"]);
    assert_eq!(resolved("format_rules.toml", &[]), quickstart);
}

#[test]
fn a_recipe_argument_is_a_file_or_a_run_folder() {
    let folder = tempfile::tempdir().expect("a folder");
    let run = folder.path().join("my-run");
    std::fs::create_dir(&run).expect("create");
    let message = locate(&run).expect_err("no recipe.toml yet").to_string();
    assert!(message.contains("has no recipe.toml"), "{message}");
    std::fs::write(run.join("recipe.toml"), "train.seed = 5").expect("write");
    let source = locate(&run).expect("a run");
    assert_eq!(source, RecipeSource::Run(run.clone()));
    assert_eq!(source.stem(), "my-run");
    assert_eq!(source.resolve(&["train.steps=1".to_owned()]).expect("resolves").recipe.train.seed, 5);

    let file = folder.path().join("some.recipe.toml");
    std::fs::write(&file, b"[train]\nseed = 1 # \xff\n").expect("write");
    let source = locate(&file).expect("a file");
    assert_eq!((source.recipe_file(), source.stem()), (file.clone(), "some.recipe".to_owned()));
    bad_input(source.resolve(&[]), &["line 2 is not UTF-8"]);

    // A model's file was read as a recipe: "larger than 1 MiB".
    let model = folder.path().join("model.gguf");
    std::fs::write(&model, b"GGUF").expect("write");
    let message = locate(&model).expect_err("a model").to_string();
    assert!(message.contains("--set model.path="), "{message}");

    bad_input(locate(&folder.path().join("none.toml")), &["no such file or folder"]);
}

#[test]
fn bug_a_recipe_for_another_task_than_its_bases_was_refused_for_the_keys_of_that_task() {
    let text = "base = \"gsm8k_qwen_lora\"\n[model]\npath = \".\"\n[task]\nname = \"command\"\ncommand = [\"true\"]\n";
    let plan = resolve(Path::new("mine.toml"), text, &[]).unwrap();
    assert_eq!((plan.recipe.task.name.name, plan.recipe.task.train_file), ("command", None));
    assert_eq!(plan.recipe.adapter.map(|adapter| adapter.rank), Some(8));
    // The keys of this recipe's own task stay, and are still checked.
    let wrong = text.replace("command = ", "extraction = \"strict\"\ncommand = ");
    let refused = resolve(Path::new("mine.toml"), &wrong, &[]).unwrap_err().to_string();
    assert!(refused.contains("mine.toml:6: task.extraction: only the task gsm8k uses this key"), "{refused}");
}

#[test]
fn a_recipe_with_a_base_holds_only_what_differs() {
    let folder = tempfile::tempdir().expect("a folder");
    std::fs::create_dir(folder.path().join("arms")).expect("create");
    let write = |name: &str, text: &str| std::fs::write(folder.path().join(name), text).expect("write");
    write("ground.toml", "[train]\nsteps = 7\nseed = 3\n[policy]\nclip_low = 0.1\n");
    let file = folder.path().join("arms/one.toml");
    let of = |text: &str, sets: &[&str]| {
        let sets: Vec<String> = sets.iter().map(|set| set.to_string()).collect();
        resolve(&file, text, &sets)
    };
    let plan = of("base = \"../ground.toml\"\n[train]\nseed = 4", &["train.steps=9"]).expect("resolves");
    assert_eq!((plan.recipe.train.steps, plan.recipe.train.seed, plan.recipe.policy.clip_low), (9, 4, 0.1));
    // The resolved recipe stands alone.
    assert_eq!(read(&plan.to_toml(), &[]).recipe, plan.recipe);
    let place = plan.mistake("policy.clip_low", String::new()).location;
    assert_eq!(place, SourceLocation::File { path: folder.path().join("ground.toml"), line: Some(5) });

    let shown = folder.path().join("arms").display().to_string();
    let above = folder.path().display().to_string();
    let refused = |text: &str, sets: &[&str]| {
        let mistakes = of(text, sets).expect_err("the recipe is broken");
        let short = |text: String| text.replace(&shown, "…").replace(&above, "^");
        mistakes.listed.iter().map(|mistake| short(mistake.to_string())).collect::<Vec<_>>()
    };
    // A mistake of the base is placed in the base, one of the recipe in the recipe.
    write("broken.toml", "[train]\nsteps = \"7\"\n");
    assert_eq!(
        refused("base = \"../broken.toml\"\n[train]\nseeds = 4", &[]),
        [
            "…/one.toml:3: train.seeds: unknown key; did you mean train.seed?",
            "^/broken.toml:2: train.steps: found the string \"7\"; give an integer, 0 to 1000000000"
        ]
    );
    // A base has a base; a name without a file is a recipe of the program.
    write("tower.toml", "base = \"ground.toml\"\ntrain.seed = 6\n");
    let plan = of("base = \"../tower.toml\"\n[rollout]\nprompts_per_step = 3", &[]).expect("resolves");
    assert_eq!((plan.recipe.train.steps, plan.recipe.train.seed), (7, 6));
    let plan = of("base = \"quickstart_lora\"", &[]).expect("resolves");
    assert_eq!(plan.recipe.adapter.map(|adapter| adapter.rank), Some(8));
    write("circle.toml", "base = \"arms/one.toml\"\n");
    write("arms/one.toml", "base = \"../circle.toml\"\n");
    let circle = refused("base = \"../circle.toml\"", &[]);
    assert!(circle.len() == 1 && circle[0].contains("base recipes is circular"), "{circle:?}");
    // What a lost base may cure is no mistake: here the files of the task.
    for lost in ["none.toml", "../broken_syntax.toml", "../lost.toml"] {
        write("broken_syntax.toml", "[task\ntrain_file = \"x\"\n");
        write("lost.toml", "base = \"nowhere.toml\"\n");
        let found = refused(&format!("base = {lost:?}\n[task]\nname = \"gsm8k\""), &[]);
        assert_eq!(found.len(), 1, "{found:?}");
    }
    assert_eq!(
        refused("base = 3\npolicy.dual_clip = 0.5", &[]),
        [
            "…/one.toml:1: base: found no string; give the path of a recipe, relative to this recipe's folder, or the name of a built-in recipe"
        ]
    );
    let missing = refused("\nbase = \"none.toml\"", &[]).concat();
    assert!(missing.starts_with("…/one.toml:2: base: cannot read …/none.toml: "), "{missing}");
    assert_eq!(
        refused("", &["base=ground.toml"]),
        [
            "--set: base: cannot be set here; write the base into the recipe file, or give that recipe as the argument"
        ]
    );
}
