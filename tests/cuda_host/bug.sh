#!/usr/bin/env bash
# bug.sh NUMBER [BUGS]: seeds one bug of bugs.txt or another such file, builds and runs the small suite of its kernels until
# a check catches it: what the file says to try first, then all checks plain and with each sanitizer. Prints one line. Exits
# 1 when nothing catches it or it cannot be seeded; 2 when it does not build, 3 when the machine code stays as it was.
set -u
cd "$(dirname "$0")" || exit 1
number=$1 bugs=${2:-bugs.txt}
heads=${HEADS:-64} # of attention
out=../../target/cuda_host
work=$out/bugs/$(basename "$bugs" .txt).$number.$heads
rm -rf "$work" && mkdir -p "$work"
if ! seeded=$($out/seed "$bugs" "$number" ../../kernels "$work/kernels" 2>&1); then
  echo "  $seeded"
  exit 1
fi
IFS=$'\t' read -r file kind name first <<<"$seeded"
read -r first_mode first_check first_sources <<<"${first:-plain}"
# Heads of 128 have kernels of their own, from the same files. HEADS=128 tries a bug of attention on them.
case "$heads $name" in
  "64 "*"heads of 128"*) width=_128 ;;
  "64 "*) width="" ;;
  *) width=_128 name="$name, heads of $heads" ;;
esac
# The family whose kernels the file is part of, by its own name where it has one; shared files are tried in the first.
case $file in
  swiglu.cu | rms_norm.cu) family=row_ops sources=$file ;;
  adamw_8bit.cu) family=optimizer sources=$file ;;
  product_mxfp4.cuh) family=product sources=product.cu ;;
  optimizer.cuh) family=optimizer sources="optimizer.cu adamw_8bit.cu" ;;
  row_ops.cuh) family=row_ops sources="swiglu.cu rms_norm.cu" ;;
  elements.cuh) family=ops sources="dispatch.cu embedding.cu head_parts.cu load_balance.cu log_prob.cu rms_norm.cu rope.cu router.cu sampling.cu silu_gated.cu swiglu.cu" ;;
  *hopper* | ring.cuh | warpgroup_*) family=hopper$width sources=$(cd ../../kernels && echo *_hopper.cu) ;;
  sink_attention* | warp_products.cuh) family=mma$width sources="sink_attention_forward.cu sink_attention_backward.cu" ;;
  *) family=${file%.*} sources=$family.cu ;;
esac
# What is compiled anew. The host's part takes as long as the kernels and seldom tells more.
case $file in
  *.cu) sources=$file also="" ;;
  *_softmax.cuh) sources=sink_attention_forward.cu also="" ;;
  *_gradients.cuh) sources=sink_attention_backward.cu also=attention ;;
  *)
    also=$family
    if [[ $family == mma* || $family == hopper* ]]; then also=attention; fi
    if [[ $family == ops ]]; then also=""; fi
    ;;
esac

caught="" unbuilt="" same=""
# Whether everything compiled anew is, without its lines' numbers, what it was.
unchanged() {
  local part
  for part; do
    objcopy --strip-debug "$work/plain/$part.bug" "$work/now" && objcopy --strip-debug "$out/plain/$part.o" "$work/before"
    cmp -s "$work/now" "$work/before" || return
  done
}
# attempt MODE CHECK SOURCES...: sets `caught` when a check notices; 1 when nothing more is to be tried.
attempt() {
  local mode=$1 check=$2 build=$work/$1 status words
  shift 2
  mkdir -p "$build"
  if ! make -s bug MODE="$mode" KERNELS="$work/kernels" BUILD="$build" CHANGED="$*" >"$build/log" 2>&1; then
    [ "$kind" = refused ] && caught="the compiler: $(grep -m1 -o 'error: .*' "$build/log")"
    [ "$kind" = refused ] || name="$name (does not build)" unbuilt=yes
    return 1
  fi
  if [ "$mode" = plain ] && unchanged "$@"; then
    same=yes
    return
  fi
  same=""
  # In a shell of its own, so that nobody remarks on a signal. Of the processor's time: others may have most of it.
  # shellcheck disable=SC2016,SC2086 # no check is all checks
  bash -c 'ulimit -t 60; TSAN_OPTIONS=halt_on_error=1 timeout 1200 "$0/suite" small "$@" >"$0/log" 2>&1; exit $?' "$build" $family $check 2>/dev/null
  status=$?
  [ $status = 0 ] && return
  if [ $status = 124 ] || [ $status = 137 ] || [ $status = 152 ]; then
    caught="$mode: no end within 60 s"
    return 1
  fi
  caught="$mode: ended with status $status"
  if words=$(grep -m1 -oE 'caught by .*|SUMMARY: .*' "$build/log"); then
    caught="$mode: ${words#caught by }"
    return 1
  fi  # else a crash, of which a sanitizer says more
}
# shellcheck disable=SC2086 # several words
attempt "$first_mode" "$first_check" $sources $first_sources && attempt plain "" $sources $also && [ -z "$same" ] &&
  attempt asan "" $sources $also && attempt tsan "" $sources $also
rm -rf "$work"
printf '  %-52s %3d s, %s\n' "$name" "$SECONDS" "${caught:-NOT CAUGHT}" | cut -c1-190
if [ -n "$unbuilt" ]; then exit 2; fi
if [ -n "$same" ]; then exit 3; fi
[ -n "$caught" ]
