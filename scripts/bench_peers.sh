#!/usr/bin/env bash
# Times one GRPO step here, in PyTorch with transformers and in TRL, side after side in interleaved rounds, and prints tables.
#
#   scripts/bench_peers.sh [--venv DIR] [--rounds N] [--threads N] [--cpus LIST] [tiny|small|tiny-16|small-16|small-bf16]...
#
# Without --venv a virtual environment is made in target/bench-venv: torch, transformers and TRL, once; TRL is left out where a
# given one lacks it. --cpus pins all sides (default: the first cores, as many as threads). Shapes are those of
# docs/BENCHMARKS.md; two are for decoding 16 sequences, and small-bf16 is small in the processor's dot products of bf16, PyTorch's
# forward and backward in autocast: only where the processor has them. "apart" is ours with each sample's prompt computed by
# itself. Figures are medians over steps and rounds. transformers runs with each of its implementations of the experts but
# `batched_mm`, which copies an expert's weights for every token.
set -euo pipefail
cd "$(dirname "$0")/.."

venv='' rounds=3 threads=2 cpus='' shapes=()
while [ $# -gt 0 ]; do
    case $1 in
        --venv) venv=$2; shift 2 ;;
        --rounds) rounds=$2; shift 2 ;;
        --threads) threads=$2; shift 2 ;;
        --cpus) cpus=$2; shift 2 ;;
        tiny | small | tiny-16 | small-16 | small-bf16) shapes+=("$1"); shift ;;
        *) sed -n '2,12p' "$0" >&2; exit 2 ;;
    esac
done
[ ${#shapes[@]} -gt 0 ] || shapes=(tiny small tiny-16 small-16)
[ -n "$cpus" ] || cpus=0-$((threads - 1))

if [ -z "$venv" ]; then
    venv=target/bench-venv
    if [ ! -e "$venv/ready" ]; then
        python3 -m venv "$venv"
        "$venv/bin/pip" install --quiet torch transformers trl datasets --extra-index-url https://download.pytorch.org/whl/cpu
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

small='--hidden 512 --layers 8 --heads 8 --kv 2 --head-dim 64 --inter 512 --experts 16 --topk 4 --vocab 4096 --samples 8
    --prompt-tokens 128'
declare -A arguments=(
    [tiny]=''
    [small]="$small --prompts 4 --response-tokens 128 --steps 1"
    [tiny-16]='--prompts 2'
    [small-16]="$small --prompts 2 --response-tokens 64 --steps 1"
    [small-bf16]="$small --prompts 4 --response-tokens 128 --steps 1"
)
peer="$venv/bin/python scripts/peer_step.py transformers --experts-implementation"
declare -A commands=(
    [rloss]=$binary
    [apart]="$binary --separate-prompts"
    [eager]="$peer eager"
    [grouped_mm]="$peer grouped_mm"
    [trl]="$venv/bin/python scripts/peer_step.py trl"
)
found=$(mktemp)
trap 'rm -f "$found"' EXIT
pinned=()
if command -v taskset >/dev/null; then pinned=(taskset -c "$cpus"); fi
for shape in "${shapes[@]}"; do
    sides=(rloss eager grouped_mm)
    case $shape in
        tiny | small) sides+=(apart); if "$venv/bin/python" -c 'import trl, datasets' 2>/dev/null; then sides+=(trl); fi ;;
    esac
    flags=('' '')
    if [ "$shape" = small-bf16 ]; then flags=(--bf16-dot --autocast); fi
    for ((round = 0; round < rounds; round++)); do
        for ((turn = 0; turn < ${#sides[@]}; turn++)); do
            # Every round begins with another side, so that none always follows the same.
            side=${sides[(round + turn) % ${#sides[@]}]}
            flag=${flags[1]}
            if [ "$side" = rloss ]; then flag=${flags[0]}; fi
            # shellcheck disable=SC2086
            line=$("${pinned[@]}" ${commands[$side]} $flag ${arguments[$shape]} --threads "$threads" | tail -n 1)
            echo "{\"shape\": \"$shape\", \"found\": $line}" | tee -a "$found" >&2
        done
    done
done

"$venv/bin/python" - "$found" "$threads" <<'PYTHON'
import json, platform, statistics, sys

rows = [json.loads(line) for line in open(sys.argv[1])]
model = next((l.split(":")[1].strip() for l in open("/proc/cpuinfo") if l.startswith("model name")), platform.processor())
print(f"{model}, {sys.argv[2]} threads, {platform.system()} {platform.release()}\n")
print("| shape | side | step, s | rollout | update | forward, backward | decode, ms a token of all | processor s: rollout | update | MiB above start, weights, gradients, moments |")
print("| --- | --- | --- | --- | --- | --- | --- | --- | --- | --- |")
steps = {}
for row in rows:
    found = row["found"]
    steps.setdefault(row["shape"], {}).setdefault(found["peer"], []).append(found)
columns = ["step_s", "rollout_s", "update_s", "forward_backward_s", "decode_step_s", "rollout_processor_s", "update_processor_s"]
median = lambda runs, column: statistics.median(
    x for run in runs for x in (run[column] if isinstance(run[column], list) else [run[column]])
)
shown = lambda x, digits: "" if x is None else f"{x:.{digits}f}"
for shape, sides in steps.items():
    medians = {}
    for side, runs in sides.items():
        values = [median(runs, column) if column in runs[0] else None for column in columns]
        values.append(statistics.median(run["peak_bytes"] - run["start_bytes"] - 4 * run["parameter_bytes"] for run in runs))
        medians[side] = values
        cells = [shown(x and x * (1e3 if c == "decode_step_s" else 1), 3) for x, c in zip(values, columns)]
        print(f"| {shape} | {side} | " + " | ".join(cells) + f" | {values[-1] / 2**20:.0f} |")
    peers = [side for side in medians if not side.startswith("rloss")]
    for mine, name, others in [
        (mine, name, [medians[side] for side in peers if (side == "trl") == (name == "TRL")])
        for mine in medians if mine not in peers for name in ["transformers at best", "TRL"]
    ]:
        ours = medians[mine]
        if others:
            best = [min((o[i] for o in others if o[i] is not None), default=None) for i in range(len(ours))]
            print(f"| {shape} | **{name} / {mine}** | " + " | ".join(shown(b and b / a, 2) for a, b in zip(ours, best)) + " |")
print()
for shape, sides in steps.items():
    runs = next(runs for side, runs in sides.items() if side.startswith("rloss") and "apart" not in side)
    at = lambda column: median(runs, column)
    print(f"{shape}: memory is read at {at('read_gb_s'):.1f} GB/s, the gemm crate reaches {at('product_gflop_s'):.0f} GFLOP/s; the "
          f"products of forward and backward take {at('product_share'):.2f} of that; a token of {runs[0]['decode_batch']} sequences takes "
          f"{at('decode_step_s') / at('decode_bound_s'):.2f} times the larger bound, {1e3 * at('decode_bound_s'):.2f} ms")
PYTHON
