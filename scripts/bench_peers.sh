#!/usr/bin/env bash
# Times one GRPO step here and in PyTorch with transformers, side after side in interleaved rounds, and prints the table.
#
#   scripts/bench_peers.sh [--venv DIR] [--rounds N] [--threads N] [--cpus LIST] [tiny|small]...
#
# Without --venv a virtual environment is made in target/bench-venv: torch and transformers, once. --cpus pins both sides
# (default: the first cores, as many as threads). Shapes are those of docs/BENCHMARKS.md. Steps are medians over rounds; what
# counts on a machine with other work is the processor time.
set -euo pipefail
cd "$(dirname "$0")/.."

venv='' rounds=3 threads=2 cpus='' shapes=()
while [ $# -gt 0 ]; do
    case $1 in
        --venv) venv=$2; shift 2 ;;
        --rounds) rounds=$2; shift 2 ;;
        --threads) threads=$2; shift 2 ;;
        --cpus) cpus=$2; shift 2 ;;
        tiny | small) shapes+=("$1"); shift ;;
        *) sed -n '2,8p' "$0" >&2; exit 2 ;;
    esac
done
[ ${#shapes[@]} -gt 0 ] || shapes=(tiny small)
[ -n "$cpus" ] || cpus=0-$((threads - 1))

if [ -z "$venv" ]; then
    venv=target/bench-venv
    if [ ! -e "$venv/ready" ]; then
        python3 -m venv "$venv"
        "$venv/bin/pip" install --quiet torch transformers --extra-index-url https://download.pytorch.org/whl/cpu
        touch "$venv/ready"
    fi
fi
"$venv/bin/python" -c 'import torch, transformers' || {
    echo "$venv has no torch and transformers: give another --venv, or none" >&2
    exit 2
}

cargo build --release --bench step
binary=$(cargo build --release --bench step --message-format json 2>/dev/null |
    sed -n 's/.*"name":"step".*"executable":"\([^"]*\)".*/\1/p')

declare -A arguments=(
    [tiny]=''
    [small]='--hidden 512 --layers 8 --heads 8 --kv 2 --head-dim 64 --inter 512 --experts 16 --topk 4 --vocab 4096
        --prompts 4 --samples 8 --prompt-tokens 128 --response-tokens 128 --steps 1'
)
found=$(mktemp)
trap 'rm -f "$found"' EXIT
pinned=()
if command -v taskset >/dev/null; then pinned=(taskset -c "$cpus"); fi
for shape in "${shapes[@]}"; do
    for ((round = 0; round < rounds; round++)); do
        # The order alternates, so that neither side always follows the other.
        sides=(rloss peer)
        if ((round % 2)); then sides=(peer rloss); fi
        for side in "${sides[@]}"; do
            command=("$binary")
            if [ "$side" = peer ]; then command=("$venv/bin/python" scripts/peer_grpo_step.py); fi
            # shellcheck disable=SC2086
            line=$("${pinned[@]}" "${command[@]}" ${arguments[$shape]} --threads "$threads")
            echo "{\"shape\": \"$shape\", \"found\": $line}" | tee -a "$found" >&2
        done
    done
done

"$venv/bin/python" - "$found" "$threads" <<'PYTHON'
import json, platform, statistics, sys

rows = [json.loads(line) for line in open(sys.argv[1])]
model = next((l.split(":")[1].strip() for l in open("/proc/cpuinfo") if l.startswith("model name")), platform.processor())
print(f"{model}, {sys.argv[2]} threads, {platform.system()} {platform.release()}\n")
print("| shape | side | step, s | rollout | update | processor s: rollout | update | peak, MiB |")
print("| --- | --- | --- | --- | --- | --- | --- | --- |")
steps = {}
for row in rows:
    found = row["found"]
    steps.setdefault(row["shape"], {}).setdefault(found["peer"], []).append(found)
columns = ["step_s", "rollout_s", "update_s", "rollout_processor_s", "update_processor_s"]
for shape, sides in steps.items():
    medians = {}
    for side, runs in sides.items():
        medians[side] = [statistics.median(x for run in runs for x in run[column]) for column in columns]
        peak = statistics.median(run["peak_bytes"] for run in runs) / 2**20
        print(f"| {shape} | {side} | " + " | ".join(f"{x:.3f}" for x in medians[side]) + f" | {peak:.0f} |")
    ratios = [b / a for a, b in zip(medians["rloss"], medians["transformers"])]
    print(f"| {shape} | **times faster** | " + " | ".join(f"{x:.1f}" for x in ratios) + " | |")
PYTHON
