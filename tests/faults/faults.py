#!/usr/bin/env python3
"""Kills, failing calls, flipped bits and a long run, done to the program as a user runs it. docs/RELIABILITY.md has figures.

    tests/faults/faults.py kills  --count 500   # SIGKILL at a random call that changes a file, or at a random time
    tests/faults/faults.py errors --count 300   # a call fails once, or the disk is full from there on
    tests/faults/faults.py bits   --count 1000  # one bit of one file of a run or a model
    tests/faults/faults.py soak   --seconds 1800

The seed is printed; --seed takes it again. Every fault is followed by what a user would do, and the end is compared with
that of a run without faults: the same weights, optimizer state and metrics, to the byte, times aside.
"""

import argparse
import errno
import json
import os
import random
import shutil
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from collections import Counter
from pathlib import Path

HERE = Path(__file__).resolve().parent
STATE = ("model.safetensors", "trainer.safetensors", "trainer.toml", "config.json", "tokenizer.json")
HANG_S = 300


class Failed(Exception):
    """A promise that was not kept."""


def options(description, count, what=None):
    """Returns the parser of the options that all campaigns have."""
    parser = argparse.ArgumentParser(description=description, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--count", type=int, default=count, help=what)
    parser.add_argument("--seed", type=int, default=random.SystemRandom().randrange(1 << 32))
    parser.add_argument("--binary", type=Path, default=HERE.parent.parent / "target/release/rloss")
    return parser


def log(line):
    print(line, flush=True)


def played(world, seed, *campaigns):
    """Prints what each campaign has to say. The world's files are left where one fails."""
    try:
        for campaign in campaigns:
            log(campaign(world))
    except Failed as failure:
        print(f"FAILED (seed {seed}, files in {world.place}): {failure}")
        sys.exit(1)
    shutil.rmtree(world.place)


class World:
    def __init__(self, arguments):
        self.place = Path(tempfile.mkdtemp(prefix="rloss-faults-"))
        self.random = random.Random(arguments.seed)
        self.binary = Path(arguments.binary).resolve()
        self.shim = self.place / "shim.so"
        subprocess.run(["cc", "-shared", "-fPIC", "-O1", "-o", self.shim, HERE / "shim.c", "-ldl"], check=True)
        self.number = 0
        self.calls = 0
        self.expected = {}
        self.sets = [part for key in arguments.set for part in ("--set", key)]

    def folder(self):
        self.number += 1
        return self.place / f"run{self.number}"

    def command(self, *arguments):
        return [str(self.binary), *map(str, arguments)]

    def train(self, run, *more, steps=None):
        sets = [] if steps is None else ["--set", f"train.steps={steps}"]
        return self.command("train", HERE / "tiny.toml", "--out", run, *self.sets, *sets, *more)

    def resume(self, run, steps=None):
        started = any((run / name).exists() for name in ("recipe.toml", "metrics.jsonl", "checkpoints"))
        return self.train(run, *(["--resume"] if started else []), steps=steps)

    def go(self, command, fault=None, kill_after=None):
        """Exit code (negative for a signal), what was said, seconds."""
        env = dict(os.environ, RUST_BACKTRACE="0")
        if fault is not None:
            env.update({key: str(value) for key, value in fault.items()}, LD_PRELOAD=str(self.shim))
        begun = time.monotonic()
        process = subprocess.Popen(
            command, env=env, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
        )
        try:
            said, _ = process.communicate(timeout=kill_after or HANG_S)
        except subprocess.TimeoutExpired:
            process.kill()
            said, _ = process.communicate()
            if kill_after is None:
                raise Failed(f"hung: {command}")
        return process.returncode, said, time.monotonic() - begun

    def done(self, command, **more):
        code, said, seconds = self.go(command, **more)
        if code != 0:
            raise Failed(f"exit {code}: {' '.join(command)}\n{said}")
        return seconds

    def reference(self, steps=None):
        """The end of a run without faults; its calls are counted on the way."""
        if steps not in self.expected:
            run, count = self.folder(), self.place / "count"
            seconds = self.done(self.train(run, steps=steps), fault={"FAULT_UNDER": run, "FAULT_COUNT": count})
            self.calls, self.seconds = int(count.read_text()), seconds
            self.expected[steps] = end(run)
        return self.expected[steps]

    def verify(self, run):
        if (run / "recipe.toml").exists() or (run / "checkpoints").is_dir():
            self.done(self.command("verify", run))

    def faults_of(self, run, at, mode, number=0):
        return {"FAULT_UNDER": run, "FAULT_AT": at, "FAULT_MODE": mode, "FAULT_ERRNO": number}


def checkpoints(run):
    folder = run / "checkpoints"
    names = [] if not folder.is_dir() else [p.name for p in folder.iterdir() if not p.name.startswith(".")]
    return sorted(names, key=lambda name: (name.startswith("step"), name))


def end(run):
    """What two ends of one run have in common."""
    names = checkpoints(run)
    newest = run / "checkpoints" / names[-1]
    files = {name: (newest / name).read_bytes() for name in STATE}
    rows = []
    for line in (run / "metrics.jsonl").read_text().splitlines():
        row = json.loads(line)
        rows.append({k: v for k, v in row.items() if not k.startswith(("timing_s/", "perf/"))})
    partial = [p.name for p in (run / "checkpoints").iterdir() if p.name.startswith(".")]
    return names, files, rows, partial, (run / "recipe.toml").read_bytes()


def same(found, expected):
    for a, b, what in zip(found, expected, ("checkpoints", "files", "metrics", "partial folders", "recipe")):
        if a != b:
            raise Failed(f"the end differs: {what}")


def kills(world, count):
    expected = world.reference()
    killed, runs = 0, 0
    while killed < count:
        run, steps_before = world.folder(), []
        runs += 1
        while True:
            # Half of the kills strike early, so that a run has several.
            most = world.calls if world.random.random() < 0.5 else world.calls // 4
            if world.random.random() < 0.8:
                fault, after = world.faults_of(run, world.random.randint(1, max(most, 1)), "kill"), None
            else:
                fault, after = None, world.random.uniform(0.0, world.seconds)
            code, said, _ = world.go(world.resume(run), fault=fault, kill_after=after)
            if code == 0:
                break
            if code != -signal.SIGKILL:
                raise Failed(f"exit {code} with {fault}, {after}\n{said}")
            killed += 1
            world.verify(run)
            steps = checkpoints(run)
            if steps_before and (not steps or steps[-1] < steps_before[-1] and steps[-1][:4] == steps_before[-1][:4]):
                raise Failed(f"a checkpoint was lost: {steps_before} became {steps}")
            steps_before = steps
        same(end(run), expected)
        world.verify(run)
        shutil.rmtree(run)
        log(f"{killed} kills, {runs} runs")
    return f"{killed} kills in {runs} runs: nothing lost, every run ended as one without kills"


def errors(world, count):
    expected = world.reference()
    codes = Counter()
    for n in range(count):
        run = world.folder()
        mode, number = world.random.choice([("once", errno.EIO), ("once", errno.ENOSPC), ("from", errno.ENOSPC)])
        fault = world.faults_of(run, world.random.randint(1, world.calls), mode, number)
        code, said, _ = world.go(world.resume(run), fault=fault)
        codes[code] += 1
        lines = [line for line in said.splitlines() if line.startswith("error: ")]
        if code not in (0, 1, 2) or len(lines) != (code != 0) or "internal error" in said or "panicked" in said:
            raise Failed(f"exit {code} with {fault}\n{said}")
        world.verify(run)
        if code != 0:
            world.done(world.resume(run))
        same(end(run), expected)
        world.verify(run)
        shutil.rmtree(run)
        if n % 20 == 19:
            log(f"{n + 1} errors: exit codes {dict(codes)}")
    return f"{count} failing calls, exit codes {dict(sorted(codes.items()))}: nothing lost, every run was resumed to the same end"


def kind(run, file):
    """A file's kind: older checkpoints are not read by a resume."""
    parts = file.relative_to(run).parts
    if parts[0] == "checkpoints":
        newest = checkpoints(run)[-1]
        return f"{'newest' if parts[1] == newest else 'older'} checkpoint's {parts[2]}"
    return parts[0] if len(parts) == 1 else f"{parts[0]}/"


def flip(file, bit):
    data = bytearray(file.read_bytes())
    data[bit // 8] ^= 1 << (bit % 8)
    file.write_bytes(data)


def bits(world, count):
    base = world.folder()
    world.done(world.train(base))
    plain = world.folder()
    shutil.copytree(base, plain)
    # One step more, so that everything that a resume reads bears on the end.
    world.done(world.resume(plain, steps=5))
    expected = end(plain)
    model = world.place / "model"
    shutil.copytree(base / "checkpoints" / checkpoints(base)[-1], model)
    model_run = world.folder()
    start = ["--set", f"model.path={model}", "--set", "cold_start.steps=0"]
    world.done(world.train(model_run, *start, steps=1))
    model_expected = end(model_run)

    table = {}
    for n in range(count):
        with_model = n % 4 == 3
        root = model if with_model else base
        files = sorted(f for f in root.rglob("*") if f.is_file() and f.stat().st_size > 0)
        file = world.random.choice(files)
        bit = world.random.randrange(file.stat().st_size * 8)
        run = world.folder()
        if with_model:
            flip(file, bit)
            name, expect = f"model's {file.name}", model_expected
            code, said, _ = world.go(world.train(run, *start, steps=1))
            checked, _, _ = world.go(world.command("verify", model))
            flip(file, bit)
        else:
            shutil.copytree(base, run)
            flip(run / file.relative_to(base), bit)
            name, expect = kind(base, file), expected
            checked, _, _ = world.go(world.command("verify", run))
            code, said, _ = world.go(world.resume(run, steps=5))
        if code == 2 and "error: " in said and file.name in said:
            found = "refused"
        elif code == 0:
            differs = end(run)[1:3] != expect[1:3]
            found = "MISSED" if differs else "found by verify" if checked == 2 else "no effect"
        else:
            raise Failed(f"exit {code} after bit {bit} of {file}\n{said}")
        table.setdefault(name, Counter())[found] += 1
        if found == "MISSED":
            log(f"MISSED: bit {bit} of {file}")
        shutil.rmtree(run, ignore_errors=True)
        if n % 50 == 49:
            log(f"{n + 1} bits: {dict(sum(table.values(), Counter()))}")
    for name, counts in sorted(table.items()):
        log(f"  {name:44} {dict(counts)}")
    total = sum(table.values(), Counter())
    if total["MISSED"]:
        raise Failed(f"{total['MISSED']} of {count} bits changed the end in silence")
    return f"{count} flipped bits: {dict(total)}"


def soak(world, seconds):
    run = world.folder()
    command = world.train(run, "--set", "logging.trajectories_per_step=1", "--set", "checkpoint.every_steps=50")
    command += ["--set", "eval.every_steps=100", "--set", "train.steps=100000000"]
    process = subprocess.Popen(command, stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    samples, begun = [], time.monotonic()
    try:
        while time.monotonic() - begun < seconds:
            time.sleep(min(5.0, seconds / 20))
            if process.poll() is not None:
                raise Failed(f"the run ended with {process.returncode}")
            proc = Path(f"/proc/{process.pid}")
            status = dict(line.split(":", 1) for line in (proc / "status").read_text().splitlines())
            children = Path(f"/proc/{process.pid}/task").glob("*/children")
            samples.append(
                (
                    int(status["VmRSS"].split()[0]),
                    len(os.listdir(proc / "fd")),
                    sum(len(c.read_text().split()) for c in children),
                    int(status["Threads"]),
                )
            )
    finally:
        process.send_signal(signal.SIGTERM)
        code = process.wait(60)
    third = len(samples) // 3
    early, late = samples[third : 2 * third], samples[2 * third :]
    figures = {}
    for place, name in enumerate(("resident KiB", "descriptors", "children", "threads")):
        a, b = [s[place] for s in early], [s[place] for s in late]
        if place == 0:
            figures[name] = (max(a), max(b))
            grew = max(b) > max(a) * 1.1 + 2048
        else:
            # A file is open while it is written, a thread is there while a tool call is awaited, and a short third may
            # see more of either than the one before it. What is never given back raises the least above the most.
            figures[name] = (statistics.median_high(a), statistics.median_high(b))
            grew = min(b) > max(a)
        if grew:
            raise Failed(f"{name} grew: {min(a)} to {max(a)} in the middle third, {min(b)} to {max(b)} in the last")
    rows = sum(1 for _ in open(run / "metrics.jsonl"))
    if code != 130:
        raise Failed(f"the stop ended with {code}")
    world.verify(run)
    return f"{seconds} s, {rows} rows of metrics; middle and last third: {figures}"


def main():
    parser = options(__doc__, 20)
    parser.add_argument("campaign", choices=["kills", "errors", "bits", "soak"])
    parser.add_argument("--seconds", type=float, default=20)
    parser.add_argument("--set", action="append", default=[], metavar="KEY=VALUE", help="a key of every run's recipe")
    arguments = parser.parse_args()
    log(f"{arguments.campaign}, seed {arguments.seed}")
    campaign = {"kills": kills, "errors": errors, "bits": bits, "soak": soak}[arguments.campaign]
    extent = arguments.seconds if arguments.campaign == "soak" else arguments.count
    played(World(arguments), arguments.seed, lambda world: campaign(world, extent))


if __name__ == "__main__":
    main()
