#!/usr/bin/env python3
"""Seeds bugs in the exchanges between GPUs and demands that runs of three emulated GPUs catch them.

  exchange_bugs.py [NAME]    all bugs, or those whose name has the word; needs the environment of ./setup.sh

A bug is caught where a run of three processes fails, the driver complains, or a metric, a weight or a moment differs from those
of one GPU without the bug. Each bug is a build of the whole program.
"""

import json
import os
import shutil
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from device_runs import SHORT, RECIPE, numbers, sets, tensors

HERE = Path(__file__).resolve().parent
ROOT = HERE.parents[1]
RANKS, RUN_SECONDS_MAX = 3, 300

EXCHANGE, NCCL, MEMORY = "src/model/device_exchange.rs", "src/dist/nccl.rs", "src/ops/cuda/gather_memory.rs"
# Name, file, what is there, what is put there.
BUGS = [
    ("the exchange does not wait for the work before it", NCCL, 'driver(self.exchanges.wait(ready), "an event of the GPU")?;', "let _ = ready;"),
    ("a layer is used before it is there", EXCHANGE, "self.exchange.wait()?;\n        let mut gathered", "let mut gathered"),
    ("gradients are added before they are there", EXCHANGE, "self.exchange.wait()?;\n        for (parameter", "for (parameter"),
    ("the event is recorded before the exchange is enqueued", EXCHANGE, "wait_for_event(&self.device, &*pending.posted()?)?;", "let ready = record_event(&self.device)?;\n            pending.posted()?;\n            wait_for_event(&self.device, &*ready)?;"),
    ("slots are swapped", "src/model/sharded_layers.rs", "*pending = Some((next, self.start(next)?));", "*pending = Some((next, self.start(index)?));"),
    ("gradients are added in another order", EXCHANGE, "shards.iter().try_for_each", "shards.iter().rev().try_for_each"),
    ("a rank's own part lies at another rank's place", MEMORY, "rank * part..rank * part + own.len()", "(ranks - 1 - rank) * part..(ranks - 1 - rank) * part + own.len()"),
    ("a rank sends from another place", NCCL, "address + (rank * part_bytes) as u64", "address + ((rank + 1) % 2 * part_bytes) as u64"),
    ("a small tensor is read at the first rank's place", EXCHANGE, "part.index, ranks) * length;\n            gathered", "part.index, ranks) * 0;\n            gathered"),
    ("parts have the length of a rank's own shard", EXCHANGE, "GatherMemory::new(own.values(), length, rank, ranks)", "GatherMemory::new(own.values(), own.values().elem_count(), rank, ranks)"),
    ("the working copy is stale after the update", "src/learner/optimizer.rs", "OptimizerKind::Sgd => sgd(master, gradient, shrink, lr as f32)?,\n            }\n            self.write_working_weights(parameters, index)?;", "OptimizerKind::Sgd => sgd(master, gradient, shrink, lr as f32)?,\n            }"),
    ("a rank sends another rank's shard of a gradient", EXCHANGE, "gradient.narrow(0, range.start, range.len())", "gradient.narrow(0, count - range.end, range.len())"),
    ("a rank's own gradient is left out", EXCHANGE, "shards_of_ranks.push(gradient.narrow(0, own.start, own.len())?);\n", ""),
]


def tree():
    """A copy of the checkout, so that a run cut short leaves no bug behind."""
    copy = Path(os.environ["CARGO_TARGET_DIR"]) / "exchange_bugs"
    listed = subprocess.run(["git", "ls-files", "-z", "-co", "--exclude-standard"], cwd=ROOT, capture_output=True, text=True, check=True)
    for name in filter(lambda name: (ROOT / name).is_file(), listed.stdout.split("\0")):
        to, data = copy / name, (ROOT / name).read_bytes()
        if not to.exists() or to.read_bytes() != data:
            to.parent.mkdir(parents=True, exist_ok=True)
            to.write_bytes(data)
    return copy


def build(copy):
    command = ["cargo", "build", "--quiet", "--profile", "emulated", "--features", "cuda,nccl", "--bin", "rloss"]
    done = subprocess.run(command, cwd=copy, capture_output=True, text=True)
    if done.returncode:
        sys.exit(f"does not build: {done.stderr[-2000:]}")
    return Path(os.environ["CARGO_TARGET_DIR"]) / "emulated/rloss"


def words(out):
    off = sets(cold_start__optimizer__grad_norm_max=0, train__optimizer__grad_norm_max=0, policy__entropy_coefficient=0.01)
    return ["train", RECIPE, "--out", out, *SHORT, *sets(device="cuda", cold_start__steps=1, train__steps=2, train__micro_batch_tokens=64, rollout__response_tokens_max=8), *off]


def outcome(folder):
    """The metrics, weights and state that a run wrote."""
    rows = [numbers(json.loads(line)) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    checkpoint = folder / "checkpoints/step-000002"
    return rows, tensors(checkpoint, "model"), tensors(checkpoint, "trainer")


def complaint(program, place, expected, mode):
    """What notices the bug, or None."""
    shutil.rmtree(place / "run", ignore_errors=True)
    command = [HERE.parent / "ranks/torchrun", RANKS, program, *words("run")]
    env = {**os.environ, "CUDA_EMULATOR": mode}
    try:
        done = subprocess.run([str(word) for word in command], cwd=place, env=env, capture_output=True, text=True, errors="replace", timeout=RUN_SECONDS_MAX)
    except subprocess.TimeoutExpired:
        return f"no end within {RUN_SECONDS_MAX} s"
    said = done.stdout + done.stderr
    complaints = [line for line in said.splitlines() if "cuda-emulator:" in line or line.startswith("error")]
    if done.returncode or complaints:
        return (complaints or said.splitlines() or [f"status {done.returncode}"])[0]
    found = outcome(place / "run")
    parts = [name for name, one, other in zip(("metrics", "weights", "state"), expected, found) if one != other]
    return f"other {', '.join(parts)}" if parts else None


def main():
    place, failed = Path(tempfile.mkdtemp(prefix="rloss-exchange-bugs-")), []
    chosen = [bug for bug in BUGS if len(sys.argv) < 2 or sys.argv[1] in bug[0]]
    copy = tree()
    program = build(copy)
    subprocess.run([str(word) for word in [program, *words("one")]], cwd=place, check=True, capture_output=True)
    expected = outcome(place / "one")
    for mode in ("late", "at-once"):
        if seen := complaint(program, place, expected, mode):
            sys.exit(f"the sources without a bug do not pass: {seen}")
    for name, file, right, wrong in chosen:
        path, begun = copy / file, time.monotonic()
        text = path.read_text()
        assert text.count(right) == 1, f"{name}: not once in {file}"
        try:
            path.write_text(text.replace(right, wrong))
            program = build(copy)
        finally:
            path.write_text(text)
        seen = next(filter(None, (complaint(program, place, expected, mode) for mode in ("late", "at-once"))), None)
        print(f"  {name}\n      {seen[:150] if seen else 'NOT CAUGHT'} ({time.monotonic() - begun:.0f} s)", flush=True)
        failed += [] if seen else [name]
    shutil.rmtree(place)
    print(f"{len(chosen) - len(failed)} of {len(chosen)} bugs in the exchanges between GPUs caught")
    return bool(failed)


sys.exit(main())
