#!/usr/bin/env python3
"""The most GPU memory that runs use, beside the plan of `rloss check`, where prompts, samples and micro-batches have the planned lengths.

    memory_plan.py --gpu target/cuda-emulated/emulated/rloss    needs the environment of ./setup.sh

One and two emulated GPUs, for Muon one; AdamW, AdamW with 8-bit moments, an adapter, sampling beside the update. A run may use no more than
planned, and must use a share of it.
"""

import argparse
import re
import shutil
import sys

from world import RECIPE, SHORT, TORCHRUN, World, sets

# Prompts of this task have at most 50 tokens: one of three has as many. Random weights do not end a response.
PROMPT, RESPONSE, SEQUENCES = 50, 8, 4
SHAPE = sets(
    model__architecture__hidden_size=256, model__architecture__intermediate_size=128, model__architecture__num_hidden_layers=3,
    model__architecture__num_attention_heads=4, model__architecture__num_key_value_heads=2,
    device="cuda", cold_start__steps=0, train__steps=3, policy__entropy_coefficient=0.01, rollout__turns_max=1,
    rollout__prompts_per_step=1, rollout__samples_per_prompt=4, rollout__prompt_tokens_max=PROMPT, rollout__response_tokens_max=RESPONSE,
)  # fmt: skip
CASES = {
    "AdamW": [],
    "AdamW, 8-bit moments": sets(train__optimizer__kind="adamw_8bit"),
    "Muon": sets(train__optimizer__kind="muon"),
    "adapter": sets(adapter__rank=8),
    "sampling beside the update": sets(rollout__lag_steps=1, policy__old_logprob="rollout"),
}
SHARE_MIN = 0.98


def planned_bytes(text):
    """Resident memory and the largest phase. The peak has too few digits."""
    table = text[text.index("Peak memory") : text.index("\npeak ")]
    totals = {phase: float(gigabytes) * 1e9 for phase, gigabytes in re.findall(r"^([a-z ]+?) +total +([0-9.]+)", table, re.M)}
    return totals.pop("resident") + max(totals.values())


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--gpu", required=True, help="the program with feature cuda")
    parser.add_argument("--only", default="", help="cases whose name has this word")
    arguments = parser.parse_args()
    arguments.cpu, arguments.steady_steps, arguments.sample = None, 0, False
    world, failed = World(arguments), False
    for name, more in CASES.items():
        # Muon has one process.
        counts = (1,) if name == "Muon" else (1, 2)
        for gpus in counts if arguments.only in name else ():
            # Each GPU has one micro-batch.
            rows = sets(train__micro_batch_tokens=SEQUENCES * (PROMPT + RESPONSE - 1) // gpus)
            words = [*SHORT, *SHAPE, *rows, *more]
            planned = planned_bytes(world.run(world.gpu, "check", RECIPE, *words, *(("--processes", gpus) if gpus > 1 else ())))
            command = [TORCHRUN, gpus, world.gpu] if gpus > 1 else [world.gpu]
            out = f"{name.split()[0].strip(',')}_{len(more)}_{gpus}"
            env = {"CUDA_EMULATOR_PEAK": "1", "CUDA_EMULATOR": "at-once"}
            said = world.run(*command, "train", RECIPE, "--out", out, *words, env=env)
            used = max(int(bytes) for bytes in re.findall(r"device memory: (\d+) bytes", said))
            fits = SHARE_MIN * planned <= used <= planned
            failed |= not fits
            print(f"{name}, {gpus} GPUs: {used / 1e6:.2f} of {planned / 1e6:.2f} MB, {used / planned:.1%}{'' if fits else ' FAILED'}", flush=True)
    shutil.rmtree(world.place)
    return int(failed)


sys.exit(main())
