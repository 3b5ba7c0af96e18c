#!/usr/bin/env python3
"""Collects the licence files of every crate and of Rust's standard library, for a release archive or an image.

    scripts/licences.py FOLDER [FEATURES]      FOLDER is made; a file is named CRATE-VERSION.FILE

A crate that ships no licence file is listed in FOLDER/without-a-file.txt with its licence and authors.
"""

import json
import shutil
import subprocess
import sys
from pathlib import Path

STEMS = ("LICENSE", "LICENCE", "COPYING", "COPYRIGHT", "NOTICE", "UNLICENSE")


def output(*command):
    return subprocess.run(command, check=True, stdout=subprocess.PIPE, text=True).stdout


def copy(files, folder, name):
    """Copies `files` under `name` and returns their number. Sources of C libraries may hold files of one name."""
    for file in files:
        place = folder / f"{name}.{file.name}"
        if place.exists():
            place = folder / f"{name}.{file.parent.name}.{file.name}"
        shutil.copyfile(file, place)
    return len(files)


def licence_files(crate):
    files = [file for file in crate.rglob("*") if file.name.upper().startswith(STEMS) and file.suffix != ".rs"]
    return sorted(file for file in files if file.is_file())


def main(folder, features=""):
    folder = Path(folder)
    folder.mkdir(parents=True, exist_ok=True)
    target = next(line.split()[1] for line in output("rustc", "-vV").splitlines() if line.startswith("host: "))
    metadata = ["cargo", "metadata", "--format-version", "1", "--locked", "--filter-platform", target]
    packages = json.loads(output(*metadata, *(["--features", features] if features else [])))["packages"]
    missing = []
    for package in packages:
        if package["source"] is None:
            continue
        name = "{name}-{version}".format(**package)
        if not copy(licence_files(Path(package["manifest_path"]).parent), folder, name):
            licence = package["license"] or package["license_file"] or sys.exit(f"{name} names no licence")
            missing.append(f"{name}: {licence}; {', '.join(package['authors'])}\n")
    library = Path(output("rustc", "--print", "sysroot").strip(), "share", "doc", "rust", "COPYRIGHT-library.html")
    # A toolchain may come without its documentation.
    if not copy([library] if library.is_file() else [], folder, "rust"):
        missing.append("Rust's standard library: MIT OR Apache-2.0; The Rust Project Developers\n")
    (folder / "without-a-file.txt").write_text("".join(sorted(missing)), encoding="utf-8")
    print(f"licences of {len(packages) - 1} crates in {folder}, {len(missing)} of them by name alone")


if __name__ == "__main__":
    if len(sys.argv) not in (2, 3):
        sys.exit(__doc__)
    main(*sys.argv[1:])
