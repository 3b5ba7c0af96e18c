# The commands of every day. `just NAME` runs one; CI runs the lines of check and test too.

check:
    cargo fmt --check -- src/model/families/*.rs src/policy/loss/*.rs src/tasks/*.rs
    cargo clippy --release --all-targets --features bench -- -D warnings
    cargo clippy --release --features whole --bin rloss -- -D dead_code -A unused_imports
    RUSTDOCFLAGS="-D warnings -A rustdoc::private_intra_doc_links" cargo doc --release --no-deps

test:
    cargo test --release

# The same where a fresh buffer begins with NaN: who reads one before it is written is seen.
unwritten:
    cargo test --profile dev --lib --test suite

# Undefined behaviour and data races in the unsafe code of the ops on the CPU: needs nightly with miri and rust-src.
miri:
    MIRIFLAGS="-Zmiri-disable-isolation -Zmiri-tree-borrows -Zmiri-permissive-provenance -Zmiri-ignore-leaks -Zmiri-deterministic-floats" \
        RUSTFLAGS="-C target-feature=+avx2,+fma" cargo +nightly miri test --lib -- \
        ops::buffer ops::packed_weights ops::sink_attention::rows ops::skinny_gemm ops::threads ops::tiles

# The losses and tasks too, whose modules a macro declares, so that `cargo fmt` alone does not find them.
format:
    cargo fmt -- src/model/families/*.rs src/policy/loss/*.rs src/tasks/*.rs

# Licences, sources, duplicates and advisories of the dependencies: needs `cargo install --locked cargo-deny`.
deny:
    scripts/dependencies.py check

# Everything that CI runs.
ci:
    bash .ci/run

# The CUDA kernels without a GPU: their machine code, and a run thread for thread on the CPU.
kernels:
    scripts/check_kernels.sh
    tests/cuda_host/run.sh

# Every seeded bug in the kernels, and what catches it.
kernel-bugs:
    tests/cuda_host/run.sh bugs

# A hundred bugs drawn by rules in the kernels newer than attention; goes on where a run was cut off.
drawn-kernel-bugs count="100":
    tests/cuda_host/drawn_bugs.py {{count}}

# The tables that docs/GPU.md sums up, from the shapes and the machine code: nothing is measured.
roofline:
    scripts/roofline.py

# Feature `cuda` on the emulated driver: no GPU and no toolkit.
cuda-emulated:
    .ci/cuda emulated

# The tests of the ops on the emulated driver with each stream's work done at once. CI runs a sample of it.
cuda-emulated-at-once:
    eval "$(tests/cuda_driver/setup.sh)" && CUDA_EMULATOR=at-once \
        cargo test --profile emulated --features cuda,nccl --lib --example gpu_check -- ops::cuda::on_device model::on_device model_ops dist::

# Whole runs on the emulated GPU.
device-runs:
    cargo build --release --bin rloss
    eval "$(tests/cuda_driver/setup.sh)" && cargo build --profile emulated --features cuda,nccl --bin rloss && \
        tests/cuda_driver/device_runs.py --cpu target/release/rloss --gpu "$CARGO_TARGET_DIR/emulated/rloss" --steady-steps 200

# Sequences that several emulated GPUs share: more models, numbers of GPUs and orders of streams than CI has.
device-sequences:
    eval "$(tests/cuda_driver/setup.sh)" && cargo build --profile emulated --features cuda,nccl --bin rloss && \
        tests/cuda_driver/device_runs.py --gpu "$CARGO_TARGET_DIR/emulated/rloss" --sequences

# Experts over several emulated GPUs beside one, all cases.
device-experts:
    eval "$(tests/cuda_driver/setup.sh)" && cargo build --profile emulated --features cuda,nccl --bin rloss && \
        tests/cuda_driver/device_runs.py --gpu "$CARGO_TARGET_DIR/emulated/rloss" --experts

# Groups of emulated GPUs that share a copy of the weights each, beside one GPU, all cases.
device-copies:
    eval "$(tests/cuda_driver/setup.sh)" && cargo build --profile emulated --features cuda,nccl --bin rloss && \
        tests/cuda_driver/device_runs.py --gpu "$CARGO_TARGET_DIR/emulated/rloss" --copies

# Packed experts, 8-bit AdamW and a critic on 2, 3, 4 emulated GPUs beside one, in all orders of the streams.
device-modes:
    eval "$(tests/cuda_driver/setup.sh)" && cargo build --profile emulated --features cuda,nccl --bin rloss && \
        tests/cuda_driver/device_runs.py --gpu "$CARGO_TARGET_DIR/emulated/rloss" --modes

# The most memory that emulated GPUs use, beside the plan: one and two GPUs, each optimizer, an adapter, sampling ahead.
device-memory:
    eval "$(tests/cuda_driver/setup.sh)" && cargo build --profile emulated --features cuda,nccl --bin rloss && \
        tests/cuda_driver/memory_plan.py --gpu "$CARGO_TARGET_DIR/emulated/rloss"

# Every seeded bug in the kernels' Rust side, and what catches it.
cuda-rust-bugs:
    eval "$(tests/cuda_driver/setup.sh)" && tests/cuda_driver/rust_bugs.py

# What gpu_check compares a GPU's outputs with first, written anew: after a change of a kernel's formulas.
seeded-outputs:
    eval "$(tests/cuda_driver/setup.sh)" && cargo run --profile emulated --features cuda --example gpu_check -- --write-seeded kernels/seeded_outputs.txt

# Doors: agents that lie, HTTP by grammar with loads, mutated tokenizers and GGUF files.
doors requests="100000" http="50000" files="10000":
    cargo build --release
    tests/faults/doors_agent.py --count {{requests}}
    tests/faults/doors_http.py --count {{http}} --loads 20
    tests/faults/doors_files.py --count {{files}} --jobs 2

# A run logged to each tracker by its real package: pip install trackio wandb mlflow pandas.
trackers run="runs/quickstart":
    for to in trackio wandb mlflow; do examples/trackers/track.py {{run}} --to $to || exit 1; done

# Kills, failing calls, flipped bits, damaged inputs and a long run, docs/RELIABILITY.md; more of each for a longer wait.
faults count="50" inputs="100000" seconds="60":
    cargo build --release
    tests/faults/faults.py kills --count {{count}}
    tests/faults/faults.py errors --count {{count}}
    tests/faults/faults.py bits --count {{count}}
    tests/faults/faults.py soak --seconds {{seconds}}
    cargo test --release --test soak -- --seconds {{seconds}}
    cargo test --release --test fuzz -- --inputs {{inputs}} --seed 1

# SIGKILL for a run with an MCP server, and for the server: the ends are equal, and no process is left.
mcp-kills count="20":
    cargo build --release
    tests/faults/mcp_kills.py --count {{count}}

# Kills, hangs and stops of one of several emulated GPUs in mid-exchange, resumed on another number of them.
gpu-kills count="20":
    eval "$(tests/cuda_driver/setup.sh)" && cargo build --profile emulated --features cuda,nccl --bin rloss && \
        tests/faults/gpu_kills.py --gpu "$CARGO_TARGET_DIR/emulated/rloss" --count {{count}}

# A task program that lies in twenty ways, a million lines: no reward reaches another trajectory.
lies:
    cargo test --release --test suite a_million_lines_of_a_liar -- --ignored --nocapture

# Distillation's divergence and gradients over a real vocabulary against PyTorch's: needs torch.
distill-parity folder="target/distill-parity":
    scripts/make_reference_values.py distill {{folder}}
    DISTILL_PARITY="$PWD/{{folder}}" cargo test --release --test suite over_a_real_vocabulary -- --ignored --nocapture

# Several processes on this machine: needs libopenmpi-dev, openmpi-bin and libclang-dev.
ranks:
    cargo test --release --features mpi --test ranks -- --test-threads=1

# The same tests with NCCL's stand-in on the emulated driver in MPI's place.
ranks-nccl:
    eval "$(tests/cuda_driver/setup.sh | grep -v CARGO_TARGET_DIR)" && \
        RANKS_BY=nccl cargo test --release --features mpi,nccl --test ranks -- --test-threads=1

# The unmodified Tinker packages against a server: needs tinker==0.38.0 and tinker-cookbook==0.6.1.
tinker:
    cargo build --release
    scripts/tinker_sdk.py check target/release/rloss
    scripts/tinker_sdk.py kills target/release/rloss

bench:
    cargo bench --features bench

quickstart:
    cargo run --release -- train recipes/quickstart.toml

# Words and long sentences of the README and docs/.
words:
    scripts/words.py

# Lines of code of each folder.
code:
    scripts/words.py --code

# Every curve of docs/FIGURES.md for three seeds, and its figures drawn anew.
figures:
    scripts/reproduce_figures.sh
    cp runs/figures/*.svg docs/figures/

# Writes docs/recipes.md anew from the types.
recipes-page:
    UPDATE_EXPECT=1 cargo test --release recipes_page

# Random models with 1,000 random mistakes, by torch and transformers: how often the cause is named. The suite has a small sample.
mismatch-campaign:
    cargo build --release
    mkdir -p runs
    scripts/mismatch_campaign.py --cases 1000 --seed 7 --out runs/mismatch-campaign.jsonl
