#!/usr/bin/env bash
# Write the pinned requirement files anew. Arguments go to `uv pip compile`, for example --upgrade.
set -euo pipefail
cd "$(dirname "$0")/.."
source scripts/common.sh

uv_into_cache
compile() { # OUTPUT INPUT... [OPTION...]
    local output=$1
    shift
    "$UV" pip compile --quiet --universal --python-version 3.11 --generate-hashes --no-emit-index-url \
        --custom-compile-command "make lock" --output-file "requirements/$output" "$@"
}
compile uv.txt requirements/uv.in "$@"
compile go.txt requirements/go.in "$@"
compile runtime.txt pyproject.toml --constraint requirements/constraints.txt "$@"
compile dev.txt pyproject.toml requirements/dev.in --all-extras --constraint requirements/runtime.txt "$@"
