#!/usr/bin/env bash
# The CUDA kernels on the CPU: the engine's tests, the kernels' suite, both sanitizers, every seeded bug.
# Needs bash, g++ and make. JOBS (default: all cores) programs at a time. Prints a table; exits 1 on any miss.
set -u
cd "$(dirname "$0")" || exit 1
jobs=${JOBS:-$(nproc)}
out=../../target/cuda_host
failed=0
fail() {
  echo "FAILED: $*"
  failed=1
}

mkdir -p $out
for mode in plain asan tsan; do
  make -s -j"$jobs" MODE=$mode || exit 1
done
g++ -std=c++17 -O1 -Wall -Wextra seed.cpp -o $out/seed || exit 1

for mode in plain asan tsan; do
  echo "engine, $mode"
  $out/$mode/engine_tests || fail "the engine's tests, $mode"
  $out/$mode/primitive_checks ../../kernels/primitive_checks.txt || fail "the host twins and primitive_checks.txt, $mode"
done
if $out/tsan/engine_tests race >/dev/null 2>&1; then fail "the engine does not see a race"; fi

echo "kernels, plain"
$out/plain/suite || fail "the kernels' suite"
for mode in asan tsan; do
  echo "kernels, $mode"
  $out/$mode/suite small || fail "the kernels' small suite, $mode"
done

count=$($out/seed bugs.txt)
echo "$count seeded bugs, and what catches each"
seq "$count" | xargs -P "$jobs" -I{} ./bug.sh {} || fail "a seeded bug was not caught or does not fit the sources"
exit $failed
