//! `rloss report RUN...`: writes or serves one page about runs.

use crate::commands::follow;
use crate::metrics::sanitize_terminal;
use crate::report::write_report;
use crate::run::sampling_folder::print_text;
use anyhow::Result;
use clap::Args;
use std::path::PathBuf;

/// Arguments of `rloss report`.
#[derive(Args, Debug, Clone)]
pub struct ReportArgs {
    /// Run folders
    #[arg(required = true)]
    runs: Vec<PathBuf>,
    /// The page's file, a folder for it, such as pages/, or a .csv file for the metrics [default: report.html
    /// in the run folder; for several runs, report-N-runs-DIGEST.html in the first run folder]
    #[arg(long)]
    out: Option<PathBuf>,
    /// Serve the page to a browser on this machine while the runs continue; a run may begin later
    #[arg(long, conflicts_with = "out")]
    follow: bool,
    /// Port of the served page
    #[arg(long, default_value_t = 8642, requires = "follow")]
    port: u16,
}

/// Writes the page and prints its path, or serves it.
///
/// # Errors
/// The errors of [`write_report`] and of [`follow::run`].
pub fn run(args: &ReportArgs) -> Result<()> {
    if args.follow {
        return follow::run(&args.runs, args.port);
    }
    let page = write_report(&args.runs, args.out.as_deref())?;
    print_text(&sanitize_terminal(&format!("{}\n", page.display())))
}
