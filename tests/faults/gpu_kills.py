#!/usr/bin/env python3
"""Kills, hangs and stops one of several GPU processes in the middle of an exchange, on emulated GPUs.

    eval "$(tests/cuda_driver/setup.sh)"
    tests/faults/gpu_kills.py --gpu target/cuda-emulated/emulated/rloss --count 20     # so many of each

A fault strikes a random rank of 2 or 3 in a random group of NCCL calls of the run:

- kill: SIGKILL. The others end by themselves and name the lost rank;
- hang: SIGSTOP. The others end at the time limit of an exchange and name it;
- stop: SIGUSR1. The step ends, a checkpoint is saved, all end with 130.

Then the run is resumed on another number of GPUs. Its metrics, weights, masters and moments must be those of one GPU without
faults, to the bit; times, memory and the norm of gradients aside.
"""

import argparse
import json
import os
import random
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections import Counter
from pathlib import Path

from faults import HERE, Failed

sys.path.insert(0, str(HERE.parent / "cuda_driver"))
from world import RECIPE, SHORT, numbers, sets, tensors  # noqa: E402

STEPS = 3
LIMIT_S = 15
HANG_S = 300
FAULTS = {"kill": signal.SIGKILL, "hang": signal.SIGSTOP, "stop": signal.SIGUSR1}
# Random weights are never rewarded; the entropy has a gradient. Nothing is clipped by the norm.
WORDS = [
    *SHORT,
    *sets(
        device="cuda", cold_start__steps=1, train__steps=STEPS, checkpoint__every_steps=1, rollout__response_tokens_max=8,
        train__micro_batch_tokens=64, policy__entropy_coefficient=0.01, train__optimizer__schedule="constant",
        train__optimizer__warmup_steps=0, cold_start__optimizer__grad_norm_max=0, train__optimizer__grad_norm_max=0,
        parallel__exchange_timeout_s=LIMIT_S,
    ),
]  # fmt: skip


class World:
    def __init__(self, arguments):
        self.place = Path(tempfile.mkdtemp(prefix="rloss-gpu-kills-"))
        self.binary = Path(arguments.gpu).resolve()
        self.random = random.Random(arguments.seed)
        self.jobs = 0

    def start(self, ranks, run, *more, env):
        """Runs on `ranks` GPUs to the end. Returns each rank's exit code and what it said."""
        self.jobs += 1
        command = [str(part) for part in (self.binary, "train", RECIPE, "--out", run, *WORDS, *more)]
        job = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(20000 + (os.getpid() * 13 + self.jobs * 7) % 12000)}
        job |= {"WORLD_SIZE": str(ranks), "TORCHELASTIC_RUN_ID": f"{os.getpid()}-{self.jobs}", "RUST_BACKTRACE": "0"}
        processes, said = [], []
        for rank in range(ranks):
            said.append(tempfile.TemporaryFile("w+", dir=self.place))
            variables = {**os.environ, **job, **env, "RANK": str(rank), "LOCAL_RANK": str(rank)}
            if ranks == 1:
                variables = {**os.environ, **env}
            processes.append(subprocess.Popen(command, cwd=self.place, env=variables, stdin=subprocess.DEVNULL, stdout=said[-1], stderr=said[-1]))
        # A stopped process never ends: it is killed after the others.
        until = time.monotonic() + HANG_S
        struck, _, number = map(int, env.get("CUDA_EMULATOR_SIGNAL", "0:0:0").split(":"))
        others = [process for rank, process in enumerate(processes) if number != signal.SIGSTOP or rank != struck]
        try:
            while any(process.poll() is None for process in others):
                if time.monotonic() > until:
                    raise Failed(f"{run}: still running after {HANG_S} s, {env}")
                time.sleep(0.02)
        finally:
            for process in processes:
                process.kill()
                process.wait()
        texts = []
        for file in said:
            file.seek(0)
            texts.append(file.read())
        # A rank that stops at once because another one is lost frees nothing.
        complaints = [line for text in texts for line in text.splitlines() if line.startswith("cuda-emulator:") and "leaked at exit" not in line]
        if complaints:
            raise Failed(f"{run}: the driver complained: {complaints}\n{texts}")
        return [process.returncode for process in processes], texts

    def end(self, run):
        """Metrics, weights and state of the last checkpoint."""
        rows = [numbers(json.loads(line)) for line in (self.place / run / "metrics.jsonl").read_text().splitlines()]
        folder = self.place / run / f"checkpoints/step-{STEPS:06}"
        return rows, tensors(folder, "model"), tensors(folder, "trainer")

    def groups(self, ranks):
        """The number of groups of NCCL calls that a run without faults makes."""
        codes, said = self.start(ranks, f"whole_{ranks}", env={"CUDA_EMULATOR_GROUPS": "1"})
        found = re.findall(r"nccl: (\d+) groups", "".join(said))
        if any(codes) or len(found) != ranks:
            raise Failed(f"{ranks} GPUs without faults: {codes}: {said}")
        return min(map(int, found))


def strike(world, fault, groups, expected, counts):
    """One fault, and the resumed run."""
    ranks = world.random.choice(sorted(groups))
    rank, at = world.random.randrange(ranks), world.random.randint(1, groups[ranks])
    run = f"{fault}_{world.jobs}"
    what = f"{fault} of rank {rank} of {ranks} in group {at} of {groups[ranks]}"
    begun = time.monotonic()
    codes, said = world.start(ranks, run, env={"CUDA_EMULATOR_SIGNAL": f"{rank}:{at}:{int(FAULTS[fault])}"})
    seconds = time.monotonic() - begun
    others = [(codes[other], said[other]) for other in range(ranks) if other != rank]
    together = "\n".join(text for _, text in others)
    if fault == "stop":
        # A signal before the first step, or in the last one, leaves nothing to stop.
        # Before the run's folder exists nothing is saved: the signal ends the process, and the others name it.
        begun_nothing = not (world.place / run / "recipe.toml").exists() and codes[rank] == -FAULTS[fault] and f"rank {rank}" in together
        if set(codes) not in ({130}, {0}) and not begun_nothing:
            raise Failed(f"{what}: ended with {codes}\n{said}")
        counts["stopped"] += codes[0] == 130
    else:
        if not all(code not in (0, -signal.SIGKILL) for code, _ in others):
            raise Failed(f"{what}: ended with {codes}\n{said}")
        # The first exchanges find the hosts, before one rank knows that another is gone.
        started = (world.place / run / "recipe.toml").exists()
        waited = f"has waited {LIMIT_S} s in" in together or not started and "has waited 120 s in" in together
        named = waited or fault == "kill" and f"rank {rank}" in together
        if not named:
            raise Failed(f"{what}: nobody named it\n{together}")
    print(f"{what}: {codes} after {seconds:.1f} s", flush=True)
    if not (world.place / run / "recipe.toml").exists():
        counts["before the run's folder"] += 1
        return
    on = world.random.choice([number for number in (1, 2, 3) if number != ranks])
    codes, said = world.start(on, run, "--resume", env={})
    if any(codes):
        raise Failed(f"{what}: resumed on {on}: {codes}\n{said}")
    for part, found, wanted in zip(("metrics", "weights", "state"), world.end(run), expected):
        if found != wanted:
            raise Failed(f"{what}, resumed on {on}: other {part}")
    counts["resumed"] += 1
    shutil.rmtree(world.place / run)


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--gpu", required=True, help="the program with features cuda and nccl")
    parser.add_argument("--count", type=int, default=20, help="faults of each kind (20)")
    parser.add_argument("--seed", type=int, default=random.SystemRandom().randrange(1 << 32))
    parser.add_argument("faults", nargs="*", default=[], help="kill, hang, stop; all if none is named")
    arguments = parser.parse_args()
    print(f"faults of GPU processes, seed {arguments.seed}", flush=True)
    world = World(arguments)
    try:
        codes, said = world.start(1, "one", env={})
        if any(codes):
            raise Failed(f"one GPU: {codes}: {said}")
        expected = world.end("one")
        groups = {ranks: world.groups(ranks) for ranks in (2, 3)}
        for fault in arguments.faults or FAULTS:
            counts = Counter()
            for _ in range(arguments.count):
                strike(world, fault, groups, expected, counts)
            print(f"{fault}: {arguments.count}, of them {dict(counts)}; every resumed run ended as on one GPU without faults", flush=True)
    except Failed as failure:
        sys.exit(f"FAILED (seed {arguments.seed}, files in {world.place}): {failure}")
    shutil.rmtree(world.place)


if __name__ == "__main__":
    main()
