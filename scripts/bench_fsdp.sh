#!/usr/bin/env bash
# Times the update of a GRPO step on two processes, here over MPI and in PyTorch's FSDP2 over gloo, side after side.
#
#   scripts/bench_fsdp.sh --venv DIR [--rounds N] [tiny|small]...
#
# DIR has torch and transformers. Each process has one thread, on all sides. Shapes are those of docs/BENCHMARKS.md; figures are
# medians over steps and interleaved rounds. transformers runs with each of its implementations of the experts but `batched_mm`,
# which copies an expert's weights for every token. Needs Open MPI, as PROCESSES.md says.
set -euo pipefail
cd "$(dirname "$0")/.."

venv='' rounds=3 shapes=()
while [ $# -gt 0 ]; do
    case $1 in
        --venv) venv=$2; shift 2 ;;
        --rounds) rounds=$2; shift 2 ;;
        tiny | small) shapes+=("$1"); shift ;;
        *) sed -n '2,8p' "$0" >&2; exit 2 ;;
    esac
done
[ ${#shapes[@]} -gt 0 ] || shapes=(tiny small)
"$venv/bin/python" -c 'import torch, transformers' || {
    echo "--venv DIR: a virtual environment with torch and transformers" >&2
    exit 2
}

binary=$(cargo build --release --features mpi --bench step --message-format json |
    sed -n 's/.*"name":"step".*"executable":"\([^"]*\)".*/\1/p')
declare -A arguments=(
    [tiny]=''
    [small]='--hidden 512 --layers 8 --heads 8 --kv 2 --head-dim 64 --inter 512 --experts 16 --topk 4 --vocab 4096 --samples 8
        --prompt-tokens 128 --prompts 4 --response-tokens 128 --steps 1'
)
export OMP_NUM_THREADS=1
found=$(mktemp)
trap 'rm -f "$found"' EXIT
for shape in "${shapes[@]}"; do
    : >"$found"
    for round in $(seq "$rounds"); do
        echo "$shape, round $round" >&2
        # shellcheck disable=SC2086  # arguments are several words
        {
            mpirun -np 2 --bind-to none "$binary" --threads 1 ${arguments[$shape]} | sed 's/^/rloss /'
            for experts in eager grouped_mm; do
                "$venv/bin/torchrun" --nproc-per-node 2 scripts/peer_fsdp_step.py --threads 1 \
                    --experts-implementation $experts ${arguments[$shape]} 2>/dev/null | sed "s/^/fsdp2-$experts /"
            done
        } | grep -F '{"peer"' >>"$found"
    done
    python3 - "$shape" "$found" <<'PYTHON'
import json
import sys
from collections import defaultdict
from statistics import median

seconds = defaultdict(list)
for line in open(sys.argv[2]):
    side, record = line.split(" ", 1)
    seconds[side] += json.loads(record)["update_s"]
ours = median(seconds["rloss"])
for side, all_of_it in seconds.items():
    print(f"{sys.argv[1]:6} {side:18} update {median(all_of_it):8.3f} s  {median(all_of_it) / ours:5.2f} x rloss  ({len(all_of_it)} updates)")
PYTHON
done
