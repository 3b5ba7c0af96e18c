//! Figures: what the report draws of several seeds, that the shipped manifest and recipes belong together,
//! bad input.

use rloss::error::BadInput;
use rloss::metrics::{MetricsFile, Phase, Row};
use rloss::recipe::resolve;
use rloss::report::write_report;
use std::collections::BTreeSet;
use std::path::{Path, PathBuf};

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

fn set() -> tempfile::TempDir {
    let set = tempfile::tempdir().unwrap();
    std::fs::write(set.path().join("figures.toml"), MANIFEST).unwrap();
    let broken = run(set.path(), "broken", 10, [1.0, 1000.0], 0.25);
    std::fs::write(broken.join("recipe.toml"), "[arms]\nrouter_noise_train = 0.3\n").unwrap();
    let broken = run(set.path(), "broken", 9, [10.0, 0.0], 0.125);
    std::fs::write(broken.join("recipe.toml"), "[arms]\nrouter_noise_train = 0.3\n").unwrap();
    run(set.path(), "sound", 0, [2.0, 2.0], 0.875);
    set
}

fn refused(folders: &[PathBuf]) -> String {
    write_report(folders, None).expect_err("bad input").downcast::<BadInput>().expect("bad input").0
}

#[test]
fn a_set_of_figures_becomes_a_page_and_an_svg_each() {
    let set = set();
    let page = write_report(&[set.path().to_owned()], None).unwrap();
    assert_eq!(page, set.path().join("report.html"));
    let page = std::fs::read_to_string(page).unwrap();
    let svg = std::fs::read_to_string(set.path().join("one.svg")).unwrap();
    assert!(page.contains(&svg), "the page shows the same drawing");
    for text in ["One &lt;figure&gt;", "a &quot;broken&quot; arm", "Gradient norm, log scale, cut off below"]
    {
        assert!(svg.contains(text), "{text} is not in {svg}");
    }
    assert!(svg.contains("Held-out arithmetic mean@1") && !svg.contains("Entropy"), "{svg}");
    assert_eq!(svg.matches("exaggerated").count(), 1, "{svg}");
    // Seeds in the order of their numbers; the largest norm and the last success of each.
    for text in [
        "What it shows &amp; why.",
        "Not run: never run.",
        ">9 · 10<",
        ">0.125 · 0.25<",
        ">10 · 1,000<",
        ">0.875<",
    ] {
        assert!(page.contains(text), "{text}");
    }
    assert!(!page.replace("http://www.w3.org/2000/svg", "").contains("://"), "asks nothing of a network");
}

#[test]
fn what_is_no_set_of_figures_is_refused_with_place_and_remedy() {
    let other = set();
    let set = set();
    let one = |text: &str| {
        std::fs::write(set.path().join("figures.toml"), text).unwrap();
        refused(&[set.path().to_owned()]).replace(&set.path().display().to_string(), "…")
    };
    assert!(one("[[figure]]\nname = 3").starts_with("…/figures.toml: line 2: invalid type"));
    let outside = one(&MANIFEST.replace("\"sound\"", "\"../sound\""));
    assert_eq!(
        outside,
        "…/figures.toml: \"../sound\" is not a plain name; use letters, digits, _ and - for figures and recipes."
    );
    assert!(one(&MANIFEST.replace("panels = [", "panel = [")).contains("unknown field `panel`"));
    assert_eq!(one(&MANIFEST.repeat(2)), "…/figures.toml: two figures are named one; rename one.");
    let empty = MANIFEST.replace("broken", "not-run").replace("\"sound\"", "\"not-run\"");
    assert_eq!(
        one(&empty),
        "…: has figures.toml but no run of any of its recipes. Run scripts/reproduce_figures.sh first."
    );
    let both = refused(&[other.path().join("sound/seed-0"), other.path().to_owned()]);
    assert!(both.contains("it is a set of figures; report it alone"), "{both}");
}

/// The shipped recipes of the figures by name, with their text.
fn shipped() -> Vec<(String, PathBuf, String)> {
    let folder = Path::new(env!("CARGO_MANIFEST_DIR")).join("recipes/figures");
    let files = std::fs::read_dir(folder).unwrap().map(|entry| entry.unwrap().path());
    let recipes = files.filter(|file| !file.ends_with("figures.toml"));
    recipes
        .map(|file| {
            let text = std::fs::read_to_string(&file).unwrap();
            (file.file_stem().unwrap().to_string_lossy().into_owned(), file, text)
        })
        .collect()
}

#[test]
fn the_shipped_figures_name_every_recipe_and_no_other() {
    let manifest = Path::new(env!("CARGO_MANIFEST_DIR")).join("recipes/figures/figures.toml");
    let manifest: toml::Table = std::fs::read_to_string(manifest).unwrap().parse().unwrap();
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
