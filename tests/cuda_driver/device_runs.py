#!/usr/bin/env python3
"""Whole runs on the emulated GPU, as a user makes them: the end of what CI shows of `device = "cuda"`.

    tests/cuda_driver/device_runs.py --cpu target/release/rloss --gpu target/cuda-emulated/emulated/rloss
    tests/cuda_driver/device_runs.py --gpu target/cuda-emulated/emulated/rloss --sequences    only sequences over several GPUs, all cases

The environment is that of ./setup.sh. A model of two layers is trained on the CPU until it calls its tool; then:

- losses: a cold start and ten steps of reinforcement learning on the same stored trajectories, on the GPU and on the CPU in f32 and
  with bf16 weights. Each loss on the GPU is no farther from f32's than three times what bf16 weights alone make;
- sampling: a cold start and ten steps with its own samples and the tool, killed on the way and resumed: every figure is a number,
  the gap between rollout and training is 0, and what is computed again after the kill has the bits it had before;
- memory: what is in use at most is within the plan; over hundreds of steps the device is asked for memory in the first few alone;
- the run's checkpoint is checked on the GPU (`check-mismatch`: 0 differing bits), and goes on on the CPU;
- decode whose launches are recorded and replayed, and not: the same rows of metrics;
- sampling beside the update on a second stream, in three orders of the streams: the same rows of metrics;
- two processes of which one is unfit: refused by both, with one message; two that ask for no memory in steady steps;
- two processes with a GPU each, also with Muon, and an adapter beside packed experts: gap 0;
- sequences shared by several GPUs: log-probs have the bits of one GPU's, weights and moments are within rounding;
- Muon: a run that was ended and resumed has the rows and the checkpoint of one that was not, and its memory is within the plan;
- heads of 128, with norms of heads in Qwen3, dense and with experts, and without them in Qwen2: gap 0, and 0 differing bits
  between rollout, prefill, decode and training;
- what a GPU cannot do is refused before any work, and more than its memory holds.
"""

import argparse
import json
import math
import os
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from array import array
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

HERE = Path(__file__).resolve().parent
RECIPE = HERE / "small.toml"
TORCHRUN = HERE.parent / "ranks/torchrun"
STEPS = 10
DISTANCES = 3
WAIT_S = 900
SETTLED_STEPS = 10


def sets(**keys):
    return [word for key, value in keys.items() for word in ("--set", f"{key.replace('__', '.')}={value}")]


SHORT = sets(
    cold_start__batch_size=4, cold_start__optimizer__warmup_steps=0, cold_start__optimizer__lr=2e-4, train__steps=STEPS,
    rollout__prompts_per_step=2, rollout__samples_per_prompt=4, logging__trajectories_per_step=8, logging__tensorboard="false",
    eval__before_training="false", eval__every_steps=0,
)  # fmt: skip


class World:
    def __init__(self, arguments):
        self.place = Path(tempfile.mkdtemp(prefix="rloss-device-"))
        self.cpu, self.gpu = (str(Path(path or arguments.gpu).resolve()) for path in (arguments.cpu, arguments.gpu))
        self.steady_steps = arguments.steady_steps
        self.model = None

    def run(self, binary, *words, code=0, env=None):
        """Runs to the end and returns what it said."""
        done = subprocess.run(
            [binary, *map(str, words)], capture_output=True, text=True, cwd=self.place, timeout=WAIT_S, env={**os.environ, **(env or {})}
        )
        said = done.stdout + done.stderr
        assert done.returncode == code, f"{words}: ended with {done.returncode}, not {code}\n{said}"
        assert "cuda-emulator:" not in said, f"{words}: the driver complained\n{said}"
        refused = (env or {}).keys() & {"CUDA_EMULATOR_REFUSES_CAPTURE"}
        assert refused or "CUDA graph capture of decode failed" not in said, f"{words}: no recording\n{said}"
        return said

    def train(self, binary, out, *words, **more):
        return self.run(binary, "train", RECIPE, "--out", out, *SHORT, *words, **more)

    def rows(self, run, phase=None):
        rows = [json.loads(line) for line in (self.place / run / "metrics.jsonl").read_text().splitlines()]
        return [row for row in rows if phase in (None, row["phase"])]


def trained_model(world):
    """The checkpoint of a cold start on the CPU, and trajectories that it sampled."""
    world.run(world.cpu, "train", RECIPE, "--out", "cold", *sets(device="cpu", logging__tensorboard="false"))
    world.model = max((world.place / "cold/checkpoints").glob("cold-start-*"))
    world.run(world.cpu, "rollout", "cold", "--out", "stored", *sets(rollout__prompts_per_step=20, rollout__samples_per_prompt=4))
    return next((world.place / "stored/trajectories").glob("*.jsonl"))


def losses(world, stored):
    """The greatest distance of a loss, in those that bf16 weights make."""
    same = sets(model__path=world.model, train__trajectories=stored, cold_start__steps=STEPS, policy__old_logprob="rollout")
    world.train(world.gpu, "on_gpu", *same, *sets(device="cuda"))
    for name, dtype in [("f32", "f32"), ("bf16", "bf16")]:
        world.train(world.cpu, name, *same, *sets(device="cpu", model__dtype=dtype))
    worst = 0.0
    for phase, metrics in [("cold_start", ["cold_start/loss", "cold_start/load_balance"]), ("rl", ["actor/pg_loss", "actor/entropy"])]:
        for metric in metrics:
            gpu, f32, bf16 = ([row[metric] for row in world.rows(run, phase)] for run in ("on_gpu", "f32", "bf16"))
            assert len(gpu) == len(f32) == len(bf16) == STEPS, f"{metric}: {len(gpu)}, {len(f32)}, {len(bf16)} steps"
            unit = max(abs(b - x) for b, x in zip(bf16, f32))
            own = max(abs(g - x) for g, x in zip(gpu, f32))
            print(f"{metric}: {own:.2e} off, bf16 weights alone {unit:.2e}")
            worst = max(worst, own / unit)
    assert worst <= DISTANCES, f"{worst:.2f} times the distance of bf16 weights, at most {DISTANCES}"
    return worst


def timeless(row):
    return {key: value for key, value in row.items() if not key.startswith(("timing_s/", "perf/"))}


def sampled_and_killed(world):
    """A run with the tool, killed after it has gone beyond a checkpoint, and resumed."""
    words = [*sets(model__path=world.model, device="cuda", cold_start__steps=2, checkpoint__every_steps=4)]
    command = [world.gpu, "train", str(RECIPE), "--out", "sampled", *SHORT, *map(str, words)]
    with open(world.place / "killed.txt", "w") as said:
        process = subprocess.Popen(command, cwd=world.place, stdout=said, stderr=said)
        deadline = time.monotonic() + WAIT_S
        metrics = world.place / "sampled/metrics.jsonl"
        while not (metrics.exists() and '"step":6,"phase":"rl"' in metrics.read_text()):
            assert process.poll() is None and time.monotonic() < deadline, (world.place / "killed.txt").read_text()
            time.sleep(0.05)
        process.send_signal(signal.SIGKILL)
        process.wait()
    before = world.rows("sampled", "rl")
    world.train(world.gpu, "sampled", "--resume", *words)
    after = world.rows("sampled", "rl")
    assert [row["step"] for row in after] == list(range(1, STEPS + 1)), [row["step"] for row in after]
    for one, other in zip(before, after):
        assert timeless(one) == timeless(other), f"step {one['step']} after the kill:\n{one}\n{other}"
    for row in world.rows("sampled"):
        bad = [key for key, value in row.items() if isinstance(value, float) and not math.isfinite(value)]
        assert not bad, f"step {row['step']}: {bad}"
    assert all(row["mismatch/logprob_abs_diff_max"] == 0 and row["mismatch/bit_equal_fraction"] == 1 for row in after)
    assert sum(row["tool/answered"] for row in after) > 0, "nobody called the tool"
    assert any(row["actor/grad_norm"] > 0 for row in after), "nothing was learned"
    return len(before)


def goes_on_elsewhere(world):
    said = world.run(world.gpu, "check-mismatch", "sampled", "--out", "mismatch", *sets(rollout__prompts_per_step=2, rollout__samples_per_prompt=2))
    assert "rollout and training are bitwise equal" in said, said
    assert re.search(r"rollout_equals_training +\d+ +0 +1\n", said), said
    shutil.copytree(world.place / "sampled", world.place / "moved")
    more = sets(model__path=world.model, device="cpu", cold_start__steps=2, checkpoint__every_steps=4, train__steps=STEPS + 1)
    said = world.train(world.cpu, "moved", "--resume", *more)
    assert "will not be bitwise equal" in said, said
    assert len(world.rows("moved", "rl")) == STEPS + 1


def several(world):
    """Two processes over NCCL's stand-in, each with an emulated GPU: the gap is 0, and so are the weights' differences."""
    words = [*sets(model__path=world.model, device="cuda", cold_start__steps=1, train__steps=2)]
    plan = world.run(world.gpu, "check", RECIPE, *SHORT, *words, "--processes", 2)
    planned = float(re.search(r"^peak +([0-9.]+)", plan, re.M)[1]) * 1e9
    said = world.run(TORCHRUN, 2, world.gpu, "train", RECIPE, "--out", "several", *SHORT, *words, env={"CUDA_EMULATOR_PEAK": "1"})
    assert "in each of 2 processes" in said, said
    used = [int(bytes) for bytes in re.findall(r"device memory: (\d+) bytes", said)]
    assert len(used) == 2 and max(used) <= planned, f"{used} bytes in use, {planned:.0f} planned"
    rows = world.rows("several", "rl")
    assert len(rows) == 2 and all(row["mismatch/bit_equal_fraction"] == 1 for row in rows), rows
    for key, value in [("parallel.rollout_weights", "by_expert"), ("parallel.packed_weights", "cut")]:
        said = world.run(TORCHRUN, 2, world.gpu, "train", RECIPE, "--out", "refused", *SHORT, *words, "--set", f"{key}={value}", code=2)
        assert key in said, said


def refused_together(world):
    """What makes one of two processes unfit is refused by both, with one message, before any work."""
    words = [*SHORT, *sets(model__path=world.model, device="cuda", cold_start__steps=0, train__steps=1)]
    command = [world.gpu, "train", RECIPE, "--out", "unfit", *words]
    cases = [
        ("CUDA_EMULATOR_NCCL=22105", "rank 0 has NCCL 2.24.3, rank 1 has 2.21.5; install one version"),
        ("CUDA_EMULATOR_NAME=H200", "rank 0 computes on emulated H100, rank 1 on H200; choose GPUs of one kind"),
        ("CUDA_EMULATOR_MEMORY_MIB=1", "are free on GPU 0"),
        ("CUDA_EMULATOR_OLD=1", "compute capability 8.0"),
    ]
    for setting, message in cases:
        said = world.run(TORCHRUN, 2, *command, ":", "env", setting, *command, code=2)
        assert said.count("error: ") == 1 and message in said, f"{setting}: {said}"
        assert not (world.place / "unfit").exists(), setting
    return len(cases)


def numbers(row):
    """What has the same bits on any number of GPUs: all but times, memory, and the norm, whose additions have another order."""
    return {key: value for key, value in row.items() if not key.startswith(("timing_s/", "perf/")) and "grad_norm" not in key}


def tensors(folder, stem, dtypes=None):
    """The bytes of each tensor of a checkpoint's files, the shards of several processes one after the other; of `dtypes` alone if given."""
    found = {}
    for path in sorted(folder.glob(f"{stem}*.safetensors")):
        data = path.read_bytes()
        start = 8 + int.from_bytes(data[:8], "little")
        for name, info in json.loads(data[8:start]).items():
            if name != "__metadata__" and (dtypes is None or info["dtype"] in dtypes):
                begin, end = (start + offset for offset in info["data_offsets"])
                found[name] = found.get(name, b"") + data[begin:end]
    return found


def equals_one(world):
    """Two, three and four GPUs have the metrics, weights and optimizer state of one. Returns the bytes compared."""
    # Nothing is clipped by the norm.
    off = sets(cold_start__optimizer__grad_norm_max=0, train__optimizer__grad_norm_max=0, policy__entropy_coefficient=0.01)
    steady = sets(train__optimizer__schedule="constant", train__optimizer__warmup_steps=0, train__micro_batch_tokens=64)
    words = [*sets(model__path=world.model, device="cuda", cold_start__steps=1, train__steps=3), *off, *steady]
    compared = 0

    def train(out, ranks, *more, mode="late"):
        world.run(TORCHRUN, ranks, world.gpu, "train", RECIPE, "--out", out, *SHORT, *words, *more, env={"CUDA_EMULATOR": mode})

    def compare(one, several):
        nonlocal compared
        rows = [[numbers(row) for row in world.rows(run)] for run in (one, several)]
        assert rows[0] == rows[1], f"{several}:\n{rows[0]}\n{rows[1]}"
        for stem in ("model", "trainer"):
            kept = [tensors(world.place / run / "checkpoints/step-000003", stem) for run in (one, several)]
            differing = [key for key in kept[0].keys() | kept[1].keys() if kept[0].get(key) != kept[1].get(key)]
            assert kept[0] and not differing, f"{several}: {stem}: {differing}"
            compared += sum(map(len, kept[0].values()))

    world.train(world.gpu, "one", *words)
    for ranks, mode in [(2, "at-once"), (3, "first-late")]:
        train(f"on_{ranks}_{mode}", ranks, mode=mode)
        compare("one", f"on_{ranks}_{mode}")
    # Two layers at a time, and moments of 8 bits.
    other = sets(train__recompute_layers="true", train__optimizer__kind="adamw_8bit")
    world.train(world.gpu, "one_8bit", *words, *other)
    train("on_4_8bit", 4, *other)
    compare("one_8bit", "on_4_8bit")
    # A run goes on on another number of GPUs.
    train("resumed", 2, *sets(train__steps=2))
    train("resumed", 3, "--resume")
    compare("one", "resumed")
    # Matrices that several GPUs share meet at one of them.
    muon = sets(train__optimizer__kind="muon")
    world.train(world.gpu, "one_muon", *words, *muon)
    weights = [tensors(world.place / run / "checkpoints/step-000003", "model") for run in ("one", "one_muon")]
    assert weights[0] != weights[1], "Muon changed nothing"
    train("muon_resumed", 2, *muon, *sets(train__steps=2))
    train("muon_resumed", 3, "--resume", *muon, mode="at-once")
    compare("one_muon", "muon_resumed")
    return compared


# Of a tensor's largest value. An adapter's factor B began at 0: it has AdamW's updates alone, large where a gradient is small.
SEQUENCES_APART, FACTORS_APART = 1e-5, 1e-4
FOUR_HEADS = dict(model__architecture__num_attention_heads=4, model__architecture__num_key_value_heads=2)
BALANCED = dict(FOUR_HEADS, train__load_balance_coefficient=0.01)
WIDE = dict(FOUR_HEADS, model__dtype="bf16", model__architecture__head_dim=128, model__architecture__hidden_size=32, model__architecture__intermediate_size=32)
# Recipe, shape, and GPUs, how many share a sequence, the order of streams. Four share key-value heads too. CI runs the first case.
SEQUENCES = [
    ("gpt_oss", RECIPE, BALANCED, [(4, 2, "late"), (4, 4, "late")]),
    ("gpt_oss", RECIPE, BALANCED, [(2, 2, "at-once"), (2, 2, "first-late"), (4, 2, "at-once"), (4, 4, "first-late"), (4, 4, "at-once")]),
    ("recomputed", RECIPE, dict(BALANCED, train__recompute_layers="true"), [(2, 2, "late"), (4, 4, "late")]),
    ("qwen3", "quickstart_dense", dict(WIDE, model__architecture__model_type="qwen3"), [(2, 2, "late"), (4, 4, "at-once")]),
    ("qwen3_moe", "quickstart_qwen3_moe", dict(WIDE, model__architecture__model_type="qwen3_moe", train__load_balance_coefficient=0.01), [(2, 2, "at-once")]),
    ("adapter", RECIPE, dict(FOUR_HEADS, adapter__rank=4), [(2, 2, "late"), (4, 2, "at-once"), (4, 4, "late")]),
]


def apart(one, other):
    """The greatest distance of two tensors' f32 values, of the largest value."""
    one, other = array("f", one), array("f", other)
    assert len(one) == len(other), f"{len(one)} and {len(other)} values"
    return max(abs(a - b) for a, b in zip(one, other)) / (max(map(abs, one)) or 1)


def sequences(world, cases):
    """Several GPUs share the rows of sequences: beside one GPU, the first step's metrics are equal, the mismatch is 0, and after three
    steps weights and moments are within rounding. Returns the values compared, and the greatest distances: where, and of an entropy."""
    compared, worst, metric_apart = 0, (0.0, ""), 0.0
    off = sets(cold_start__optimizer__grad_norm_max=0, train__optimizer__grad_norm_max=0, policy__entropy_coefficient=0.01)
    steady = sets(train__optimizer__schedule="constant", train__optimizer__warmup_steps=0, train__micro_batch_tokens=64, checkpoint__dtype="f32", checkpoint__every_steps=1, checkpoint__keep=9)
    short = sets(device="cuda", cold_start__steps=0, train__steps=3, rollout__samples_per_prompt=2, rollout__response_tokens_max=4, model__architecture__num_hidden_layers=2)
    for name, recipe, shape, runs in cases:
        words = [*SHORT, *short, *off, *steady, *sets(**shape)]
        one = f"one_{name}"
        shutil.rmtree(world.place / one, ignore_errors=True)
        world.run(world.gpu, "train", recipe, "--out", one, *words)
        expected = world.rows(one, "rl")
        for ranks, sequence, mode in runs:
            out = f"{name}_{sequence}_of_{ranks}_{mode}"
            world.run(TORCHRUN, ranks, world.gpu, "train", recipe, "--out", out, *words, *sets(parallel__sequence=sequence), env={"CUDA_EMULATOR": mode})
            rows = world.rows(out, "rl")
            assert len(rows) == 3 and all(row["mismatch/bit_equal_fraction"] == 1 and row["mismatch/logprob_abs_diff_max"] == 0 for row in rows), rows
            assert numbers(rows[0]) == numbers(expected[0]), f"{out}:\n{numbers(rows[0])}\n{numbers(expected[0])}"
            assert all(row["actor/grad_norm"] > 0 for row in rows), rows
            metric_apart = max([metric_apart, *(abs(a["actor/entropy"] - b["actor/entropy"]) for a, b in zip(rows, expected))])
            for stem in ("model", "adapter_model", "trainer"):
                kept = [tensors(world.place / run / "checkpoints/step-000003", stem, ("F32",)) for run in (one, out)]
                assert kept[0].keys() == kept[1].keys(), f"{out}: {stem}: {kept[0].keys() ^ kept[1].keys()}"
                for tensor in kept[0]:
                    distance = apart(kept[0][tensor], kept[1][tensor])
                    most = FACTORS_APART if "lora_B" in tensor else SEQUENCES_APART
                    assert distance <= most, f"{out}: {stem}: {tensor}: {distance:.2e}"
                    worst = max(worst, (distance, f"{out}: {stem}: {tensor}"))
                    compared += len(kept[0][tensor]) // 4
    return compared, worst, metric_apart


COPIED_BYTES_A_TOKEN_MAX = 64


def host_copies(world):
    """The bytes that a steady step of two processes copies between hosts and GPUs, those of the weights, and the step's tokens."""
    wide = sets(model__architecture__hidden_size=128, model__architecture__intermediate_size=64, train__optimizer__schedule="constant")
    # Each process has a micro-batch.
    shape = sets(rollout__response_tokens_max=8, train__micro_batch_tokens=192)
    words = [*sets(device="cuda", cold_start__steps=1, policy__entropy_coefficient=0.01), *shape, *wide]
    copied = []
    for steps in (2, 3):
        run = f"copies_{steps}"
        env = {"CUDA_EMULATOR_COPIES": "1", "CUDA_EMULATOR": "at-once"}
        said = world.run(TORCHRUN, 2, world.gpu, "train", RECIPE, "--out", run, *SHORT, *words, *sets(train__steps=steps), env=env)
        found = re.findall(r"copies: (\d+) bytes to the device, (\d+) bytes from it", said)
        assert len(found) == 2, said
        copied.append(sum(int(bytes) for process in found for bytes in process))
    step = copied[1] - copied[0]
    f32_bytes = sum(map(len, tensors(world.place / run / "checkpoints/step-000003", "model").values()))
    # The shards of both in bf16 are half of this.
    assert 0 < step < f32_bytes / 2 / 4, f"{step} bytes in a step, {f32_bytes} bytes of weights"
    last = world.rows(run, "rl")[-1]
    tokens = round(8 * (last["prompt_length/mean"] + last["response_length/mean"]))
    assert step <= COPIED_BYTES_A_TOKEN_MAX * tokens, f"{step} bytes in a step of {tokens} tokens"
    return step, f32_bytes, tokens


def hangs(world):
    """One of two processes stops in the middle of a step: the other one says in which exchange it waits, and both end."""
    words = [*sets(model__path=world.model, device="cuda", cold_start__steps=0, train__steps=1000, parallel__exchange_timeout_s=15)]
    command = [TORCHRUN, 2, world.gpu, "train", RECIPE, "--out", "hangs", *SHORT, *words]
    with open(world.place / "hangs.txt", "w") as said:
        process = subprocess.Popen(list(map(str, command)), cwd=world.place, stdout=said, stderr=said)
        deadline = time.monotonic() + WAIT_S
        while not (world.place / "hangs/metrics.jsonl").exists():
            assert process.poll() is None and time.monotonic() < deadline, (world.place / "hangs.txt").read_text()
            time.sleep(0.05)
        children = Path(f"/proc/{process.pid}/task/{process.pid}/children").read_text().split()
        ranks = {pid: Path(f"/proc/{pid}/environ").read_bytes().split(b"\0") for pid in children}
        os.kill(int(next(pid for pid, variables in ranks.items() if b"RANK=1" in variables)), signal.SIGSTOP)
        code = process.wait(WAIT_S)
    said = (world.place / "hangs.txt").read_text()
    assert code != 0 and 'has waited 15 s in "' in said, f"{code}: {said}"


def adapted(world):
    """An adapter learns beside experts that stay packed in MXFP4."""
    short = sets(device="cpu", cold_start__steps=1, train__steps=0, checkpoint__dtype="mxfp4")
    world.train(world.cpu, "packed", *sets(model__path=world.model), *short)
    base = max((world.place / "packed/checkpoints").iterdir())
    words = sets(model__path=base, device="cuda", cold_start__steps=0, train__steps=2, adapter__rank=4)
    world.train(world.gpu, "adapted", *words)
    rows = world.rows("adapted", "rl")
    assert len(rows) == 2 and all(row["mismatch/bit_equal_fraction"] == 1 for row in rows), rows
    assert any(row["actor/grad_norm"] > 0 for row in rows), rows
    # Beside an update only the factors are copied: the experts have one memory for both streams.
    ahead = sets(train__steps=3, rollout__lag_steps=1, policy__old_logprob="rollout")
    world.train(world.gpu, "adapted_ahead", *words, *ahead)
    rows = world.rows("adapted_ahead", "rl")
    assert len(rows) == 3 and all(row["engine/bit_equal_fraction"] == 1 for row in rows), rows


def muon_resumed(world):
    """Muon: four steps, and two that are resumed for two more. Returns the bytes of state compared, and memory in use and planned."""
    muon = sets(train__optimizer__kind="muon", train__optimizer__schedule="constant", train__optimizer__warmup_steps=0)
    words = [*sets(model__path=world.model, device="cuda", cold_start__steps=1, checkpoint__every_steps=2, policy__entropy_coefficient=0.01), *muon]
    world.train(world.gpu, "muon", *words, *sets(train__steps=4))
    world.train(world.gpu, "muon_ended", *words, *sets(train__steps=2))
    world.train(world.gpu, "muon_ended", "--resume", *words, *sets(train__steps=4))
    whole, resumed = ([timeless(row) for row in world.rows(name, "rl")] for name in ("muon", "muon_ended"))
    assert len(whole) == 4 and whole == resumed, f"{whole}\n{resumed}"
    assert all(row["mismatch/bit_equal_fraction"] == 1 for row in whole) and any(row["actor/grad_norm"] > 0 for row in whole), whole
    compared = 0
    for name in ("model.safetensors", "trainer.safetensors"):
        one, other = ((world.place / run / "checkpoints/step-000004" / name).read_bytes() for run in ("muon", "muon_ended"))
        assert one == other, f"{name} after the resume"
        compared += len(one)
    used, planned = plan_holds_with(world, "muon_memory", *muon)
    return compared, used, planned


def wide_heads(world):
    """Heads of 128, from random weights: samples, updates, and the links between rollout and training. Returns the tokens compared."""
    shape = sets(
        model__dtype="bf16", device="cuda", model__architecture__head_dim=128, model__architecture__hidden_size=32,
        model__architecture__intermediate_size=32, model__architecture__num_hidden_layers=2,
        model__architecture__num_attention_heads=4, model__architecture__num_key_value_heads=2,
    )  # fmt: skip
    # Random weights are never rewarded; the entropy has a gradient.
    short = sets(
        cold_start__steps=1, cold_start__batch_size=2, train__steps=2, rollout__prompts_per_step=1, rollout__samples_per_prompt=2,
        rollout__response_tokens_max=6, policy__entropy_coefficient=0.01,
    )  # fmt: skip
    compared = 0
    for family, recipe in [("qwen3", "quickstart_dense"), ("qwen3_moe", "quickstart_qwen3_moe"), ("qwen2", "quickstart_dense")]:
        out = f"wide_{family}"
        world.run(world.gpu, "train", recipe, "--out", out, *SHORT, *short, *shape, *sets(model__architecture__model_type=family))
        rows = world.rows(out, "rl")
        assert len(rows) == 2 and all(row["mismatch/bit_equal_fraction"] == 1 for row in rows), rows
        assert all(row["actor/grad_norm"] > 0 for row in rows), rows
        if family == "qwen2":
            continue
        said = world.run(world.gpu, "check-mismatch", out, "--out", f"mismatch_{family}")
        assert "rollout and training are bitwise equal" in said, said
        links = dict(re.findall(r"^(\w+) +(\d+) +0 +1$", said, re.M))
        wanted = {"batch_invariance", "prefill_equals_training", "decode_equals_prefill", "rollout_equals_training"}
        assert links.keys() == wanted and all(map(int, links.values())), said
        compared += sum(map(int, links.values()))
    return compared


def recorded(world):
    """Launches of decode are recorded and replayed, or not: the same bits. A driver that records nothing is no end."""
    words = sets(model__path=world.model, device="cuda", cold_start__steps=0, train__steps=2)
    kept, launched = {}, {}
    for name, key, env in [("graphs", "true", {}), ("no_graphs", "false", {}), ("refused_graphs", "true", {"CUDA_EMULATOR_REFUSES_CAPTURE": "1"})]:
        said = world.train(world.gpu, name, *words, *sets(rollout__cuda_graphs=key), env={"CUDA_EMULATOR_GRAPHS": "1", **env})
        assert ("CUDA graph capture of decode failed" in said) == bool(env), said
        launched[name] = int(re.search(r"graphs: (\d+) launched", said)[1])
        kept[name] = [timeless(row) for row in world.rows(name, "rl")]
    assert launched["graphs"] > 0 == launched["no_graphs"] == launched["refused_graphs"], launched
    assert kept["graphs"] == kept["no_graphs"] == kept["refused_graphs"], kept
    return launched["graphs"]


def sampled_ahead(world):
    """Sampling on a stream of its own beside the update: the same rows however the streams are ordered, and after a stop signal."""
    words = [*sets(model__path=world.model, device="cuda", cold_start__steps=0, rollout__lag_steps=1, policy__old_logprob="rollout")]
    kept = {}
    for name, mode in [("ahead", "late"), ("ahead_at_once", "at-once"), ("ahead_first_late", "first-late")]:
        world.train(world.gpu, name, *words, *sets(train__steps=5, train__optimizer__schedule="constant"), env={"CUDA_EMULATOR": mode})
        kept[name] = [timeless(row) for row in world.rows(name, "rl")]
    one, *others = kept.values()
    assert all(other == one for other in others), kept
    assert all(row["engine/bit_equal_fraction"] == 1 and row["engine/logprob_abs_diff_max"] == 0 for row in one), one
    # The weights move, so what older weights sampled has another probability.
    assert [row["staleness/steps/max"] for row in one] == [0, 1, 1, 1, 1], one
    assert any(row["mismatch/bit_equal_fraction"] < 1 for row in one), one


def plan_holds(world):
    """The most memory in use, of the plan that `check` prints."""
    return [plan_holds_with(world, f"measured_{lag}", *sets(rollout__lag_steps=lag)) for lag in (0, 1)]


def plan_holds_with(world, name, *more):
    # The second step samples nothing: the run ends.
    words = sets(model__path=world.model, device="cuda", cold_start__steps=1, train__steps=2, policy__old_logprob="rollout")
    words = [*words, *more]
    plan = world.run(world.gpu, "check", RECIPE, *SHORT, *words)
    planned = float(re.search(r"^peak +([0-9.]+)", plan, re.M)[1]) * 1e9
    said = world.train(world.gpu, name, *words, env={"CUDA_EMULATOR_PEAK": "1", "CUDA_EMULATOR": "at-once"})
    used = int(re.search(r"device memory: (\d+) bytes", said)[1])
    assert used <= planned, f"{used} bytes in use, {planned:.0f} planned"
    return used, planned


SMALLEST = sets(
    model__architecture__hidden_size=8, model__architecture__intermediate_size=8, model__architecture__num_hidden_layers=1,
    model__architecture__num_local_experts=2, model__architecture__num_experts_per_tok=1, device="cuda",
    cold_start__steps=1, rollout__samples_per_prompt=2, rollout__response_tokens_max=2,
)  # fmt: skip


def steady(world):
    """Hundreds of steps, each sampling and training: after the first few, nothing more is asked of the device, and nothing goes back."""
    steps = world.steady_steps
    words = [*SMALLEST, *sets(train__steps=steps, rollout__prompts_per_step=1, checkpoint__every_steps=steps)]
    # What is small beside 2 MiB would never show that it grows.
    env = {"CUDA_EMULATOR_PEAK": "1", "CUDA_EMULATOR_POOL_KIB": "16"}
    said = world.train(world.gpu, "steady", *words, env=env)
    rows = world.rows("steady", "rl")
    reserved, used = ([row[f"perf/max_memory_{kind}_gb"] for row in rows] for kind in ("reserved", "allocated"))
    assert len(rows) == steps
    settled = reserved[SETTLED_STEPS - 1]
    grown = [step for step, bytes in enumerate(reserved, 1) if step > SETTLED_STEPS and bytes != settled]
    assert not grown, f"memory is asked for or given back at steps {grown}, {len(grown)} in all: {reserved}"
    # A buffer that every step leaves behind may fit into what is kept; but then what is in use grows.
    quarter = steps // 4
    assert min(used[-quarter:]) <= max(used[:quarter]), f"what is in use grows: {used}"
    given_back = int(re.search(r"memory pool: .* given back (\d+) times", said)[1])
    assert given_back == 0, f"freed memory went back to the device {given_back} times"
    return settled, max(used)


def steady_on_two(world):
    """Two processes: after ten steps neither asks its device for memory, or gives any back. Returns how often they ask."""
    words = [*SMALLEST, *sets(rollout__prompts_per_step=2, policy__entropy_coefficient=0.01, checkpoint__every_steps=100)]
    env = {"CUDA_EMULATOR_PEAK": "1", "CUDA_EMULATOR_POOL_KIB": "16"}
    asked = []
    for steps in (SETTLED_STEPS, 2 * SETTLED_STEPS):
        command = [TORCHRUN, 2, world.gpu, "train", RECIPE, "--out", f"steady_2_{steps}", *SHORT, *words]
        said = world.run(*command, *sets(train__steps=steps), env=env)
        found = re.findall(r"memory pool: .* at most, (\d+) times, given back (\d+) times", said)
        assert len(found) == 2, said
        asked.append(sorted((int(times), int(back)) for times, back in found))
    assert asked[0] == asked[1], f"{asked} in {SETTLED_STEPS} steps and in twice as many"
    return sum(times for times, _ in asked[1])


def memory_runs_out(world):
    """Another process takes the GPU's memory after this one has planned."""
    env = {"CUDA_EMULATOR_TAKEN_MIB": str(80 * 1024 - 3)}
    said = world.train(world.gpu, "ran_out", *sets(model__path=world.model, device="cuda"), code=1, env=env)
    for words in ("memory ran out; the plan was", "optimizer", "remedies: "):
        assert words in said, said


def refusals(world):
    asked = [*SHORT, *sets(device="cuda")]
    on_gpu = sets(model__path=world.model)
    cases = [
        (["model.architecture.head_dim", "head size is 16", "device = \"cpu\""], [*asked, *sets(model__architecture__head_dim=16)], {}),
        (["model.dtype", "bf16"], [*asked, *on_gpu, *sets(model__dtype="f32")], {}),
        (["arms.router_noise", "no GPU kernel"], [*asked, *on_gpu, *sets(arms__router_noise=0.1)], {}),
        (["compute capability 8.0", "9.0 (H100, H200)"], [*asked, *on_gpu], {"CUDA_EMULATOR_OLD": "1"}),
        (["GPU 7 cannot be used"], [*asked, *on_gpu, *sets(parallel__device_index=7)], {}),
        (["are free on GPU 0", "remedies", "tokens"], [*asked, *on_gpu], {"CUDA_EMULATOR_MEMORY_MIB": "1"}),
    ]
    for words, arguments, env in cases:
        said = world.run(world.gpu, "train", RECIPE, "--out", "refused", *arguments, code=2, env=env)
        missing = [word for word in words if word not in said]
        assert not missing, f"{missing} not in: {said}"
        assert not (world.place / "refused").exists()
    if world.cpu != world.gpu:
        said = world.run(world.cpu, "train", RECIPE, "--out", "refused", *asked, *on_gpu, code=2)
        assert "--features cuda" in said, said
    return len(cases) + 1


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--cpu", help="the program, built to be fast on a CPU")
    parser.add_argument("--gpu", required=True, help="the program with feature cuda")
    parser.add_argument("--steady-steps", type=int, default=40, help="steps over which memory must not grow (40)")
    parser.add_argument("--sequences", action="store_true", help="only sequences over several GPUs, all cases")
    arguments = parser.parse_args()
    if not (arguments.cpu or arguments.sequences):
        parser.error("give --cpu or --sequences")
    world = World(arguments)

    seconds = {}

    def timed(part, *words):
        begun = time.monotonic()
        result = part(*words)
        seconds[part.__name__] = time.monotonic() - begun
        return result

    def over_several_gpus(cases):
        compared, worst, entropy = timed(sequences, world, cases)
        print(f"sequences over several GPUs: {compared} values of weights and moments, {worst[0]:.1e} apart at most ({worst[1]}); entropies {entropy:.1e}")

    def on_fixed_data():
        print(f"refused: {timed(refusals, world)} cases")
        timed(memory_runs_out, world)
        for used, planned in timed(plan_holds, world):
            print(f"memory: {used / 1e6:.1f} MB in use, {planned / 1e6:.0f} planned")
        kept, most = timed(steady, world)
        print(f"steady: {world.steady_steps} steps, {most * 1e3:.2f} MB in use at most, {kept * 1e3:.2f} MB kept since step {SETTLED_STEPS}")
        print(f"losses: at most {timed(losses, world, stored):.2f} times the distance of bf16 weights")

    def on_own_samples():
        print(f"sampled: killed after {timed(sampled_and_killed, world)} steps of {STEPS}, resumed, gap 0")
        timed(goes_on_elsewhere, world)
        timed(several, world)
        print(f"several GPUs: {timed(equals_one, world)} bytes of weights and state as on one, in three orders of the streams")
        over_several_gpus(SEQUENCES[:1])
        step, weights, tokens = timed(host_copies, world)
        print(f"several GPUs: a step of {tokens} tokens copies {step} bytes between two hosts and their GPUs, beside {weights} bytes of weights in f32")
        print(f"several GPUs: {timed(refused_together, world)} unfit processes are refused by all, with one message")
        print(f"several GPUs: both ask for memory {timed(steady_on_two, world)} times, in 10 steps as in 20")
        timed(hangs, world)
        timed(adapted, world)
        compared, used, planned = timed(muon_resumed, world)
        print(f"Muon: resumed, {compared} bytes of weights and state as without the break; {used / 1e6:.1f} MB in use, {planned / 1e6:.0f} planned")
        print(f"heads of 128: {timed(wide_heads, world)} tokens, 0 differing bits")
        timed(sampled_ahead, world)
        print("sampled ahead on a second stream: the same rows in three orders of the streams")
        print(f"decode recorded: {timed(recorded, world)} launches, the same bits as kernel by kernel")
        print("checked on the GPU, gone on on the CPU, gap 0 in two processes and beside an adapter over packed experts")

    try:
        if arguments.sequences:
            over_several_gpus(SEQUENCES)
            shutil.rmtree(world.place)
            return
        stored = timed(trained_model, world)
        with ThreadPoolExecutor() as side_by_side:
            for ended in [side_by_side.submit(part) for part in (on_fixed_data, on_own_samples)]:
                ended.result()
        print("seconds, two parts at a time: " + ", ".join(f"{name} {took:.0f}" for name, took in seconds.items()))
    except AssertionError as error:
        sys.exit(f"device_runs: {error}\nleft in {world.place}")
    shutil.rmtree(world.place)


if __name__ == "__main__":
    main()
