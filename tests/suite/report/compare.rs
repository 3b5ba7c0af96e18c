//! Comparing runs, following one that has not begun, and taking a run away: tables and model cards.

use super::*;

#[test]
fn settings_that_differ_come_first() {
    let folder = tempfile::tempdir().unwrap();
    let recipe = |lr: f64, threads: u64, more: &str| {
        format!("[train]\nsteps = 40\n[train.optimizer]\nlr = {lr}\n[parallel]\nthreads = {threads}\n{more}")
    };
    let texts = [recipe(0.5, 1, ""), recipe(0.25, 2, "[policy]\nadvantage = \"rloo\"\n"), String::new()];
    let runs: Vec<PathBuf> = ["a", "b", "c"]
        .iter()
        .zip(&texts)
        .map(|(name, text)| {
            let run = run(folder.path(), name, &rising(0.01));
            std::fs::write(run.join("recipe.toml"), text).unwrap();
            run
        })
        .collect();
    let several = page(&runs);
    let table =
        several.split("<h2>Settings that differ</h2>").nth(1).unwrap().split("</table>").next().unwrap();
    let keys: Vec<&str> =
        table.split("<code>").skip(1).map(|rest| rest.split("</code>").next().unwrap()).collect();
    assert_eq!(keys, ["policy.advantage", "train.optimizer.lr", "parallel.threads"]);
    for text in [">0.5", ">0.25", ">rloo", ">–", ">no recipe"] {
        assert!(table.contains(text), "{text} is not in {table}");
    }
    assert!(several.find("Settings that differ") < several.find("Held-out success"), "first");
    assert!(!page(&runs[..1]).contains("Settings that differ"));
}

/// `--out cmp.csv` was a page of HTML.
#[test]
fn a_table_of_the_metrics_is_written_where_its_name_asks_for_one() {
    let folder = tempfile::tempdir().unwrap();
    let first = [row(1, Phase::Rl, &[("a/x", 0.1)]), row(1, Phase::Eval, &[("b", f64::NAN)])];
    let runs = [run(folder.path(), "one, \"two\"", &first), run(folder.path(), "b", &rising(0.5)[..1])];
    let file = folder.path().join("cmp.csv");
    assert_eq!(write_report(&runs, Some(&file)).unwrap(), file);
    let quoted = "\"one, \"\"two\"\"\"";
    let expected = [
        "run,phase,step,a/x,actor/pg_clipfrac,b,critic/rewards/mean".to_owned(),
        format!("{quoted},rl,1,0.1,,,"),
        format!("{quoted},eval,1,,,NaN,"),
        "b,rl,1,,0,,-1".to_owned(),
        String::new(),
    ];
    assert_eq!(text_of(&file), expected.join("\r\n"));
    refused(write_report(&runs, Some(&folder.path().join("cmp.json"))), ".csv");
    assert!(!folder.path().join("cmp.json").exists());
}

/// Following a run before its start ended with "no such run folder".
#[test]
fn a_run_that_has_not_begun_is_awaited_by_a_server_alone() {
    let folder = tempfile::tempdir().unwrap();
    let later = [folder.path().join("later")];
    assert_eq!(rloss::report::awaited(&later), [later[0].as_path()]);
    let before = rloss::report::state_digest(&later);
    assert!(rloss::report::page(&later, true).unwrap().contains("later has no measurements yet"));
    refused(write_report(&later, None), "no such run folder");
    run(folder.path(), "later", &rising(0.5));
    assert_ne!(rloss::report::state_digest(&later), before);
    assert!(rloss::report::awaited(&later).is_empty());
    assert!(rloss::report::page(&later, true).unwrap().contains("1.25 → <b>16.25</b>"));
}

/// The page of a run had no place for what `rloss eval` measured of it later.
#[test]
fn later_evaluations_of_a_run_stand_on_its_page() {
    let folder = tempfile::tempdir().unwrap();
    let success = |value| [("val-core/gsm8k/acc/mean@1", value), ("val-core/gsm8k/acc/mean@1/ci95_low", 0.1)];
    let own = row(40, Phase::Eval, &success(0.25));
    let mine = run(folder.path(), "mine", &[rising(0.5), vec![own]].concat());
    let before = rloss::report::state_digest(std::slice::from_ref(&mine));
    run(&mine.join("eval"), "step-000040", &[row(40, Phase::Eval, &success(0.75))]);
    assert_ne!(rloss::report::state_digest(std::slice::from_ref(&mine)), before);
    let text = page(&[mine]);
    for (name, value) in [("gsm8k mean@1, step 40", "0.25"), ("gsm8k mean@1 by rloss eval, step 40", "0.75")]
    {
        let (_, rest) = text.split_once(name).unwrap_or_else(|| panic!("{name} is not in {text}"));
        assert!(rest.get(..60).unwrap().contains(value), "{name}: {}", &rest[..60]);
    }
}

#[test]
fn a_model_card_has_results_data_and_recipe() {
    let folder = tempfile::tempdir().unwrap();
    let run = run(folder.path(), "mine", &rising(0.5));
    let recipe = "[model]\npath = '/models/Qwen2.5: \"small\"'\n[task]\nname = \"gsm8k\"\ntrain_file = \"my/train.jsonl\"\nnote = \"```python\"\n";
    std::fs::write(run.join("recipe.toml"), recipe).unwrap();
    let card = rloss::report::model_card(&run, "peft").unwrap();
    for text in [
        "---\nlibrary_name: peft\nbase_model: \"Qwen2.5: \\\"small\\\"\"\ntags:",
        "\n# mine\n",
        "| mean reward, first → last 10 RL steps | 1.25 | 16.25 |",
        "- `task.train_file`: `my/train.jsonl`",
    ] {
        assert!(card.contains(text), "{text} is not in {card}");
    }
    assert!(card.contains(&format!("````toml\n{recipe}````")), "a longer fence: {card}");
}
