//! `rloss rollout RECIPE|RUN`: the trajectories of one training step, written and not trained on.

use crate::atomic_file::write_file;
use crate::commands::arguments::RunArgs;
use crate::error::{EXIT_DONE, EXIT_STOPPED};
use crate::metrics::{Console, Phase, Row, Table, format_number};
use crate::recipe::locate;
use crate::rollout::RolloutSettings;
use crate::run::collect::{Collection, default_out, pin_model, show};
use crate::run::signals::Stop;
use crate::run::workbench::Workbench;
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
    if let Some(confinement) = bench.confinement() {
        console.print(&format!("python tool: {confinement}"));
    }
    bench.plan.warnings.iter().for_each(|warning| console.print(&format!("warning: {warning}")));
    let stop = Stop::listen()?;
    let recipe = bench.recipe();
    let prompts = bench.training_prompts(step, 0, recipe.rollout.prompts_per_step);
    let settings = RolloutSettings::training(recipe, bench.preamble.clone(), step);
    let asked = (&settings, recipe.rollout.samples_per_prompt);
    let name = format!("step-{step:06}");
    let policy = bench.rollout_policy()?;
    let found = collection.sample(&name, Phase::Rl, &policy, asked, &prompts, &console, &|| stop.asked())?;
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
    show(&table.to_string())?;
    console.print(&format!("done: {}", collection.file(&name).display()));
    Ok(EXIT_DONE)
}
