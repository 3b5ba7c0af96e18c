#!/usr/bin/env bash
# The CUDA kernels on the CPU: the engine's tests, the kernels' suite, both sanitizers, ten of the seeded bugs, and five of
# those that drawn_bugs.py draws.
#
#   run.sh         as said
#   run.sh ci      a sample: of attention one family whole and the small cases of all, one family in each sanitizer;
#                  six seeded and three drawn bugs
#   run.sh bugs    every seeded bug, and nothing else
#
# Needs bash, g++, make and python3. JOBS (default: all cores) programs at a time. Prints a table; exits 1 on any miss.
set -u
cd "$(dirname "$0")" || exit 1
jobs=${JOBS:-$(nproc)}
sample=10
drawn=5
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

# Every check, each into a log, with its seconds; shown in order.
run_check() {
  local code=0 log=$out/logs/${1//[\/ ]/_}
  timeout 1800 $out/$1 >"$log" 2>&1 || code=$?
  echo "$SECONDS s" >"$log.seconds"
  return $code
}
export -f run_check
checks() {
  local mode check checks=("plain/suite hopper" "plain/suite ops" "plain/engine_tests" "asan/engine_tests" "tsan/engine_tests")
  if [ "$1" = whole ]; then
    checks=("plain/suite hopper_128" "plain/suite mma" "plain/suite mma_128" "asan/suite small" "tsan/suite small" "${checks[@]}")
  else
    checks+=("plain/suite small" "asan/suite small hopper" "asan/suite small ops" "tsan/suite small hopper" "tsan/suite small ops")
  fi
  # The file in which the host twins and a GPU's instructions must agree.
  for mode in plain asan tsan; do checks+=("$mode/primitive_checks ../../kernels/primitive_checks.txt"); done
  # One of these at a time would leave cores idle.
  printf '%s\n' "${checks[@]}" | xargs -P "$jobs" -I{} bash -c 'run_check "$1"' - {} || fail "a check, see below"
  for check in "${checks[@]}"; do
    echo "$check: $(cat "$out/logs/${check//[\/ ]/_}.seconds")"
    head -40 "$out/logs/${check//[\/ ]/_}"
  done
  if $out/tsan/engine_tests race >/dev/null 2>&1; then fail "the engine does not see a race"; fi
}

# Heads and number of each bug: attention's are seeded for heads of 64 and of 128, unless they say which.
mapfile -t pairs < <(awk '/^= / { number++; name = $0; print 64, number }
  /^@ (sink_attention|ring|warp)/ && name !~ /heads of (64|128)/ { print 128, number }' bugs.txt)
count=${#pairs[@]}
step=1
case ${1:-} in
  "") checks whole && step=$((count / sample)) ;;
  ci)
    sample=6 drawn=3
    checks sample && step=$((count / sample))
    ;;
  bugs) sample=$count ;;
  *)
    echo "takes ci, bugs or nothing, not $1" >&2
    exit 2
    ;;
esac
echo "$sample of $count seeded bugs, and what catches each"
for ((i = step; i <= count && i <= step * sample; i += step)); do echo "${pairs[i - 1]}"; done |
  xargs -P "$jobs" -L 1 bash -c 'HEADS=$1 ./bug.sh "$2"' - ||
  fail "a seeded bug was not caught or does not fit the sources"
if [ "${1:-}" != bugs ]; then
  echo "$drawn of the drawn bugs, and what catches each"
  ./drawn_bugs.py $drawn || fail "a drawn bug was not caught"
fi
if [ $failed = 0 ]; then echo "all good, $sample of $sample seeded bugs caught in ${SECONDS} s"; fi
exit $failed
