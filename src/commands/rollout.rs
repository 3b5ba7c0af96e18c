//! `rloss rollout RECIPE|RUN`: the trajectories of one training step, written and not trained on.

use super::collect::{Collection, default_out, pin_model, show};
use super::run_folder::write_file;
use super::signals::Stop;
use super::workbench::Workbench;
use crate::cli::{EXIT_DONE, EXIT_STOPPED, RunArgs};
use crate::metrics::{Console, Phase, Row, Table, format_number};
use crate::recipe::locate;
use crate::rollout::{Prompt, RolloutSettings};
use crate::trajectory::Group;
use anyhow::Result;
use std::time::Duration;

/// Samples `rollout.prompts_per_step` prompts, `rollout.samples_per_prompt` times each: those of step 1, or of the step
/// after a checkpoint's. Exit code 130 when a signal stopped it; the same command then goes on.
///
/// # Errors
/// [`crate::error::BadInput`] before any work; the rollout's and the disk's leave what was sampled.
pub fn run(args: &RunArgs) -> Result<u8> {
    let source = locate(&args.recipe)?;
    let mut plan = source.resolve(&args.sets)?;
    let step = pin_model(&mut plan, &source, &args.sets)? + 1;
    let out = args.out.clone().unwrap_or_else(|| default_out(&plan, &source, "rollout"));
    let bench = Workbench::open(plan)?;
    let collection = Collection::open(&bench, &out, "rollout", step)?;
    let console = Console::stderr(Duration::from_secs(2), bench.recipe().logging.console_every_steps);
    bench.plan.warnings.iter().for_each(|warning| console.print(&format!("warning: {warning}")));
    let stop = Stop::listen()?;
    let recipe = bench.recipe();
    let prompts = training_prompts(&bench, step, 0, recipe.rollout.prompts_per_step);
    let settings = RolloutSettings::training(recipe, bench.preamble.clone(), step);
    let asked = (&settings, recipe.rollout.samples_per_prompt);
    let name = format!("step-{step:06}");
    let found = collection.sample(&name, Phase::Rl, asked, &prompts, &console, &|| stop.asked())?;
    let Some(rows) = found else {
        console.print(&format!("stopped: {}; the same command goes on", out.display()));
        return Ok(EXIT_STOPPED);
    };
    let group = |rows: Vec<_>| Group {
        trajectories: rows.into_iter().map(|row: crate::trajectory::TrajectoryRow| row.trajectory).collect(),
        greedy: None,
    };
    let groups: Vec<Group> = rows.into_iter().map(group).collect();
    let metrics = crate::rollout::metrics(&groups).finish()?;
    let mut table = Table::new(["metric", "value"]);
    metrics.iter().for_each(|(name, value)| table.row([name.to_owned(), format_number(value)]));
    write_file(&out.join("metrics.jsonl"), &(Row { step, phase: Phase::Rl, metrics }.to_json() + "\n"))?;
    show(&table.to_string());
    console.print(&format!("done: {}", collection.file(&name).display()));
    Ok(EXIT_DONE)
}

/// The first `count` prompts of draw `round` (from 0) of training step `step` (from 1): the task's stream in order. Each
/// step owns a stretch that suffices for every draw it may make, so its prompts depend on its number alone.
pub(super) fn training_prompts(bench: &Workbench, step: u64, round: u64, count: usize) -> Vec<Prompt> {
    let recipe = bench.recipe();
    let draws = recipe.rollout.resample_rounds_max + 1;
    let first = ((step - 1) * draws + round) * recipe.rollout.prompts_per_step as u64;
    let problem = |index| bench.task.training_problem(recipe.train.seed, index);
    (first..first + count as u64).map(|index| Prompt { index, problem: problem(index) }).collect()
}
