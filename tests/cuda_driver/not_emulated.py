#!/usr/bin/env python3
"""not_emulated.py CUDARC MODULE OBJECT...: C for every function that cudarc may link of a library and that no OBJECT has.

Each says its name and fails. MODULE is one of cudarc's: driver, cublas, cublaslt, curand, nvrtc, nccl."""

import re
import subprocess
import sys
from pathlib import Path

cudarc, module, *objects = sys.argv[1:]
listing = subprocess.run(["nm", "--defined-only", *objects], capture_output=True, text=True, check=True).stdout if objects else ""
there = set(re.findall(r" T (\w+)$", listing, re.M))
source = (Path(cudarc) / "src" / module / "sys" / "mod.rs").read_text()
names = set(re.findall(r"\bpub (?:unsafe )?fn ((?:cu|nvrtc|nccl)\w+)", source)) - there
assert len(names) + len(there) > 15, f"{source[:80]}: no functions found"
print("int cuda_driver_not_emulated(const char* name);")
for name in sorted(names):
    print(f'int {name}(void) {{ return cuda_driver_not_emulated("{name}"); }}')
