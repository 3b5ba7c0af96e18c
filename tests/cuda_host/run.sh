#!/usr/bin/env bash
# The CUDA kernels on the CPU: the engine's tests, the kernels' suite, both sanitizers, every seeded bug.
# Needs bash, g++ and make. JOBS (default: all cores) programs at a time. Prints a table; exits 1 on any miss.
set -u
cd "$(dirname "$0")" || exit 1
jobs=${JOBS:-$(nproc)}
export out=../../target/cuda_host
failed=0
fail() {
  echo "FAILED: $*"
  failed=1
}

mkdir -p $out/logs
for mode in plain asan tsan; do
  make -s -j"$jobs" MODE=$mode || exit 1
done
g++ -std=c++17 -O1 -Wall -Wextra seed.cpp -o $out/seed || exit 1

# One of these at a time would leave cores idle: each into a log, shown in order.
checks=("plain/suite hopper" "plain/suite mma" "asan/suite small" "tsan/suite small"
  "plain/engine_tests" "asan/engine_tests" "tsan/engine_tests")
# The file in which the host twins and a GPU's instructions must agree.
for mode in plain asan tsan; do checks+=("$mode/primitive_checks ../../kernels/primitive_checks.txt"); done
run_check() { timeout 600 $out/$1 >"$out/logs/${1//[\/ ]/_}" 2>&1; }
export -f run_check
printf '%s\n' "${checks[@]}" | xargs -P "$jobs" -I{} bash -c 'run_check "$1"' - {} || fail "a check, see below"
for check in "${checks[@]}"; do
  echo "$check"
  head -40 "$out/logs/${check//[\/ ]/_}"
done
if $out/tsan/engine_tests race >/dev/null 2>&1; then fail "the engine does not see a race"; fi

count=$($out/seed bugs.txt)
echo "$count seeded bugs, and what catches each"
seq "$count" | xargs -P "$jobs" -I{} ./bug.sh {} || fail "a seeded bug was not caught or does not fit the sources"
if [ $failed = 0 ]; then echo "all good, $count of $count seeded bugs caught in ${SECONDS} s"; fi
exit $failed
