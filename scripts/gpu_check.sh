#!/usr/bin/env bash
# Checks the CUDA kernels on a machine with a GPU. That machine needs neither Rust nor network.
#
#   scripts/gpu_check.sh --build          here: builds rloss and the checks, stripped and packed, target/gpu-check/*.gz
#   scripts/gpu_check.sh --deadline 600   there: the first call, ten minutes at most; appends to gpu-check.md
#   scripts/gpu_check.sh --full           there: the second call, every case
#
# Options there: --binary FILE (rloss, for quickstart), --check FILE (the program gpu_check, for all other parts), --out FILE
# (default: gpu-check.md in the folder OUT, or here), --device N, --deadline SECONDS (from the start), --only PARTS
# (comma-separated), which run in the order of this list:
#   the first call     device, primitives, facts, seeded, oracle, links, speed, profile, model, quickstart, memcheck
#   --full             oracle-full, links-full, nccl, speed-full, model-full, quickstart-full
#   only when named    peers (other implementations beside speed-full and model-full), racecheck, initcheck, synccheck
# racecheck and initcheck do not know mbarriers and wgmma: their failures in such kernels may be false.
# Each row is appended when it is known, so a call that is cut off keeps every row that it reached. A part that the
# deadline stops, before it begins or within it, has the row "not run: deadline". Every part has a process and a
# time limit of its own: one that crashes or hangs is a row of the table, no more.
# The machine needs a driver of release 580 or newer and CUDA 13's libraries, from a toolkit or beside a Python's torch
# (PYTHON names it). compute-sanitizer, ncu and torch are used where they are; else their rows say "not run".
# Exit code: 0 nothing failed, 1 something failed, 2 it could not begin.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."

FIRST=(device primitives facts seeded oracle links speed profile model quickstart memcheck)
FULL=(oracle-full links-full nccl speed-full model-full quickstart-full)
NAMED=(peers racecheck initcheck synccheck)

binary=target/gpu-check/rloss.gz check=target/gpu-check/gpu_check.gz
out=${OUT:-.}/gpu-check.md device=0 deadline="" parts=("${FIRST[@]}")
fail() {
    echo "gpu_check: $*" >&2
    exit 2
}

mib() { awk '{ printf "%.1f", $1 / 1048576 }'; }

# pack FILE PACKED
pack() {
    strip -o "$2.part" "$1"
    # Most of it is PTX, which is text.
    gzip -9 <"$2.part" >"$2"
    echo "$2: $(stat -c %s "$2" | mib) MiB ($(stat -c %s "$2.part" | mib) unpacked)"
    rm "$2.part"
}

build() {
    command -v nvcc >/dev/null || fail 'no nvcc: first run  eval "$(scripts/setup_cuda.sh)"'
    # NCCL is checked where it was there to build with: scripts/setup_cuda.sh --nccl.
    local features=cuda
    if ls "${CUDA_HOME:-/usr/local/cuda}"/lib*/libnccl.so >/dev/null 2>&1; then features=cuda,nccl; fi
    local tree all
    cargo build --release --features "$features" --bin rloss --example gpu_check
    mkdir -p "$(dirname "$binary")"
    pack "${CARGO_TARGET_DIR:-target}/release/rloss" "$binary"
    pack "${CARGO_TARGET_DIR:-target}/release/examples/gpu_check" "$check"
    tree=$(git ls-files -z | xargs -0 stat -c %s | awk '{ s += $1 } END { print s }')
    all=$((tree + $(stat -c %s "$binary") + $(stat -c %s "$check")))
    echo "the tree: $(mib <<<"$tree") MiB"
    [ $all -lt 55000000 ] || fail "both programs and the tree are over 55 MB together"
}

while [ $# -gt 0 ]; do
    case $1 in
        --build)
            build
            exit
            ;;
        --full)
            parts=("${FULL[@]}")
            shift
            ;;
        --binary | --check | --out | --device | --deadline | --only)
            [ $# -ge 2 ] || fail "$1 needs a value"
            case $1 in
                --binary) binary=$2 ;;
                --check) check=$2 ;;
                --out) out=$2 ;;
                --device) device=$2 ;;
                --deadline)
                    [[ $2 =~ ^[1-9][0-9]*$ ]] || fail "--deadline takes seconds from the start, such as 600, not $2"
                    deadline=$2
                    ;;
                --only)
                    IFS=, read -ra parts <<<"$2"
                    [ ${#parts[@]} -gt 0 ] || fail "--only needs the names of parts, such as seeded,oracle"
                    ;;
            esac
            shift 2
            ;;
        --skip) fail "--skip is gone: name the parts to run, such as --only oracle-full,links-full (see the head of scripts/gpu_check.sh)" ;;
        *) fail "unknown argument $1 (see the head of scripts/gpu_check.sh)" ;;
    esac
done
wanted() { [[ " ${parts[*]} " == *" $1 "* ]]; }
for name in "${parts[@]}"; do
    [[ " ${FIRST[*]} ${FULL[*]} ${NAMED[*]} " == *" $name "* ]] || fail "no part $name: --only takes ${FIRST[*]} ${FULL[*]} ${NAMED[*]}"
done
scratch=$(mktemp -d)
trap 'rm -rf "$scratch"' EXIT
# unpack FILE: sets `program` to its path, unpacked.
unpack() {
    [ -f "$1" ] || fail "no program at $1: make it with scripts/gpu_check.sh --build on a machine with Rust, and bring it here"
    program=$1
    if [[ $1 == *.gz ]]; then
        program=$scratch/$(basename "$1" .gz)
        gzip -dc "$1" >"$program" || fail "$1 cannot be unpacked: bring it here anew"
        chmod +x "$program"
    fi
}
unpack "$check" && check=$program
if [[ " ${parts[*]}" == *" quickstart"* ]]; then unpack "$binary" && binary=$program; fi
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

# What the loader says of a program: both need the same. Its exit code says less than its text.
loader() { LD_LIBRARY_PATH=$libraries ldd "$check" 2>&1 || true; }

missing() { loader | sed -n 's/^[[:space:]]*\([^ ]*\) => not found.*/\1/p' | sort -u; }

libraries=${LD_LIBRARY_PATH:-}
too_new=$(loader | sed -n "s/.*version \`\(GLIBC[^']*\)' not found.*/\1/p" | sort -u | tail -1)
[ -z "$too_new" ] || fail "$check wants $too_new, which this system's C library lacks: build it on an older system"
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

# With eager loading no kernel is loaded while another one runs, and no first launch is slower than the next.
with_libraries() { LD_LIBRARY_PATH=$libraries CUDA_MODULE_LOADING=EAGER "$@"; }

failed=0

# limit SECONDS: sets `limit` to SECONDS, or to what the deadline leaves of them. Fails where that is nothing.
limit() {
    limit=$1 is_cut=""
    if [ -n "$deadline" ] && [ $((deadline - SECONDS)) -lt "$limit" ]; then
        limit=$((deadline - SECONDS)) is_cut=yes
    fi
    [ "$limit" -ge 1 ]
}

# Exit code 2 is refused here, before anything is written.
limit 120 || limit=1
described=$(with_libraries timeout -k 5 "$limit" "$check" device --device "$device") || exit 2
name=$(sed -n 's/^| device | \([^|]*[^ |]\) *|.*/\1/p' <<<"$described")

mkdir -p "$(dirname "$out")"
begin_table() {
    printf '\n| check | | |\n| --- | --- | --- |\n'
    in_table=yes
} >>"$out"
# row NAME VERDICT TEXT: appended to the table of checks, which begins anew after a part's own tables.
row() {
    [ -n "$in_table" ] || begin_table
    echo "| $1 | $2 | ${3//|//} |" >>"$out"
}

echo "### $name, $(date -u "+%Y-%m-%d %H:%M")" >>"$out"
begin_table
echo "$described" >>"$out"
if command -v nvidia-smi >/dev/null; then
    row driver "$(nvidia-smi --query-gpu=driver_version --format=csv,noheader -i "$device" 2>/dev/null || echo unknown)" ""
fi
if commit=$(git rev-parse --short HEAD 2>/dev/null); then row commit "$commit" ""; fi

# begin NAME SECONDS: whether the part is wanted and the deadline leaves time for it.
begin() {
    wanted "$1" || return 1
    if ! limit "$2"; then
        row "$1" "not run: deadline" ""
        return 1
    fi
    echo "gpu_check: $1" >&2
}

# end NAME CODE ERRORS: an end that is none is a row, with the last line of the file ERRORS.
end() {
    local last
    last=$(tail -1 "$3")
    case $2 in
        0) ;;
        124 | 137)
            if [ -n "$is_cut" ]; then
                row "$1" "not run: deadline" "cut off after $limit seconds"
                return
            fi
            row "$1" "**FAILED**" "not done after $limit seconds"
            ;;
        *) row "$1" "**FAILED**" "ended with code $2: $last" ;;
    esac
    if [ "$2" != 0 ]; then failed=1; fi
}

# part NAME SECONDS ARGUMENTS...: the checks append their rows themselves. Speed has tables of its own.
part() {
    local name=$1 code=0
    begin "$name" "$2" || return 0
    shift 2
    case $name in
        speed* | model*) in_table="" ;;
        *) [ -n "$in_table" ] || begin_table ;;
    esac
    with_libraries timeout -k 5 "$limit" "$check" "$@" --device "$device" >>"$out" 2>"$scratch/errors" || code=$?
    cat "$scratch/errors" >&2
    if [ $code = 1 ] && ! grep -q '^error:' "$scratch/errors"; then
        failed=1 # and its rows say so
    else
        end "$name" "$code" "$scratch/errors"
    fi
}

# whole_run PART SECONDS DEVICE SETS...: quickstart_cuda from its cold start to its last evaluation.
whole_run() {
    local name=$1 where=$3 run=$scratch/$1-$3 code=0 begun=$SECONDS success gap verdict=passed
    begin "$name" "$2" || return 0
    shift 3
    with_libraries timeout -k 5 "$limit" "$binary" train quickstart_cuda --out "$run" --set logging.tensorboard=false "$@" >"$scratch/errors" 2>&1 || code=$?
    if [ $code != 0 ]; then
        end "$name on the $where" "$code" "$scratch/errors"
        return
    fi
    success=$(sed -n 's/.*"phase":"eval".*acc\/mean@1":\([0-9.]*\).*/\1/p' "$run/metrics.jsonl" | tail -1)
    gap=$(sed -n 's/.*"mismatch\/logprob_abs_diff_max":\([-+0-9.e]*\).*/\1/p' "$run/metrics.jsonl" | sort -g | tail -1)
    if [ "$gap" != 0 ]; then verdict="**FAILED**" failed=1; fi
    row "$name on the $where" "$verdict" "$((SECONDS - begun)) s, success $success at the end, largest gap $gap"
}

# tool NAME: the first of a CUDA tool that is found.
tool() { command -v "$1" || ls /usr/local/cuda*/bin/"$1" 2>/dev/null | head -1 || true; }

# Four kernels: attention forward and backward, a dense product, the experts' product.
KERNELS='^(sink_attention_forward_hopper|sink_attention_dkv_hopper|product_forward)$'
METRICS=gpu__time_duration.sum,sm__throughput.avg.pct_of_peak_sustained_elapsed
METRICS+=,gpu__compute_memory_throughput.avg.pct_of_peak_sustained_elapsed
METRICS+=,l1tex__data_pipe_lsu_wavefronts_mem_shared.avg.pct_of_peak_sustained_elapsed
profile() {
    local ncu code=0
    begin profile 60 || return 0
    ncu=$(tool ncu)
    if [ -z "$ncu" ]; then
        row profile "not run" "no ncu"
        return
    fi
    with_libraries timeout -k 5 "$limit" "$ncu" --kernel-name "regex:$KERNELS" --metrics "$METRICS" --csv \
        "$check" profile --device "$device" >"$scratch/profile" 2>"$scratch/errors" || code=$?
    # A line of CSV for each kernel and metric. Fields 5 and 13 to 15 are the kernel, the metric, its unit and its value.
    while IFS=$'\t' read -r kernel metric unit value; do
        row "ncu: $kernel" "$metric" "$value $unit"
    done < <(awk -F '","' '/^"[0-9]+"/ { gsub(/"/, "", $15); print $5 "\t" $13 "\t" $14 "\t" $15 }' "$scratch/profile")
    if [ $code = 0 ] && ! grep -q '^"[0-9]' "$scratch/profile"; then
        row profile "not run" "$(cat "$scratch/errors" "$scratch/profile" | grep ERROR | tail -1)"
    fi
    end profile "$code" "$scratch/errors"
}

# sanitizer NAME SECONDS: the small checks under a tool of compute-sanitizer.
sanitizer() {
    local sanitizer summary code=0
    begin "$1" "$2" || return 0
    sanitizer=$(tool compute-sanitizer)
    if [ -z "$sanitizer" ]; then
        row "compute-sanitizer $1" "not run" "no compute-sanitizer"
        return
    fi
    with_libraries timeout -k 5 "$limit" "$sanitizer" --tool "$1" --error-exitcode 9 \
        "$check" oracle links --small --device "$device" >"$scratch/sanitizer" 2>&1 || code=$?
    summary=$(grep -E 'ERROR SUMMARY|RACECHECK SUMMARY|not supported' "$scratch/sanitizer" | tail -1 | sed 's/^=* *//' || true)
    if [ $code = 0 ]; then row "compute-sanitizer $1" passed "$summary"; fi
    if [ $code = 1 ] || [ $code = 9 ]; then
        row "compute-sanitizer $1" "**FAILED**" "code $code: $summary"
        failed=1
        grep -v '^|' "$scratch/sanitizer" | head -40 >&2 || true
        return
    fi
    end "compute-sanitizer $1" "$code" "$scratch/sanitizer"
}

# peer NAME SECONDS SCRIPT ARGUMENTS...: runs a Python script that measures other implementations.
peer() {
    local name=$1 code=0
    begin peers "$2" || return 1
    shift 2
    in_table=""
    if [ -z "$python" ]; then
        row "$name" "not run" "no Python; name one with torch in PYTHON"
        return 1
    fi
    CUDA_VISIBLE_DEVICES=${CUDA_VISIBLE_DEVICES:-$device} timeout -k 5 "$limit" "$python" "$@" || code=$?
    [ $code = 0 ] || row "$name" "not run" "ended with code $code"
    return $code
}

part primitives 20 primitives
part facts 40 facts
part seeded 40 seeded
part oracle 40 oracle --small
part links 40 links --small
part speed 90 speed --short
profile
part model 120 model --short
whole_run quickstart 100 GPU --set parallel.device_index="$device" --set cold_start.steps=100 --set train.steps=8
sanitizer memcheck 60
part oracle-full 180 oracle
part links-full 180 links
if with_libraries "$check" --help | grep -q nccl; then
    part nccl 120 nccl
elif wanted nccl; then
    row nccl "not run" "built without it"
fi
attention_peers=()
if peer "attention of others" 330 scripts/attention_peers.py "$scratch/peers.json" --seconds-max 150; then
    attention_peers=(--peers "$scratch/peers.json")
fi
part speed-full 240 speed "${attention_peers[@]}"
part model-full 600 model
peer "models of others" 660 scripts/model_peers.py --ours "$out" --seconds-max 560 >>"$out" || true
whole_run quickstart-full 600 GPU --set parallel.device_index="$device"
whole_run quickstart-full 600 CPU --set device=cpu
for name in racecheck initcheck synccheck; do sanitizer "$name" 120; done

cat "$out"
if [ $failed = 1 ]; then
    echo "gpu_check: something failed; the table is in $out" >&2
    exit 1
fi
echo "gpu_check: nothing failed; the table is in $out" >&2
