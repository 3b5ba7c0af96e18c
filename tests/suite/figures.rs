//! Figures: what the script draws of several seeds, and that the shipped manifest and recipes belong together.

use crate::cli::{in_repository, text_of};
use crate::skips;
use rloss::metrics::{MetricsFile, Phase, Row};
use rloss::recipe::resolve;
use std::collections::BTreeSet;
use std::path::{Path, PathBuf};
use std::process::Command;

const MANIFEST: &str = r#"
[[figure]]
name = "one"
title = "One <figure>"
about = "What it shows & why."
panels = ["actor/grad_norm", "val-core/arithmetic/acc/mean@1", "actor/entropy"]
curves = [
    { recipe = "broken", label = "a \"broken\" arm" },
    { recipe = "sound", label = "sound" },
    { recipe = "absent", label = "never run" },
]
"#;

/// A run of `recipe` and `seed`: two steps with these gradient norms, and an evaluation.
fn run(set: &Path, recipe: &str, seed: u64, norms: [f64; 2], success: f64) -> PathBuf {
    let folder = set.join(recipe).join(format!("seed-{seed}"));
    std::fs::create_dir_all(&folder).unwrap();
    let mut file = MetricsFile::create(&folder.join("metrics.jsonl")).unwrap();
    for (step, norm) in (1..).zip(norms) {
        let metrics = [("actor/grad_norm", norm)].into_iter().collect();
        file.write(&Row { step, phase: Phase::Rl, metrics }).unwrap();
    }
    let metrics = [("val-core/arithmetic/acc/mean@1", success)].into_iter().collect();
    file.write(&Row { step: 2, phase: Phase::Eval, metrics }).unwrap();
    folder
}

/// What the script that draws prints as an error; empty if it succeeds.
fn draw(set: &Path) -> String {
    let script = in_repository("scripts/draw_figures.py");
    let done = Command::new("python3").arg(script).arg(set).output().unwrap();
    let error = String::from_utf8(done.stderr).unwrap();
    assert_eq!(done.status.success(), error.is_empty(), "{error}");
    error.replace(&set.display().to_string(), "…")
}

#[test]
fn a_set_of_figures_becomes_a_page_and_an_svg_each() {
    let Some(()) = skips::python3() else { return };
    let set = tempfile::tempdir().unwrap();
    assert!(draw(set.path()).starts_with("…/figures.toml: cannot be read"));
    std::fs::write(set.path().join("figures.toml"), MANIFEST).unwrap();
    assert!(draw(set.path()).starts_with("…: has no run of any recipe of figures.toml"));
    for (seed, norms, success) in
        [(10, [1.0, 1000.0], 0.25), (9, [10.0, 0.0], 0.125), (11, [f64::NAN, 1.0], 0.5)]
    {
        let broken = run(set.path(), "broken", seed, norms, success);
        std::fs::write(broken.join("recipe.toml"), "[arms]\nrouter_noise_train = 0.3\n").unwrap();
    }
    run(set.path(), "sound", 0, [2.0, 2.0], 0.875);
    assert_eq!(draw(set.path()), "");
    let page = text_of(set.path().join("figures.md"));
    let svg = text_of(set.path().join("one.svg"));
    for text in ["One &lt;figure&gt;", "a &quot;broken&quot; arm", "Gradient norm, log scale, cut off below"]
    {
        assert!(svg.contains(text), "{text} is not in {svg}");
    }
    assert!(svg.contains("Held-out arithmetic mean@1") && !svg.contains("Entropy"), "{svg}");
    assert_eq!(svg.matches("exaggerated").count(), 1, "{svg}");
    // Two curves in each of two panels and the legend; a band where several seeds have several steps.
    assert_eq!(
        (svg.matches("class=\"line\"").count(), svg.matches("class=\"band\"").count()),
        (6, 1),
        "{svg}"
    );
    // Seeds in the order of their numbers; the largest norm and the last success of each.
    for text in [
        "![One <figure>](one.svg)",
        "What it shows & why.",
        "Not run: never run.",
        "| a \"broken\" arm* | 9 10 11 | 0.125 0.25 0.5 | 10 1,000 1 |",
        "| sound | 0 | 0.875 | 2 |",
    ] {
        assert!(page.contains(text), "{text} is not in {page}");
    }
    let metrics = set.path().join("sound/seed-0/metrics.jsonl");
    std::fs::write(metrics, "{\"step\":1").unwrap();
    assert!(draw(set.path()).starts_with("…/sound/seed-0/metrics.jsonl: a line cannot be read"));
}

/// The shipped recipes of the figures by name, with their text.
fn shipped() -> Vec<(String, PathBuf, String)> {
    let folder = in_repository("recipes/figures");
    let files = std::fs::read_dir(folder).unwrap().map(|entry| entry.unwrap().path());
    let recipes = files.filter(|file| !file.ends_with("figures.toml"));
    recipes
        .map(|file| {
            let text = text_of(&file);
            (file.file_stem().unwrap().to_string_lossy().into_owned(), file, text)
        })
        .collect()
}

#[test]
fn the_shipped_figures_name_every_recipe_and_no_other() {
    let manifest = in_repository("recipes/figures/figures.toml");
    let manifest: toml::Table = text_of(manifest).parse().unwrap();
    let figures = manifest["figure"].as_array().unwrap();
    let curves = figures.iter().flat_map(|figure| figure["curves"].as_array().unwrap());
    let named: BTreeSet<&str> = curves.map(|curve| curve["recipe"].as_str().unwrap()).collect();
    let recipes = shipped();
    let there: BTreeSet<&str> =
        recipes.iter().map(|recipe| &*recipe.0).filter(|name| !name.starts_with("cold_start_")).collect();
    assert_eq!(named, there);
    let drawn: Vec<&str> = figures.iter().map(|figure| figure["name"].as_str().unwrap()).collect();
    for number in 1..=9 {
        assert!(drawn.contains(&&*format!("fig{number}")), "{drawn:?}");
    }
}

#[test]
fn a_curve_starts_from_the_cold_start_of_its_own_model_and_task() {
    let recipes = shipped();
    let resolved = |name: &str, folder: &Path| {
        let (_, file, text) = recipes.iter().find(|recipe| recipe.0 == name).unwrap();
        let here = format!("model.path={}", folder.display());
        let sets = if name.starts_with("cold_start_") { vec![] } else { vec![here] };
        resolve(file, text, &sets).unwrap_or_else(|mistakes| panic!("{name}: {mistakes}")).recipe
    };
    let folder = tempfile::tempdir().unwrap();
    for (name, _, text) in &recipes {
        let recipe = resolved(name, folder.path());
        if name.starts_with("cold_start_") {
            assert_eq!((recipe.cold_start.steps, recipe.train.steps), (1000, 0), "{name}");
            assert!(
                recipe.arms.list_enabled().is_empty(),
                "{name}: a cold start is made with nothing broken"
            );
            continue;
        }
        let (_, path) = text.split_once("path = \"runs/figures/").expect("a cold start");
        let start = resolved(path.split_once("/seed-0\"").expect("seed 0").0, folder.path());
        assert_eq!(start.task.name, recipe.task.name, "{name}");
        assert_eq!(recipe.cold_start.steps, 0, "{name}");
        assert_eq!((recipe.train.optimizer.grad_norm_max, recipe.policy.dual_clip), (1.0, 0.0), "{name}");
    }
}
