#!/usr/bin/env bash
# Makes a release archive: the stripped binary, the recipes, the docs, the scripts that the program names, and the licences of
# every crate in it.
#
#   scripts/package.sh [FEATURES]         dist/rloss-VERSION-TARGET.tar.gz; the binary's --version names the commit
#
# OUT names another folder than dist/.
set -euo pipefail
cd "$(dirname "$0")/.."
out=${OUT:-dist}
features=${1:-}

version=$(sed -n 's/^version = "\(.*\)"/\1/p' Cargo.toml | head -n 1)
target=$(rustc -vV | sed -n 's/^host: //p')
name=rloss-$version-$target
folder=$out/$name

if commit=$(git rev-parse --short HEAD 2>/dev/null); then
    [ -z "$(git status --porcelain 2>/dev/null)" ] || commit=$commit-changed
    export RLOSS_COMMIT=$commit
fi
cargo build --release --locked ${features:+--features "$features"}

rm -rf "$folder"
mkdir -p "$folder/licences" "$folder/scripts"
target_folder=$(cargo metadata --format-version 1 --no-deps | sed -n 's/.*"target_directory":"\([^"]*\)".*/\1/p')
cp "$target_folder/release/rloss" "$folder/rloss"
strip "$folder/rloss"
cp -r recipes docs README.md LICENSE "$folder/"
cp scripts/fetch_data.sh scripts/random_checkpoint.py "$folder/scripts/"

# Each dependency's own licence files, by crate and version; a crate without any is named with its licence's name.
cargo metadata --format-version 1 --locked ${features:+--features "$features"} --filter-platform "$target" |
    python3 -c '
import glob, json, os, shutil, sys
folder = sys.argv[1]
missing = []
for package in json.load(sys.stdin)["packages"]:
    if package["source"] is None:
        continue
    here = os.path.dirname(package["manifest_path"])
    files = [f for stem in ("LICEN[SC]E*", "COPYING*", "NOTICE*", "UNLICENSE*") for f in glob.glob(os.path.join(here, stem))]
    name = "{name}-{version}".format(**package)
    for file in filter(os.path.isfile, files):
        shutil.copy(file, os.path.join(folder, name + "." + os.path.basename(file)))
    if not files:
        missing.append("{}: {}".format(name, package["license"] or package["license_file"]))
with open(os.path.join(folder, "without-a-file.txt"), "w") as out:
    out.write("\n".join(sorted(missing)) + "\n")
' "$folder/licences"

tar -C "$out" -czf "$out/$name.tar.gz" "$name"
"$folder/rloss" --version
echo "$out/$name.tar.gz"
