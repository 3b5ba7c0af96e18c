"""Whole runs of several processes, each with an emulated GPU: parts of device_runs.py."""

import math
import os
import re
import shutil
import signal
import subprocess
import time
from array import array
from pathlib import Path

from world import RECIPE, SETTLED_STEPS, SHORT, SMALLEST, TORCHRUN, WAIT_S, numbers, sets, tensors


STEADY = sets(train__optimizer__schedule="constant", train__optimizer__warmup_steps=0, train__micro_batch_tokens=64)
# Nothing is clipped by the norm.
NOT_CLIPPED = sets(cold_start__optimizer__grad_norm_max=0, train__optimizer__grad_norm_max=0, policy__entropy_coefficient=0.01)
# Of a tensor's largest value. An adapter's factor B began at 0: it has AdamW's updates alone, large where a gradient is small.
SEQUENCES_APART, FACTORS_APART = 1e-5, 1e-4


def on_one(world, out, recipe, *words):
    """A run on one GPU, which others are compared with. The folder of an earlier one is removed."""
    shutil.rmtree(world.place / out, ignore_errors=True)
    world.run(world.gpu, "train", recipe, "--out", out, *words)


def on_several(world, ranks, out, recipe, *words, **more):
    return world.run(TORCHRUN, ranks, world.gpu, "train", recipe, "--out", out, *words, **more)


def plan_of(world, recipe, words, ranks):
    """What `check` prints of each of several processes, and the bytes that it plans."""
    plan = world.run(world.gpu, "check", recipe, *words, "--processes", ranks)
    return plan, float(re.search(r"^peak +([0-9.]+)", plan, re.M)[1]) * 1e9


def used_bytes(said, ranks, planned, out):
    """The most memory that a process used, which is within the plan."""
    used = [int(bytes) for bytes in re.findall(r"device memory: (\d+) bytes", said)]
    assert len(used) == ranks and max(used) <= planned, f"{out}: {used} bytes in use, {planned:.0f} planned"
    return max(used)


def rows_of(world, out, steps):
    """The rows of a run's steps, whose mismatch is 0."""
    rows = world.rows(out, "rl")
    assert len(rows) == steps and all(row["mismatch/bit_equal_fraction"] == 1 and row["mismatch/logprob_abs_diff_max"] == 0 for row in rows), rows
    return rows


def compare_numbers(expected, rows, out):
    kept = [[numbers(row) for row in some] for some in (expected, rows)]
    assert kept[0] == kept[1], f"{out}:\n{kept[0]}\n{kept[1]}"


def bytes_equal(world, one, out, step, stems):
    """The tensors of two runs' checkpoints are equal. Returns the bytes compared, by stem."""
    compared = {}
    for stem in stems:
        kept = [tensors(world.place / run / f"checkpoints/step-{step:06}", stem) for run in (one, out)]
        differing = [key for key in kept[0].keys() | kept[1].keys() if kept[0].get(key) != kept[1].get(key)]
        assert not differing, f"{out}: {stem}: {differing}"
        compared[stem] = sum(map(len, kept[0].values()))
    return compared


def apart(one, other):
    """The greatest distance of two tensors' f32 values, of the largest value."""
    one, other = array("f", one), array("f", other)
    assert len(one) == len(other), f"{len(one)} and {len(other)} values"
    return max(abs(a - b) for a, b in zip(one, other)) / (max(map(abs, one)) or 1)


def bytes_near(world, one, out, step, stems):
    """The f32 tensors of two runs' checkpoints are within rounding. Returns the bytes compared, and the greatest distance: where."""
    compared, worst = 0, (0.0, "")
    for stem in stems:
        kept = [tensors(world.place / run / f"checkpoints/step-{step:06}", stem, ("F32",)) for run in (one, out)]
        assert kept[0].keys() == kept[1].keys(), f"{out}: {stem}: {kept[0].keys() ^ kept[1].keys()}"
        for tensor in kept[0]:
            distance = apart(kept[0][tensor], kept[1][tensor])
            most = FACTORS_APART if "lora_B" in tensor else SEQUENCES_APART
            assert distance <= most, f"{out}: {stem}: {tensor}: {distance:.2e}"
            worst = max(worst, (distance, f"{out}: {stem}: {tensor}"))
            compared += len(kept[0][tensor])
    return compared, worst


def several(world):
    """Two processes over NCCL's stand-in, each with an emulated GPU: the gap is 0, and so are the weights' differences."""
    words = [*sets(model__path=world.model, device="cuda", cold_start__steps=1, train__steps=2)]
    _, planned = plan_of(world, RECIPE, [*SHORT, *words], 2)
    said = on_several(world, 2, "several", RECIPE, *SHORT, *words, env={"CUDA_EMULATOR_PEAK": "1"})
    assert "in each of 2 processes" in said, said
    used_bytes(said, 2, planned, "several")
    rows = world.rows("several", "rl")
    assert len(rows) == 2 and all(row["mismatch/bit_equal_fraction"] == 1 for row in rows), rows
    said = on_several(world, 2, "refused", RECIPE, *SHORT, *words, *sets(parallel__packed_weights="cut"), code=2)
    assert "parallel.packed_weights" in said, said


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


def equals_one(world):
    """Two, three and four GPUs have the metrics, weights and optimizer state of one. Returns the bytes compared."""
    words = [*sets(model__path=world.model, device="cuda", cold_start__steps=1, train__steps=3), *NOT_CLIPPED, *STEADY]
    compared = 0

    def train(out, ranks, *more, mode="late"):
        on_several(world, ranks, out, RECIPE, *SHORT, *words, *more, env={"CUDA_EMULATOR": mode})

    def compare(one, several):
        nonlocal compared
        compare_numbers(world.rows(one), world.rows(several), several)
        sizes = bytes_equal(world, one, several, 3, ("model", "trainer"))
        assert all(sizes.values()), f"{several}: {sizes}"
        compared += sum(sizes.values())

    world.train(world.gpu, "one", *words)
    for ranks, mode in [(3, "first-late")] if world.sample else [(2, "at-once"), (3, "first-late")]:
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
    return compared


FOUR_HEADS = dict(model__architecture__num_attention_heads=4, model__architecture__num_key_value_heads=2)
BALANCED = dict(FOUR_HEADS, train__load_balance_coefficient=0.01)
WIDE = dict(FOUR_HEADS, model__dtype="bf16", model__architecture__head_dim=128, model__architecture__hidden_size=32, model__architecture__intermediate_size=32)
# Recipe, shape, and GPUs, how many share a sequence, the order of streams. Four share key-value heads too. CI runs the first case.
SEQUENCES = [
    ("gpt_oss", RECIPE, BALANCED, [(4, 2, "late"), (4, 4, "late")]),
    ("gpt_oss", RECIPE, BALANCED, [(2, 2, "at-once"), (2, 2, "first-late"), (4, 2, "at-once"), (4, 4, "first-late"), (4, 4, "at-once")]),
    ("experts", RECIPE, dict(BALANCED, parallel__experts="by_expert"), [(2, 2, "late"), (4, 2, "at-once"), (4, 4, "first-late")]),
    ("experts_recomputed", "quickstart_qwen3_moe", dict(WIDE, model__architecture__model_type="qwen3_moe", parallel__experts="by_expert", parallel__rollout_weights="by_expert", train__load_balance_coefficient=0.01, train__recompute_layers="true"), [(4, 2, "late")]),
    ("recomputed", RECIPE, dict(BALANCED, train__recompute_layers="true"), [(2, 2, "late"), (4, 4, "late")]),
    ("qwen3", "quickstart_dense", dict(WIDE, model__architecture__model_type="qwen3"), [(2, 2, "late"), (4, 4, "at-once")]),
    ("qwen3_moe", "quickstart_qwen3_moe", dict(WIDE, model__architecture__model_type="qwen3_moe", train__load_balance_coefficient=0.01), [(2, 2, "at-once")]),
    ("adapter", RECIPE, dict(FOUR_HEADS, adapter__rank=4), [(2, 2, "late"), (4, 2, "at-once"), (4, 4, "late")]),
]


def sequences(world, cases):
    """Several GPUs share the rows of sequences: beside one GPU, the first step's metrics are equal, the mismatch is 0, and after three
    steps weights and moments are within rounding. Returns the values compared, and the greatest distances: where, and of an entropy."""
    compared, worst, metric_apart = 0, (0.0, ""), 0.0
    kept = sets(checkpoint__dtype="f32", checkpoint__every_steps=1, checkpoint__keep=9)
    short = sets(device="cuda", cold_start__steps=0, train__steps=3, rollout__samples_per_prompt=2, rollout__response_tokens_max=4, model__architecture__num_hidden_layers=2)
    for name, recipe, shape, runs in cases:
        words = [*SHORT, *short, *NOT_CLIPPED, *STEADY, *kept, *sets(**shape)]
        one = f"one_{name}"
        on_one(world, one, recipe, *words, *sets(parallel__experts="gathered"))
        expected = world.rows(one, "rl")
        for ranks, sequence, mode in runs:
            out = f"{name}_{sequence}_of_{ranks}_{mode}"
            on_several(world, ranks, out, recipe, *words, *sets(parallel__sequence=sequence), env={"CUDA_EMULATOR": mode})
            rows = rows_of(world, out, 3)
            compare_numbers(expected[:1], rows[:1], out)
            assert all(row["actor/grad_norm"] > 0 for row in rows), rows
            metric_apart = max([metric_apart, *(abs(a["actor/entropy"] - b["actor/entropy"]) for a, b in zip(rows, expected))])
            size, distance = bytes_near(world, one, out, 3, ("model", "adapter_model", "trainer"))
            compared, worst = compared + size // 4, max(worst, distance)
    return compared, worst, metric_apart


SMALL = dict(model__architecture__num_hidden_layers=2, rollout__response_tokens_max=4, rollout__samples_per_prompt=2)
MANY = dict(SMALL, train__micro_batch_tokens=512)
# Ranks times rows of a rank, up to which GPUs gather rows of experts.
GATHERED_ROWS_MAX = 512
# Recipe, shape, prompts of a step, and GPUs, the order of streams. CI runs the first case. Of many prompts rows are sent to the GPUs of
# their experts. Of one prompt alone, all GPUs but one have no rows. Three GPUs have 1, 1 and 2 of four experts, or 1, 2 and 2 of five.
EXPERTS = [
    ("gpt_oss", RECIPE, SMALL, 3, [(3, "late")]),
    ("gpt_oss", RECIPE, SMALL, 3, [(2, "late"), (2, "at-once"), (3, "first-late"), (4, "at-once")]),
    ("alone", RECIPE, dict(SMALL, train__recompute_layers="true"), 1, [(3, "late"), (4, "at-once")]),
    ("many", RECIPE, MANY, 40, [(2, "late"), (3, "at-once"), (4, "first-late")]),
    ("skewed", RECIPE, dict(MANY, model__architecture__num_local_experts=5, model__architecture__num_experts_per_tok=1), 40, [(3, "late")]),
    ("fewer", RECIPE, dict(MANY, model__architecture__num_local_experts=3), 3, [(4, "late")]),
    ("qwen3_moe", "quickstart_qwen3_moe", dict(SMALL, **WIDE, model__architecture__model_type="qwen3_moe"), 3, [(2, "late"), (3, "at-once")]),
    ("qwen3_many", "quickstart_qwen3_moe", dict(MANY, **dict(WIDE, model__architecture__num_hidden_layers=1), model__architecture__model_type="qwen3_moe", rollout__response_tokens_max=2), 40, [(2, "at-once")]),
    ("adapter", RECIPE, dict(SMALL, adapter__rank=4), 3, [(2, "late")]),
    ("routes", RECIPE, dict(SMALL, rollout__keep_routes="true", policy__router_replay="rollout"), 3, [(2, "late")]),
]


def experts(world, cases):
    """Each GPU has some experts while it samples: beside one GPU the metrics, weights and moments are equal, the mismatch is 0, and the
    memory is within the plan. Returns the bytes compared, and the memory in use and planned of the last run."""
    compared, memory = 0, None
    for name, recipe, shape, prompts, runs in cases:
        words = [*SHORT, *sets(device="cuda", cold_start__steps=1, train__steps=2), *NOT_CLIPPED, *STEADY, *sets(**shape, rollout__prompts_per_step=prompts)]
        one = f"whole_{name}"
        on_one(world, one, recipe, *words)
        for ranks, mode in runs:
            out = f"by_expert_{name}_{ranks}_{mode}"
            more = [*words, *sets(parallel__rollout_weights="by_expert")]
            _, planned = plan_of(world, recipe, more, ranks)
            said = on_several(world, ranks, out, recipe, *more, env={"CUDA_EMULATOR": mode, "CUDA_EMULATOR_PEAK": "1"})
            assert "do not record decode" in said, said
            memory = used_bytes(said, ranks, planned, out), planned
            rows = rows_of(world, out, 2)
            sent = ranks * math.ceil(prompts / ranks) * min(row["prompt_length/min"] for row in rows) > GATHERED_ROWS_MAX
            assert sent == (prompts > 3), f"{out}: {rows}"
            compare_numbers(world.rows(one), world.rows(out), out)
            compared += sum(bytes_equal(world, one, out, 2, ("model", "adapter_model", "trainer")).values())
    return compared, memory


BLOCKED = dict(SMALL, train__optimizer__kind="adamw_8bit", cold_start__optimizer__kind="adamw_8bit")
# All biases of an expert together are large enough for 8-bit moments, but experts would share blocks: the moments are f32.
BLOCKED_BIASES = dict(BLOCKED, model__architecture__num_local_experts=24, model__architecture__intermediate_size=96)
ONLY_EXPERTS = '["model.embed_tokens.*", "lm_head.*", "*norm.weight", "*.self_attn.*", "*.router.*"]'
LOOSE = dict(train__load_balance_coefficient=0.01, policy__kl__place="loss", policy__kl__coefficient=0.1)
# As EXPERTS, for three steps of training. A run of several numbers of GPUs goes on after two steps on the last number; "gathered" is
# how experts were placed before, "regathered" how they are placed then. Of few tokens, or of one expert a token, some GPUs get no rows. Of one prompt alone, all passes but one
# are masked.
TRAINED = [
    ("trained", RECIPE, SMALL, 3, [(3, "late")]),
    ("trained", RECIPE, SMALL, 3, [(2, "late"), (2, "at-once"), (3, "first-late"), (4, "at-once")]),
    ("trained_sampled", RECIPE, dict(SMALL, parallel__rollout_weights="by_expert"), 3, [(2, "at-once"), (3, "late")]),
    ("trained_recomputed", RECIPE, dict(SMALL, **LOOSE, train__recompute_layers="true"), 3, [(2, "first-late"), (3, "late"), (4, "at-once")]),
    ("trained_alone", RECIPE, SMALL, 1, [(3, "late"), (4, "at-once")]),
    ("trained_many", RECIPE, dict(MANY, **LOOSE), 40, [(2, "late"), (3, "at-once"), (4, "first-late")]),
    ("trained_skewed", RECIPE, dict(MANY, model__architecture__num_local_experts=5, model__architecture__num_experts_per_tok=1), 40, [(3, "late")]),
    ("trained_fewer", RECIPE, dict(SMALL, model__architecture__num_local_experts=3), 3, [(4, "late"), (4, "at-once")]),
    ("trained_only", RECIPE, dict(SMALL, model__architecture__num_local_experts=3, train__freeze=ONLY_EXPERTS), 3, [(2, "late"), (4, "late")]),
    ("trained_8bit", RECIPE, BLOCKED, 3, [(4, "at-once"), ((2, 3), "late")]),
    ("trained_8bit_biases", RECIPE, BLOCKED_BIASES, 3, [(3, "late"), ((2, 3), "at-once")]),
    ("trained_resumed", RECIPE, SMALL, 3, [((2, 3), "late"), ((4, 2), "at-once"), (("gathered", 2, 3), "late"), (("regathered", 3, 2), "late")]),
    ("trained_critic", RECIPE, dict(SMALL, policy__advantage="gae", critic__warmup_steps=0), 3, [(2, "late"), (3, "at-once")]),
    ("trained_qwen3_moe", "quickstart_qwen3_moe", dict(SMALL, **WIDE, model__architecture__model_type="qwen3_moe"), 3, [(2, "late"), (3, "at-once"), (4, "first-late")]),
    ("trained_qwen3_many", "quickstart_qwen3_moe", dict(MANY, **dict(WIDE, model__architecture__num_hidden_layers=1), model__architecture__model_type="qwen3_moe", rollout__response_tokens_max=2), 40, [(2, "at-once"), (3, "late")]),
]


def trained_experts(world, cases):
    """Each GPU trains its own experts: beside one GPU the metrics, weights and moments are equal, the mismatch is 0, and the memory is
    within the plan. Returns the bytes compared, and the memory in use and planned of the last run."""
    compared, memory = 0, None
    for name, recipe, shape, prompts, runs in cases:
        words = [*SHORT, *sets(device="cuda", cold_start__steps=1, train__steps=3), *NOT_CLIPPED, *STEADY, *sets(**shape, rollout__prompts_per_step=prompts)]
        one = f"one_{name}"
        on_one(world, one, recipe, *words)
        for ranks, mode in runs:
            *before, last = ranks if isinstance(ranks, tuple) else (ranks,)
            out = f"{name}_{'_'.join(map(str, [*before, last]))}_{mode}"
            more = [*words, *sets(parallel__experts="by_expert")]
            gathered = sets(parallel__experts="gathered")
            first, then = (more + gathered if word in before else more for word in ("gathered", "regathered"))
            _, planned = plan_of(world, recipe, then, last)
            env = {"CUDA_EMULATOR": mode, "CUDA_EMULATOR_PEAK": "1"}
            if before:
                on_several(world, before[-1], out, recipe, *first, *sets(train__steps=2), env=env)
            resumed = ["--resume"] if before else []
            said = on_several(world, last, out, recipe, *resumed, *then, env=env)
            memory = used_bytes(said, last, planned, out), planned
            rows = rows_of(world, out, 3)
            assert all(row["actor/grad_norm"] > 0 for row in rows), rows
            compare_numbers(world.rows(one), world.rows(out), out)
            compared += sum(bytes_equal(world, one, out, 3, ("model", "critic", "trainer")).values())
            # The experts of a process are in its own file.
            if "regathered" not in before:
                shards = tensors(world.place / out / "checkpoints/step-000003", f"trainer-00001-of-{last:05}")
                whole = tensors(world.place / one / "checkpoints/step-000003", "trainer")
                experts = [key for key in shards if ".mlp.experts." in key]
                parts = {len(shards[key]) / len(whole[key]) for key in experts}
                assert experts and len(parts) == 1, f"{out}: {parts}"
    return compared, memory


BY_EXPERT = dict(parallel__experts="by_expert", parallel__rollout_weights="by_expert")
# Recipe, shape, and GPUs, how many share a copy of the weights, the order of streams. A run of several pairs goes on with the last pair after
# two steps. In an exact case no copy but the first adds more than one micro-batch, so sums have the order of one GPU. CI runs the first case.
ROUND = dict(SMALL, train__micro_batch_tokens=128)
COPIES = [
    ("copies", RECIPE, SMALL, False, [((4, 2), "late")]),
    ("copies_exact", RECIPE, ROUND, True, [((4, 2), "at-once"), ((3, 1), "late"), ((3, 1), (4, 2), "first-late"), ((4, 2), (2, 0), "late"), ((2, 0), (4, 2), "at-once")]),
    ("copies_8bit", RECIPE, dict(ROUND, train__optimizer__kind="adamw_8bit", train__recompute_layers="true"), True, [((4, 2), "late")]),
    ("copies_critic", RECIPE, dict(ROUND, policy__advantage="gae", critic__warmup_steps=0), True, [((4, 2), "late")]),
    ("copies_experts", RECIPE, dict(ROUND, **BY_EXPERT), True, [((4, 2), "late"), ((4, 2), (2, 0), "at-once")]),
    ("copies_many", RECIPE, dict(SMALL, **BY_EXPERT), False, [((4, 2), "first-late")]),
    ("copies_adapter", RECIPE, dict(SMALL, adapter__rank=4), False, [((4, 2), "late"), ((2, 1), "at-once")]),
    ("copies_sequence", RECIPE, dict(SMALL, **BALANCED, parallel__sequence=2), False, [((4, 2), "late")]),
    ("copies_mixed", RECIPE, dict(SMALL, **BALANCED, **BY_EXPERT, parallel__sequence=2), False, [((4, 2), "late")]),
    ("copies_qwen3_moe", "quickstart_qwen3_moe", dict(SMALL, **WIDE, model__architecture__model_type="qwen3_moe"), False, [((4, 2), "at-once")]),
]


def copies(world, cases):
    """Groups of GPUs share a copy of the weights each. The mismatch is 0, the memory is within the plan, and each shard of the state is written
    once. Beside one GPU the first step's metrics are equal, and weights and moments within rounding; in an exact case everything is equal.
    Returns the values compared, and the greatest distance."""
    compared, worst = 0, (0.0, "")
    for name, recipe, shape, exact, runs in cases:
        words = [*SHORT, *sets(device="cuda", cold_start__steps=0, train__steps=3), *NOT_CLIPPED, *STEADY, *sets(checkpoint__dtype="f32", rollout__prompts_per_step=3, **shape)]
        one = f"one_{name}"
        on_one(world, one, recipe, *words, *sets(parallel__sequence=1, parallel__experts="gathered"))
        expected = world.rows(one, "rl")
        for *pairs, mode in runs:
            out = "_".join([name, *(f"{size}_of_{ranks}" for ranks, size in pairs), mode])
            env = {"CUDA_EMULATOR": mode, "CUDA_EMULATOR_PEAK": "1"}
            for place, (ranks, size) in enumerate(pairs):
                more = [*words, *sets(parallel__shard_size=size)]
                if place < len(pairs) - 1:
                    more += sets(train__steps=2)
                said = on_several(world, ranks, out, recipe, *more, *["--resume"][: place], env=env)
            plan, planned = plan_of(world, recipe, more, ranks)
            assert ("sum of all copies" in plan) == (0 < size < ranks), plan
            used_bytes(said, ranks, planned, out)
            rows = rows_of(world, out, 3)
            assert all(row["actor/grad_norm"] > 0 for row in rows), rows
            same = len(rows) if exact else 1
            compare_numbers(expected[:same], rows[:same], out)
            shards = sorted(path.name for path in (world.place / out / "checkpoints/step-000003").glob("trainer*.safetensors"))
            files = size or ranks
            assert shards == ([f"trainer-{shard + 1:05}-of-{files:05}.safetensors" for shard in range(files)] if files > 1 else ["trainer.safetensors"]), shards
            stems = ("model", "adapter_model", "critic", "trainer")
            if exact:
                compared += sum(bytes_equal(world, one, out, 3, stems).values())
            else:
                size, distance = bytes_near(world, one, out, 3, stems)
                compared, worst = compared + size, max(worst, distance)
    return compared, worst


def experts_refused(world):
    """What cannot be trained by expert is refused, with the key and the remedy. Returns the number of cases."""
    asked = [*SHORT, *sets(device="cuda", cold_start__steps=0, train__steps=1, parallel__experts="by_expert")]
    cases = [
        (RECIPE, dict(adapter__rank=4), "remove [adapter]"),
        (RECIPE, dict(train__freeze='["*.mlp.experts.*"]'), "remove its pattern from train.freeze"),
        (RECIPE, dict(device="cpu"), "device = \"cuda\""),
        ("quickstart_dense", dict(WIDE, model__architecture__model_type="qwen3"), "no experts"),
    ]
    for recipe, shape, message in cases:
        said = on_several(world, 2, "unfit", recipe, *asked, *sets(**shape), code=2)
        assert said.count("parallel.experts") >= 1 and message in said, f"{shape}: {said}"
        assert not (world.place / "unfit").exists(), shape
    return len(cases)


# Orders of the streams: a stream's work at the call, when it is waited for, or in turn.
MODES = ("at-once", "late", "first-late")
MODE_RANKS = (2, 3, 4)
# Frozen experts stay packed in MXFP4.
MODE_CASES = {
    "packed experts": {"train__freeze": '["*.mlp.experts.*"]'},
    "packed adapter": dict(adapter__rank=4),
    "8-bit AdamW": dict(train__optimizer__kind="adamw_8bit"),
    "critic": dict(policy__advantage="gae", critic__optimizer__lr=1e-3, critic__optimizer__warmup_steps=0, critic__optimizer__schedule="constant", critic__optimizer__grad_norm_max=0),
}


def packed_base(world):
    """A checkpoint whose experts are packed in MXFP4."""
    run = "packed_base"
    if not (world.place / run).exists():
        words = sets(device="cuda", cold_start__steps=1, train__steps=0, checkpoint__dtype="mxfp4", model__architecture__num_hidden_layers=2)
        world.run(world.gpu, "train", RECIPE, "--out", run, *SHORT, *words)
    return max((world.place / run / "checkpoints").iterdir())


def modes(world, ranks_of, cases):
    """Packed experts, 8-bit AdamW and a critic on several GPUs in every order of the streams, beside one GPU: equal metrics, weights and
    moments after three steps, mismatch 0. Returns a line for each case."""
    said = []
    for name in cases:
        packed = name.startswith("packed")
        source = dict(model__path=packed_base(world)) if packed else {"model__architecture__num_hidden_layers": 2}
        shape = dict(rollout__response_tokens_max=4, rollout__samples_per_prompt=2, rollout__prompts_per_step=3)
        words = [*SHORT, *sets(device="cuda", cold_start__steps=0, train__steps=3), *NOT_CLIPPED, *STEADY, *sets(**source, **shape, **MODE_CASES[name])]
        stem = name.replace(" ", "_")
        world.run(world.gpu, "train", RECIPE, "--out", f"one_{stem}", *words)
        for ranks in ranks_of:
            for mode in MODES:
                out = f"{stem}_{ranks}_{mode}"
                on_several(world, ranks, out, RECIPE, *words, env={"CUDA_EMULATOR": mode})
                rows = rows_of(world, out, 3)
                assert any(row["actor/grad_norm"] > 0 for row in rows), rows
                compare_numbers(world.rows(f"one_{stem}", "rl"), rows, out)
                compared = bytes_equal(world, f"one_{stem}", out, 3, ("model", "adapter_model", "critic", "trainer"))
                needed = ["adapter_model" if "adapter" in name else "model", "trainer", *(["critic"] if name == "critic" else [])]
                assert all(compared[part] for part in needed), f"{out}: {compared}"
                said.append(f"{name}, {ranks} GPUs, {mode}: {sum(compared.values())} bytes equal")
                print(said[-1], flush=True)
                shutil.rmtree(world.place / out)
    return f"{len(said)} runs as on one GPU"


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
        said = on_several(world, 2, run, RECIPE, *SHORT, *words, *sets(train__steps=steps), env=env)
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
