#!/usr/bin/env python3
"""Collects the licence files of the dependencies, and checks the dependencies.

    scripts/dependencies.py licences FOLDER [FEATURES]   FOLDER is made; a file is named CRATE-VERSION.FILE
    scripts/dependencies.py check                        by deny.toml; needs `cargo install --locked cargo-deny`

`licences` collects those of every crate and of Rust's standard library, for a release archive or an image. A
crate that ships no licence file is listed in FOLDER/without-a-file.txt with its licence and authors.

`check` looks at duplicates, licences, sources, and advisories where their database can be reached.
"""

import json
import shutil
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
ADVISORIES = "https://github.com/RustSec/advisory-db"
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


def licences(folder, features=""):
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


def check():
    deny = ["cargo", "deny", "--locked", "check"]
    subprocess.run([*deny, "-D", "unmatched-skip", "bans", "licenses", "sources"], cwd=ROOT, check=True)
    try:
        asked = ["git", "ls-remote", "--exit-code", ADVISORIES, "HEAD"]
        subprocess.run(asked, check=True, timeout=20, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    except (subprocess.CalledProcessError, subprocess.TimeoutExpired):
        print(f"advisories: not checked, because {ADVISORIES} cannot be reached")
    else:
        subprocess.run([*deny, "advisories"], cwd=ROOT, check=True)


if __name__ == "__main__":
    match sys.argv[1:]:
        case ["licences", folder, *features] if len(features) < 2:
            licences(folder, *features)
        case ["check"]:
            try:
                check()
            except subprocess.CalledProcessError as error:
                sys.exit(error.returncode)
        case _:
            sys.exit(__doc__)
