#!/usr/bin/env bash
# Trains with several processes over machines that mpirun reaches by ssh:
#   scripts/run_hosts.sh HOSTFILE PROCESSES train RECIPE [--set …] …
# HOSTFILE has a line a machine, "name slots=N". Every machine sees the same run folder and has the same program in the same
# place; ranks compare recipe, program and checkpoint before they start.
set -euo pipefail

if [ $# -lt 3 ]; then
    echo "usage: scripts/run_hosts.sh HOSTFILE PROCESSES train RECIPE [--set key=value] ..." >&2
    exit 2
fi
hostfile=$1
processes=$2
shift 2
[ -f "$hostfile" ] || {
    echo "error: $hostfile: no such file; write a line a machine: name slots=N" >&2
    exit 2
}
program=${RLOSS:-$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)/target/release/rloss}
options=()
if [ "$(id -u)" = 0 ]; then
    options+=(--allow-run-as-root)
fi
exec mpirun "${options[@]}" --hostfile "$hostfile" -np "$processes" "$program" "$@"
