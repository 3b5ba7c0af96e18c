#!/usr/bin/env python3
"""Seeds bugs drawn by fixed rules in the kernels newer than attention and demands that their checks catch them.

  drawn_bugs.py [COUNT]   the first COUNT of the drawn bugs (100 without it); JOBS of them at a time, all cores without it
  drawn_bugs.py --list    all that the rules can make, in the order of the draw, no run

The rules below are applied to every line; a seeded draw takes a rule, then a place for it. bug.sh builds and runs each as
it does those of bugs.txt. What does not compile and what leaves the machine code as it was is no bug, and the draw goes on.
A bug that survives must be explained in drawn_bugs.txt, and at most one in twenty may. Results are kept in
target/cuda_host/drawn_results.jsonl, by the texts they depend on, so that a run goes on where another was cut off.
"""

import hashlib
import json
import os
import random
import re
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

HERE = Path(__file__).resolve().parent
KERNELS = HERE.parents[1] / "kernels"
OUT = HERE.parents[1] / "target" / "cuda_host"
RESULTS = OUT / "drawn_results.jsonl"
SEED, COUNT, SURVIVORS_PERCENT = 31, 100, 5
# Attention's, Muon's, and what all kernels are written in: bugs.txt has theirs.
NOT_DRAWN = re.compile(r"sink_attention|ring|warp|primitive|muon")
# Where an order is promised. Elsewhere a sum's order is fixed, and another would do.
IN_ORDER = {"dispatch.cu", "embedding.cu", "product.cu"}
DOES_NOT_BUILD, SAME_CODE = 2, 3
# Whose checks a kernel's file has, where the names differ: as in bug.sh.
FAMILIES = {"swiglu": "row_ops", "rms_norm": "row_ops", "adamw_8bit": "optimizer"}

NAME = r"[A-Za-z_][\w.]*(?:\[\w+\])?"  # a variable, a member, an element
CONDITION = r"\bif \(((?:[^()]|\((?:[^()]|\([^()]*\))*\))*)\)"
SIZE = r"(?:p\.\w+|width|stride|experts|vector|top_k|\w+_threads|\w+_rows|\w+_columns|\w+_block|step|chunk|threads|of_row)"
OTHER_NAMES = {
    "x": "dy", "dy": "x", "y": "x", "gate": "up", "up": "gate", "a": "b", "b": "a", "m": "v", "v": "m", "z": "x", "w": "y",
    "low": "high", "high": "low", "first": "second", "second": "first", "cosines": "sines", "sines": "cosines",
    "first_scale": "second_scale", "second_scale": "first_scale", "first_codes": "second_codes", "second_codes": "first_codes",
    "weights": "dweights", "dweights": "weights", "row_of": "token_of", "token_of": "row_of", "sum": "moment", "moment": "sum",
    "log_prob": "entropy", "entropy": "log_prob", "d_log_prob": "d_entropy", "d_entropy": "d_log_prob", "n": "k", "k": "n",
    "of_groups": "of_threads", "of_threads": "of_groups", "begin": "end", "end": "begin", "row": "column", "column": "row",
    "MN": "K", "K": "MN", "total": "highest", "i_limit": "k_limit", "k_limit": "i_limit", "across": "down", "down": "across",
}  # fmt: skip

ORDER = "order"
# Name, pattern, what to put. Groups as in re.sub.
RULES = [
    ("bound", r" < ", " <= "),
    ("bound", r" <= ", " < "),
    ("bound", r" > ", " >= "),
    ("bound", r" >= ", " > "),
    ("off by one", rf"< ({NAME})(?=[;)])", r"< \1 - 1"),
    ("off by one", r" - 1\b", ""),
    ("off by one", r" \+ 1\b", ""),
    ("off by one", rf"({NAME}|\]) = 0;", r"\1 = 1;"),
    ("off by one", r"(\w)\[([^\[\]]*[a-z][^\[\]]*)\]", r"\1[\2 + 1]"),
    ("stride", rf"\* ({SIZE})\b", r"* (\1 + 1)"),
    ("stride", rf"\+= ({SIZE})\b", r"+= 2 * \1"),
    ("stride", r"\b(16|32|64) \* ", lambda m: f"{int(m[1]) // 2} * "),
    ("stride", rf" / ({SIZE})\b", r" / (2 * \1)"),
    ("guard dropped", CONDITION, "if (true)"),
    ("guard dropped", CONDITION, "if (false)"),
    ("guard dropped", r"^\s*if \(.*\) (return|continue);$", ""),
    ("guard dropped", r" && [^&|;?]*?(?=\)| &&|;| \?)", ""),
    ("guard dropped", r" && ", " || "),
    ("guard dropped", r" \|\| ", " && "),
    ("guard dropped", r"\b(?:min|max|fmin)\(([^(),]+), ([^(),]+)\)", r"(\1)"),
    ("guard dropped", r"\b(?:min|max|fmin)\(([^(),]+), ([^(),]+)\)", r"(\2)"),
    ("wait dropped", r"\b(?:block_barrier|warp_barrier|copy_async_commit|copy_async_wait<.*?>)\(\);", ""),
    ("wait dropped", r"copy_async_wait<S::stages - 2>", "copy_async_wait<S::stages - 1>"),
    ("operands swapped", rf"\(({NAME}), ({NAME})(?=[,)])", r"(\2, \1"),
    ("operands swapped", rf", ({NAME}), ({NAME})\)", r", \2, \1)"),
    ("operands swapped", rf"\b({NAME}) ([-/%]) ({NAME})", r"\3 \2 \1"),
    ("operands swapped", r" ([-+]) (?=\w)", lambda m: " + " if m[1] == "-" else " - "),
    ("operands swapped", r"(?<=[(, ])-(?=[a-z])", ""),
    ("wrong name", r"(?<!\w)(\w+)(?=[\[.,();: ]|$)", lambda m: OTHER_NAMES.get(m[1], m[1])),
    (ORDER, r"for \(int (slot|other|i) = ([01]); \1 < ([^;&]+); \1\+\+\)(?!.* \+= )", r"for (int \1 = (\3) - 1; \1 >= \2; \1--)"),
    ("first value", r"= 0\.0f\b", "= 1.0f"),
    ("first value", r"-INFINITY", "0.0f"),
    ("first value", r"= ([01]);", lambda m: f"= {1 - int(m[1])};"),
    ("32 bits", r"static_cast<int64_t>", "static_cast<int>"),
    ("32 bits", r"\bint64_t (?=\w+ =)", "int "),
    ("32 bits", r"\bint64_t (?=\w+[,)] )", "int "),
    ("factor dropped", r"\bmultiply\(([^(),]+), ([^(),]+)\)", r"(\1)"),
    ("factor dropped", r"\bmultiply\(([^(),]+), ([^(),]+)\)", r"(\2)"),
    ("factor dropped", rf" \* ({NAME})\b", ""),
    ("factor dropped", rf" / ({NAME})\b", ""),
    ("constant", r"\b([12]\.0f|1\.44\d+f|LN2|LOWEST_SHIFT)\b", r"(0.5f * \1)"),
    ("constant", r"(?<![\w.])([2348]|16|128)(?![\w.])", lambda m: str(int(m[1]) // 2)),
    ("constant", r"(?<![\w.])([2348]|16|128)(?![\w.])", lambda m: str(int(m[1]) * 2)),
    ("constant", r"(_shared_bytes = .*);", r"\1 / 2;"),
    ("lane", r"mask = 16\b", "mask = 8"),
    ("lane", r"mask > 0\b", "mask > 1"),
    ("lane", r", mask\)", ", mask / 2)"),
    ("lane", r"threadIdx\.x ([%/]) 32", r"threadIdx.x \1 16"),
    ("lane", r"\blane ([%/]) (4|8|16)", lambda m: f"lane {m[1]} {int(m[2]) // 2}"),
    ("lane", r"(threadIdx\.x(?: % 32)?|lane|thread) == 0\b", r"\1 == 1"),
    ("rounding", r"\bto_bf16\(((?:[^()]|\((?:[^()]|\([^()]*\))*\))*)\)", r"bf16{static_cast<uint16_t>(__float_as_uint(\1) >> 16)}"),
    ("rounding", r"= ((?:add|multiply|multiply_add)\(.*\));$", r"= to_float(to_bf16(\1));"),
    ("sum", r" \+= ", " = "),
    ("sum", rf"= add\(({NAME}), (.*)\);", r"= \2;"),
    ("sum", r"= multiply_add\(([^(),]+), ([^(),]+), [^()]+\);", r"= multiply(\1, \2);"),
]


def code_lines(path):
    """The lines that are code, with their numbers and without their comments."""
    for number, line in enumerate(path.read_text().splitlines()):
        code = line.split("//")[0].rstrip()
        # Sizes that host and kernel share are right whatever they are, but for shared memory's; fields have no code.
        declares = re.match(r"\s*(#|using|namespace|struct|template|constexpr int (?!\w+_shared_bytes)|(const )?[\w:]+[*]? [^=(]*;$)", code)
        if code.strip() and not declares:
            yield number, code


def sites():
    """(rule, file, line number, the line with the bug), by rule."""
    by_rule = {}
    for path in sorted([*KERNELS.glob("*.cu"), *KERNELS.glob("*.cuh")]):
        if NOT_DRAWN.match(path.name):
            continue
        for number, line in code_lines(path):
            for name, pattern, put in RULES:
                if name == ORDER and path.name not in IN_ORDER:
                    continue
                for match in re.finditer(pattern, line):
                    changed = line[: match.start()] + (match.expand(put) if isinstance(put, str) else put(match)) + line[match.end() :]
                    if changed != line and (site := (name, path.name, number, changed)) not in by_rule.setdefault(name, []):
                        by_rule[name].append(site)
    return by_rule


def drawn():
    """Every site, in the order of the draw."""
    left, draw = sites(), random.Random(SEED)
    while left:
        name = draw.choice(sorted(left))
        yield left[name].pop(draw.randrange(len(left[name])))
        if not left[name]:
            del left[name]


def shown(site):
    """The bug as drawn_bugs.txt names it."""
    _, file, at, changed = site
    lines = (KERNELS / file).read_text().splitlines()
    return f"{file}: {changed.strip() or f'no {lines[at].strip()} after {lines[at - 1].strip()}'}"


def explained():
    """The bugs of drawn_bugs.txt: their names and, indented below, why nothing can see it."""
    lines = (HERE / "drawn_bugs.txt").read_text().splitlines()
    return {line for line in lines if line and not line.startswith((" ", "#"))}


def seeding(number, site):
    """The bug as seed.cpp reads it. The line's neighbours are taken along until the text is the file's only one."""
    rule, file, at, changed = site
    text = (KERNELS / file).read_text()
    lines = text.splitlines()
    first = last = at
    while text.count("\n".join(lines[first : last + 1])) > 1:
        first, last = max(first - 1, 0), min(last + 1, len(lines) - 1)
    put = [changed if i == at else lines[i] for i in range(first, last + 1)]
    return "\n".join([f"= drawn {number}", f"@ {file}", *(f"- {lines[i]}" for i in range(first, last + 1)), *(f"+ {line}" for line in put)])


def texts_digest(file):
    """Of all that decides what becomes of a bug in `file`: the kernels' own text, their family's checks, and what all share."""
    stem = Path(file).stem
    own = FAMILIES.get(stem, stem)
    families = {path.stem for path in KERNELS.glob("*.cu*")} | set(FAMILIES.values())
    of_all = own not in families or not (HERE / f"{own}.cpp").exists()
    checks = [path for path in HERE.glob("*.cpp") if of_all or path.stem == own or path.stem not in families]
    kernels = [path for path in KERNELS.glob("*.cu") if of_all or FAMILIES.get(path.stem, path.stem) == own]
    parts = sorted([*checks, *kernels, *HERE.glob("*.h"), *KERNELS.glob("*.cuh")])
    return hashlib.sha256(b"".join(part.read_bytes() for part in parts)).hexdigest()[:16]


def verdict(number):
    """bug.sh's exit code and what it says of bug `number`."""
    done = subprocess.run([HERE / "bug.sh", str(number), OUT / "drawn.txt"], capture_output=True, text=True, errors="replace")
    said = done.stdout.strip()
    if not said.startswith("drawn"):
        sys.exit(f"bug {number} cannot be seeded: {said} {done.stderr}")
    return done.returncode, re.sub(r"^drawn \d+\s*", "", said)


def main():
    if sys.argv[1:] == ["--list"]:
        for rule, file, at, line in drawn():
            print(f"{rule}: {file}:{at + 1}: {line.strip()}")
        return 0
    count, jobs = int(sys.argv[1]) if len(sys.argv) > 1 else COUNT, int(os.environ.get("JOBS", os.cpu_count()))
    for mode in ("plain", "asan", "tsan"):
        subprocess.run(["make", "-s", f"-j{jobs}", "-C", HERE, f"MODE={mode}"], check=True)
    subprocess.run(["g++", "-std=c++17", "-O1", HERE / "seed.cpp", "-o", OUT / "seed"], check=True)
    bugs, reasons, start = list(drawn()), explained(), time.monotonic()
    digests = {file: texts_digest(file) for file in {site[1] for site in bugs}}
    (OUT / "drawn.txt").write_text("\n\n".join(seeding(i + 1, site) for i, site in enumerate(bugs)) + "\n")
    known = {}
    if RESULTS.exists():
        of_runs = [json.loads(line) for line in RESULTS.read_text().splitlines()]
        known = {(of["texts"], of["bug"]): (of["code"], of["said"]) for of in of_runs}

    def tried(index):
        bug = (digests[bugs[index][1]], f"{shown(bugs[index])}, line {bugs[index][2] + 1}")
        if bug not in known:
            known[bug] = verdict(index + 1)
            with RESULTS.open("a") as results:
                results.write(json.dumps({"texts": bug[0], "bug": bug[1], "code": known[bug][0], "said": known[bug][1]}) + "\n")
        return known[bug]

    real, survivors, unexplained, at = 0, 0, 0, 0
    with ThreadPoolExecutor(jobs) as pool:
        while real < count and at < len(bugs):
            batch = range(at, min(at + count - real, len(bugs)))
            for site, (code, said) in zip((bugs[i] for i in batch), pool.map(tried, batch)):
                if code in (DOES_NOT_BUILD, SAME_CODE):
                    continue
                real += 1
                if code:
                    survivors += 1
                    unexplained += shown(site) not in reasons
                    said = "survives, as explained" if shown(site) in reasons else "NOT CAUGHT"
                print(f"  {site[0]}, line {site[2] + 1}: {shown(site)}\n      {said[:150]}", flush=True)
            at = batch.stop
    print(f"{real - survivors} of {real} drawn bugs caught, {survivors} survive, {unexplained} of them unexplained; {at - real} of {at} drawn are no bugs; {time.monotonic() - start:.0f} s")
    return int(real < count or unexplained > 0 or survivors > max(1, real * SURVIVORS_PERCENT // 100))


sys.exit(main())
