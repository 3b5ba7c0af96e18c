#!/usr/bin/env bash
# Runs every curve of recipes/figures/ for three seeds and draws the figures: runs/figures/figures.md, and one SVG each.
#
# Started again, it goes on: a run that has ended ends at once, one that was interrupted goes on from its last checkpoint.
# One thread a run, as many runs at a time as there are cores; no result depends on either.
#
#   scripts/reproduce_figures.sh
#   JOBS=2 scripts/reproduce_figures.sh          runs at a time
#   SEEDS="0 1 2 3 4" scripts/reproduce_figures.sh
#   OUT=/tmp/figures scripts/reproduce_figures.sh
#   RLOSS=path/to/rloss scripts/reproduce_figures.sh      a binary that is there, instead of building one
set -euo pipefail
cd "$(dirname "$0")/.."

export OUT="${OUT:-runs/figures}"
JOBS="${JOBS:-$(nproc)}"
SEEDS="${SEEDS:-0 1 2}"
if [ -z "${RLOSS:-}" ]; then
    cargo build --release
    RLOSS=target/release/rloss
fi
export RLOSS

# run RECIPE SEED: trains into $OUT/NAME/seed-SEED, from its cold start where the recipe names one.
run() {
    local recipe=$1 seed=$2
    local name cold out
    name=$(basename "$recipe" .toml)
    out="$OUT/$name/seed-$seed"
    local args=(--out "$out" --set "train.seed=$seed" --set parallel.threads=1
        --set logging.tensorboard=false --set logging.console_every_steps=0)
    cold=$(sed -n 's|^path = ".*/\(cold_start_[a-z0-9_]*\)/seed-0".*|\1|p' "$recipe")
    if [ -n "$cold" ]; then
        args+=(--set "model.path=$OUT/$cold/seed-$seed")
    fi
    if [ -e "$out/recipe.toml" ]; then
        args+=(--resume)
    fi
    mkdir -p "$OUT/$name"
    if "$RLOSS" train "$recipe" "${args[@]}" >"$out.log" 2>&1; then
        echo "$name, seed $seed"
    else
        echo "$name, seed $seed: $(tail -n 1 "$out.log")"
        return 1
    fi
}
export -f run

# all RECIPE...: every seed of every recipe. What fails is said, and the others go on.
all() {
    for recipe in "$@"; do
        for seed in $SEEDS; do printf '%s\0%s\0' "$recipe" "$seed"; done
    done | xargs -0 -n 2 -P "$JOBS" bash -c 'run "$1" "$2"' run
}

failed=0
all recipes/figures/cold_start_*.toml
all recipes/figures/fig*_*.toml || failed=1

cp recipes/figures/figures.toml "$OUT/figures.toml"
scripts/draw_figures.py "$OUT"
times >"$OUT/processor_time.txt"
awk -F '[ms ]+' 'NR == 2 { printf "%.1f minutes of processor time in this call\n", $1 + $3 + ($2 + $4) / 60 }' \
    "$OUT/processor_time.txt"
exit "$failed"
