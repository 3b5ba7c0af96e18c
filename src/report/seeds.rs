//! Merges runs that differ only in their seed into one curve: the mean, and a band from the lowest to the
//! highest value.

use super::run::Run;
use crate::metrics::{Metrics, Phase, Row};
use std::collections::BTreeMap;

/// Keys and tables that may differ between the runs of a curve: the seed, and tables that do not affect
/// results.
const MAY_DIFFER: [(&str, Option<&str>); 4] =
    [("train", Some("seed")), ("parallel", None), ("logging", None), ("checkpoint", None)];

/// Returns one curve for each recipe: its only run, or the merged runs of its seeds. Sets each run's `curve`
/// to the index of its curve.
pub(super) fn merge_seeds(runs: &mut [Run]) -> Vec<Run> {
    let mut groups: Vec<(Option<toml::Table>, Vec<usize>)> = Vec::new();
    for (i, run) in runs.iter().enumerate() {
        let recipe = (!run.recipe.is_empty()).then(|| without_seed(&run.recipe));
        let has_other_seed =
            |&member: &usize| runs[member].setting("train.seed") != run.setting("train.seed");
        let known = groups.iter_mut().find(|(group_recipe, members)| {
            recipe.is_some() && *group_recipe == recipe && members.iter().all(has_other_seed)
        });
        if let Some((_, members)) = known { members.push(i) } else { groups.push((recipe, vec![i])) }
    }
    let mut curves = Vec::new();
    for (_, members) in groups {
        members.iter().for_each(|&i| runs[i].curve = curves.len());
        let members: Vec<&Run> = members.iter().map(|&i| &runs[i]).collect();
        curves.push(merge_runs(&members));
    }
    curves
}

fn without_seed(recipe: &toml::Table) -> toml::Table {
    let mut recipe = recipe.clone();
    for (table, key) in MAY_DIFFER {
        match (key, recipe.get_mut(table).and_then(toml::Value::as_table_mut)) {
            (Some(key), Some(table)) => drop(table.remove(key)),
            (None, Some(_)) => drop(recipe.remove(table)),
            (_, None) => {}
        }
    }
    recipe
}

/// Merges runs into one. At each step, the value of a metric is the mean over the runs that have it. The
/// lowest and the highest value become the ends of the band that charts draw.
fn merge_runs(runs: &[&Run]) -> Run {
    let first = Run { sample_trajectories: vec![], mismatch: None, ..runs[0].clone() };
    if runs.len() == 1 {
        return first;
    }
    let labels: Vec<&str> = runs.iter().map(|run| run.label.as_str()).collect();
    let label = format!("{} ({} seeds)", labels.join(", "), runs.len());
    let seeds: Vec<String> = runs.iter().filter_map(|run| run.setting("train.seed")).collect();
    Run { label, rows: mean_rows(runs), seeds: seeds.join(", "), ..first }
}

fn mean_rows(runs: &[&Run]) -> Vec<Row> {
    let mut values: BTreeMap<(Phase, u64), BTreeMap<&str, Vec<f64>>> = BTreeMap::new();
    for row in runs.iter().flat_map(|run| &run.rows) {
        let at = values.entry((row.phase, row.step)).or_default();
        for (name, value) in row.metrics.iter().filter(|(name, _)| !super::tables::is_interval_end(name)) {
            at.entry(name).or_default().push(value);
        }
    }
    let row = |((phase, step), metrics): ((Phase, u64), BTreeMap<&str, Vec<f64>>)| {
        let mut merged = Metrics::new();
        for (name, values) in metrics {
            merged.set(name, values.iter().sum::<f64>() / values.len() as f64);
            if values.len() > 1 {
                merged.set(format!("{name}/ci95_low"), values.iter().copied().fold(f64::INFINITY, f64::min));
                merged.set(
                    format!("{name}/ci95_high"),
                    values.iter().copied().fold(f64::NEG_INFINITY, f64::max),
                );
            }
        }
        Row { step, phase, metrics: merged }
    };
    let mut rows: Vec<Row> = values.into_iter().map(row).collect();
    rows.sort_by_key(|row| (row.step, row.phase));
    rows
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::report::{alarms, tables};

    #[test]
    fn bug_the_mean_over_seeds_hid_each_seeds_alarm_and_mismatch() {
        let seed = |seed: u32, kl: f64| {
            let mut run = run(&seed.to_string(), &format!("[train]\nseed = {seed}\n"), &[0.0, 0.0]);
            run.rows[1].metrics.set("rollout_corr/kl", kl);
            run.rows[1].metrics.set("mismatch/log_ppl_abs_diff_max", kl.abs());
            run.rows[1].metrics.set("outcome/finished", f64::from(seed));
            run
        };
        let curves = merge_seeds(&mut [seed(1, -0.3), seed(2, 0.4)]);
        let alarms = minijinja::Value::from_serialize(alarms::table(&curves));
        let kl = alarms.get_item_by_index(0).unwrap().get_attr("runs").unwrap().get_item_by_index(0).unwrap();
        let worst = kl.get_attr("worst").unwrap().get_attr("text").unwrap();
        assert_eq!(
            (worst.to_string(), kl.get_attr("beyond").unwrap().to_string()),
            ("0.4".into(), "1 of 1".into())
        );
        let summary = &tables::summary(&curves)[0];
        assert_eq!(summary.get_attr("mismatch").unwrap().to_string(), "up to 0.4 (1 step)");
        // The ends of the band were counted as outcomes.
        let outcomes = tables::outcomes(&curves).unwrap().get_attr("rows").unwrap();
        assert_eq!(outcomes.len(), Some(1), "{outcomes}");
    }

    fn run(label: &str, recipe: &str, rewards: &[f64]) -> Run {
        let row = |(step, &reward): (u64, &f64)| Row {
            step,
            phase: Phase::Rl,
            metrics: Metrics::from_iter([("critic/rewards/mean", reward)]),
        };
        Run {
            label: label.to_owned(),
            rows: (1..).zip(rewards).map(row).collect(),
            recipe: recipe.parse().unwrap(),
            ..Run::default()
        }
    }

    #[test]
    fn runs_that_differ_in_their_seed_alone_are_one_curve() {
        let recipe =
            |seed: u64, lr: f64| format!("[train]\nseed = {seed}\nlr = {lr}\n[parallel]\nthreads = {seed}\n");
        let mut runs = [
            run("a", &recipe(1, 0.5), &[0.0, 1.0]),
            run("b", &recipe(1, 0.25), &[9.0, 9.0]),
            run("c", &recipe(2, 0.5), &[1.0, 2.0, 3.0]),
            run("no recipe", "", &[5.0]),
            run("none either", "", &[5.0]),
            run("a again", &recipe(1, 0.5), &[0.0, 1.0]),
        ];
        let curves = merge_seeds(&mut runs);
        assert_eq!(runs.map(|run| run.curve), [0, 1, 0, 2, 3, 4]);
        let labels: Vec<&str> = curves.iter().map(|run| run.label.as_str()).collect();
        assert_eq!(labels, ["a, c (2 seeds)", "b", "no recipe", "none either", "a again"]);
        assert_eq!(curves[0].seeds, "1, 2");
        assert_eq!(curves[0].series(Phase::Rl, "critic/rewards/mean"), [(1, 0.5), (2, 1.5), (3, 3.0)]);
        let end = |end: &str| curves[0].series(Phase::Rl, &format!("critic/rewards/mean/{end}"));
        assert_eq!((end("ci95_low"), end("ci95_high")), (vec![(1, 0.0), (2, 1.0)], vec![(1, 1.0), (2, 2.0)]));
        assert!(curves[1].series(Phase::Rl, "critic/rewards/mean/ci95_low").is_empty());
    }
}
