//! Broken recipes, each with the whole message that the user sees.

use super::*;
use crate::cli::assert_has;
use rand::Rng;
use rloss::error::BadInput;
use rloss::random::{Purpose, stream};
use rloss::recipe::KeyScope;

pub(super) fn mistakes(text: &str, sets: &[&str]) -> Vec<String> {
    let sets: Vec<String> = sets.iter().map(|set| set.to_string()).collect();
    let mistakes = resolve(Path::new("r.toml"), text, &sets).expect_err("the recipe is broken");
    mistakes.listed.iter().map(ToString::to_string).collect()
}

pub(super) fn mistake(text: &str, sets: &[&str]) -> String {
    let mistakes = mistakes(text, sets);
    assert_eq!(mistakes.len(), 1, "{text} {sets:?} gives {mistakes:#?}");
    mistakes.concat()
}

/// The cases of a file: a recipe, and what follows the `=>` behind it.
fn cases(text: &str) -> impl Iterator<Item = (&str, &str)> {
    let cases = text.trim_end().split("\n---\n").skip(1);
    cases.map(|case| case.rsplit_once("\n=> ").unwrap_or_else(|| panic!("no \"=> \" in {case}")))
}

#[test]
fn broken_recipes_are_refused_with_place_key_and_remedy() {
    let text = include_str!("refused.txt");
    assert_eq!(cases(text).count(), 61);
    for (recipe, message) in cases(text) {
        assert_eq!(mistake(recipe, &[]), message, "{recipe}");
    }
}

#[test]
fn a_group_of_one_is_refused_where_the_advantage_compares_within_groups() {
    let text =
        |advantage: &str| format!("rollout.samples_per_prompt = 1\npolicy.advantage = \"{advantage}\"");
    assert_eq!(
        mistake(&text("grpo"), &[]),
        "r.toml:1: rollout.samples_per_prompt: a group of one has its raw reward as advantage under grpo; give 2 or more, or \
         an advantage without groups such as \"reinforce_plus_plus\""
    );
    for advantage in ["dr_grpo", "grpo_batch_std", "rloo"] {
        assert_eq!(mistakes(&text(advantage), &[]).len(), 1, "{advantage}");
    }
    for advantage in ["reinforce_plus_plus", "remax", "gae"] {
        assert!(resolve(Path::new("r.toml"), &text(advantage), &[]).is_ok(), "{advantage}");
    }
    // A run that was written before the rule goes on.
    let stored =
        rloss::recipe::resolve_run_recipe(KeyScope::TrainStoredRun, Path::new("r.toml"), &text("grpo"), &[]);
    assert!(stored.is_ok());
}

#[test]
fn a_command_is_not_refused_for_keys_that_it_does_not_read() {
    let accepts = |scope: KeyScope, set: &str| {
        let data =
            "[task]\nname = \"gsm8k\"\ntrain_file = \"Cargo.toml\"\nvalidation_file = \"Cargo.toml\"\n";
        rloss::recipe::resolve_for(scope, Path::new("r.toml"), data, &[set.to_owned()]).is_ok()
    };
    let all = [KeyScope::Train, KeyScope::Rollout, KeyScope::Eval, KeyScope::Chat, KeyScope::CheckMismatch];
    for (set, refusing) in [
        ("train.minibatches=1000", &[KeyScope::Train][..]),
        ("train.freeze=[\"\"]", &[KeyScope::Train]),
        ("eval={samples=4,temperature=0}", &[KeyScope::Train, KeyScope::Eval]),
        ("rollout.top_k=1", &[KeyScope::Train]),
        ("rollout={top_p=0.5,top_k=20,min_p=0.1}", &[]),
        ("task.train_file=none", &[KeyScope::Train, KeyScope::Rollout, KeyScope::CheckMismatch]),
        ("task.validation_file=none", &[KeyScope::Train, KeyScope::Eval]),
        ("interpreter.time_limit_s=9", &all),
        ("train.minibatches=no number", &all),
    ] {
        for scope in all {
            assert_eq!(accepts(scope, set), !refusing.contains(&scope), "{scope:?} {set}");
        }
    }
}

#[test]
fn missing_files_are_named_with_their_absolute_path() {
    let here = std::env::current_dir().expect("a working directory");
    for (text, key, remedy) in [
        ("model.path = \"no/folder\"", "model.path", "set model.path to a folder"),
        ("model.tokenizer = \"no/folder\"", "model.tokenizer", "name a tokenizer.json or its folder"),
        ("cold_start.train_file = \"no/folder\"", "cold_start.train_file", "name an existing file"),
        ("cold_start.validation_file = \"no/folder\"", "cold_start.validation_file", "name an existing file"),
        (
            "task = { name = \"gsm8k\", train_file = \"no/folder\", validation_file = \"Cargo.toml\" }",
            "task.train_file",
            "rloss fetch gsm8k",
        ),
    ] {
        let message = mistake(text, &[]);
        assert!(message.starts_with(&format!("r.toml:1: {key}: no")), "{message}");
        assert_has(&message, &[&here.join("no/folder").display().to_string(), remedy]);
    }
}

#[test]
fn mistakes_in_sets_name_the_set() {
    for (set, message) in [
        ("train.steps=ten", "--set: train.steps: found the string \"ten\"; give an integer, 0 to 1000000000"),
        ("train.step=10", "--set: train.step: unknown key; did you mean train.steps?"),
        (
            "policy.clip_low=2",
            "--set: policy.clip_low: 2 is out of range; give a number, above 0 and at most 1",
        ),
        (
            "train.freeze=[a",
            "--set: train.freeze: found the string \"[a\"; give an array, each element a string",
        ),
        ("train.steps", "--set: \"train.steps\" is not key=value; write it like --set train.steps=80"),
        ("[train] # x=1", "--set: \"[train] # x=1\" is not key=value; write it like --set train.steps=80"),
        ("two words=1", "--set: \"two words=1\" is not key=value; write it like --set train.steps=80"),
        ("=1", "--set: \"=1\" is not key=value; write it like --set train.steps=80"),
        (
            "train.seed=1\ntrain.steps=2",
            "--set: train.seed: found the string \"1\\ntrain.steps=2\"; give an integer, 0 or more",
        ),
        (
            "model.dtype=fp32",
            "--set: model.dtype: no such value \"fp32\", did you mean \"f32\"? Give \"f32\", \"bf16\" or \"bf16_dot\"",
        ),
    ] {
        assert_eq!(mistake("[train]\nsteps = 3", &[set]), message);
    }
}

#[test]
fn all_mistakes_come_at_once_in_order() {
    let text = "[train]\nsteps = \"x\"\nlr = 1\n[rollout]\nsamples_per_prompt = 1\n[tsak]\nname = 1\n[policy]\nclip_low = 7\n";
    let all = mistakes(text, &["eval.sample=2", "nonsense"]);
    let starts = [
        "r.toml:2: train.steps:",
        "r.toml:3: train.lr:",
        "r.toml:5: rollout.samples_per_prompt:",
        "r.toml:6: tsak:",
        "r.toml:9: policy.clip_low:",
        "--set: eval.sample:",
        "--set: \"nonsense\"",
    ];
    assert_eq!(all.len(), starts.len(), "{all:#?}");
    for (mistake, start) in all.iter().zip(starts) {
        assert!(mistake.starts_with(start), "{mistake} / {start}");
    }
}

#[test]
fn mistakes_of_syntax_are_shown_with_those_of_meaning() {
    let all = mistakes("[train]\nsteps = = 3\nseed = -1\n[policy]\nclip_low = 0.2 0.3\n[policy]\n", &[]);
    assert!(all.iter().any(|mistake| mistake.starts_with("r.toml:2: not TOML: ")), "{all:#?}");
    assert!(all.iter().any(|mistake| mistake.starts_with("r.toml:3: train.seed: ")), "{all:#?}");
    assert!(all.iter().any(|mistake| mistake.starts_with("r.toml:5: not TOML: ")), "{all:#?}");
    assert!(all.iter().any(|mistake| mistake.starts_with("r.toml:6: not TOML: duplicate")), "{all:#?}");
    assert!(mistakes("steps = \"", &[])[0].starts_with("r.toml:1: not TOML: "));
}

#[test]
fn one_slip_is_one_mistake() {
    // A slip of syntax is not also what the parser makes of the rest of its line, or of the keys below it.
    for text in [
        "[train\nsteps = 2",
        "[train]\nsteps = 2\n[train.optimizer\nlr = 1",
        "[train]\nlr == 2",
        "[train]\nsteps: 3",
    ] {
        assert!(mistake(text, &[]).contains("not TOML: "), "{text}");
    }
    // A misspelt train_file is not also a missing one, and a wrong task name brings no rule of another task.
    let gsm8k = "[task]\nname = \"gsm8k\"\nvalidation_file = \"Cargo.toml\"\n";
    assert_eq!(
        mistake(&format!("{gsm8k}train_fiel = \"Cargo.toml\""), &[]),
        "r.toml:4: task.train_fiel: unknown key; did you mean task.train_file?"
    );
    assert!(
        mistake("[task]\nname = \"gsm\"\ntrain_file = \"Cargo.toml\"", &[])
            .starts_with("r.toml:2: task.name")
    );
}

#[test]
fn mistakes_become_one_bad_input() {
    let mistakes = resolve(Path::new("r.toml"), "a = 1\nb = 2", &[]).expect_err("broken");
    let error = anyhow::Error::from(mistakes);
    let bad_input = error.downcast_ref::<BadInput>().expect("bad input");
    assert!(bad_input.0.starts_with("2 mistakes in the recipe:\n  r.toml:1: a: "), "{bad_input}");
    assert!(bad_input.0.contains("\n  r.toml:2: b: "), "{bad_input}");
}

#[test]
fn no_damage_to_a_recipe_is_a_panic() {
    let text = include_str!("everything.toml");
    let read = |text: &str| match resolve(Path::new("r.toml"), text, &[text.to_owned()]) {
        Ok(plan) => assert!(plan.to_toml().contains("[train]")),
        Err(mistakes) => assert!(!mistakes.listed.is_empty()),
    };
    for (end, _) in text.char_indices() {
        read(&text[..end]);
    }
    let letters: Vec<char> = "[]{}\"'=.,#\n\\0-e x".chars().collect();
    let mut rng = stream(0, Purpose::Shuffle, &[]);
    for _ in 0..2000 {
        let mut damaged: Vec<char> = text.chars().collect();
        for _ in 0..rng.random_range(1..4) {
            let at = rng.random_range(0..damaged.len());
            damaged[at] = letters[rng.random_range(0..letters.len())];
        }
        read(&damaged.into_iter().collect::<String>());
    }
}

#[test]
fn contradictions_are_refused_with_the_key_and_the_reason() {
    let text = include_str!("contradictions.txt");
    assert_eq!(cases(text).count(), 61);
    for (recipe, told) in cases(text) {
        let (key, reason) = told.split_once(": ").unwrap();
        let found = mistake(recipe, &[]);
        assert!(found.contains(&format!(" {key}: ")) && found.contains(reason), "{recipe}: {found}");
    }
}

#[test]
fn what_only_looks_like_a_contradiction_is_allowed() {
    for text in [
        // Bounds of a weight, the lower one open.
        "[policy]\nloss = \"cispo\"\nclip_low = 1.0\nclip_high = 4.0",
        // No ratio in the loss: the weights are the only one.
        "policy.loss = \"reinforce\"\npolicy.old_logprob = \"rollout\"\npolicy.correction.is = \"sequence\"",
        "policy.loss = \"gspo\"\npolicy.correction.is = \"sequence\"",
        "policy.loss = \"geo_mean\"\npolicy.correction.is = \"token\"",
        "policy.loss = \"sapo\"\n[policy.sapo]\ntemperature_positive = 2",
        "policy.loss = \"dppo_kl\"\npolicy.advantage = \"opo\"",
        "[policy.kl]\nplace = \"reward\"\ntarget = 0.1",
        "policy.advantage = \"remax\"\nrollout.samples_per_prompt = 1",
    ] {
        let found = resolve(Path::new("r.toml"), text, &[]);
        let plan = found.unwrap_or_else(|mistakes| panic!("{text}: {:?}", mistakes.listed));
        assert!(plan.warnings.is_empty(), "{text}: {:?}", plan.warnings);
    }
}
