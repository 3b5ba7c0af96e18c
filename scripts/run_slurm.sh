#!/usr/bin/env bash
# Trains on several nodes under Slurm: sbatch --nodes=4 --ntasks-per-node=8 scripts/run_slurm.sh train RECIPE [--set …] …
# Slurm must be built with PMIx, as Open MPI is. RLOSS names the program, built with --features mpi; every node sees it and
# the run folder. Two minutes before the time ends Slurm sends SIGUSR1: the step under way is finished and saved, and the
# same command with --resume goes on. With --resume=auto one command line starts and goes on: after `sbatch --requeue`, a
# preemption or a failed node needs nobody.
#SBATCH --job-name=rloss
#SBATCH --signal=USR1@120
#SBATCH --output=rloss-%j.log
set -euo pipefail

if [ $# -lt 2 ]; then
    echo "usage: sbatch [--nodes=N --ntasks-per-node=N] scripts/run_slurm.sh train RECIPE [--set key=value] ..." >&2
    exit 2
fi
program=${RLOSS:-${SLURM_SUBMIT_DIR:-$PWD}/target/release/rloss}
# Of a process that dies the others hear at once and stop by themselves; what hangs, Slurm ends.
exec srun --mpi=pmix --kill-on-bad-exit=1 "$program" "$@"
