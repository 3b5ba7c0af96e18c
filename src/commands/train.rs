//! `rloss train RECIPE`: SFT warm-up, reinforcement learning, evaluations, checkpoints.

use crate::bad_input;
use crate::checkpoint::{ResumePoint, newest_checkpoint};
use crate::commands::arguments::RunArgs;
use crate::dist::Mesh;
use crate::error::{EXIT_STOPPED, EXIT_SUCCESS};
use crate::metrics::Console;
use crate::recipe::{Plan, RecipeSource, locate};
use crate::run::header::{self, command_line};
use crate::run::inputs::Inputs;
use crate::run::memory::{ModelCommand, explain_out_of_memory};
use crate::run::processes;
use crate::run::run_folder::{RunFolder, contains_run, prepare_resume};
use crate::run::signals::StopFlag;
use crate::run::source::pin_model;
use crate::run::startup::{Resources, Started, start_on_mesh};
use crate::run::trust::ask_consent;
use crate::trainer::{Trainer, TrainingData};
use anyhow::Result;
use clap::{Args, ValueEnum};
use std::path::{Path, PathBuf};
use std::sync::Arc;

/// Arguments of `rloss train`.
#[derive(Args, Debug, Clone)]
pub struct TrainArgs {
    #[command(flatten)]
    run: RunArgs,
    /// Resume the run in the folder from its last checkpoint; with =auto, start a run if there is none
    #[arg(long, value_name = "WHEN", num_args = 0..=1, require_equals = true, default_missing_value = "always")]
    resume: Option<Resume>,
    /// Resume although data files, task programs or templates changed; the run records the changes
    #[arg(long, requires = "resume")]
    accept_changes: bool,
}

/// When a run is resumed.
#[derive(ValueEnum, Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Resume {
    /// A folder without a run is an error
    Always,
    /// A run is started in a folder without one
    Auto,
}

/// Trains. The exit code is 130 if a signal stopped training after a checkpoint.
///
/// # Errors
/// [`crate::error::BadInput`] before any work. Other errors leave the last checkpoint intact.
pub fn run(args: &TrainArgs) -> Result<u8> {
    let mesh = Mesh::connect()?;
    let source = mesh.require_success("the recipe", locate(&args.run.recipe))?;
    run_source(mesh, &source, &args.run, (args.resume, args.accept_changes), StartingWeights::Recipe)
}

/// The weights from which a run starts, if its RECIPE is a run folder or a checkpoint.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum StartingWeights {
    /// Those that the recipe names.
    Recipe,
    /// Those of the last checkpoint.
    Checkpoint,
}

/// Trains as the recipe `source` says, with the other arguments of `args`. `resuming`: when the run is
/// resumed, and whether its inputs may have changed.
///
/// # Errors
/// Errors of [`run`].
pub(super) fn run_source(
    mesh: Arc<Mesh>,
    source: &RecipeSource,
    args: &RunArgs,
    resuming: (Option<Resume>, bool),
    starting_weights: StartingWeights,
) -> Result<u8> {
    let TrainInputs { out, plan, inputs, console, resumes, fresh_start_note, resume_notes, resume_point } =
        mesh.require_success("the recipe", prepare(source, args, resuming, starting_weights, &mesh))?;
    let checkpoint = resume_point.as_ref().map(|resume_point| resume_point.folder.as_path());
    let started = start_on_mesh(plan, ModelCommand::Train, &mesh, checkpoint, &console);
    let Started { loaded, environment, resources } = mesh.require_success("the model", started)?;
    let Resources { device_name, memory_plan, two_samplings } = resources;
    let data_inputs = environment.data_inputs(loaded.config(), loaded.actor.parameters.device().is_cpu());
    let data = mesh.require_success("the data", TrainingData::open(&data_inputs))?;
    mesh.require_success("the inputs", inputs.check_unchanged(environment.recipe(), &console))?;
    let state =
        resume_point.as_ref().map_or(String::new(), |resume_point| format!("{:?}", resume_point.state));
    let plan = &environment.plan;
    let weights = checkpoint.or(plan.recipe.model.path.as_deref());
    processes::check_agreement(&mesh, plan, &device_name, weights, &state)?;
    // From here on, a signal saves the run.
    let stop = StopFlag::listen()?;
    let folder = match resumes {
        _ if !mesh.is_rank_zero() => Ok(RunFolder::for_other_rank(&out)),
        true => RunFolder::resume(&out, plan, resume_point.as_ref(), &inputs),
        false => RunFolder::create(&out, plan, &inputs),
    };
    let folder = mesh.require_success("the run's folder", folder)?;
    let lines = header::lines(&loaded, &environment, &device_name, ModelCommand::Train, &out);
    lines.iter().for_each(|line| console.print(line));
    plan.warnings
        .iter()
        .chain(&inputs.warning)
        .for_each(|warning| console.print(&format!("warning: {warning}")));
    fresh_start_note.iter().chain(&resume_notes).for_each(|line| console.print(line));
    let before = RunFolder::previous_device(&out).filter(|before| resumes && *before != device_name);
    if let Some(before) = before {
        console.print(&format!(
            "warning: this run computed on {before}, and continues on {device_name}: the results will not be bitwise equal to a run on one device"
        ));
    }
    if mesh.is_rank_zero() {
        let (console, run) = (console.clone(), out.clone());
        stop.before_exit(move || {
            console.remove_status_file();
            console.print(&stopped_at_once(&run));
        });
    }
    let run = || {
        let facts = header::model_facts(&loaded, environment.recipe(), &device_name);
        folder.write_line("model.json", &facts.to_string())?;
        if let Some(confinement) = environment.sandbox_description() {
            folder.write_line("sandbox.txt", &confinement)?;
        }
        let model = (loaded, environment);
        let point = resume_point.as_ref();
        let mut trainer = Trainer::new(model, two_samplings, data, (folder, console.clone()), stop, point)?;
        trainer.run(resume_point)
    };
    let explain = |error| explain_out_of_memory(mesh.explain(error), &memory_plan);
    let stopped = run().map_err(explain).inspect_err(|_| {
        if !resumes && mesh.is_rank_zero() {
            RunFolder::remove_without_results(&out);
        }
    })?;
    mesh.disconnect();
    let path_text = out.display().to_string();
    if stopped {
        console.print(&format!("stopped: {path_text}"));
        console.print(&format!("to resume: {}", command_line(&["train", &path_text, "--resume"])));
        return Ok(EXIT_STOPPED);
    }
    console.print(&format!("done: {path_text}"));
    console.print(&format!("to see the results: {}", command_line(&["report", &path_text])));
    Ok(EXIT_SUCCESS)
}

/// Returns the last message of a run that a second signal ends within a step.
fn stopped_at_once(run: &Path) -> String {
    let resume = command_line(&["train", &run.display().to_string(), "--resume"]);
    let Ok(Some(checkpoint)) = newest_checkpoint(run) else {
        return format!("stopped at once: there is no checkpoint yet\nto start again: {resume}");
    };
    let name = checkpoint.file_name().unwrap_or_default().to_string_lossy().into_owned();
    format!("stopped at once: the work after {name} is lost\nto resume: {resume}")
}

/// The checked inputs of training.
struct TrainInputs {
    out: PathBuf,
    plan: Plan,
    inputs: Inputs,
    console: Console,
    /// Whether a run is resumed.
    resumes: bool,
    /// A line for the console if a run's recipe is trained again from the start.
    fresh_start_note: Option<String>,
    /// Description of the resumed run, as lines.
    resume_notes: Vec<String>,
    resume_point: Option<ResumePoint>,
}

/// Reads the recipe and, if a run is resumed, the run. Writes nothing.
fn prepare(
    source: &RecipeSource,
    args: &RunArgs,
    (resume, accepts_changes): (Option<Resume>, bool),
    starting_weights: StartingWeights,
    mesh: &Mesh,
) -> Result<TrainInputs> {
    let out = match (&args.out, source) {
        (_, RecipeSource::Checkpoint { folder, .. }) if starting_weights == StartingWeights::Recipe => {
            return Err(bad_input!(
                "{}: is a checkpoint; continue its run with --resume, or name a recipe and start from the checkpoint with --set model.path={}",
                folder.display(),
                folder.display()
            ));
        }
        (Some(out), _) => out.clone(),
        (None, RecipeSource::Run(run)) if resume.is_some() => run.clone(),
        _ => PathBuf::from("runs").join(source.stem()),
    };
    let mut plan = source.resolve(&args.sets)?;
    if starting_weights == StartingWeights::Checkpoint {
        let adapter = plan.recipe.model.adapter.clone();
        pin_model(&mut plan, source, &args.sets)?;
        // A resume compares this key with the run's recipe, so it stays as the user wrote it.
        plan.recipe.model.adapter = plan.recipe.model.adapter.and(adapter);
    }
    processes::configure_mesh(mesh, &plan)?;
    processes::check_distillation(mesh, &plan)?;
    processes::check_optimizers(&plan, mesh.ranks())?;
    let console = match mesh.is_rank_zero() {
        true => Console::stderr(plan.recipe.logging.console_every_steps),
        false => Console::silent(),
    };
    if mesh.is_rank_zero() {
        ask_consent(source, &plan.recipe, &args.sets, args.trust, &console)?;
    }
    let resumes = match resume {
        None => false,
        Some(Resume::Always) => true,
        Some(Resume::Auto) => contains_run(&out),
    };
    let mut inputs = Inputs::read(&plan.recipe, &console)?;
    let (resume_notes, resume_point) = match resumes {
        true => {
            let _stage = console.start_inner_stage("reading the checkpoint", 0);
            inputs.compare(&out, accepts_changes)?;
            prepare_resume(&out, &mut plan)?
        }
        false => RunFolder::refuse_existing(&out).map(|()| (vec![], None))?,
    };
    let fresh_start_note = match source {
        RecipeSource::Run(run) if !resumes && starting_weights == StartingWeights::Recipe => Some(format!(
            "the recipe of {} is trained from the start, in another folder; --resume continues that run",
            run.display()
        )),
        _ => None,
    };
    Ok(TrainInputs { out, plan, inputs, console, resumes, fresh_start_note, resume_notes, resume_point })
}
