//! `rloss train RECIPE`: cold start, reinforcement learning, evaluations, checkpoints.

use crate::bad_input;
use crate::commands::arguments::RunArgs;
use crate::error::{EXIT_DONE, EXIT_STOPPED};
use crate::metrics::Console;
use crate::recipe::{RecipeSource, locate};
use crate::run::header::{self, command_line};
use crate::run::memory::Intent;
use crate::run::run_folder::{RunFolder, prepare_resume};
use crate::run::signals::Stop;
use crate::run::source::unverified;
use crate::run::workbench::Workbench;
use crate::trainer::{Trainer, TrainingData};
use anyhow::Result;
use clap::Args;
use std::path::PathBuf;

/// What `rloss train` takes.
#[derive(Args, Debug, Clone)]
pub struct TrainArgs {
    #[command(flatten)]
    run: RunArgs,
    /// Go on with the run in the folder from its last checkpoint
    #[arg(long)]
    resume: bool,
}

/// Trains; exit code 130 when a signal stopped it after a checkpoint.
///
/// # Errors
/// [`crate::error::BadInput`] before any work; other errors leave the last checkpoint intact.
pub fn run(args: &TrainArgs) -> Result<u8> {
    let source = locate(&args.run.recipe)?;
    let out = match (&args.run.out, &source) {
        (Some(out), _) => out.clone(),
        (None, RecipeSource::Run(run)) if args.resume => run.clone(),
        (None, RecipeSource::Checkpoint { folder, .. }) => {
            return Err(bad_input!(
                "{}: is a checkpoint; go on with its run by --resume, or name a recipe and start from it with --set model.path={}",
                folder.display(),
                folder.display()
            ));
        }
        _ => PathBuf::from("runs").join(source.stem()),
    };
    let mut plan = source.resolve(&args.run.sets)?;
    let console = Console::stderr(plan.recipe.logging.console_every_steps);
    let (resumed, point) = match args.resume {
        true => prepare_resume(&out, &mut plan)?,
        false => RunFolder::refuse_existing(&out).map(|()| (vec![], None))?,
    };
    let checkpoint = point.as_ref().map(|point| point.folder.as_path());
    let bench = Workbench::open_at(plan, Intent::Train, checkpoint, &console)?;
    let data = TrainingData::open(&bench)?;
    // From here on a signal finds a run to save.
    let stop = Stop::listen()?;
    let folder = match args.resume {
        true => RunFolder::resume(&out, &bench.plan, point.as_ref())?,
        false => RunFolder::create(&out, &bench.plan)?,
    };
    header::lines(&bench, &out).iter().for_each(|line| console.print(line));
    bench.plan.warnings.iter().for_each(|warning| console.print(&format!("warning: {warning}")));
    if let Some(point) = point.as_ref().filter(|point| !point.verified) {
        console.print(&format!("warning: {}", unverified(&point.folder)));
    }
    resumed.iter().for_each(|line| console.print(line));
    let run = || {
        folder.write_model(&header::model(&bench))?;
        if let Some(confinement) = bench.confinement() {
            folder.write_confinement(&confinement)?;
        }
        let mut trainer = Trainer::new(bench, data, folder, console.clone(), stop, point.as_ref())?;
        trainer.run(point)
    };
    let stopped = run().inspect_err(|_| {
        if !args.resume {
            RunFolder::clear_unused(&out);
        }
    })?;
    let shown = out.display().to_string();
    if stopped {
        console.print(&format!("stopped: {shown}"));
        console.print(&format!("to go on: {}", command_line(&["train", &shown, "--resume"])));
        return Ok(EXIT_STOPPED);
    }
    console.print(&format!("done: {shown}"));
    console.print(&format!("to see it: {}", command_line(&["report", &shown])));
    Ok(EXIT_DONE)
}
