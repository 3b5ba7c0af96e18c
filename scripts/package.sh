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
mkdir -p "$folder/scripts"
target_folder=$(cargo metadata --format-version 1 --no-deps | sed -n 's/.*"target_directory":"\([^"]*\)".*/\1/p')
cp "$target_folder/release/rloss" "$folder/rloss"
strip "$folder/rloss"
cp -r recipes docs README.md LICENSE "$folder/"
cp scripts/fetch_data.sh scripts/random_checkpoint.py "$folder/scripts/"

scripts/dependencies.py licences "$folder/licences" ${features:+"$features"}

tar -C "$out" -czf "$out/$name.tar.gz" "$name"
"$folder/rloss" --version
echo "$out/$name.tar.gz"
