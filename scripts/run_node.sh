#!/usr/bin/env bash
# Trains with several processes on this machine: scripts/run_node.sh PROCESSES train RECIPE [--set …] …
# Needs Open MPI and libclang (libopenmpi-dev, openmpi-bin, libclang-dev) and builds the program with them.
#
# To stop after the step under way, with a checkpoint: kill -USR1 of the mpirun that this becomes. Ctrl-C leaves a few seconds,
# which seldom suffice; the last checkpoint is whole in any case.
set -euo pipefail

if [ $# -lt 2 ]; then
    echo "usage: scripts/run_node.sh PROCESSES train RECIPE [--set key=value] ..." >&2
    exit 2
fi
processes=$1
shift
command -v mpirun >/dev/null || {
    echo "error: there is no mpirun; install Open MPI (Debian: libopenmpi-dev openmpi-bin libclang-dev)" >&2
    exit 2
}
root=$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)
program=${RLOSS:-}
if [ -z "$program" ]; then
    cargo build --release --features mpi --manifest-path "$root/Cargo.toml"
    target=$(cargo metadata --format-version 1 --no-deps --manifest-path "$root/Cargo.toml" |
        sed -n 's/.*"target_directory":"\([^"]*\)".*/\1/p')
    program=$target/release/rloss
fi
options=()
if [ "$processes" -gt "$(nproc)" ]; then
    options+=(--oversubscribe)
fi
if [ "$(id -u)" = 0 ]; then
    options+=(--allow-run-as-root)
fi
exec mpirun "${options[@]}" -np "$processes" "$program" "$@"
