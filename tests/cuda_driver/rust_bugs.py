#!/usr/bin/env python3
"""Seeds bugs in src/ops/cuda and demands that the tests on the emulated driver catch them.

  rust_bugs.py [COUNT]       the first COUNT of the drawn bugs (30 without it); needs the environment of ./setup.sh
  rust_bugs.py --list        all that the rules can make, no run

The rules below are applied to every line; a seeded draw takes a rule, then a place for it. What the compiler refuses is
no bug and the draw goes on. A bug that survives must be explained in rust_bugs.txt, and at most one in ten may survive.
"""

import itertools
import os
import random
import re
import subprocess
import sys
import threading
import time
from pathlib import Path

HERE = Path(__file__).resolve().parent
ROOT = HERE.parents[1]
SOURCES = ROOT / "src" / "ops" / "cuda"
SEED, COUNT, SURVIVORS_PERCENT = 20, 30, 10
RUN_SECONDS_MAX = 600
NOT_OURS = {"flash_attention.rs", "mod.rs"}  # not built; names only
# The tests' and the ops' part of the program: a fifth of it to build.
MODULES = "pub mod error;\npub mod ops;\npub mod panics;\npub mod random;\n"
# In their place: whole models, which the ops' tests do not need.
STAND_INS = {
    "src/lib.rs": MODULES,
    "benches/gpu_check/speed/model.rs": "pub fn run(_: &candle_core::Device, _: super::Extent) -> anyhow::Result<()> {\n    Ok(())\n}\n",
}
FREED = "{ let gone = (%s).clone(); candle_core::cuda_backend::cudarc::driver::DevicePtr::device_ptr(&gone, gone.stream()).0 }"

# Only launch.rs launches on it. Elsewhere `Addresses` has it, to order what other streams do, and there are none.
STREAM = r"\.cuda_stream\(\);"

# A kernel of a launch, with its number of blocks.
LAUNCHED = r"\((&[A-Z]\w*|&?kernel|&kernels\.\w+|&tiling\.\w+|forward|chunk|merge), ([^,\[\]]+)\)(?=[\],])"

# Name, pattern, what to put. Groups as in re.sub.
RULES = [
    ("argument order", r"\((\w[\w.]*), (\w[\w.]*)\b(?=[,)])", r"(\2, \1"),
    ("argument order", r"\(([\w&.]+), ([\w&.]+), ([\w&.]+)\b(?=[,)])", r"(\1, \3, \2"),
    ("argument order", r"\b(q|kv|out|dout|dq|dkv|delta|lse)(?=[,)]| }|: at)", lambda m: {"q": "out", "kv": "q", "out": "dout", "dout": "out", "dq": "dkv", "dkv": "dq", "delta": "dq", "lse": "delta"}[m[1]]),
    ("size", r"\b(\w+) \* head_dim\b", r"(\1 * head_dim - 8)"),
    ("size", r"\b(self\.tokens|self\.\w+_tiles|heads|kv_heads|width|input\.len\(\)|output_words) as i32", r"(\1 + 1) as i32"),
    ("size", r"alloc\((rows|\w+)\)", r"alloc(\1 - 1)"),
    ("size", r"(self\.)?\btokens \* ", r"(\1tokens - 1) * "),
    ("stride", r"\b([24]) \* \(", lambda m: f"{int(m[1]) // 2} * ("),
    ("stride", r"\b4 \* (?=self|starts)", "8 * "),
    ("stride", r"_(token|head)_stride: \(?", lambda m: m[0] + "2 * "),
    ("stride", r"starts\[(\d)\]", lambda m: f"starts[{(int(m[1]) + 1) % 5}]"),
    ("stride", r"\barray\((\d)\)", lambda m: f"array({(int(m[1]) + 1) % 5})"),
    ("stride", r"/ VECTOR", "/ (2 * VECTOR)"),
    ("stream", r"new_cuda_with_stream", "new_cuda"),
    ("stream", STREAM, ".cuda_stream().context().default_stream();"),
    ("lifetime", r"\bat\.read\(&([\w.]+)\)", lambda m: FREED % m[1]),
    ("lifetime", r"\bat\.write\(&mut ([\w.]+)\)", lambda m: FREED % m[1]),
    ("missing zeroing", r"([\w.]+)\.alloc_zeros(::<\w+>)?\((?!0\))(.*)\)\?", r"unsafe { \1.alloc\2(\3)? }"),
    ("missing zeroing", r"u32::MAX; ", "0; "),
    ("wrong grid", r"\b(blocks|threads|kernel\.threads) as u32", r"\1 as u32 + 1"),
    ("wrong grid", r"\b(blocks|kernel\.threads) as u32", r"\1 as u32 / 2"),
    ("wrong grid", r"\.div_ceil\((\w+)\)", r" / \1"),
    ("wrong grid", r"\b(\w+_tiles) \* kv_heads", r"\1"),
    ("wrong grid", LAUNCHED, r"(\1, \2 - 1)"),
    ("missing attribute", r"^\s*\(CUfunction_attribute::.*\),\s*$", ""),
    ("missing attribute", r"function\.set_attribute\(attribute, value\)\.w\(\)\?;", ""),
    ("missing attribute", r"shared_mem_bytes: (.*) as u32", r"shared_mem_bytes: \1 as u32 - 16"),
    ("missing attribute", r"kernel\.shared_bytes > ", "kernel.shared_bytes < "),
    ("missing step", LAUNCHED, r"(\1, 0)"),
    ("missing step", r"^\s*arrays\.\w+\(.*\);\s*$", ""),
    ("missing step", r"\bif (sinks|tokens == 0|\w+\.is_some\(\))", r"if !(\1)"),
]


def code_lines(path):
    """The lines that are code, with their numbers."""
    for number, line in enumerate(path.read_text().splitlines()):
        if line.strip().startswith("#[cfg(test)]"):
            return
        if line.strip() and not line.strip().startswith(("//", "use ", "pub use", "mod ", "#")):
            yield number, line


def sites():
    """(rule, file, line number, the line with the bug), by rule."""
    by_rule = {}
    for path in sorted(SOURCES.glob("*.rs")):
        if path.name in NOT_OURS:
            continue
        for number, line in code_lines(path):
            for name, pattern, put in RULES:
                if pattern == STREAM and path.name != "launch.rs":
                    continue
                for match in re.finditer(pattern, line):
                    text = match.expand(put) if isinstance(put, str) else put(match)
                    changed = line[: match.start()] + text + line[match.end() :]
                    if changed != line and (site := (name, path.name, number, changed)) not in by_rule.get(name, []):
                        by_rule.setdefault(name, []).append(site)
    return by_rule


def drawn():
    """Every site, in the order of the draw."""
    left, draw = sites(), random.Random(SEED)
    while left:
        name = draw.choice(sorted(left))
        yield left[name].pop(draw.randrange(len(left[name])))
        if not left[name]:
            del left[name]


def explained():
    """The bugs of rust_bugs.txt: `file: the changed line` and, indented below, why nothing can see it."""
    lines = (HERE / "rust_bugs.txt").read_text().splitlines()
    return {line for line in lines if line and not line.startswith((" ", "#"))}


def tree():
    """A copy of the checkout, so that a run cut short leaves no bug behind; of the program, what the tests need."""
    copy = Path(os.environ["CARGO_TARGET_DIR"]) / "bugs"
    listed = subprocess.run(["git", "ls-files", "-z"], cwd=ROOT, capture_output=True, text=True, check=True).stdout
    files = set(filter(None, listed.split("\0")))
    # What an earlier checkout had and this one has not would be compiled too.
    for path in [path for path in copy.rglob("*") if path.is_file()]:
        if str(path.relative_to(copy)) not in files:
            path.unlink()
    for name in files:
        to = copy / name
        if not (ROOT / name).is_file():
            continue
        text = STAND_INS[name].encode() if name in STAND_INS else (ROOT / name).read_bytes()
        if not to.exists() or to.read_bytes() != text:
            to.parent.mkdir(parents=True, exist_ok=True)
            to.write_bytes(text)
    return copy


def build(copy):
    """The test programs of the library and of the checks, or None when the compiler refuses."""
    command = ["cargo", "test", "--no-run", "--quiet", "--profile", "emulated", "--features", "cuda", "--lib", "--example", "gpu_check", "--message-format", "json"]
    done = subprocess.run(command, cwd=copy, capture_output=True, text=True)
    programs = re.findall(r'"executable":"([^"]+)"', done.stdout)
    return sorted(programs, key=lambda path: "gpu_check" in path) if done.returncode == 0 and len(programs) == 2 else None


def complaint(program, tests, mode):
    """The first word against a bug, or None. What comes after it is not waited for."""
    command = [program, tests, "--test-threads", "1", "--nocapture"]
    running = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, errors="replace", env={**os.environ, "CUDA_EMULATOR": mode})
    end = threading.Timer(RUN_SECONDS_MAX, running.kill)
    end.start()
    seen, panicked = None, False
    for line in running.stdout:
        # A panic's words are on the line below its place.
        found = re.search(r"cuda-emulator: (?!leaked at exit: the module)(.*)|\*\*FAILED\*\* \| (.*)", line)
        if panicked or found:
            seen = next(filter(None, found.groups()), "") if found else line.strip()
            running.kill()
            break
        panicked = "panicked at" in line
    running.stdout.close()
    code = running.wait()
    late = not end.is_alive()
    end.cancel()
    if seen is None and code:
        seen = f"no end within {RUN_SECONDS_MAX} s" if late else f"status {code}"
    return seen


def caught(programs):
    """What notices the bug, or None. The quick tests come first."""
    for program, mode in itertools.product(programs, ("late", "at-once")):
        if seen := complaint(program, "on_device::", mode):
            return f"{mode}: {seen[:100]}"
    return None


def main():
    if sys.argv[1:] == ["--list"]:
        for name, file, number, line in drawn():
            print(f"{name}: {file}:{number + 1}: {line.strip()}")
        return 0
    count = int(sys.argv[1]) if len(sys.argv) > 1 else COUNT
    copy, reasons, start = tree(), explained(), time.monotonic()
    programs = build(copy)
    if not programs or (seen := caught(programs)):
        sys.exit(f"the sources without a bug do not pass: {seen if programs else 'they do not compile'}")
    tried, survivors, unexplained, last = 0, 0, 0, time.monotonic()
    for name, file, number, line in drawn():
        if tried == count:
            break
        path = copy / "src" / "ops" / "cuda" / file
        lines = path.read_text().splitlines(keepends=True)
        right, lines[number] = lines[number], line + "\n"
        path.write_text("".join(lines))
        programs, built = build(copy), time.monotonic()
        seen = caught(programs) if programs else None
        lines[number] = right
        path.write_text("".join(lines))
        if not programs:
            continue
        tried += 1
        known = f"{file}: {line.strip()}" in reasons
        if not seen:
            survivors += 1
            unexplained += not known
        verdict = seen or ("survives, as explained" if known else "NOT CAUGHT")
        print(f"  {name}: {file}:{number + 1}: {line.strip()[:90]}\n      {verdict} ({built - last:.0f} s to build, {time.monotonic() - built:.0f} to run)", flush=True)
        last = time.monotonic()
    print(f"{tried - survivors} of {tried} bugs in src/ops/cuda caught, {survivors} explained but for {unexplained}, in {time.monotonic() - start:.0f} s")
    return int(tried < count or unexplained > 0 or survivors * 100 > tried * SURVIVORS_PERCENT)


sys.exit(main())
