#!/usr/bin/env python3
"""Reference values of tests, by numpy or PyTorch's autograd in f64, and reference tables of other programs.

    scripts/make_reference_values.py gdpo            advantages of TRL 1.16 (normalize_then_sum); needs numpy
    scripts/make_reference_values.py sum_losses      losses of the Tinker API with their gradients; needs numpy, torch
    scripts/make_reference_values.py truncated_head  log-probs over kept tokens with their gradients; needs torch
    scripts/make_reference_values.py muon MUON_PY    ten steps of Muon by its author's reference; needs torch
    scripts/make_reference_values.py distill_head    the head with a teacher: divergences with their gradients; needs torch
    scripts/make_reference_values.py distill FOLDER  cases of it over Qwen2.5's vocabulary of 151,936 tokens, as raw numbers
    scripts/make_reference_values.py tables          one table in the forms of several programs, with rows.json as they must
                                                     be read; needs pyarrow, pandas, polars, datasets

Each but `distill` writes tests/fixtures/NAME.json, or the folder of that name, anew. MUON_PY is muon.py of
github.com/KellerJordan/Muon at 857d1ad.
"""

import ast
import decimal
import gzip
import json
import random
import sys
import warnings
from pathlib import Path

FIXTURES = Path(__file__).resolve().parent.parent / "tests" / "fixtures"


def gdpo():
    """100 random batches in 64 bits, where TRL computes in 32. A reward that is null is left out, as None in TRL."""
    import numpy as np

    warnings.simplefilter("ignore", RuntimeWarning)

    def nan_std(values, axis):
        """Standard deviation with n - 1, of the values that are no NaN; NaN of fewer than two."""
        mean = np.nanmean(values, axis=axis, keepdims=True)
        variance = np.nanmean((values - mean) ** 2, axis=axis, keepdims=True)
        count = np.sum(~np.isnan(values), axis=axis, keepdims=True)
        return np.sqrt(variance * np.where(count > 1, count / (count - 1.0), np.nan))

    def advantages(rewards, weights):
        """`rewards`: [groups, samples, functions]."""
        normal = (rewards - np.nanmean(rewards, axis=1, keepdims=True)) / (nan_std(rewards, 1) + 1e-4)
        sums = np.nansum(normal * weights, axis=2).ravel()
        return (sums - sums.mean()) / (sums.std(ddof=1) + 1e-4)

    rng = np.random.default_rng(84)
    batches = []
    for _ in range(100):
        groups, samples, functions = rng.integers(1, 5), rng.integers(2, 7), rng.integers(1, 4)
        kind = rng.integers(3)
        shape = (groups, samples, functions)
        rewards = rng.integers(0, 2, shape) * 1.0 if kind == 0 else rng.normal(size=shape)
        rewards = rewards.astype(np.float32).astype(np.float64)
        if kind == 2 and functions > 1:
            rewards[:, :, 1:][rng.random((groups, samples, functions - 1)) < 0.2] = np.nan
        weights = np.round(rng.uniform(0.1, 2, functions), 2).astype(np.float32).astype(np.float64)
        columns = [[None if np.isnan(v) else float(v) for v in column] for column in rewards.reshape(-1, functions).T]
        batches.append(dict(
            group_sizes=[int(samples)] * int(groups), weights=[float(w) for w in weights], rewards=columns,
            advantages=[float(f"{a:.9g}") for a in advantages(rewards, weights)],
        ))
    return "[\n" + ",\n".join(json.dumps(b) for b in batches) + "\n]\n"


def sum_losses():
    """The inputs come from a generator that the test has too, so the file holds results alone."""
    import numpy as np
    import torch

    def noise(count, seed):
        """Numbers in [-1, 1), exact in f32."""
        state, values = (seed * 2_654_435_761 + 1) % 2**32, []
        for _ in range(count):
            state = (state * 1_664_525 + 1_013_904_223) % 2**32
            values.append((state >> 8) / 2**23 - 1)
        return np.array(values, np.float32)

    def loss(name, l, q, a, w, mask):
        ratio = torch.exp(l - q)
        if name == "cross_entropy":
            return -(l * w).sum()
        if name == "importance_sampling":
            return -(ratio * a).sum()
        if name == "ppo":
            return -torch.minimum(ratio * a, ratio.clamp(0.8, 1.2) * a).sum()
        if name == "cispo":
            return -(ratio.clamp(0.0, 4.0).detach() * l * a).sum()
        if name == "dro":
            return -(l * a - 0.5 * 0.05 * (l - q) ** 2).sum()
        kept = mask != 0
        sequence = torch.exp((l.detach() - q)[kept].mean() + l - l.detach())
        return -torch.minimum(sequence * a, sequence.clamp(0.8, 1.2) * a).sum()

    results = {}
    for name in ["cross_entropy", "importance_sampling", "ppo", "cispo", "dro", "gspo"]:
        rows = []
        for batch in range(100):
            count = 1 + batch % 7
            values = noise(4 * count, batch + 1).reshape(4, count)
            l = np.float32(2) * values[0] - np.float32(2)
            q = l + values[1]
            mask = np.array([1.0 if index % 3 != 2 else 0.0 for index in range(count)])
            tensor = lambda x: torch.tensor(x.astype(np.float64))
            own = tensor(l).requires_grad_(True)
            value = loss(name, own, tensor(q), tensor(np.float32(2) * values[2]), tensor(values[3]), tensor(mask))
            value.backward()
            rows.append([value.item(), *own.grad.tolist()])
        results[name] = rows
    return json.dumps(results) + "\n"


def truncated_head():
    """Logits of tokens that are not kept are -inf before log_softmax, as in trainers with a mask of kept tokens. Inputs are
    multiples of 2^-6, so that f32 holds them exactly."""
    import torch

    rows, width, vocabulary = 7, 6, 41
    rng = random.Random(46)

    def grid(*shape):
        values = [rng.randint(-128, 128) / 64 for _ in range(torch.Size(shape).numel())]
        return torch.tensor(values, dtype=torch.float64).reshape(shape)

    def case(temperature):
        h, w = grid(rows, width).requires_grad_(), grid(width, vocabulary).requires_grad_()
        kept, targets = [], []
        # One token, few, most, all; None is a row without a set.
        for count in [1, 2, 5, 20, vocabulary - 1, vocabulary, None]:
            ids = sorted(rng.sample(range(vocabulary), vocabulary if count is None else count))
            kept.append(None if count is None else ids)
            targets.append(rng.choice(ids))
        mask = torch.zeros(rows, vocabulary, dtype=torch.bool)
        for row, ids in enumerate(kept):
            mask[row, range(vocabulary) if ids is None else ids] = True
        log_probs = torch.log_softmax((h @ w / temperature).masked_fill(~mask, float("-inf")), -1)
        chosen = log_probs.gather(1, torch.tensor(targets)[:, None])[:, 0]
        entropies = -(log_probs.exp() * log_probs.masked_fill(~mask, 0.0)).sum(-1)
        weights = grid(2, rows)
        (weights[0] @ chosen + weights[1] @ entropies).backward()
        lists = dict(h=h, w=w, log_probs=chosen, entropies=entropies, dh=h.grad, dw=w.grad, gradient=weights)
        lists = {name: tensor.detach().flatten().tolist() for name, tensor in lists.items()}
        return dict(temperature=temperature, targets=targets, kept=kept, **lists)

    cases = [case(temperature) for temperature in (1.0, 0.7, 1.6)]
    return json.dumps(dict(torch=torch.__version__, rows=rows, width=width, cases=cases)) + "\n"


def muon(path):
    """`muon_update` runs from its source, with two changes: the iteration is in f64 instead of bf16, and the factor
    sqrt(max(1, rows / columns)) is replaced with that of Moonlight (arXiv 2502.16982), 0.2 * sqrt(max(rows, columns)).
    Gradients are multiples of 2^-6, which f32 holds exactly."""
    import torch

    scope = {"torch": torch}
    for node in ast.parse(Path(path).read_text()).body:
        if getattr(node, "name", "") in ("zeropower_via_newtonschulz5", "muon_update"):
            source = ast.unparse(node)
            assert "bfloat16" not in source or source.count(".bfloat16()") == 1
            exec(source.replace(".bfloat16()", ".double()"), scope)
    generator = torch.Generator().manual_seed(7)
    cases = []
    # Wide, tall, square, one row, and the matrices of three experts.
    for number, shape in enumerate([[5, 12], [12, 5], [8, 8], [1, 6], [3, 6, 4]]):
        lr, momentum, weight_decay = [(0.02, 0.95, 0.0), (4e-3, 0.95, 0.1), (0.01, 0.8, 0.01)][number % 3]
        rows, columns = shape[-2:]
        scale = 0.2 * max(rows, columns) ** 0.5 / max(1, rows / columns) ** 0.5
        weight = torch.randn(shape, generator=generator)
        weights, momenta = weight.double(), torch.zeros(shape, dtype=torch.float64)
        case = dict(shape=shape, settings=dict(lr=lr, momentum=momentum, weight_decay=weight_decay),
                    initial=weight.flatten().tolist(), gradients=[], weights=[])
        for _ in range(10):
            gradient = (torch.randn(shape, generator=generator, dtype=torch.float64) * 64).round() / 64
            case["gradients"].append(gradient.flatten().tolist())
            update = scope["muon_update"](gradient, momenta, beta=momentum) * scale
            weights = weights * (1 - lr * weight_decay) - lr * update
            case["weights"].append(weights.flatten().tolist())
        cases.append(case)
    return json.dumps(cases) + "\n"


def divergences(logits, teacher_logits):
    """KL(p || q) of each row: `generalized_jsd_loss` with `beta = 1` and no reduction, of TRL's GKDTrainer, whose value is
    compared if it can be imported."""
    import torch

    log_p, log_q = torch.log_softmax(logits, -1), torch.log_softmax(teacher_logits, -1)
    kl = (log_p.exp() * (log_p - log_q)).sum(-1)
    try:
        from trl.experimental.gkd import GKDTrainer
    except ImportError:
        print("TRL is not installed: compared with torch alone", file=sys.stderr)
        return kl
    with torch.no_grad():
        trl = GKDTrainer.generalized_jsd_loss(logits, teacher_logits, beta=1, reduction="none").sum(-1)
    assert (kl - trl).abs().max() < 1e-12 * max(1.0, kl.abs().max()), "TRL's divergence differs"
    return kl


def distill_case(generator, shape, temperature, scale, outputs):
    import torch

    rows, width, teacher_width, vocabulary = shape

    def noise(*size):
        # f32 holds the inputs exactly.
        return torch.randn(size, generator=generator).double()

    h, w = noise(rows, width).requires_grad_(), (scale * noise(width, vocabulary)).float().double().requires_grad_()
    teacher_h = noise(rows, teacher_width)
    teacher_w = (scale * noise(teacher_width, vocabulary)).float().double()
    targets = torch.randint(vocabulary, (rows,), generator=generator)
    # The upstream gradient of the log-probabilities, the entropies and the divergences.
    gradient = noise(3, rows) * torch.tensor(outputs)[:, None]
    logits, teacher_logits = h @ w / temperature, teacher_h @ teacher_w / temperature
    log_p = torch.log_softmax(logits, -1)
    chosen, entropies = log_p.gather(1, targets[:, None])[:, 0], -(log_p.exp() * log_p).sum(-1)
    values = torch.stack([chosen, entropies, divergences(logits, teacher_logits)])
    (gradient * values).sum().backward()
    return dict(
        targets=targets.double(), h=h, w=w, teacher_h=teacher_h, teacher_w=teacher_w, gradient=gradient, values=values,
        dh=h.grad, dw=w.grad,
    )


def distill_head():
    import torch

    generator, cases = torch.Generator().manual_seed(50), []
    for temperature in (1.0, 0.7, 1.6):
        tensors = distill_case(generator, (5, 4, 3, 41), temperature, 1.0, [1, 1, 1])
        lists = {name: tensor.detach().flatten().tolist() for name, tensor in tensors.items()}
        lists["targets"] = [int(target) for target in lists["targets"]]
        cases.append(dict(temperature=temperature, **lists))
    return json.dumps(cases) + "\n"


def distill(folder):
    """`just distill-parity` compares rloss with what this writes."""
    import torch

    generator = torch.Generator().manual_seed(50)
    folder = Path(folder)
    folder.mkdir(parents=True, exist_ok=True)
    for temperature in (1.0, 0.7):
        # Logits with a standard deviation of about 3, in three chunks of rows.
        tensors = distill_case(generator, (256, 32, 48, 151_936), temperature, 0.5, [0, 0, 1])
        for name, tensor in tensors.items():
            values = tensor.detach().double() if name in ("values", "dh", "dw") else tensor.detach().float()
            (folder / f"at_{temperature}.{name}").write_bytes(values.numpy().tobytes())
        kl = tensors["values"][2]
        print(f"at {temperature}: divergences {kl.min():.3f} to {kl.max():.3f}")


def table_row(i):
    """A row in verl's form, with columns of the kinds that such files have."""
    return {
        "data_source": "openai/gsm8k",
        "prompt": [
            {"role": "system", "content": "Answer with a number."},
            {"role": "user", "content": f"What is {i} + {i}? ½ ∑ 字" + " long" * (i % 7)},
        ],
        "reward_model": {"style": "rule", "ground_truth": str(2 * i)},
        "extra_info": {"index": i, "split": "train", "parts": [[i], [], [i, i + 1]], "note": None if i % 3 else "n"},
        "large": 2**53 + 1 + i,
        "share": i / 7,
        "flag": i % 2 == 0,
        "empty": None,
        "tags": None if i % 5 == 0 else ["a", None, "b"][: i % 4],
        "kind": ["red", "green", "blue"][i % 3],
    }


def tables():
    """One table as pyarrow, pandas, polars and datasets write it."""
    import datasets
    import polars
    import pyarrow as pa
    import pyarrow.csv
    import pyarrow.parquet as pq

    count, folder = 40, FIXTURES / "tables"
    folder.mkdir(parents=True, exist_ok=True)
    rows = [table_row(i) for i in range(count)]
    schema = pa.schema(
        [
            ("data_source", pa.string()),
            ("prompt", pa.list_(pa.struct([("role", pa.string()), ("content", pa.string())]))),
            ("reward_model", pa.struct([("style", pa.string()), ("ground_truth", pa.string())])),
            (
                "extra_info",
                pa.struct(
                    [
                        ("index", pa.int64()),
                        ("split", pa.string()),
                        ("parts", pa.list_(pa.list_(pa.int64()))),
                        ("note", pa.string()),
                    ]
                ),
            ),
            ("large", pa.int64()),
            ("share", pa.float64()),
            ("flag", pa.bool_()),
            ("empty", pa.string()),
            ("tags", pa.list_(pa.string())),
            ("kind", pa.string()),
        ]
    )
    table = pa.Table.from_pylist(rows, schema)
    texts = [json.dumps(row, ensure_ascii=False) for row in rows]
    (folder / "rows.json").write_text("[\n" + ",\n".join(texts) + "\n]\n", encoding="utf-8")
    with gzip.GzipFile(folder / "rows.jsonl.gz", "wb", mtime=0) as file:
        file.write("\n".join(texts).encode())
    for compression in ["none", "snappy", "zstd", "gzip"]:
        pq.write_table(table, folder / f"pyarrow_{compression}.parquet", compression=compression, row_group_size=16)
    pq.write_table(table, folder / "pyarrow_plain.parquet", use_dictionary=False, data_page_version="2.0")
    large = pa.schema([(f.name, pa.large_string() if f.type == pa.string() else f.type) for f in schema])
    pq.write_table(table.cast(large), folder / "pyarrow_large_string.parquet")
    kind = table.set_column(9, "kind", table["kind"].dictionary_encode())
    pq.write_table(kind, folder / "pyarrow_dictionary.parquet")
    table.to_pandas().to_parquet(folder / "pandas.parquet")
    frame = polars.from_arrow(table)
    frame.write_parquet(folder / "polars.parquet")
    frame.write_parquet(folder / "polars_snappy.parquet", compression="snappy")
    datasets.Dataset(table).to_parquet(folder / "datasets.parquet")
    with open(folder / "pyarrow_zstd.parquet", "rb") as file, gzip.GzipFile(
        folder / "gzipped.parquet.gz", "wb", mtime=0
    ) as packed:
        packed.write(file.read())
    # Numbers that JSON writers lose: decimals, and integers beyond a float.
    numbers = pa.table(
        {
            "d": pa.array([decimal.Decimal("1.20"), decimal.Decimal("-0.05"), None], pa.decimal128(38, 2)),
            "small": pa.array([decimal.Decimal("12.5"), decimal.Decimal("-3.0"), None], pa.decimal128(5, 1)),
            "u": pa.array([2**64 - 1, 0, None], pa.uint64()),
            "f": pa.array([0.1, float("nan"), None], pa.float32()),
            "b": pa.array([b"text", b"\xff\x00", None], pa.binary()),
            "i8": pa.array([-128, 127, None], pa.int8()),
        }
    )
    pq.write_table(numbers, folder / "numbers.parquet")
    plain = table.select(["data_source", "kind"]).append_column("n", pa.array([str(i) for i in range(count)]))
    pa.csv.write_csv(plain, folder / "rows.csv")
    polars.from_arrow(plain).write_csv(folder / "rows.tsv", separator="\t")
    print(f"wrote {folder}", file=sys.stderr)


MAKERS = dict(
    gdpo=gdpo, sum_losses=sum_losses, truncated_head=truncated_head, muon=muon, distill_head=distill_head, distill=distill,
    tables=tables,
)  # fmt: skip

if __name__ == "__main__":
    needs_path = sys.argv[1:] and sys.argv[1] in ("muon", "distill")
    if len(sys.argv) != 2 + bool(needs_path) or sys.argv[1] not in MAKERS:
        sys.exit(__doc__)
    content = MAKERS[sys.argv[1]](*sys.argv[2:])
    if content is not None:
        (FIXTURES / f"{sys.argv[1]}.json").write_text(content)
