//! What started this process: alone, or as one of several.

use crate::error::{BadInput, ToldElsewhere};

/// Variables by which launchers say how many processes there are, and which this is: Open MPI's mpirun, PMI of MPICH and Slurm,
/// then Slurm alone.
const SAID: [[&str; 2]; 3] = [
    ["OMPI_COMM_WORLD_SIZE", "OMPI_COMM_WORLD_RANK"],
    ["PMI_SIZE", "PMI_RANK"],
    ["SLURM_STEP_NUM_TASKS", "SLURM_PROCID"],
];

fn said(which: usize) -> Option<usize> {
    SAID.iter().find_map(|names| std::env::var(names[which]).ok()?.parse().ok())
}

/// How many processes a launcher says there are; 1 for a process that was started alone.
pub fn processes() -> usize {
    said(0).unwrap_or(1)
}

/// An error that every process finds for itself before they are connected: the first tells `what`, the others are silent.
pub(super) fn told_once(what: String) -> anyhow::Error {
    match said(1) {
        None | Some(0) => BadInput(what).into(),
        Some(_) => ToldElsewhere { is_bad_input: true }.into(),
    }
}

/// Refuses several processes for `command`, which is made for one.
///
/// # Errors
/// [`BadInput`] when a launcher started several.
pub fn refuse_several(command: &str) -> anyhow::Result<()> {
    match processes() {
        0 | 1 => Ok(()),
        several => Err(told_once(format!(
            "`{command}` runs in one process, and this is one of {several}; start it without mpirun or srun"
        ))),
    }
}
