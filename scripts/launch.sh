#!/usr/bin/env bash
# Trains with several processes.
#   scripts/launch.sh node PROCESSES train RECIPE [--set …] …             on this machine
#   scripts/launch.sh hosts HOSTFILE PROCESSES train RECIPE [--set …] …   over machines that mpirun reaches by ssh
#   sbatch --nodes=4 --ntasks-per-node=8 scripts/launch.sh slurm train RECIPE [--set …] …
#
# node: needs Open MPI and libclang (libopenmpi-dev, openmpi-bin, libclang-dev) and builds the program with them. To stop after
# the step under way, with a checkpoint: kill -USR1 of the mpirun that this becomes. Ctrl-C leaves a few seconds, which seldom
# suffice; the last checkpoint is whole in any case.
#
# hosts: HOSTFILE has a line a machine, "name slots=N". Every machine sees the same run folder and has the same program in the
# same place; ranks compare recipe, program and checkpoint before they start.
#
# slurm: Slurm must be built with PMIx, as Open MPI is. RLOSS names the program, built with --features mpi; every node sees it
# and the run folder. Two minutes before the time ends Slurm sends SIGUSR1: the step under way is finished and saved, and the
# same command with --resume goes on. With --resume=auto one command line starts and goes on: after `sbatch --requeue`, a
# preemption or a failed node needs nobody.
#SBATCH --job-name=rloss
#SBATCH --signal=USR1@120
#SBATCH --output=rloss-%j.log
set -euo pipefail

usage() {
    echo "usage: $1 train RECIPE [--set key=value] ..." >&2
    exit 2
}
# Slurm runs a copy of this script elsewhere, and takes the program from another place.
root() { cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd; }
options=()
if [ "$(id -u)" = 0 ]; then
    options+=(--allow-run-as-root)
fi

case ${1:-} in
    node)
        [ $# -ge 3 ] || usage "scripts/launch.sh node PROCESSES"
        processes=$2
        shift 2
        command -v mpirun >/dev/null || {
            echo "error: there is no mpirun; install Open MPI (Debian: libopenmpi-dev openmpi-bin libclang-dev)" >&2
            exit 2
        }
        program=${RLOSS:-}
        if [ -z "$program" ]; then
            manifest=$(root)/Cargo.toml
            cargo build --release --features mpi --manifest-path "$manifest"
            target=$(cargo metadata --format-version 1 --no-deps --manifest-path "$manifest" |
                sed -n 's/.*"target_directory":"\([^"]*\)".*/\1/p')
            program=$target/release/rloss
        fi
        if [ "$processes" -gt "$(nproc)" ]; then
            options+=(--oversubscribe)
        fi
        exec mpirun "${options[@]}" -np "$processes" "$program" "$@"
        ;;
    hosts)
        [ $# -ge 4 ] || usage "scripts/launch.sh hosts HOSTFILE PROCESSES"
        hostfile=$2
        processes=$3
        shift 3
        [ -f "$hostfile" ] || {
            echo "error: $hostfile: no such file; write a line a machine: name slots=N" >&2
            exit 2
        }
        exec mpirun "${options[@]}" --hostfile "$hostfile" -np "$processes" "${RLOSS:-$(root)/target/release/rloss}" "$@"
        ;;
    slurm)
        [ $# -ge 3 ] || usage "sbatch [--nodes=N --ntasks-per-node=N] scripts/launch.sh slurm"
        shift
        program=${RLOSS:-${SLURM_SUBMIT_DIR:-$PWD}/target/release/rloss}
        # Of a process that dies the others hear at once and stop by themselves; what hangs, Slurm ends.
        exec srun --mpi=pmix --kill-on-bad-exit=1 "$program" "$@"
        ;;
    *)
        echo "takes node, hosts or slurm, not ${1:-nothing}" >&2
        exit 2
        ;;
esac
