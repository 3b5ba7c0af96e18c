//! `rloss check-mismatch [RECIPE]`: compares the log-probs of the same tokens in rollout and in training, or
//! in this program and in another engine. Names the cause of a mismatch.

use crate::actor::Actor;
use crate::atomic_file::write_file;
use crate::commands::arguments::{locate_recipe_or_model, name_of};
use crate::dist::Mesh;
use crate::dist::launch::require_single_process;
use crate::error::{EXIT_BAD_INPUT, EXIT_DIFFERS, EXIT_SUCCESS};
use crate::metrics::{Console, format_count, format_number, sanitize_terminal};
use crate::mismatch::bitwise_equality::EqualityChecks;
use crate::mismatch::measure::AblationMeasurement;
use crate::mismatch::output::{ResultLine, equality_table, mismatch_table, to_json};
use crate::mismatch::search::SearchSettings;
use crate::mismatch::{ablations, diagnose::UnmodifiedModel, external_engine, page, rows::RowReader};
use crate::model::ablations::Ablations;
use crate::model::policy_view::PolicyView;
use crate::model::rounding::WeightRounding;
use crate::recipe::{KeyScope, Plan, Recipe, RecipeSource, locate, resolve_for};
use crate::rollout::{Prompt, RolloutProgress};
use crate::run::environment::Environment;
use crate::run::header;
use crate::run::loaded::LoadedModel;
use crate::run::memory::{ModelCommand, SecondWeights, explain_out_of_memory};
use crate::run::processes;
use crate::run::sampling::Sampling;
use crate::run::sampling_folder::print_text;
use crate::run::signals::StopFlag;
use crate::run::source::pin_model;
use crate::run::startup::{Started, start_on_mesh};
use crate::run::trust::ask_consent;
use crate::trajectory::Trajectory;
use anyhow::{Context, Result};
use clap::Args;
use std::io::Write;
use std::path::{Path, PathBuf};
use std::sync::{Arc, OnceLock};
use std::time::Duration;

/// Arguments of `rloss check-mismatch`.
#[derive(Args, Debug, Clone)]
#[command(after_help = ablations::help())]
pub struct CheckMismatchArgs {
    /// A recipe file, a built-in recipe, a run folder (its last checkpoint) or a checkpoint; with --against
    /// also a model folder or GGUF file [default: quickstart]
    recipe: Option<PathBuf>,
    /// Replace a recipe's value, such as --set train.seed=1
    #[arg(long = "set", value_name = "KEY=VALUE")]
    sets: Vec<String>,
    /// Folder for mismatch.json; with --against also for mismatch.md, .svg and .csv
    /// [default: the run folder, or runs/<recipe's name>-mismatch]
    #[arg(long)]
    out: Option<PathBuf>,
    /// Ablations to measure: a comma starts a new row, a plus combines ablations in one row
    #[arg(long, value_name = "A,B+C")]
    arms: Option<String>,
    /// Compare a file of another engine, in a format of docs/AGAINST.md. The simplest format is one row per
    /// line: {"tokens": [...], "logprobs": [a number or null per token], "temperature": 1.0}. The exit code
    /// is 2 if a row is bad, otherwise 3 if the log-probs differ, otherwise 0
    #[arg(long, value_name = "FILE", num_args = 1.., conflicts_with = "arms")]
    against: Vec<PathBuf>,
    /// Temperature of the file's log-probs, if the file does not give it
    #[arg(long, value_name = "T", default_value_t = 1.0, requires = "against")]
    temperature: f64,
    /// Folder with the weights of an earlier update; tests whether these weights sampled the tokens of the
    /// file
    #[arg(long, value_name = "FOLDER", requires = "against")]
    earlier: Option<PathBuf>,
    /// Time limit in minutes of each search for the cause of a difference; 0 prints only the verdict
    /// [default: no limit]
    #[arg(long, value_name = "MINUTES", value_parser = minutes)]
    search_minutes: Option<Duration>,
    /// Start the programs named in another user's run folder
    #[arg(long)]
    trust: bool,
}

const JSON_FILE: &str = "mismatch.json";

/// Parses a number of minutes.
fn minutes(text: &str) -> Result<Duration, String> {
    let seconds = text.parse::<f64>().map(|minutes| minutes * 60.0);
    let limit = seconds.ok().and_then(|seconds| Duration::try_from_secs_f64(seconds).ok());
    limit.ok_or_else(|| "give a number of minutes that is not negative, such as 2.5".to_owned())
}

impl CheckMismatchArgs {
    fn path(&self) -> &Path {
        self.recipe.as_deref().unwrap_or(Path::new("quickstart"))
    }

    /// Returns the recipe; `None` for a model alone, which `--against` takes.
    fn source(&self) -> Result<Option<RecipeSource>> {
        if self.against.is_empty() {
            locate(self.path()).map(Some)
        } else {
            locate_recipe_or_model(self.path())
        }
    }

    /// Resolves the recipe with the command line's settings and `more_sets`.
    fn plan(&self, more_sets: &[String]) -> Result<Plan> {
        let sets: Vec<String> = self.sets.iter().chain(more_sets).cloned().collect();
        let scope =
            if self.against.is_empty() { KeyScope::CheckMismatch } else { KeyScope::CheckMismatchAgainst };
        let Some(source) = self.source()? else {
            let sets = [&[format!("model.path={}", self.path().display())], &sets[..]].concat();
            return Ok(resolve_for(scope, Path::new("rloss check-mismatch"), "", &sets)?);
        };
        let mut plan = source.resolve_for(scope, &sets)?;
        // If a --set names a model, the check uses that model.
        pin_model(&mut plan, &source, &sets)?;
        Ok(plan)
    }

    /// Returns the type of comparison, for the header.
    fn command(&self) -> ModelCommand {
        ModelCommand::CheckMismatch(match self.against.as_slice() {
            [] => SecondWeights::Rounded(WeightRounding::default()),
            _ => SecondWeights::Changed,
        })
    }

    fn out_folder(&self) -> Result<PathBuf> {
        if let Some(out) = &self.out {
            return Ok(out.clone());
        }
        let folder = |stem: &str| PathBuf::from("runs").join(format!("{stem}-mismatch"));
        Ok(match self.source()? {
            None => folder(&name_of(self.path())),
            Some(RecipeSource::Run(run) | RecipeSource::Checkpoint { run, .. }) => run,
            Some(source) => folder(&source.stem()),
        })
    }
}

/// Prints the results and writes `mismatch.json`. The exit code is 2 if a row of `--against` is bad.
///
/// # Errors
/// [`crate::error::BadInput`] before any work.
pub fn run(args: &CheckMismatchArgs) -> Result<u8> {
    if !args.against.is_empty() {
        require_single_process("check-mismatch --against")?;
    }
    let mesh = Mesh::connect()?;
    let (started, ablations) = mesh.require_success("the recipe", open(args, &mesh))?;
    let Started { loaded, environment, resources } = &started;
    let names: Vec<&str> = ablations.iter().map(|(name, _)| name.as_str()).collect();
    let (plan, device) = (&environment.plan, &resources.device_name);
    let weights = plan.recipe.model.path.as_deref();
    processes::check_agreement(&mesh, plan, device, weights, &names.join(" "))?;
    let console = console(plan, &mesh);
    let (command, out) = (args.command(), args.out_folder()?);
    let lines = header::lines(loaded, environment, device, command, &out);
    lines.iter().for_each(|line| console.print(line));
    let result = match args.against.as_slice() {
        [] => check_ablations(loaded, environment, &ablations, args.search_minutes, &console)
            .map_err(|error| explain_out_of_memory(mesh.explain(error), &resources.memory_plan))?,
        _ => check_against(loaded, environment, args, &console)?,
    };
    mesh.disconnect();
    if !mesh.is_rank_zero() {
        return Ok(result.code);
    }
    std::fs::create_dir_all(&out).with_context(|| format!("creating {}", out.display()))?;
    for (name, text) in &result.files {
        write_file(&out.join(name), text)?;
    }
    write_file(
        &out.join(JSON_FILE),
        &to_json(&result.lines, &result.verdict, result.diagnosis, &result.bad_rows),
    )?;
    let pages = result.files.iter().map(|(name, _)| &**name).filter(|name| name.ends_with(".md"));
    for name in pages.chain([JSON_FILE]) {
        print_text(&sanitize_terminal(&format!("{}\n", out.join(name).display())))?;
    }
    Ok(result.code)
}

/// Opens the model. Also returns the ablations to measure, with their names.
fn open(args: &CheckMismatchArgs, mesh: &Arc<Mesh>) -> Result<(Started, Vec<(String, Ablations)>)> {
    args.out_folder()?;
    let plan = args.plan(&[])?;
    processes::configure_mesh(mesh, &plan)?;
    let rows = ablations::parse_rows(args.arms.as_deref().unwrap_or_default(), &plan.recipe.arms);
    let rows = if args.arms.is_some() { rows } else { vec![] };
    let ablation_plans: Vec<(String, Plan)> =
        rows.into_iter().map(|row| Ok((row.name, args.plan(&row.overrides)?))).collect::<Result<_>>()?;
    let console = console(&plan, mesh);
    if mesh.is_rank_zero()
        && let Some(source) = args.source()?
    {
        ask_consent(&source, &plan.recipe, &args.sets, args.trust, &console)?;
    }
    let other_weights = match args.against.as_slice() {
        [] => {
            let plans = [&plan].into_iter().chain(ablation_plans.iter().map(|(_, plan)| plan));
            let rounding = plans.map(|plan| WeightRounding::from_ablations(&plan.recipe.arms));
            SecondWeights::Rounded(rounding.fold(WeightRounding::default(), WeightRounding::union))
        }
        _ => SecondWeights::Changed,
    };
    let started = start_on_mesh(plan, ModelCommand::CheckMismatch(other_weights), mesh, None, &console)?;
    let warnings = &started.environment.plan.warnings;
    warnings.iter().for_each(|warning| console.print(&format!("warning: {warning}")));
    ablation_plans
        .iter()
        .try_for_each(|(_, plan)| started.loaded.check_family(plan, &started.environment.chat))?;
    let ablations: Vec<(String, Ablations)> =
        ablation_plans.into_iter().map(|(name, plan)| (name, plan.recipe.arms)).collect();
    Ok((started, ablations))
}

/// Returns the console for progress, silent on ranks other than 0.
fn console(plan: &Plan, mesh: &Mesh) -> Console {
    match mesh.is_rank_zero() {
        true => Console::stderr(plan.recipe.logging.console_every_steps),
        false => Console::silent(),
    }
}

/// The result of the command: the contents of its files, and its exit code.
struct CheckResult {
    lines: Vec<ResultLine>,
    verdict: String,
    diagnosis: Option<serde_json::Value>,
    /// The rows that could not be compared.
    bad_rows: Vec<String>,
    /// Other files for the folder: name and text.
    files: Vec<(String, String)>,
    code: u8,
}

/// The signal that ends the search for a cause.
static STOP: OnceLock<StopFlag> = OnceLock::new();

/// Compares the files of `--against` with the model: the engine's log-probs and, if the files have them,
/// those of a trainer.
fn check_against(
    loaded: &LoadedModel,
    environment: &Environment,
    args: &CheckMismatchArgs,
    console: &Console,
) -> Result<CheckResult> {
    let (recipe, chat) = (environment.recipe(), &environment.chat);
    let (config, tokens_max) = (loaded.config(), loaded.actor.model.context_tokens_max());
    let token_rows =
        RowReader::new(config, tokens_max, chat.vocabulary(), args.temperature).read(&args.against)?;
    let tokens: usize = token_rows.rows.iter().map(|row| row.tokens.len()).sum();
    let log_probs: usize =
        token_rows.rows.iter().map(|row| row.log_probs.iter().skip(1).flatten().count()).sum();
    let counts = format!(
        "{}, {}, {} with a log-prob",
        format_count(token_rows.rows.len() as u64, "row"),
        format_count(tokens as u64, "token"),
        format_number(log_probs as f64)
    );
    let files: Vec<String> = args.against.iter().map(|file| file.display().to_string()).collect();
    print_note(&format!("data     {}: {counts}", files.join(", ")));
    token_rows.formats.iter().for_each(|format| print_note(format));
    for message in token_rows.bad_row_messages() {
        print_note(&format!("error: {message}"));
    }
    let tokens = recipe.train.micro_batch_tokens;
    let load = |folder| loaded.load_weights(recipe, folder, console);
    let earlier = args.earlier.as_deref().map(load).transpose()?;
    let reference =
        UnmodifiedModel { earlier_weights: earlier.as_ref(), ..reference(&loaded.actor, console) };
    let sides_line = external_engine::compare_sides(&token_rows.rows, clip(recipe))?;
    let stop = StopFlag::listen()?;
    let stop_console = console.clone();
    stop.on_request(move || {
        stop_console.print("ending the search: the results follow; a second signal stops at once")
    })?;
    let _ = STOP.set(stop);
    let (mut lines, mut answers, mut diagnoses) = (vec![], vec![], serde_json::Map::new());
    let (mut differs, mut files, mut largest) = (false, vec![], vec![]);
    let sides = external_engine::split_sides(token_rows.rows);
    let has_several = sides.len() > 1;
    for (side, rows) in &sides {
        let announce = |text: &str| match has_several {
            true => print_text(&sanitize_terminal(&format!("{side}: {text}\n"))),
            false => print_text(&sanitize_terminal(&format!("{text}\n"))),
        };
        let search = SearchSettings {
            limit: args.search_minutes,
            is_stopped: || STOP.get().is_some_and(StopFlag::is_requested),
            announce: &announce,
            ..SearchSettings::silent()
        };
        let comparison = external_engine::compare(reference, chat, rows, tokens, clip(recipe), &search)?;
        differs |= comparison.diagnosis.verdict.differs();
        let answer = &comparison.answer;
        answers.push(if has_several { format!("{side}: {answer}") } else { answer.clone() });
        diagnoses.insert((*side).to_owned(), comparison.to_json());
        let name = if has_several { format!("mismatch-{side}") } else { "mismatch".to_owned() };
        files.push((format!("{name}.svg"), page::chart(&comparison)));
        files.push((format!("{name}.csv"), page::token_table(&comparison, chat.vocabulary())?));
        largest.push(page::largest_table(&comparison, chat.vocabulary()));
        lines.extend(comparison.lines.into_iter().map(|line| {
            if has_several { ResultLine { name: format!("{side}: {}", line.name), ..line } } else { line }
        }));
    }
    lines.extend(sides_line);
    let mut answer = answers.join("\n\n");
    if !token_rows.bad_rows.is_empty() {
        let count = format_count(token_rows.bad_rows.len() as u64, "row");
        answer.push_str(&format!("\n\n{count} could not be compared."));
    }
    // The answer has the causes.
    let plain: Vec<ResultLine> =
        lines.iter().map(|line| ResultLine { cause: None, ..line.clone() }).collect();
    let table = |columns| mismatch_table("comparison", &plain, columns);
    print_text(&format!("{}\n\n{}\n", sanitize_terminal(&answer), table(stdout_columns())))?;
    if args.out.is_some() {
        let model =
            recipe.model.path.as_deref().map_or("random weights".into(), |path| path.display().to_string());
        let read = [&[format!("{counts}, computed with {model}")], &token_rows.formats[..]].concat();
        let page = page::page(&answer, &table(usize::MAX), &largest.join("\n"), &read);
        files.push(("mismatch.md".to_owned(), page));
    }
    let code = match (token_rows.bad_rows.is_empty(), differs) {
        (false, _) => EXIT_BAD_INPUT,
        (true, true) => EXIT_DIFFERS,
        (true, false) => EXIT_SUCCESS,
    };
    let diagnosis = match has_several {
        true => Some(serde_json::Value::Object(diagnoses)),
        false => diagnoses.into_iter().next().map(|(_, diagnosis)| diagnosis),
    };
    Ok(CheckResult { lines, verdict: answer, diagnosis, bad_rows: token_rows.bad_rows, files, code })
}

/// Returns the width of the terminal on standard output; unlimited for a file.
fn stdout_columns() -> usize {
    console::Term::stdout().size_checked().map_or(usize::MAX, |(_, columns)| columns.into())
}

/// Prints a line to standard error. A closed standard error is not an error.
fn print_note(line: &str) {
    let _ = writeln!(std::io::stderr(), "{}", sanitize_terminal(line));
}

/// Checks that rollout and training agree. Then measures `ablations`, each with its name.
fn check_ablations(
    loaded: &LoadedModel,
    environment: &Environment,
    ablations: &[(String, Ablations)],
    search_limit: Option<Duration>,
    console: &Console,
) -> Result<CheckResult> {
    let print = |text: &str| if loaded.mesh().is_rank_zero() { print_text(text) } else { Ok(()) };
    let trajectories = sample_step(Sampling { actor: &loaded.actor, environment }, console)?;
    let trajectories: Vec<&Trajectory> = trajectories.iter().collect();
    let recipe = environment.recipe();
    let Actor { model, parameters, .. } = &loaded.actor;
    let proof = EqualityChecks {
        actor: &loaded.actor,
        // Each process runs these forward passes alone.
        rollout: &PolicyView::for_rollout(model, parameters, &recipe.arms, recipe.train.seed)?,
        training: environment.training_forward(),
        temperature: recipe.rollout.temperature,
        console,
    };
    let links = proof.run_checks(&trajectories)?;
    let mut lines: Vec<ResultLine> = links.iter().map(ResultLine::from_check).collect();
    print(&format!("{}\n", equality_table(&lines)))?;

    let measurement = AblationMeasurement::new(
        reference(&loaded.actor, console),
        &trajectories,
        &recipe.arms,
        recipe.train.seed,
        recipe.rollout.temperature,
        clip(recipe),
        recipe.train.micro_batch_tokens,
    )?
    .with_search_limit(search_limit);
    let mut mismatches = vec![measurement.measure("the recipe without changes", &recipe.arms)?];
    for (name, ablations) in ablations {
        mismatches.push(measurement.measure(name, ablations)?);
    }
    print(&format!("{}\n", mismatch_table("ablation", &mismatches, stdout_columns())))?;
    let failed: Vec<&str> = links.iter().filter(|link| !link.is_bit_equal()).map(|link| link.name).collect();
    let tokens = links.last().map_or(0, |link| link.tokens);
    let verdict = if failed.is_empty() {
        format!("rollout and training are bitwise equal on {tokens} sampled tokens")
    } else {
        format!("rollout and training differ; failed checks: {}", failed.join(", "))
    };
    lines.extend(mismatches);
    print(&format!("{}\n", sanitize_terminal(&verdict)))?;
    // An ablation of the recipe makes them differ on purpose.
    let differs = !failed.is_empty() && recipe.arms.list_enabled().is_empty();
    let code = if differs { EXIT_DIFFERS } else { EXIT_SUCCESS };
    Ok(CheckResult { lines, verdict, diagnosis: None, bad_rows: vec![], files: vec![], code })
}

/// Samples the rollout of one training step.
fn sample_step(sampling: Sampling, console: &Console) -> Result<Vec<Trajectory>> {
    let environment = sampling.environment;
    let recipe = environment.recipe();
    let prompts: Vec<Prompt> = (0..recipe.rollout.prompts_per_step as u64)
        .map(|index| Prompt { index, problem: environment.task.training_problem(recipe.train.seed, index) })
        .collect();
    let plan = environment.training_rollout(0);
    let engine = sampling.engine(sampling.training_policy()?, 0, &plan.settings)?;
    let samples = recipe.rollout.samples_per_prompt;
    let stage = console.start_item_stage("sampling", (prompts.len() * samples) as u64, 0);
    let progress = RolloutProgress::show_on(&stage);
    let rollouts = sampling.sample_groups(&engine, &plan, (&prompts, samples), &progress, None, &|| false)?;
    stage.finish();
    let rollouts = rollouts.context("the rollout ended early")?;
    Ok(rollouts.groups.into_iter().flat_map(|group| group.trajectories).collect())
}

fn reference<'a>(actor: &'a Actor, console: &'a Console) -> UnmodifiedModel<'a> {
    let Actor { model, parameters, execution, .. } = actor;
    UnmodifiedModel { threads: &execution.threads, model, parameters, earlier_weights: None, console }
}

fn clip(recipe: &Recipe) -> (f64, f64) {
    (recipe.policy.clip_low, recipe.policy.clip_high)
}
