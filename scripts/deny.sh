#!/usr/bin/env bash
# Checks the dependencies by the rules of deny.toml: duplicates, licences, sources, and advisories where their
# database can be reached. Needs `cargo install --locked cargo-deny`.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."

cargo deny --locked check -D unmatched-skip bans licenses sources
database=https://github.com/RustSec/advisory-db
if timeout 20 git ls-remote --exit-code "$database" HEAD >/dev/null 2>&1; then
    cargo deny --locked check advisories
else
    echo "advisories: not checked, because $database cannot be reached"
fi
