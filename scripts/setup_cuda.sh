#!/usr/bin/env bash
# The CUDA toolkit that the kernels and feature `cuda` are built with, on a machine that needs no GPU and no root.
#
#   eval "$(scripts/setup_cuda.sh)"       installs it where it is missing and sets the environment
#   eval "$(scripts/setup_cuda.sh --nccl)"  NCCL too, for feature `nccl`: 250 MB more
#   scripts/setup_cuda.sh [--nccl] FOLDER  another folder than ~/.cache/rloss-cuda
#
# NVIDIA's own wheels, pinned: newer compilers write PTX that drivers of the 580 series refuse. 1.4 GB. A toolkit named by
# CUDA_HOME that has the same compiler release is used as it is. Exports go to stdout, everything else to stderr; a second run
# does nothing but print them. The driver's library is in no wheel: a stub with its names lets programs link, not run.
set -euo pipefail

RELEASE=13.0.88
WHEELS="nvidia-cuda-nvcc==13.0.88 nvidia-cuda-crt==13.0.88 nvidia-nvvm==13.0.88 nvidia-cuda-runtime==13.0.96
    nvidia-cuda-cccl==13.0.85 nvidia-cuda-nvrtc==13.0.88 nvidia-cublas==13.0.2.14 nvidia-curand==10.4.0.35
    nvidia-cuda-cuobjdump==13.2.78 nvidia-cuda-nvdisasm==13.2.78"
NCCL_WHEEL=nvidia-nccl-cu13==2.30.7

say() { echo "setup_cuda: $*" >&2; }
fail() {
    say "$@"
    exit 1
}

# release NVCC: the full version, such as 13.0.88.
release() { "$1" --version 2>/dev/null | sed -n 's/.*, V\([0-9.]*\)$/\1/p'; }

exports() {
    local home=$1
    cat <<EXPORTS
export CUDA_HOME='$home' CUDA_PATH='$home' CUDA_ROOT='$home' NVCC='$home/bin/nvcc' CUDA_COMPUTE_CAP=90
export PATH='$home/bin':"\$PATH"
EXPORTS
}

# install_wheels FOLDER TARGET MIB WHEELS: into FOLDER/TARGET, for which so much room is needed.
install_wheels() {
    local folder=$1 target=$2 needed=$3 wheels=$4 python=${PYTHON:-python3} pip free
    command -v "$python" >/dev/null || fail "no $python: the toolkit comes as Python wheels; install python3, or name one in PYTHON"
    if "$python" -m pip --version >/dev/null 2>&1; then
        pip=("$python" -m pip)
    elif "$python" -m venv "$folder/venv" >&2 2>/dev/null; then
        pip=("$folder/venv/bin/python" -m pip)
    else
        fail "$python has neither pip nor venv: install python3-pip or python3-venv"
    fi
    free=$(df -Pk "$folder" | awk 'NR == 2 { print int($4 / 1024) }')
    [ "$free" -ge "$needed" ] || fail "$folder has $free MiB free, $needed are needed while this is installed: name another folder"
    say "installing wheels into $folder/$target, for which $needed MiB must be free"
    # shellcheck disable=SC2086 # a list
    "${pip[@]}" install --quiet --no-deps --no-compile --disable-pip-version-check --root-user-action=ignore --only-binary=:all: --target "$folder/$target" --upgrade \
        $wheels >&2 || fail "pip could not install the wheels (see above): the package index must be reachable the first time"
    rm -rf "$folder/venv"
}

# What the wheels lack: lib64, libX.so beside libX.so.N, and a stub of the driver.
complete() {
    local home=$1 library short names
    ln -sfn lib "$home/lib64"
    for library in "$home"/lib/lib*.so.*; do
        short=${library%%.so.*}.so
        [ -e "$short" ] || ln -s "$(basename "$library")" "$short"
    done
    mkdir -p "$home/lib/stubs"
    [ -s "$home/lib/stubs/libcuda.so.1" ] || {
        # Every function of the header, in each of its versions, and none of the types.
        names=$(grep -ohE '\bcu[A-Z][A-Za-z0-9_]*' "$home/include/cuda.h" | sort -u)
        [ "$(wc -l <<<"$names")" -gt 300 ] || fail "$home/include/cuda.h names no driver functions: delete the folder and run this again"
        # 3 is CUDA_ERROR_NOT_INITIALIZED: a program that does start with the stub is told so, and crashes nowhere.
        sed 's/.*/int &(void) { return 3; }/' <<<"$names" |
            "${CC:-cc}" -x c -shared -fPIC -w -Wl,-soname,libcuda.so.1 -o "$home/lib/stubs/libcuda.so.part" - ||
            fail "no C compiler works: set CC, or install gcc"
        mv "$home/lib/stubs/libcuda.so.part" "$home/lib/stubs/libcuda.so.1"
    }
    ln -sfn libcuda.so.1 "$home/lib/stubs/libcuda.so"
}

nccl=
if [ "${1:-}" = --nccl ]; then
    nccl=1
    shift
fi
[ $# -le 1 ] || fail "takes one folder at most, not: $*"
case ${1:-} in -*) fail "takes a folder, not $1" ;; esac
if [ $# -eq 0 ] && [ -n "${CUDA_HOME:-}" ] && [ "$(release "$CUDA_HOME/bin/nvcc")" = "$RELEASE" ]; then
    say "CUDA $RELEASE is in $CUDA_HOME"
    [ -z "$nccl" ] || ls "$CUDA_HOME"/lib*/libnccl.so >/dev/null 2>&1 || ldconfig -p | grep -q 'libnccl\.so ' ||
        fail "$CUDA_HOME has no libnccl.so: install NCCL (libnccl-dev), or unset CUDA_HOME"
    exports "$CUDA_HOME"
    exit
fi
[ "$(uname -s)" = Linux ] || fail "CUDA builds on Linux only, this is $(uname -s)"
folder=${1:-${XDG_CACHE_HOME:-${HOME:?no HOME: name a folder}/.cache}/rloss-cuda}
mkdir -p "$folder" 2>/dev/null && [ -w "$folder" ] || fail "cannot write to $folder: name another folder"
folder=$(cd "$folder" && pwd)
home=$folder/wheels/nvidia/cu13
# The stamp is written last: an installation cut short, or of other versions, is made anew.
if [ "$(cat "$folder/complete" 2>/dev/null)" != "$WHEELS" ] || [ "$(release "$home/bin/nvcc")" != "$RELEASE" ]; then
    # Two builds on one machine share the folder: one installs, the other waits.
    exec 9>"$folder/lock"
    flock 9
fi
if [ "$(cat "$folder/complete" 2>/dev/null)" != "$WHEELS" ] || [ "$(release "$home/bin/nvcc")" != "$RELEASE" ]; then
    rm -rf "$folder/complete" "$folder/wheels"
    install_wheels "$folder" wheels 4096 "$WHEELS"
    complete "$home"
    [ "$(release "$home/bin/nvcc")" = "$RELEASE" ] || fail "$home/bin/nvcc does not run, or is not release $RELEASE"
    echo "$WHEELS" >"$folder/complete"
fi
if [ -n "$nccl" ] && [ "$(cat "$folder/nccl/complete" 2>/dev/null)" != "$NCCL_WHEEL" ]; then
    rm -rf "$folder/nccl"
    mkdir "$folder/nccl"
    install_wheels "$folder" nccl 1024 "$NCCL_WHEEL"
    echo "$NCCL_WHEEL" >"$folder/nccl/complete"
fi
if [ -n "$nccl" ]; then
    # Where the toolkit's own libraries are looked for.
    for name in libnccl.so libnccl.so.2; do ln -sfn "$folder/nccl/nvidia/nccl/lib/libnccl.so.2" "$home/lib/$name"; done
fi
exports "$home"
