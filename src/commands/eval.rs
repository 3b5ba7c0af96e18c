//! `rloss eval RECIPE|RUN`: evaluates a model on the held-out problems.

use crate::atomic_file::write_file;
use crate::bad_input;
use crate::commands::arguments::RunArgs;
use crate::commands::sft;
use crate::error::{EXIT_STOPPED, EXIT_SUCCESS};
use crate::metrics::{Console, Phase, Row, TextTable, format_count, format_number};
use crate::recipe::{KeyScope, Recipe, RecipeSource, locate, override_key};
use crate::rollout::accuracy;
use crate::run::causes::{SampleFacts, sample_causes};
use crate::run::environment::Environment;
use crate::run::evaluation::{Evaluation, ProblemResult, ValidationResult};
use crate::run::header::command_line;
use crate::run::memory::{ModelCommand, explain_out_of_memory};
use crate::run::run_folder::EVAL_FILE;
use crate::run::sampling::Sampling;
use crate::run::sampling_folder::{SamplingFolder, check_failures, print_text, refuse_other_results};
use crate::run::source::pin_model;
use crate::run::startup::{Started, start};
use crate::run::trust::ask_consent;
use crate::trajectory::{CallOutcome, Outcome, TrajectoryRow};
use anyhow::Result;
use serde_json::{Map, Value, json};
use std::collections::BTreeMap;

/// Evaluates the model. The exit code is 130 if a signal stopped the evaluation. The same command then
/// continues with the missing samples. For a finished evaluation, it only prints the tables again.
///
/// For a run folder, the seeds are those of the run's own evaluation after the same step.
///
/// # Errors
/// [`crate::error::BadInput`] before any work. Errors of the rollout or the disk keep the finished samples.
pub fn run(args: &RunArgs) -> Result<u8> {
    let source = locate(&args.recipe)?;
    let mut plan = source.resolve_for(KeyScope::Eval, &args.sets)?;
    refuse_run_without_task(&source, &plan.recipe, &args.sets)?;
    let task = &plan.recipe.task;
    let names_no_file = task.validation_file.is_none() && task.validation_files.is_empty();
    if task.name.reads_files && !task.is_agent() && names_no_file {
        return Err(bad_input!(
            "the task {} has no held-out problems; name them: --set task.validation_file=FILE",
            task.name
        ));
    }
    let step = pin_model(&mut plan, &source, &args.sets)?;
    refuse_other_results(args.out.as_deref(), &plan, ("eval", step))?;
    let console = Console::stderr(plan.recipe.logging.console_every_steps);
    ask_consent(&source, &plan.recipe, &args.sets, args.trust, &console)?;
    let started = start(plan, ModelCommand::Eval, &console)?;
    let Started { loaded, environment, resources } = &started;
    let sets = environment.validation_prompts();
    if sets.iter().all(|(_, prompts)| prompts.is_empty()) {
        return Err(bad_input!("the task {} has no held-out problems", environment.task.name()));
    }
    let sampling = Sampling { actor: &loaded.actor, environment };
    let collection = SamplingFolder::open(sampling, &source, args.out.as_deref(), ("eval", step))?;
    let out = &collection.path;
    let stop = collection.announce(&started, ModelCommand::Eval, &console)?;
    let plan = environment.evaluation_rollout(step);
    let samples = environment.recipe().eval.samples;
    let engine = sampling.engine(sampling.policy_without_ablations()?, step, &plan.settings)?;
    let mut evaluation = Evaluation { sets: vec![] };
    for (set, prompts) in &sets {
        // The name ends with the number of the step, by which a report finds the newest evaluation.
        let name = match sets.len() {
            1 => format!("eval-{step:06}"),
            _ => format!("eval-{}-{step:06}", set.name),
        };
        let stop_requested = || stop.is_requested();
        let sampled = collection
            .sample(&name, Phase::Eval, &engine, (&plan, samples), prompts, &console, &stop_requested)
            .map_err(|error| explain_out_of_memory(error, &resources.memory_plan))?;
        let Some(groups) = sampled else {
            console.print(&format!("stopped: {}; run the same command again to continue", out.display()));
            return Ok(EXIT_STOPPED);
        };
        evaluation.sets.push(ValidationResult::new(environment, set, prompts, groups));
    }
    let row = Row { step, phase: Phase::Eval, metrics: evaluation.metrics()? };
    write_file(&out.join("metrics.jsonl"), &(row.to_json() + "\n"))?;
    let text = serde_json::to_string_pretty(&document(environment, step, &evaluation))?;
    write_file(&out.join(EVAL_FILE), &(text + "\n"))?;
    print_text(&evaluation.sets.iter().map(tables).collect::<Result<String>>()?)?;
    console.print(&format!("done: {}", out.display()));
    let shown = out.display().to_string();
    let run = source.run().map(|run| run.display().to_string());
    let words: Vec<&str> = ["report"].into_iter().chain(run.as_deref()).chain([&*shown]).collect();
    console.print(&format!("to see the results: {}", command_line(&words)));
    let rows = evaluation.sets.iter().flat_map(ValidationResult::rows);
    let causes = sample_causes(&SampleFacts::new(loaded, environment), environment, rows);
    collection.warn(causes, Phase::Eval, step, &console)?;
    check_failures(evaluation.sets.iter().flat_map(ValidationResult::rows), &console).map(|()| EXIT_SUCCESS)
}

/// Refuses a run of `rloss sft` on a model's folder. Its recipe names a task only because a recipe must.
fn refuse_run_without_task(source: &RecipeSource, recipe: &Recipe, sets: &[String]) -> Result<()> {
    let Some(run) = source.run() else { return Ok(()) };
    let is_set = sets.iter().filter_map(|set| override_key(set)).any(|key| key.starts_with("task."));
    if is_set || recipe.train.steps > 0 || recipe.task != sft::unused_task()? {
        return Ok(());
    }
    Err(bad_input!(
        "{}: `rloss sft` made this run, so it has no task to evaluate; name one, such as --set task.name=gsm8k --set task.validation_file=FILE",
        run.display()
    ))
}

/// Counts trajectories and successes for each value of `key`.
fn totals<K: Ord>(set: &ValidationResult, key: impl Fn(&TrajectoryRow) -> K) -> BTreeMap<K, (usize, usize)> {
    let mut counts = BTreeMap::new();
    for row in set.rows() {
        let (all, right): &mut (usize, usize) = counts.entry(key(row)).or_default();
        *all += 1;
        *right += usize::from(row.trajectory.success);
    }
    counts
}

/// Counts tool calls by outcome.
fn calls(set: &ValidationResult) -> BTreeMap<CallOutcome, usize> {
    let mut counts = BTreeMap::new();
    for call in set.rows().flat_map(|row| &row.trajectory.turns).flat_map(|turn| &turn.calls) {
        *counts.entry(*call).or_default() += 1;
    }
    counts
}

/// Returns the tables of a validation set for the terminal.
fn tables(set: &ValidationResult) -> Result<String> {
    let (problems, trajectories) = (set.problems.len(), set.rows().count());
    let mut table = TextTable::new(["measure", "value", "95% from", "to"]);
    for (measure, e) in set.estimates() {
        let cells = [e.mean, e.low, e.high].map(|value| format!("{value:.3}"));
        table.add_row(std::iter::once(set.key(&measure)).chain(cells));
    }
    let rewards = set.reward_metrics()?;
    for (name, mean) in rewards.iter().filter(|_| set.rows().any(|row| !row.trajectory.rewards.is_empty())) {
        table.add_row([name.to_owned(), format!("{mean:.3}"), String::new(), String::new()]);
    }
    let mut outcomes = TextTable::new(["outcome", "trajectories", "right"]);
    let by_outcome: BTreeMap<Outcome, _> = totals(set, |row| row.trajectory.outcome);
    for &outcome in Outcome::ALL {
        let (all, right) = by_outcome.get(&outcome).copied().unwrap_or_default();
        outcomes.add_row([outcome.name().to_owned(), format_integer(all), format_integer(right)]);
    }
    let mut turns = TextTable::new(["turns", "trajectories", "right"]);
    for (n, (all, right)) in totals(set, |row| row.trajectory.turns.len()) {
        turns.add_row([format_integer(n), format_integer(all), format_integer(right)]);
    }
    let mut text = format!(
        "{}: {}, {}; intervals over problems\n\n{table}\n{outcomes}\n{turns}\n",
        crate::metrics::sanitize_line(&set.name),
        format_count(problems as u64, "problem"),
        if trajectories == 1 {
            "1 trajectory".to_owned()
        } else {
            format!("{} trajectories", format_integer(trajectories))
        }
    );
    let calls = calls(set);
    if !calls.is_empty() {
        let mut table = TextTable::new(["tool call", "calls"]);
        calls.iter().for_each(|(call, n)| table.add_row([call.name().to_owned(), format_integer(*n)]));
        text.push_str(&format!("{table}\n"));
    }
    Ok(text)
}

fn format_integer(n: usize) -> String {
    format_number(n as f64)
}

/// Returns the contents of `eval.json`.
fn document(environment: &Environment, step: u64, evaluation: &Evaluation) -> Value {
    let recipe = environment.recipe();
    json!({
        "model": recipe.model.path,
        "step": step,
        "task": environment.task.name(),
        "seed": recipe.train.seed,
        "samples": recipe.eval.samples,
        "sampling": {
            "temperature": recipe.eval.temperature,
            "top_p": recipe.eval.top_p,
            "top_k": recipe.eval.top_k,
            "min_p": recipe.eval.min_p,
        },
        "sets": evaluation.sets.iter().map(set_document).collect::<Vec<_>>(),
    })
}

fn set_document(set: &ValidationResult) -> Value {
    let share = |(all, right): (usize, usize)| json!({ "trajectories": all, "right": right });
    let estimates: Map<String, Value> =
        set.estimates().into_iter().map(|(measure, e)| (measure, json!(e))).collect();
    let outcomes: Map<String, Value> = totals(set, |row| row.trajectory.outcome)
        .into_iter()
        .map(|(outcome, counts)| (outcome.name().to_owned(), share(counts)))
        .collect();
    let turns: Map<String, Value> = totals(set, |row| row.trajectory.turns.len())
        .into_iter()
        .map(|(n, counts)| (n.to_string(), share(counts)))
        .collect();
    let calls: Map<String, Value> =
        calls(set).into_iter().map(|(call, n)| (call.name().to_owned(), json!(n))).collect();
    json!({
        "name": set.name,
        "estimates": estimates,
        "outcomes": outcomes,
        "turns": turns,
        "calls": calls,
        "problems": set.problems.iter().map(|p| problem_document(set, p)).collect::<Vec<_>>(),
    })
}

fn problem_document(set: &ValidationResult, problem: &ProblemResult) -> Value {
    let mut document = Map::new();
    document.insert("id".into(), json!(problem.id));
    document.insert(format!("mean@{}", set.samples), json!(accuracy::mean(&problem.samples)));
    for &k in &set.pass_at {
        document.insert(format!("pass@{k}"), json!(accuracy::pass_at(k, &problem.samples)));
    }
    if set.samples > 1 {
        document.insert(format!("maj@{}", set.samples), json!(accuracy::majority(&problem.votes)));
    }
    let samples = problem.rows.iter().zip(&problem.samples).map(|(row, sample)| {
        let mut document = json!({
            "right": sample.success,
            "reward": row.trajectory.reward,
            "outcome": row.trajectory.outcome.name(),
            "answer": sample.answer,
            "turns": row.trajectory.turns.len(),
            "sampled_tokens": row.trajectory.sampled_tokens(),
        });
        if !row.trajectory.rewards.is_empty() {
            document["rewards"] = json!(row.trajectory.rewards);
        }
        document
    });
    document.insert("samples".into(), samples.collect());
    Value::Object(document)
}
