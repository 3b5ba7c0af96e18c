#!/usr/bin/env bash
# The emulated CUDA toolkit: no file of NVIDIA's, no GPU. Builds it where it is missing or old and prints the environment.
#
#   eval "$(tests/cuda_driver/setup.sh)"      then: cargo test --profile emulated --features cuda --lib -- cuda
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/../.."

target=$(realpath -m "${CARGO_TARGET_DIR:-target}")
case $target in */cuda-emulated) ;; *) target=$target/cuda-emulated ;; esac
cudarc=$(cargo metadata --locked --format-version 1 --features cuda |
    python3 -c 'import json, os, sys
print(*(os.path.dirname(p["manifest_path"]) for p in json.load(sys.stdin)["packages"] if p["name"] == "cudarc"))')
# Another checkout with this target folder may have been here last: its headers would be read.
if [ "$(readlink "$target/toolkit/bin/nvcc")" != "$(realpath tests/cuda_driver/nvcc)" ]; then
    rm -f "$target/toolkit/bin/nvcc"
fi
make -s -j"$(nproc)" -C tests/cuda_driver TOOLKIT="$target/toolkit" CUDARC="$cudarc" >&2
# Nothing else tells the build of candle's kernels that their compiler's stand-in has changed.
stamp=$(cat tests/cuda_driver/{nvcc,kernel_table.h,include/*.h} tests/cuda_host/language.h | sha256sum)
if [ "$(cat "$target/stamp" 2>/dev/null)" != "$stamp" ]; then
    rm -rf "$target"/emulated/{build,.fingerprint}/{candle-kernels,rloss}-* "$target/toolkit/modules"
    mkdir -p "$target/toolkit/modules"
    echo "$stamp" >"$target/stamp"
fi
cat <<EXPORTS
export CARGO_TARGET_DIR='$target'
export CUDA_HOME='$target/toolkit' CUDA_PATH='$target/toolkit' CUDA_ROOT='$target/toolkit' NVCC='$target/toolkit/bin/nvcc' CUDA_COMPUTE_CAP=90
export PATH='$target/toolkit/bin':"\$PATH"
export LD_LIBRARY_PATH='$target/toolkit/lib64'\${LD_LIBRARY_PATH:+:\$LD_LIBRARY_PATH}
EXPORTS
