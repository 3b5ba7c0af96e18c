//! `rloss train RECIPE`: cold start, reinforcement learning, evaluations, checkpoints.

use crate::commands::arguments::RunArgs;
use crate::error::{EXIT_DONE, EXIT_STOPPED};
use crate::metrics::Console;
use crate::recipe::locate;
use crate::run::run_folder::RunFolder;
use crate::run::signals::Stop;
use crate::run::workbench::{Workbench, unverified};
use crate::trainer::{Trainer, TrainingData};
use anyhow::Result;
use clap::Args;
use std::path::PathBuf;
use std::time::Duration;

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
    let out = args.run.out.clone().unwrap_or_else(|| PathBuf::from("runs").join(source.stem()));
    let plan = source.resolve(&args.run.sets)?;
    if !args.resume {
        RunFolder::refuse_existing(&out)?;
    }
    let bench = Workbench::open(plan)?;
    let data = TrainingData::open(&bench)?;
    // From here on a signal finds a run to save.
    let stop = Stop::listen()?;
    let (folder, point) = match args.resume {
        true => RunFolder::resume(&out, &bench.plan)?,
        false => (RunFolder::create(&out, &bench.plan)?, None),
    };
    let console = Console::stderr(Duration::from_secs(2), bench.recipe().logging.console_every_steps);
    if let Some(confinement) = bench.confinement() {
        console.print(&format!("python tool: {confinement}"));
    }
    bench.plan.warnings.iter().for_each(|warning| console.print(&format!("warning: {warning}")));
    if let Some(point) = point.as_ref().filter(|point| !point.verified) {
        console.print(&format!("warning: {}", unverified(&point.folder)));
    }
    if let Some(confinement) = bench.confinement() {
        folder.write_confinement(&confinement)?;
    }
    let mut trainer = Trainer::new(bench, data, folder, console, stop, point.as_ref())?;
    let stopped = trainer.run(point)?;
    trainer.say(&format!("{} {}", if stopped { "stopped:" } else { "done:" }, out.display()));
    Ok(if stopped { EXIT_STOPPED } else { EXIT_DONE })
}
