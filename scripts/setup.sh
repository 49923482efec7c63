#!/usr/bin/env bash
# Create the virtual environment and the patched upstream trees. Safe to run again and to run
# twice at once: a lock is held while packages install, and finished work is not repeated.
#
# Environment: PYTHON (interpreter, default python3.11), VENV (folder, default .venv).
# Exit codes: 0 done, 2 unusable interpreter, else the failing installer's code.
set -euo pipefail
cd "$(dirname "$0")/.."
PYTHON=${PYTHON:-python3.11}
VENV=${VENV:-.venv}

if ! command -v "$PYTHON" >/dev/null; then
    echo "setup: $PYTHON is not on PATH; Python 3.11 or 3.12 is required" >&2
    echo "hint: make setup PYTHON=/path/to/python3.11" >&2
    exit 2
fi

exec 9>".setup.lock"
flock 9

tag=$({ "$PYTHON" --version; cat scripts/requirements.lock; } | sha256sum | cut -c1-16)
stamp="$VENV/.setup-$tag"
if [ ! -e "$stamp" ]; then
    [ -x "$VENV/bin/python" ] || "$PYTHON" -m venv "$VENV"
    pip() { "$VENV/bin/python" -m pip --disable-pip-version-check install --quiet "$@"; }
    echo "setup: installing torch and $(grep -c == scripts/requirements.lock) pinned packages" >&2
    # The patch verbs need few packages; the upstreams are fetched and patched while the rest installs.
    pip --constraint scripts/requirements.lock --editable .
    "$VENV/bin/samebits" patch apply >&2 &
    patching=$!
    # torch with its dependencies: on Python 3.12 its build brings CUDA libraries.
    pip "$(grep '^torch==' scripts/requirements.lock)"
    pip --no-deps -r scripts/requirements.lock
    wait "$patching"
    touch "$stamp"
fi

"$VENV/bin/samebits" patch apply >/dev/null
