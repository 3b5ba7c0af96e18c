//! `rloss rollout RECIPE|RUN`: samples the trajectories of one training step without training on them.

use crate::actor::Actor;
use crate::atomic_file::write_file;
use crate::commands::arguments::RunArgs;
use crate::error::{EXIT_STOPPED, EXIT_SUCCESS};
use crate::metrics::{Console, Phase, Row, TextTable, format_number};
use crate::mismatch::export;
use crate::model::policy_view::PolicyView;
use crate::recipe::{KeyScope, locate};
use crate::run::causes::{SampleFacts, sample_causes};
use crate::run::memory::{ModelCommand, explain_out_of_memory};
use crate::run::sampling::Sampling;
use crate::run::sampling_folder::{SamplingFolder, check_failures, print_text, refuse_other_results};
use crate::run::source::pin_model;
use crate::run::startup::{Started, start};
use crate::run::trust::ask_consent;
use crate::settings::Choice;
use crate::trajectory::Group;
use anyhow::{Context, Result};
use clap::{Args, ValueEnum};

/// Arguments of `rloss rollout`.
#[derive(Args, Debug, Clone)]
pub struct RolloutArgs {
    #[command(flatten)]
    run: RunArgs,
    /// Also write the trajectories in another trainer's format: prime-rl's token_exports/step_N/rank_0.jsonl
    #[arg(long)]
    format: Option<Format>,
}

/// A format of another trainer.
#[derive(Debug, Clone, Copy, PartialEq, Eq, ValueEnum)]
enum Format {
    PrimeRl,
}

/// Samples `rollout.prompts_per_step` prompts, `rollout.samples_per_prompt` times each. The prompts are those
/// of step 1 or, for a checkpoint, of the step after it. The exit code is 130 if a signal stopped the
/// command. The same command then continues.
///
/// # Errors
/// [`crate::error::BadInput`] before any work. Errors of the rollout or the disk keep the finished samples.
pub fn run(args: &RolloutArgs) -> Result<u8> {
    let RolloutArgs { run: args, format } = args;
    let source = locate(&args.recipe)?;
    let mut plan = source.resolve_for(KeyScope::Rollout, &args.sets)?;
    let step = pin_model(&mut plan, &source, &args.sets)? + 1;
    refuse_other_results(args.out.as_deref(), &plan, ("rollout", step))?;
    let console = Console::stderr(plan.recipe.logging.console_every_steps);
    ask_consent(&source, &plan.recipe, &args.sets, args.trust, &console)?;
    let started = start(plan, ModelCommand::Rollout, &console)?;
    let Started { loaded, environment, resources } = &started;
    let sampling = Sampling { actor: &loaded.actor, environment };
    let folder = SamplingFolder::open(sampling, &source, args.out.as_deref(), ("rollout", step))?;
    let out = &folder.path;
    let stop = folder.announce(&started, ModelCommand::Rollout, &console)?;
    let recipe = environment.recipe();
    let prompts = environment.training_prompts(step, 0, recipe.rollout.prompts_per_step);
    let plan = environment.training_rollout(step);
    let samples = (&plan, recipe.rollout.samples_per_prompt);
    let name = format!("step-{step:06}");
    let engine = sampling.engine(sampling.training_policy()?, step - 1, &plan.settings)?;
    let sampled_rows = folder
        .sample(&name, Phase::Rl, &engine, samples, &prompts, &console, &|| stop.is_requested())
        .map_err(|error| explain_out_of_memory(error, &resources.memory_plan))?;
    let Some(rows) = sampled_rows else {
        console.print(&format!("stopped: {}; run the same command again to continue", out.display()));
        return Ok(EXIT_STOPPED);
    };
    let causes = sample_causes(&SampleFacts::new(loaded, environment), environment, rows.iter().flatten());
    folder.warn(causes, Phase::Rl, step, &console)?;
    let failures = check_failures(rows.iter().flatten(), &console);
    let group = |rows: Vec<_>| Group {
        trajectories: rows.into_iter().map(|row: crate::trajectory::TrajectoryRow| row.trajectory).collect(),
        greedy: None,
    };
    let groups: Vec<Group> = rows.into_iter().map(group).collect();
    if *format == Some(Format::PrimeRl) {
        let ablations = &recipe.arms;
        let Actor { model, parameters, execution, .. } = &loaded.actor;
        let training = PolicyView::for_training(model, parameters, ablations, recipe.train.seed)?;
        let trajectories: Vec<_> = groups.iter().flat_map(|group| &group.trajectories).collect();
        let settings = (recipe.rollout.temperature, recipe.train.micro_batch_tokens);
        let step_and_task = (step, Choice::name(recipe.task.name));
        let threads = &execution.threads;
        let text = export::prime_rl(threads, &training, &trajectories, step_and_task, settings)?;
        let folder = out.join(format!("token_exports/step_{step}"));
        std::fs::create_dir_all(&folder).with_context(|| format!("creating {}", folder.display()))?;
        write_file(&folder.join("rank_0.jsonl"), &text)?;
        console.print(&format!("prime-rl: {}", folder.join("rank_0.jsonl").display()));
    }
    let metrics = crate::rollout::metrics(&groups).finish()?;
    let mut table = TextTable::new(["metric", "value"]);
    metrics.iter().for_each(|(name, value)| table.add_row([name.to_owned(), format_number(value)]));
    write_file(&out.join("metrics.jsonl"), &(Row { step, phase: Phase::Rl, metrics }.to_json() + "\n"))?;
    print_text(&table.to_string())?;
    console.print(&format!("done: {}", folder.trajectories_file(&name).display()));
    failures.map(|()| EXIT_SUCCESS)
}
