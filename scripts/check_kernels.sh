#!/usr/bin/env bash
# Compiles every kernel to machine code for sm_90a and compares what it takes of the machine with kernels/resources.txt:
# registers a thread, shared memory a block, spills (none allowed), its tensor-core instructions (HMMA of a warp, HGMMA of a
# warpgroup), how many of these and of LDSM transpose an operand, and its proxy fences (FENCE.VIEW): what the CPU takes on
# trust. Needs no GPU. The compiler is pinned, so that the table is exact.
#
#   scripts/check_kernels.sh             compares
#   scripts/check_kernels.sh --update    writes the table anew: look at its difference before you commit it
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."

update=""
case ${1:-} in
    "") ;;
    --update) update=yes ;;
    *)
        echo "check_kernels: takes --update or nothing, not $1" >&2
        exit 2
        ;;
esac
setup=$(scripts/setup_cuda.sh)
eval "$setup"
table=kernels/resources.txt
scratch=$(mktemp -d)
trap 'rm -rf "$scratch"' EXIT

# The flags of build.rs.
compile() {
    local source=$1 scratch=$2 name
    name=$(basename "$source" .cu)
    nvcc -gencode=arch=compute_90a,code=sm_90a -std=c++17 -O3 -cubin -Xptxas -v -o "$scratch/$name.cubin" "$source" \
        >"$scratch/$name.report" 2>&1 || {
        echo "check_kernels: $source does not compile:" >&2
        cat "$scratch/$name.report" >&2
        return 1
    }
    # A warning of nvcc may be a kernel that is not what it seems (wgmma serialised, setmaxnreg ignored).
    if grep -E 'warning|C75[0-9][0-9]' "$scratch/$name.report" >&2; then
        echo "check_kernels: $source compiles with warnings" >&2
        return 1
    fi
    cuobjdump --dump-sass "$scratch/$name.cubin" >"$scratch/$name.sass"
}
export -f compile
printf '%s\0' kernels/*.cu | xargs -0 -P 2 -I{} bash -euo pipefail -c 'compile "$1" "$2"' _ {} "$scratch"

# Launch sizes, as the header's constants say: `size forward_threads` is 128. The host's twins make it plain C++.
{
    echo '#include "sink_attention.cuh"'
    echo '#include <cstdio>'
    echo 'int main() {'
    sed -n 's/^ *constexpr int \([a-z_0-9]*_\(threads\|shared_bytes\)\) =.*/printf("\1 %d\\n", sink_attention::\1);/p' kernels/sink_attention.cuh
    echo '}'
} >"$scratch/sizes.cpp"
"${CXX:-c++}" -std=c++17 -w -O1 -I tests/cuda_host -I kernels -o "$scratch/sizes" "$scratch/sizes.cpp"
"$scratch/sizes" >"$scratch/sizes.txt"
size() { awk -v name="$1" '$1 == name { found = $2 } END { print found + 0 }' "$scratch/sizes.txt"; }

{
    echo "# What each kernel takes of an sm_90a machine. Written by scripts/check_kernels.sh --update, compared in CI."
    printf '%-32s %9s %7s %13s %14s %6s %6s %6s %10s %6s\n' kernel registers threads static_shared dynamic_shared spills \
        HMMA HGMMA transposed fences
    for report in "$scratch"/*.report; do
        name=$(basename "$report" .report)
        # kernel registers static_shared stack+spills
        sed -n "s/.*Compiling entry function '\([^']*\)'.*/kernel \1/p
            s/^ *\([0-9]*\) bytes stack frame, \([0-9]*\) bytes spill stores, \([0-9]*\) bytes spill loads/spills \1 \2 \3/p
            s/.*Used \([0-9]*\) registers\(.*\)/used \1 \2/p" "$report" |
            awk '$1 == "kernel" { k = $2 } $1 == "spills" { s = $2 + $3 + $4 }
                $1 == "used" { m = 0; for (i = 4; i < NF; i++) if ($(i + 1) == "bytes" && $(i + 2) ~ /^smem/) m = $i; print k, $2, m, s }' |
            sort | while read -r kernel registers static spills; do
            products=$(awk -v k="$kernel" '$1 == "Function" { on = $3 == k } on && /HMMA/ { h++ } on && /HGMMA/ { g++ }
                on && /tnsp|LDSM.*MT88/ { t++ } on && /FENCE.VIEW/ { f++ } END { print h + 0, g + 0, t + 0, f + 0 }' "$scratch/$name.sass")
            # A check's launch is its own affair, not the header's.
            short=${kernel#sink_attention_}
            # shellcheck disable=SC2086 # four numbers
            printf '%-32s %9d %7d %13d %14d %6d %6d %6d %10d %6d\n' "$kernel" "$registers" "$(size "${short}_threads")" "$static" \
                "$(size "${short}_shared_bytes")" "$spills" $products
        done
    done
} >"$scratch/resources.txt"

failed=0
while read -r kernel _ _ _ _ spills hmma hgmma _; do
    case $kernel in '#' | kernel) continue ;; esac
    if [ "$spills" != 0 ]; then
        echo "check_kernels: $kernel keeps $spills bytes in local memory (stack or spills): use fewer registers" >&2
        failed=1
    fi
    case $kernel in
        sink_attention_*forward* | sink_attention_chunk* | sink_attention_dkv* | sink_attention_dq*)
            if [ $((hmma + hgmma)) = 0 ]; then
                echo "check_kernels: $kernel has no tensor-core instruction" >&2
                failed=1
            fi
            ;;
    esac
done <"$scratch/resources.txt"
[ $failed = 0 ] || exit 1

if [ -n "$update" ]; then
    cp "$scratch/resources.txt" "$table"
    echo "check_kernels: wrote $table"
elif ! diff -u "$table" "$scratch/resources.txt" >&2; then
    echo "check_kernels: $table is not what the kernels take now; if that is meant, run scripts/check_kernels.sh --update" >&2
    exit 1
else
    echo "check_kernels: $(grep -cv -e '^#' -e '^kernel' "$table") kernels as in $table, no spills"
fi
