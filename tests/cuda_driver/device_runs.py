#!/usr/bin/env python3
"""Whole runs on the emulated GPU, as a user makes them: the end of what CI shows of `device = "cuda"`.

    tests/cuda_driver/device_runs.py --cpu target/release/rloss --gpu target/cuda-emulated/emulated/rloss
    tests/cuda_driver/device_runs.py --gpu target/cuda-emulated/emulated/rloss --sequences    only sequences over several GPUs, all cases
    tests/cuda_driver/device_runs.py --gpu target/cuda-emulated/emulated/rloss --experts      only experts over several GPUs, all cases
    tests/cuda_driver/device_runs.py --gpu target/cuda-emulated/emulated/rloss --modes        only packed experts, 8-bit AdamW and a critic
                                                                                              on 2, 3, 4 GPUs in all orders of the streams

CI has `--sample`.

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
- two processes with a GPU each, and an adapter beside packed experts: gap 0;
- experts that several GPUs share, in sampling and in training: metrics, weights and moments have the bits of one GPU's;
- sequences shared by several GPUs: log-probs have the bits of one GPU's, weights and moments are within rounding;
- Muon: a run that was ended and resumed has the rows and the checkpoint of one that was not, and its memory is within the plan;
- heads of 128, with norms of heads in Qwen3, dense and with experts, and without them in Qwen2: gap 0, and 0 differing bits
  between rollout, prefill, decode and training;
- what a GPU cannot do is refused before any work, and more than its memory holds.
"""

import argparse
import math
import re
import shutil
import signal
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor

from several_gpus import COPIES, EXPERTS, MODE_CASES, MODE_RANKS, SEQUENCES, TRAINED, copies, equals_one, experts, experts_refused, hangs
from several_gpus import host_copies, modes, refused_together, sequences, several, steady_on_two, trained_experts
from world import RECIPE, SETTLED_STEPS, SHORT, SMALLEST, STEPS, WAIT_S, World, sets, timeless

DISTANCES = 3


def trained_model(world):
    """The checkpoint of a cold start on the CPU, and trajectories that it sampled."""
    world.run(world.cpu, "train", RECIPE, "--out", "cold", *sets(device="cpu", logging__tensorboard="false"))
    world.model = max((world.place / "cold/checkpoints").glob("cold-start-*"))
    world.run(world.cpu, "rollout", "cold", "--out", "stored", *sets(rollout__prompts_per_step=20, rollout__samples_per_prompt=4))
    return next((world.place / "stored/trajectories").glob("*.jsonl"))


def losses(world):
    """The greatest distance of a loss, in those that bf16 weights make."""
    same = sets(model__path=world.model, train__trajectories=world.stored, cold_start__steps=STEPS, policy__old_logprob="rollout")
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
    """Sampling on a stream of its own beside the update: the same rows however the streams are ordered. Returns the number of orders."""
    words = [*sets(model__path=world.model, device="cuda", cold_start__steps=0, rollout__lag_steps=1, policy__old_logprob="rollout")]
    kept = {}
    orders = [("ahead", "late"), ("ahead_first_late", "first-late"), ("ahead_at_once", "at-once")]
    for name, mode in orders[: 2 if world.sample else 3]:
        world.train(world.gpu, name, *words, *sets(train__steps=5, train__optimizer__schedule="constant"), env={"CUDA_EMULATOR": mode})
        kept[name] = [timeless(row) for row in world.rows(name, "rl")]
    one, *others = kept.values()
    assert all(other == one for other in others), kept
    assert all(row["engine/bit_equal_fraction"] == 1 and row["engine/logprob_abs_diff_max"] == 0 for row in one), one
    # The weights move, so what older weights sampled has another probability.
    assert [row["staleness/steps/max"] for row in one] == [0, 1, 1, 1, 1], one
    assert any(row["mismatch/bit_equal_fraction"] < 1 for row in one), one
    return len(kept)


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


def several_sequences(world, cases):
    compared, worst, entropy = sequences(world, cases)
    return f"{compared} values of weights and moments, {worst[0]:.1e} apart at most ({worst[1]}); entropies {entropy:.1e}"


def several_copies(world, cases):
    compared, worst = copies(world, cases)
    return f"{compared} bytes of weights and state, {worst[0]:.1e} apart at most ({worst[1]})"


def several_experts(world, cases):
    compared, memory = experts(world, cases)
    return f"{compared} bytes of weights and state as on one; {of_plan(*memory)}"


def several_trained(world, cases):
    compared, memory = trained_experts(world, cases)
    return f"trained by expert, {compared} bytes of weights and state as on one; {of_plan(*memory)}; {experts_refused(world)} recipes refused"


def killed_and_moved(world):
    steps = sampled_and_killed(world)
    goes_on_elsewhere(world)
    return f"killed after {steps} steps of {STEPS}, resumed, checked on the GPU, gone on on the CPU, gap 0"


def of_plan(used, planned):
    return f"{used / 1e6:.1f} MB in use, {planned / 1e6:.0f} planned"


def resumed_muon(world):
    compared, *memory = muon_resumed(world)
    return f"resumed, {compared} bytes of weights and state as without the break; {of_plan(*memory)}"


def copies_of_hosts(world):
    step, weights, tokens = host_copies(world)
    return f"a step of {tokens} tokens copies {step} bytes between two hosts and their GPUs, beside {weights} bytes of weights in f32"


def steady_memory(world):
    kept, most = steady(world)
    return f"{world.steady_steps} steps, {most * 1e3:.2f} MB in use at most, {kept * 1e3:.2f} MB kept since step {SETTLED_STEPS}"


# Each on runs of its own; the longest first. Returns what it has to say.
PARTS = {
    "sampled": killed_and_moved,
    "equals_one": lambda world: f"{equals_one(world)} bytes of weights and state as on one, in {'one order' if world.sample else 'three orders'} of the streams",
    "sampled_ahead": lambda world: f"the same rows in {sampled_ahead(world)} orders of the streams",
    "muon_resumed": resumed_muon,
    "losses": lambda world: f"at most {losses(world):.2f} times the distance of bf16 weights",
    "several": several,
    "recorded": lambda world: f"{recorded(world)} launches, the same bits as kernel by kernel",
    "adapted": adapted,
    "memory_runs_out": memory_runs_out,
    "plan_holds": lambda world: ", ".join(of_plan(*memory) for memory in plan_holds(world)),
    "wide_heads": lambda world: f"{wide_heads(world)} tokens, 0 differing bits",
    "sequences": lambda world: several_sequences(world, SEQUENCES[:1]),
    "copies": lambda world: several_copies(world, COPIES[:1]),
    "experts": lambda world: several_experts(world, EXPERTS[:1]),
    "trained_experts": lambda world: several_trained(world, TRAINED[:1]),
    "steady": steady_memory,
    "host_copies": copies_of_hosts,
    "steady_on_two": lambda world: f"both ask for memory {steady_on_two(world)} times, in 10 steps as in 20",
    "hangs": hangs,
    "refused_together": lambda world: f"{refused_together(world)} unfit processes are refused by all, with one message",
    "refusals": lambda world: f"{refusals(world)} cases",
}  # fmt: skip
NOT_IN_SAMPLE = {
    "muon_resumed", "recorded", "memory_runs_out", "wide_heads", "sampled_ahead", "losses", "steady", "host_copies", "steady_on_two",
    "equals_one", "trained_experts",
}  # fmt: skip


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--cpu", help="the program, built to be fast on a CPU")
    parser.add_argument("--gpu", required=True, help="the program with feature cuda")
    parser.add_argument("--steady-steps", type=int, default=40, help="steps over which memory must not grow (40)")
    parser.add_argument("--sequences", action="store_true", help="only sequences over several GPUs, all cases")
    parser.add_argument("--experts", nargs="?", const="", metavar="CASE", help="only experts over several GPUs, all cases or one")
    parser.add_argument("--copies", nargs="?", const="", metavar="CASE", help="only several copies of the weights, all cases or one")
    parser.add_argument("--modes", nargs="*", metavar="CASE", help="only the orders of streams, all cases or those of: " + ", ".join(MODE_CASES))
    parser.add_argument("--sample", action="store_true", help="what CI runs: not " + ", ".join(sorted(NOT_IN_SAMPLE)) + ", and fewer orders of streams")
    parser.add_argument("--only", nargs="+", metavar="PART", choices=PARTS, help="these parts: " + ", ".join(PARTS))
    arguments = parser.parse_args()
    if not arguments.cpu and not arguments.sequences and all(given is None for given in (arguments.experts, arguments.copies, arguments.modes)):
        parser.error("give --cpu, --sequences, --experts, --copies or --modes")
    if unknown := set(arguments.modes or []) - MODE_CASES.keys():
        parser.error(f"--modes: no case {', '.join(sorted(unknown))}")
    world = World(arguments)

    def timed(part):
        begun = time.monotonic()
        said = PARTS[part](world)
        print(f"{part}: {said or 'good'}, {time.monotonic() - begun:.0f} s", flush=True)

    try:
        if arguments.sequences:
            print(several_sequences(world, SEQUENCES))
        elif arguments.experts is not None:
            for said, listed in ((several_experts, EXPERTS), (several_trained, TRAINED)):
                if cases := [case for case in listed if arguments.experts in ("", case[0])]:
                    print(said(world, cases), flush=True)
        elif arguments.copies is not None:
            print(several_copies(world, [case for case in COPIES if arguments.copies in ("", case[0])]))
        elif arguments.modes is not None:
            print(modes(world, MODE_RANKS, arguments.modes or MODE_CASES))
        else:
            world.stored = trained_model(world)
            parts = arguments.only or [part for part in PARTS if not (arguments.sample and part in NOT_IN_SAMPLE)]
            with ThreadPoolExecutor(max_workers=2) as two_at_a_time:
                for ended in [two_at_a_time.submit(timed, part) for part in parts]:
                    ended.result()
    except AssertionError as error:
        sys.exit(f"device_runs: {error}\nleft in {world.place}")
    shutil.rmtree(world.place)


if __name__ == "__main__":
    main()
