#!/usr/bin/env bash
# bug.sh NUMBER: seeds one bug of bugs.txt, builds and runs the small suite of its kernels, plain, then with each sanitizer, until a
# check catches it. Prints one line. Exits 1 when nothing catches it or it cannot be seeded.
set -u
cd "$(dirname "$0")" || exit 1
number=$1
out=../../target/cuda_host
work=$out/bugs/$number
rm -rf "$work" && mkdir -p "$work"
if ! seeded=$($out/seed bugs.txt "$number" ../../kernels "$work/kernels" 2>&1); then
  echo "  $seeded"
  exit 1
fi
IFS=$'\t' read -r file kind name <<<"$seeded"
# The family whose kernels the file is part of; shared files are tried in the first.
case $file in
  *hopper* | ring.cuh | warpgroup_*) family=hopper sources=$(cd ../../kernels && echo *_hopper.cu) ;;
  *) family=mma sources="sink_attention_forward.cu sink_attention_backward.cu" ;;
esac
case $file in
  *.cu) changed=$file ;;
  *_softmax.cuh) changed=sink_attention_forward.cu ;;
  *_gradients.cuh) changed="sink_attention_backward.cu attention" ;;
  *) changed="$sources attention" ;;
esac

caught=""
for mode in plain asan tsan; do
  build=$work/$mode
  mkdir -p "$build"
  if ! make -s bug MODE=$mode KERNELS="$work/kernels" BUILD="$build" CHANGED="$changed" >"$build/log" 2>&1; then
    [ "$kind" = refused ] && caught="the compiler: $(grep -m1 -o 'error: .*' "$build/log")"
    [ "$kind" = refused ] || name="$name (does not build)"
    break
  fi
  # In a shell of its own, so that nobody remarks on a signal.
  bash -c 'TSAN_OPTIONS=halt_on_error=1 timeout 120 "$1/suite" small "$2" >"$1/log" 2>&1; exit $?' - "$build" $family 2>/dev/null
  status=$?
  [ $status = 0 ] && continue
  caught="$mode: ended with status $status"
  if words=$(grep -m1 -oE 'caught by .*|SUMMARY: .*' "$build/log"); then
    caught="$mode: ${words#caught by }"
    break
  fi  # else a crash, of which a sanitizer says more
done
rm -rf "$work"
printf '  %-52s %s\n' "$name" "${caught:-NOT CAUGHT}" | cut -c1-190
[ -n "$caught" ]
