#!/usr/bin/env python3
"""Seeds bugs in the exchanges between GPUs and demands that runs of three or four emulated GPUs catch them.

  exchange_bugs.py [WORD]    all bugs, or those whose name has the word; needs the environment of ./setup.sh

One build has all bugs; a variable of the environment selects one. A bug is caught where a run fails, the driver complains,
or a metric, a weight or a moment differs: in exchanges of shards or of experts' rows, on three GPUs, from those of
one GPU without a bug; in exchanges of sequences, which four GPUs share, or of two copies of the weights, from those of four GPUs without a bug.
"""

import json
import os
import shutil
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from world import RECIPE, SHORT, numbers, sets, tensors

HERE = Path(__file__).resolve().parent
ROOT = HERE.parents[1]
RUN_SECONDS_MAX = 300
MODES = ("late", "at-once")

EXCHANGE, NCCL, MEMORY = "src/model/parallel/device_exchange.rs", "src/dist/nccl.rs", "src/ops/cuda/gather_memory.rs"
# Name, file, the text before the place, what is there, what is put there.
BUGS = [
    ("an exchange does not wait for the work before it", NCCL, "", 'driver(self.exchanges.wait(ready), "an event of the GPU")?;', ""),
    ("memory is used before the exchange has ended", EXCHANGE, "", "wait_for_event(&self.device, &*pending.posted()?)?;", "pending.posted()?;"),
    ("gradients are added before they are there", EXCHANGE, "Option<&'a Tensor>) -> Result<()> {\n        ", "self.exchange.wait()?;", ""),
    ("the event is recorded on the stream that computes", EXCHANGE, "", "wait_for_event(&self.device, &*pending.posted()?)?;", "pending.posted()?; wait_for_event(&self.device, &*record_event(&self.device)?)?;"),
    ("slots are swapped", "src/model/parallel/sharded_layers.rs", "*pending = Some((next, ", "self.start(next)?", "self.start(index)?"),
    ("gradients are added in another order", EXCHANGE, "", "shards.iter().try_for_each(|shard| add_on_device(sum, shard))?", "shards.iter().rev().try_for_each(|shard| add_on_device(sum, shard))?"),
    ("a rank's own part lies at another rank's place", MEMORY, "memory.slice_mut(", "rank * part..rank * part + own.len()", "(ranks - 1 - rank) * part..(ranks - 1 - rank) * part + own.len()"),
    ("a rank sends from another rank's place", NCCL, "let own = ", "address + (rank * part_bytes) as u64", "address + ((rank + 1) % 2 * part_bytes) as u64"),
    ("a small tensor is read at the first rank's place", EXCHANGE, "let first = ", "first_shard_rank(count, part.index, ranks) * length", "0"),
    ("parts have the length of a rank's own shard", EXCHANGE, "GatherMemory::new(own.values(), ", "length", "own.values().elem_count()"),
    ("the working copy is stale after the update", "src/actor/optimizer.rs", "&rates)?;\n            ", "self.write_working_weights(parameters, index)?;", ""),
    ("a rank sends another rank's shard of a gradient", EXCHANGE, "let part = ", "gradient.narrow(0, range.start, range.len())?", "gradient.narrow(0, count - range.end, range.len())?"),
    ("a rank's own gradient is left out", EXCHANGE, "if other == rank {\n                    ", "shards_of_ranks.push(gradient.narrow(0, own.start, own.len())?);", ""),
]

SEQUENCES, SHARED = "src/model/parallel/sequence_parallel.rs", "src/ops/cuda/shared_keys.rs"
SEQUENCE_BUGS = [
    ("sinks are not moved with their heads", SEQUENCES, "let sinks = ", "slice(&sinks, first..first + own)?", "slice(&sinks, 0..own)?"),
    ("heads are used before the exchange has ended", EXCHANGE, "", "start_exchange(mesh, name, group, &Device::Cuda(from.device().clone()), &memories)?.wait()?;", "std::mem::forget(start_exchange(mesh, name, group, &Device::Cuda(from.device().clone()), &memories)?);"),
    ("heads are sent before they are packed", EXCHANGE, "let ready = ", "record_event(device)?", "{ static FIRST: std::sync::OnceLock<crate::dist::DeviceEvent> = std::sync::OnceLock::new(); FIRST.get_or_init(|| record_event(device).expect(\"an event\")).clone() }"),
    ("a part is received at the first part's place", MEMORY, "", "part(base, &(end - length..end))", "part(base, &(0..*length))"),
    ("a rank's own part is left out", MEMORY, "if part.len() == lengths[own] => ", "device.memcpy_dtod(&part, &mut own_place)?", "()"),
    ("a rank's own part lies at the first rank's place", MEMORY, "let own_start: usize = ", "lengths[..own].iter().sum()", "0"),
    ("a rank sends its own rows of the heads, not those of the other rank", SEQUENCES, "let part = |range: &Range<usize>| ", "start + range.start * width..start + range.end * width", "{ let first = split.local_range().start.min(split.rows() - range.len()); start + first * width..start + (first + range.len()) * width }"),
    ("a rank gets another rank's heads", SEQUENCES, "let parts: Vec<_> = ", "(0..split.group.len()).map(|i| i * length..(i + 1) * length).collect()", "(0..split.group.len()).rev().map(|i| i * length..(i + 1) * length).collect()"),
    ("the gradient of router logits is the first rank's", SEQUENCES, "Ok([Some(grad.narrow(0, ", "own.start", "0"),
    ("GPUs that share a head compute the gradients of the same keys", SEQUENCES, "(", "self.split.group_index - self.members.start", "0"),
    ("log-sum-exps of GPUs that share a head lie one after the other", SHARED, "", "numbers.permute((1, 2, 0, 3))?.contiguous()?", "numbers.permute((1, 0, 2, 3))?.contiguous()?"),
    ("keys of other GPUs keep what was in memory", "src/ops/cuda/packed_attention.rs", "prepared.gradients_with(", "device.alloc_zeros(prepared.key_value_count())?", "super::arguments::output(device, prepared.key_value_count())?"),
]

EXPERTS, OUTPUTS = "src/model/parallel/expert_exchange.rs", "src/model/parallel/expert_outputs.rs"
EXPERT_BUGS = [
    ("a rank has another rank's experts", "src/model/parameters/shards.rs", "let experts = ", "ranks.experts_of(rank)", "ranks.experts_of((rank + 1) % mesh.ranks())"),
    ("a rank multiplies by the first rank's experts", EXPERTS, "", "plan.of_experts(self.local_experts())", "plan.of_experts(0..self.local_experts().len())"),
    ("gathered rows' outputs are in the order of experts", EXPERTS, "", "ops::take_rows(&outputs, &plan.row_of()?)?", "outputs"),
    ("a rank gets the outputs of another rank's tokens", EXPERTS, "", "consecutive(slots)", "consecutive(slots.rev()).into_iter().rev().collect::<Vec<_>>()"),
    ("an output is taken from another rank", EXPERTS, "affine(ranks, ", "ranks - 1.0", "0.0"),
    ("outputs of ranks lie one row too early", EXPERTS, "owners.affine(", "pairs as f64", "pairs as f64 - 1.0"),
    ("an output is one slot off", EXPERTS, "let slots = ", "Tensor::arange(0, pairs as u32, device)?", "Tensor::arange(1, pairs as u32 + 1, device)?"),
    ("received rows have the experts of the own rows", EXPERTS, "", "count(rank, expert..expert + 1)", "{ let _ = rank; count(mesh.rank(), expert..expert + 1) }"),
    ("sent rows' outputs are in the order of experts", EXPERTS, "", "ops::unsort(&products(&rows, &plan)?, &plan)?", "products(&rows, &plan)?"),
    ("sent rows' outputs are added in the order of arrival", EXPERTS, "products)?,\n                rows: ", "own.plan.row_of()?", "Tensor::arange(0, own.plan.row_of()?.elem_count() as u32, own.h.device())?"),
    ("outputs of a token have each other's weights", OUTPUTS, "", "ops::fused::combine_rows_and_add(outputs, weights, rows, x)?", "{ let rows = rows.reshape(weights.dims())?; let turned = Tensor::cat(&[rows.narrow(1, 1, 1)?, rows.narrow(1, 0, 1)?], 1)?; ops::fused::combine_rows_and_add(outputs, weights, &turned.flatten_all()?, x)? }"),
]

GROUPED, ROWS = "src/ops/experts.rs", "src/ops/take_rows.rs"
TRAINED_BUGS = [
    ("gradients of an expert's weights are added in another order", GROUPED, "", "weight.add(|dw| sources.iter().try_for_each(|starts| add(dw, starts)))?;", "weight.add(|dw| sources.iter().rev().try_for_each(|starts| add(dw, starts)))?;"),
    ("gradients of an expert's bias are added in another order", GROUPED, "", "bias.add(|db| sources.iter().try_for_each(|starts| add(db, starts)))?;", "bias.add(|db| sources.iter().rev().try_for_each(|starts| add(db, starts)))?;"),
    ("gradients of an expert's weights are added for all ranks at once", GROUPED, "let in_token_order = match ", "is_trained && !self.plan.sources.is_empty()", "false"),
    ("an expert has the gradients of the first rank's tokens alone", GROUPED, "", "Ok(Self { sources, ..self })", "Ok(Self { sources: sources.into_iter().take(1).collect(), ..self })"),
    ("a rank's tokens begin at the first rank's place", GROUPED, "let mut starts = ", "vec![first as u32]", "{ if !sources.is_empty() { first = 0; } vec![first as u32] }"),
    ("inputs of products are in the order of experts where gradients are added", GROUPED, "", "take_rows(x, &self.plan.row_of()?)?", "x.clone()"),
    ("gradients of outputs are in the order of experts where gradients are added", GROUPED, "", "take_rows(dy, &self.plan.row_of()?)?", "dy.clone()"),
    ("gradients of outputs are multiplied in the order of arrival", ROWS, "Ok([Some(", "take_rows(grad, &self.plan.token_of()?)?", "{ let _ = &self.plan; grad.clone() }"),
    ("gradients of outputs are ordered as outputs are", ROWS, "", "self.plan.token_of()?", "self.plan.row_of()?"),
    ("a rank's rows begin at another rank's", EXCHANGE, "", "start - rows * width..start", "{ let first = layout.start_offset(); let all = layout.shape().elem_count(); first + all - (start - first)..first + all - (start - first) + rows * width }"),
    ("an expert's gradients are those of the pass alone", "src/actor/gradients.rs", "return ", "add(&buffer.reshape(shape)?)", "{ scale(buffer, 0.0)?; add(&buffer.reshape(shape)?) }"),
]

GROUP = "src/dist/group.rs"
COPY_BUGS = [
    ("copies: gradients are not added over the copies", "src/actor/mod.rs", "", "replica_sum::sum_replicas(replicas, parameters.gradients())?;", "let _ = replicas;"),
    ("copies: a rank keeps its own gradients where its sums belong", EXCHANGE, "", "buffer.slice_set(sum, 0, own.start)?;", ""),
    ("copies: a sum begins with the rank's own gradients", EXCHANGE, "Ok((*index, ", "Tensor::zeros(range(*index, buffer, rank).len(), DType::F32, device)?", "{ let own = range(*index, buffer, rank); buffer.narrow(0, own.start, own.len())?.copy()? }"),
    ("copies: sums of another rank arrive at the tensor's first values", EXCHANGE, "receive.push(device_part(other, &", "buffer.narrow(0, range.start, range.len())?", "buffer.narrow(0, 0, range.len())?"),
    ("copies: sums are used before they are there", EXCHANGE, "", "RunningExchange::start(mesh, name, device, vec![], [send, receive])?.wait()", "{ std::mem::forget(RunningExchange::start(mesh, name, device, vec![], [send, receive])?.pending.take()); Ok(()) }"),
    ("copies: a gathered part lies at the receiver's place", GROUP, "let received = gathers.iter().flat_map(|g| others().map(|(place, rank)| ", "part(g, place, rank)", "{ let _ = place; part(g, self.rank, rank) }"),
    ("copies: a rank sends the part of the group's first rank", GROUP, "let sent = gathers.iter().flat_map(|g| others().map(|(_, rank)| ", "part(g, self.rank, rank)", "part(g, 0, rank)"),
    ("copies: the replicas of a rank are the ranks beside it", "src/dist/mesh.rs", "", "group((self.rank() % ranks..self.ranks()).step_by(ranks).collect())?", "group((first..first + ranks).collect())?"),
]
ALL_BUGS = BUGS + SEQUENCE_BUGS + EXPERT_BUGS + TRAINED_BUGS + COPY_BUGS
# Bugs of the lists above that exchanges of experts' rows must catch too.
SHARED_BUGS = ("an exchange does not wait for the work before it", "heads are used before the exchange has ended", "heads are sent before they are packed", "a part is received at the first part's place", "a rank's own part is left out")


def tree():
    """A copy of the checkout with all bugs."""
    copy = Path(os.environ["CARGO_TARGET_DIR"]) / "exchange_bugs"
    listed = subprocess.run(["git", "ls-files", "-z", "-co", "--exclude-standard"], cwd=ROOT, capture_output=True, text=True, check=True)
    files = {name: (ROOT / name).read_bytes() for name in filter(None, listed.stdout.split("\0")) if (ROOT / name).is_file()}
    for number, (name, file, before, right, wrong) in enumerate(ALL_BUGS):
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
    built = Path(os.environ["CARGO_TARGET_DIR"]) / "emulated"
    program = shutil.copy(built / "rloss", copy / "rloss-with-bugs")
    # Cargo watches the files of the copy. It would take this program for that of the checkout, whatever changes there.
    for fingerprint in (built / ".fingerprint").glob("rloss-*"):
        shutil.rmtree(fingerprint)
    return program


# Ranks, and what is run besides.
SHARDS, SPLIT = (3, ()), (4, sets(parallel__sequence=4, model__architecture__num_attention_heads=4, model__architecture__num_key_value_heads=2, train__load_balance_coefficient=0.01))

PAIRS = (4, sets(parallel__shard_size=2))
# Rows of many prompts are sent to the ranks of their experts, those of decode are gathered.
MANY = sets(
    rollout__prompts_per_step=40, rollout__response_tokens_max=2, train__steps=1, train__micro_batch_tokens=512,
    model__architecture__num_hidden_layers=1,
)  # fmt: skip
TRAINED = (3, (*MANY, *sets(parallel__experts="by_expert", parallel__exchange_timeout_s=60)))
BY_EXPERT = (3, (*MANY, *sets(parallel__rollout_weights="by_expert", parallel__exchange_timeout_s=60)))


def words(out, more):
    # Nothing is clipped by the norm, whose additions have another order on several GPUs.
    off = sets(cold_start__optimizer__grad_norm_max=0, train__optimizer__grad_norm_max=0, policy__entropy_coefficient=0.01)
    short = sets(device="cuda", cold_start__steps=1, train__steps=2, train__micro_batch_tokens=64, rollout__response_tokens_max=4, rollout__samples_per_prompt=2)
    return [str(word) for word in ("train", RECIPE, "--out", out, *SHORT, *short, *off, *more)]


def outcome(folder):
    """The metrics, weights and state that a run wrote."""
    rows = [numbers(json.loads(line)) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    checkpoint = max((folder / "checkpoints").glob("step-*"))
    return rows, tensors(checkpoint, "model"), tensors(checkpoint, "trainer")


def complaint(program, place, runs, expected, mode, bug=""):
    """What notices the bug, or None. Without `expected`, the outcome of the run is expected of later ones."""
    shutil.rmtree(place / "run", ignore_errors=True)
    ranks, more = runs
    command = [HERE.parent / "ranks/torchrun", str(ranks), program, *words("run", more)]
    env = {**os.environ, "CUDA_EMULATOR": mode, "EXCHANGE_BUG": bug}
    try:
        done = subprocess.run(command, cwd=place, env=env, capture_output=True, text=True, errors="replace", timeout=RUN_SECONDS_MAX)
    except subprocess.TimeoutExpired:
        return f"no end within {RUN_SECONDS_MAX} s"
    said = (done.stdout + done.stderr).splitlines()
    complaints = [line for line in said if "cuda-emulator:" in line or "error" in line]
    if done.returncode or complaints:
        return (complaints or said or [f"status {done.returncode}"])[0]
    found = outcome(place / "run")
    if not expected:
        expected.extend(found)
    differing = [name for name, one, several in zip(("metrics", "weights", "state"), expected, found) if one != several]
    return f"other {', '.join(differing)}" if differing else None


def main():
    word = sys.argv[1] if len(sys.argv) > 1 else ""
    place, program, missed, count = Path(tempfile.mkdtemp(prefix="rloss-exchange-bugs-")), build(tree()), 0, 0
    shared = [bug for bug in ALL_BUGS if bug[0] in SHARED_BUGS]
    # The outcome of one GPU is expected, or, where `of_one` is none, that of several without a bug.
    groups = [
        ("", SHARDS, BUGS, ()), ("", SPLIT, SEQUENCE_BUGS, None),
        ("", PAIRS, COPY_BUGS, None), ("experts: ", BY_EXPERT, EXPERT_BUGS + shared, MANY), ("trained: ", TRAINED, TRAINED_BUGS + shared, MANY),
    ]  # fmt: skip
    for prefix, runs, bugs, of_one in groups:
        chosen = [(ALL_BUGS.index(bug), prefix + bug[0]) for bug in bugs if word in prefix + bug[0]]
        expected = []
        if chosen and of_one is not None:
            shutil.rmtree(place / "one", ignore_errors=True)
            subprocess.run([program, *words("one", of_one)], cwd=place, check=True, capture_output=True)
            expected.extend(outcome(place / "one"))
        for mode in MODES if chosen else ():
            if seen := complaint(program, place, runs, expected, mode):
                sys.exit(f"the sources without a bug do not pass: {seen}")
        for number, name in chosen:
            begun = time.monotonic()
            caught = ((mode, complaint(program, place, runs, expected, mode, str(number))) for mode in MODES)
            seen = next((f"{mode}: {found[:140]}" for mode, found in caught if found), None)
            print(f"  {name}\n      {seen or 'NOT CAUGHT'} ({time.monotonic() - begun:.0f} s)", flush=True)
            missed += not seen
            count += 1
    shutil.rmtree(place)
    print(f"{count - missed} of {count} bugs in the exchanges between GPUs caught")
    return int(missed > 0)


sys.exit(main())
