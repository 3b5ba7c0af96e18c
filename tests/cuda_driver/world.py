"""Whole runs of the program: how they are started, and what they leave."""

import json
import os
import subprocess
import tempfile
from pathlib import Path

HERE = Path(__file__).resolve().parent
RECIPE = HERE / "small.toml"
TORCHRUN = HERE.parent / "ranks/torchrun"
STEPS = 10
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
        self.steady_steps, self.sample = arguments.steady_steps, arguments.sample
        self.model = self.stored = None

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


def timeless(row):
    return {key: value for key, value in row.items() if not key.startswith(("timing_s/", "perf/"))}


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


SMALLEST = sets(
    model__architecture__hidden_size=8, model__architecture__intermediate_size=8, model__architecture__num_hidden_layers=1,
    model__architecture__num_local_experts=2, model__architecture__num_experts_per_tok=1, device="cuda",
    cold_start__steps=1, rollout__samples_per_prompt=2, rollout__response_tokens_max=2,
)  # fmt: skip
