#!/usr/bin/env bash
# Create the virtual environment and the patched upstream trees. Safe to run again and to run
# twice at once: a lock is held while packages install, and finished work is not repeated.
#
# Environment: PYTHON (interpreter, default python3.11), VENV (folder, default .venv), GPU (1: torch as
# vLLM's release was built against it, and that release's compiled extensions in the patched tree).
# Exit codes: 0 done, 2 unusable interpreter, else the failing installer's code.
set -euo pipefail
cd "$(dirname "$0")/.."
PYTHON=${PYTHON:-python3.11}
VENV=${VENV:-.venv}
LOCK=scripts/requirements.lock
GPU=${GPU:-}

if ! command -v "$PYTHON" >/dev/null; then
    echo "setup: $PYTHON is not on PATH; Python 3.11 or 3.12 is required" >&2
    echo "hint: make setup PYTHON=/path/to/python3.11" >&2
    exit 2
fi

say() { echo "setup: step $1 of 4, $((SECONDS / 60)):$(printf %02d $((SECONDS % 60))) so far: $2" >&2; }

# Modules are compiled when they are first imported: most of what is installed never is.
pip() { "$VENV/bin/python" -m pip --disable-pip-version-check install --quiet --no-compile "$@"; }

# Wait for every process named, then fail with the last failure, so that none outlives this script.
join() {
    local code=0 process
    for process in "$@"; do wait "$process" || code=$?; done
    return "$code"
}

exec 9>".setup.lock"
flock 9

TORCH=$(grep '^torch==' "$LOCK")
COMPILED=()
if [ -n "$GPU" ]; then
    TORCH=$(sed -n 's/^ *torch: \(2[.0-9]*\)[.][*].*/torch==\1.0/p' patches/compiled.yaml)
    COMPILED=(--compiled)
fi

tag=$({ "$PYTHON" --version; cat "$LOCK"; echo "$TORCH"; } | sha256sum | cut -c1-16)
stamp="$VENV/.setup-$tag"
if [ ! -e "$stamp" ]; then
    say 1 "virtual environment in $VENV"
    [ -x "$VENV/bin/python" ] || "$PYTHON" -m venv "$VENV"
    # The patch verbs need few packages; the upstreams are fetched and patched while the rest installs.
    say 2 "samebits and what its patch verbs need"
    pip --constraint "$LOCK" --editable .
    say 3 "torch; beside it, the upstreams are fetched and patched"
    "$VENV/bin/samebits" patch apply "${COMPILED[@]}" >&2 &
    patching=$!
    # With its dependencies: on Python 3.12 torch's build brings CUDA libraries. The lock comes after,
    # because its versions are the ones that count.
    pip "$TORCH" || { code=$?; wait "$patching" || true; exit "$code"; }
    say 4 "$(grep -c == "$LOCK") pinned packages"
    # Installing is mostly unpacking, on one core: two installers, each with every second package.
    mapfile -t packages < <(grep == "$LOCK" | grep -v '^torch==')
    halves=()
    for half in 0 1; do
        chosen=()
        for ((i = half; i < ${#packages[@]}; i += 2)); do chosen+=("${packages[i]}"); done
        pip --no-deps "${chosen[@]}" &
        halves+=($!)
    done
    join "$patching" "${halves[@]}"
    touch "$stamp"
fi

"$VENV/bin/samebits" patch apply "${COMPILED[@]}" >/dev/null
