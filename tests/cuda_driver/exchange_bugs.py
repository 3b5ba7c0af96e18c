#!/usr/bin/env python3
"""Seeds bugs in the exchanges between GPUs and demands that runs of three emulated GPUs catch them.

  exchange_bugs.py [WORD]    all bugs, or those whose name has the word; needs the environment of ./setup.sh

One build has all bugs; a variable of the environment selects one. A bug is caught where a run of three processes fails, the
driver complains, or a metric, a weight or a moment differs from those of one GPU without a bug.
"""

import json
import os
import shutil
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from device_runs import RECIPE, SHORT, numbers, sets, tensors

HERE = Path(__file__).resolve().parent
ROOT = HERE.parents[1]
RANKS, RUN_SECONDS_MAX = 3, 300
MODES = ("late", "at-once")

EXCHANGE, NCCL, MEMORY = "src/model/device_exchange.rs", "src/dist/nccl.rs", "src/ops/cuda/gather_memory.rs"
# Name, file, the text before the place, what is there, what is put there.
BUGS = [
    ("an exchange does not wait for the work before it", NCCL, "", 'driver(self.exchanges.wait(ready), "an event of the GPU")?;', ""),
    ("memory is used before the exchange has ended", EXCHANGE, "", "wait_for_event(&self.device, &*pending.posted()?)?;", "pending.posted()?;"),
    ("gradients are added before they are there", EXCHANGE, "Option<&'a Tensor>) -> Result<()> {\n        ", "self.exchange.wait()?;", ""),
    ("the event is recorded on the stream that computes", EXCHANGE, "", "wait_for_event(&self.device, &*pending.posted()?)?;", "pending.posted()?; wait_for_event(&self.device, &*record_event(&self.device)?)?;"),
    ("slots are swapped", "src/model/sharded_layers.rs", "*pending = Some((next, ", "self.start(next)?", "self.start(index)?"),
    ("gradients are added in another order", EXCHANGE, "", "shards.iter().try_for_each(|shard| add_on_device(sum, shard))?", "shards.iter().rev().try_for_each(|shard| add_on_device(sum, shard))?"),
    ("a rank's own part lies at another rank's place", MEMORY, "memory.slice_mut(", "rank * part..rank * part + own.len()", "(ranks - 1 - rank) * part..(ranks - 1 - rank) * part + own.len()"),
    ("a rank sends from another rank's place", NCCL, "let own = ", "address + (rank * part_bytes) as u64", "address + ((rank + 1) % 2 * part_bytes) as u64"),
    ("a small tensor is read at the first rank's place", EXCHANGE, "let first = ", "first_shard_rank(count, part.index, ranks) * length", "0"),
    ("parts have the length of a rank's own shard", EXCHANGE, "GatherMemory::new(own.values(), ", "length", "own.values().elem_count()"),
    ("the working copy is stale after the update", "src/learner/optimizer.rs", "shrink, lr as f32)?,\n            }\n            ", "self.write_working_weights(parameters, index)?;", ""),
    ("a rank sends another rank's shard of a gradient", EXCHANGE, "let part = ", "gradient.narrow(0, range.start, range.len())?", "gradient.narrow(0, count - range.end, range.len())?"),
    ("a rank's own gradient is left out", EXCHANGE, "if other == rank {\n                    ", "shards_of_ranks.push(gradient.narrow(0, own.start, own.len())?);", ""),
]


def tree():
    """A copy of the checkout with all bugs."""
    copy = Path(os.environ["CARGO_TARGET_DIR"]) / "exchange_bugs"
    listed = subprocess.run(["git", "ls-files", "-z", "-co", "--exclude-standard"], cwd=ROOT, capture_output=True, text=True, check=True)
    files = {name: (ROOT / name).read_bytes() for name in filter(None, listed.stdout.split("\0")) if (ROOT / name).is_file()}
    for number, (name, file, before, right, wrong) in enumerate(BUGS):
        text = files[file].decode()
        assert text.count(before + right) == 1, f"{name}: not once in {file}"
        seeded = f'{{ if std::env::var("EXCHANGE_BUG").as_deref() == Ok("{number}") {{ {wrong} }} else {{ {right} }} }}'
        files[file] = text.replace(before + right, before + seeded).encode()
    for name, data in files.items():
        to = copy / name
        if not to.exists() or to.read_bytes() != data:
            to.parent.mkdir(parents=True, exist_ok=True)
            to.write_bytes(data)
    return copy


def build(copy):
    command = ["cargo", "build", "--quiet", "--profile", "emulated", "--features", "cuda,nccl", "--bin", "rloss"]
    done = subprocess.run(command, cwd=copy, capture_output=True, text=True)
    if done.returncode:
        sys.exit(done.stderr)
    return Path(os.environ["CARGO_TARGET_DIR"]) / "emulated/rloss"


def words(out):
    # Nothing is clipped by the norm, whose additions have another order on several GPUs.
    off = sets(cold_start__optimizer__grad_norm_max=0, train__optimizer__grad_norm_max=0, policy__entropy_coefficient=0.01)
    short = sets(device="cuda", cold_start__steps=1, train__steps=2, train__micro_batch_tokens=64, rollout__response_tokens_max=4, rollout__samples_per_prompt=2)
    return [str(word) for word in ("train", RECIPE, "--out", out, *SHORT, *short, *off)]


def outcome(folder):
    """The metrics, weights and state that a run wrote."""
    rows = [numbers(json.loads(line)) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    checkpoint = folder / "checkpoints/step-000002"
    return rows, tensors(checkpoint, "model"), tensors(checkpoint, "trainer")


def complaint(program, place, expected, mode, bug=""):
    """What notices the bug, or None."""
    shutil.rmtree(place / "run", ignore_errors=True)
    command = [HERE.parent / "ranks/torchrun", str(RANKS), program, *words("run")]
    env = {**os.environ, "CUDA_EMULATOR": mode, "EXCHANGE_BUG": bug}
    try:
        done = subprocess.run(command, cwd=place, env=env, capture_output=True, text=True, errors="replace", timeout=RUN_SECONDS_MAX)
    except subprocess.TimeoutExpired:
        return f"no end within {RUN_SECONDS_MAX} s"
    said = (done.stdout + done.stderr).splitlines()
    complaints = [line for line in said if "cuda-emulator:" in line or "error" in line]
    if done.returncode or complaints:
        return (complaints or said or [f"status {done.returncode}"])[0]
    parts = zip(("metrics", "weights", "state"), expected, outcome(place / "run"))
    differing = [name for name, one, several in parts if one != several]
    return f"other {', '.join(differing)}" if differing else None


def main():
    chosen = [number for number, bug in enumerate(BUGS) if len(sys.argv) < 2 or sys.argv[1] in bug[0]]
    place, program, missed = Path(tempfile.mkdtemp(prefix="rloss-exchange-bugs-")), build(tree()), 0
    subprocess.run([program, *words("one")], cwd=place, check=True, capture_output=True)
    expected = outcome(place / "one")
    for mode in MODES:
        if seen := complaint(program, place, expected, mode):
            sys.exit(f"the sources without a bug do not pass: {seen}")
    for number in chosen:
        begun = time.monotonic()
        caught = ((mode, complaint(program, place, expected, mode, str(number))) for mode in MODES)
        seen = next((f"{mode}: {found[:140]}" for mode, found in caught if found), None)
        print(f"  {BUGS[number][0]}\n      {seen or 'NOT CAUGHT'} ({time.monotonic() - begun:.0f} s)", flush=True)
        missed += not seen
    shutil.rmtree(place)
    print(f"{len(chosen) - missed} of {len(chosen)} bugs in the exchanges between GPUs caught")
    return int(missed > 0)


sys.exit(main())
