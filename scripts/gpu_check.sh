#!/usr/bin/env bash
# Checks the CUDA kernels on a machine with a GPU. That machine needs neither Rust nor network.
#
#   scripts/gpu_check.sh --build          here: builds the program, stripped and packed, target/gpu-check/rloss.gz
#   scripts/gpu_check.sh                  there: runs everything, writes gpu-check.md
#
# Options there: --binary FILE, --out FILE, --device N, --skip PART (sanitizer, peers, runs, model; may be repeated). runs: the
# quickstart on the GPU and on the CPU; model: tokens a second at the shape of 20B; peers: other implementations of attention
# and of the model beside ours.
# Every part has a process and a time limit of its own: one that crashes or hangs is a row of the table, no more. The
# machine needs a driver of release 580 or newer and CUDA 13's libraries, from a toolkit or beside a Python's torch
# (PYTHON names it). compute-sanitizer and torch are used where they are; else their rows say "not run".
# Exit code: 0 all passed, 1 something failed, 2 it could not begin.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."

binary=target/gpu-check/rloss.gz out=gpu-check.md device=0 skip=""
fail() {
    echo "gpu_check: $*" >&2
    exit 2
}

mib() { awk '{ printf "%.1f", $1 / 1048576 }'; }

build() {
    command -v nvcc >/dev/null || fail 'no nvcc: first run  eval "$(scripts/setup_cuda.sh)"'
    # NCCL is checked where it was there to build with: scripts/setup_cuda.sh --nccl.
    local features=cuda
    if ls "${CUDA_HOME:-/usr/local/cuda}"/lib*/libnccl.so >/dev/null 2>&1; then features=cuda,nccl; fi
    cargo build --release --features "$features" --bin rloss
    mkdir -p "$(dirname "$binary")"
    strip -o "$binary.part" "${CARGO_TARGET_DIR:-target}/release/rloss"
    local stripped packed tree
    stripped=$(stat -c %s "$binary.part")
    # Most of it is PTX, which is text.
    gzip -9 <"$binary.part" >"$binary"
    rm "$binary.part"
    packed=$(stat -c %s "$binary")
    tree=$(git ls-files -z | xargs -0 stat -c %s | awk '{ s += $1 } END { print s }')
    echo "$binary: $(mib <<<"$packed") MiB ($(mib <<<"$stripped") unpacked); the tree: $(mib <<<"$tree") MiB"
    [ $((packed + tree)) -lt 55000000 ] || fail "program and tree are over 55 MB together"
}

while [ $# -gt 0 ]; do
    case $1 in
        --build)
            build
            exit
            ;;
        --binary | --out | --device | --skip)
            [ $# -ge 2 ] || fail "$1 needs a value"
            case $1 in
                --binary) binary=$2 ;;
                --out) out=$2 ;;
                --device) device=$2 ;;
                --skip)
                    case $2 in sanitizer | peers | runs | model) skip="$skip $2" ;; *) fail "--skip takes sanitizer, peers, runs or model, not $2" ;; esac
                    ;;
            esac
            shift 2
            ;;
        *) fail "unknown argument $1 (see the head of scripts/gpu_check.sh)" ;;
    esac
done
[ -f "$binary" ] || fail "no program at $binary: make it with scripts/gpu_check.sh --build on a machine with Rust, and bring it here"
scratch=$(mktemp -d)
trap 'rm -rf "$scratch"' EXIT
if [[ $binary == *.gz ]]; then
    gzip -dc "$binary" >"$scratch/rloss" || fail "$binary cannot be unpacked: bring it here anew"
    chmod +x "$scratch/rloss"
    binary=$scratch/rloss
fi
python=${PYTHON:-python3}
command -v "$python" >/dev/null || python=""

# Folders that may hold CUDA's libraries. Never the stubs: their driver runs nothing.
library_folders() {
    local folder
    for folder in "${CUDA_HOME:+$CUDA_HOME/lib64}" /usr/local/cuda/lib64 /usr/local/cuda-13*/lib64 \
        /usr/local/cuda*/targets/x86_64-linux/lib /usr/local/nvidia/lib64 /usr/lib/x86_64-linux-gnu /usr/lib64/nvidia \
        /usr/lib/wsl/lib; do
        [ -d "$folder" ] && echo "$folder"
    done
    if [ -n "$python" ]; then
        "$python" -c 'import glob, sys
for path in sys.path:
    print(*glob.glob(glob.escape(path) + "/nvidia/*/lib"), sep="\n")' 2>/dev/null || true
    fi
}

# What the loader says of the program. Its exit code says less than its text.
loader() { LD_LIBRARY_PATH=$libraries ldd "$binary" 2>&1 || true; }

missing() { loader | sed -n 's/^[[:space:]]*\([^ ]*\) => not found.*/\1/p' | sort -u; }

libraries=${LD_LIBRARY_PATH:-}
too_new=$(loader | sed -n "s/.*version \`\(GLIBC[^']*\)' not found.*/\1/p" | sort -u | tail -1)
[ -z "$too_new" ] || fail "$binary wants $too_new, which this system's C library lacks: build it on an older system"
folders=$(library_folders | sort -u)
for library in $(missing); do
    while read -r folder; do
        if [ -n "$folder" ] && [ -e "$folder/$library" ]; then
            libraries=${libraries:+$libraries:}$folder
            break
        fi
    done <<<"$folders"
done
still=$(missing | tr '\n' ' ')
case " $still" in
    *" libcuda.so.1 "*) fail "no NVIDIA driver: the loader finds no libcuda.so.1 (is this a machine with a GPU? nvidia-smi shows one)" ;;
    *" lib"*) fail "the loader does not find: $still. Install CUDA 13's libraries, or name a Python with torch for CUDA 13 in PYTHON, or set CUDA_HOME" ;;
esac

rloss() { LD_LIBRARY_PATH=$libraries "$@"; }

# Exit code 2 is refused here, before anything is written.
described=$(rloss timeout 120 "$binary" gpu-check device --device "$device") || exit 2
name=$(sed -n 's/^| device | \([^|]*[^ |]\) *|.*/\1/p' <<<"$described")
table=$scratch/table.md
failed=0

{
    echo "### $name, $(date -u +%Y-%m-%d)"
    echo
    echo "| check | | |"
    echo "| --- | --- | --- |"
    echo "$described"
    if command -v nvidia-smi >/dev/null; then
        echo "| driver | $(nvidia-smi --query-gpu=driver_version --format=csv,noheader -i "$device" 2>/dev/null || echo unknown) | |"
    fi
    if commit=$(git rev-parse --short HEAD 2>/dev/null); then echo "| commit | $commit | |"; fi
} >"$table"

# part NAME SECONDS ARGUMENTS...: its rows go to the table; an end that is none is a row too.
part() {
    local name=$1 seconds=$2 code=0
    shift 2
    echo "gpu_check: $name" >&2
    rloss timeout "$seconds" "$binary" gpu-check "$@" --device "$device" >"$scratch/rows" 2>"$scratch/errors" || code=$?
    cat "$scratch/errors" >&2
    cat "$scratch/rows" >>"$table"
    if [ $code -ne 0 ]; then failed=1; fi
    case $code in
        0 | 1) if [ $code = 1 ] && grep -q '^error:' "$scratch/errors"; then row "$name" "**FAILED**" "$(tail -1 "$scratch/errors")"; fi ;;
        124) row "$name" "**FAILED**" "not done after $seconds seconds" ;;
        *) row "$name" "**FAILED**" "ended with code $code: $(tail -1 "$scratch/errors")" ;;
    esac
}

row() { echo "| $1 | $2 | ${3//|//} |" >>"$table"; }

part seeded 60 seeded
part primitives 60 primitives
part facts 120 facts
part oracle 180 oracle
part links 180 links
if rloss "$binary" gpu-check --help | grep -q nccl; then
    part nccl 120 nccl
else
    row "NCCL" "not run" "built without it"
fi

# whole_run NAME SETS...: the quickstart with heads 64 wide, from its cold start to its last evaluation.
whole_run() {
    local name=$1 run=$scratch/$1 code=0 begun=$SECONDS success gap verdict=passed
    shift
    echo "gpu_check: quickstart_cuda on the $name" >&2
    rloss timeout 600 "$binary" train quickstart_cuda --out "$run" --set logging.tensorboard=false "$@" >"$scratch/errors" 2>&1 || code=$?
    if [ $code != 0 ]; then
        failed=1
        row "quickstart_cuda on the $name" "**FAILED**" "ended with code $code: $(tail -1 "$scratch/errors")"
        return
    fi
    success=$(sed -n 's/.*"phase":"eval".*acc\/mean@1":\([0-9.]*\).*/\1/p' "$run/metrics.jsonl" | tail -1)
    gap=$(sed -n 's/.*"mismatch\/logprob_abs_diff_max":\([-+0-9.e]*\).*/\1/p' "$run/metrics.jsonl" | sort -g | tail -1)
    if [ "$gap" != 0 ]; then verdict="**FAILED**" failed=1; fi
    row "quickstart_cuda on the $name" "$verdict" "$((SECONDS - begun)) s, success $success at the end, largest gap $gap"
}
if [[ $skip != *runs* ]]; then
    whole_run GPU --set parallel.device_index="$device"
    whole_run CPU --set device=cpu
fi

sanitizer=$(command -v compute-sanitizer || ls /usr/local/cuda*/bin/compute-sanitizer 2>/dev/null | head -1 || true)
for tool in memcheck racecheck initcheck synccheck; do
    if [[ $skip == *sanitizer* ]] || [ -z "$sanitizer" ]; then
        row "compute-sanitizer $tool" "not run" ""
        continue
    fi
    echo "gpu_check: compute-sanitizer $tool" >&2
    code=0
    rloss timeout 120 "$sanitizer" --tool "$tool" --error-exitcode 9 \
        "$binary" gpu-check oracle links --small --device "$device" >"$scratch/sanitizer" 2>&1 || code=$?
    summary=$(grep -E 'ERROR SUMMARY|RACECHECK SUMMARY|not supported' "$scratch/sanitizer" | tail -1 | sed 's/^=* *//')
    case $code in
        0) row "compute-sanitizer $tool" passed "$summary" ;;
        124) row "compute-sanitizer $tool" "not run" "not done after 120 seconds" ;;
        *)
            row "compute-sanitizer $tool" "**FAILED**" "code $code: $summary"
            failed=1
            grep -v '^|' "$scratch/sanitizer" | head -40 >&2
            ;;
    esac
done

peers=()
if [[ $skip == *peers* ]] || [ -z "$python" ]; then
    echo "gpu_check: other implementations: not run" >&2
elif CUDA_VISIBLE_DEVICES=${CUDA_VISIBLE_DEVICES:-$device} timeout 330 "$python" scripts/attention_peers.py "$scratch/peers.json" --seconds-max 150; then
    peers=(--peers "$scratch/peers.json")
fi
part speed 240 speed "${peers[@]}"
if [[ $skip != *model* ]]; then
    part model 600 model
    why=""
    if [[ $skip == *peers* ]]; then
        why="--skip peers"
    elif [ -z "$python" ]; then
        why="no Python; name one with torch in PYTHON"
    else
        echo "gpu_check: other implementations of the model" >&2
        CUDA_VISIBLE_DEVICES=${CUDA_VISIBLE_DEVICES:-$device} timeout 660 "$python" scripts/model_peers.py \
            --ours "$scratch/rows" --seconds-max 560 >>"$table" || why="ended with code $?"
    fi
    if [ -n "$why" ]; then printf '\nOther implementations of the model: not run (%s).\n' "$why" >>"$table"; fi
fi

mkdir -p "$(dirname "$out")"
cp "$table" "$out"
cat "$out"
if [ $failed = 1 ]; then
    echo "gpu_check: something failed; the table is in $out" >&2
    exit 1
fi
echo "gpu_check: all passed; the table is in $out" >&2
