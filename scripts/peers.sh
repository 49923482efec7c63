#!/usr/bin/env bash
# Fill a folder with what benchmarks of Gated DeltaNet are compared with (scripts/peers.lock), for the
# PYTHONPATH of a GPU host, which may have no network: flash-linear-attention, FlashQLA, and the
# compiler that FlashQLA's kernels take, from its wheels. About 700 MB.
#
#   scripts/peers.sh DIR [PYTHON VERSION OF THE HOST, 3.12 by default]
#
# It never goes into an environment in which models run: other packages change what they do when they
# find flash-linear-attention. Exit codes: 0 done, 2 bad input, else the failing installer's code.
set -euo pipefail
LOCK=$(cd "$(dirname "$0")" && pwd)/peers.lock

if [ $# -lt 1 ] || [ $# -gt 2 ]; then
    echo "usage: scripts/peers.sh DIR [3.12]" >&2
    exit 2
fi
case $1 in -*) echo "peers: DIR is a folder, not $1" >&2; exit 2 ;; esac
DIR=$1
VERSION=${2:-3.12}
MARK=$(cat "$LOCK" <(echo "$VERSION") | sha256sum | cut -c1-16)

if [ -e "$DIR" ] && [ "$(cat "$DIR/.peers" 2>/dev/null)" != "$MARK" ]; then
    echo "peers: $DIR exists and holds something else, or was not finished" >&2
    echo "hint: rm -r $DIR, or name another folder" >&2
    exit 2
fi
if [ ! -e "$DIR" ]; then
    "${PYTHON:-python3.11}" -m pip --disable-pip-version-check install --quiet --no-compile --no-deps \
        --target "$DIR" --only-binary :all: --implementation cp --python-version "$VERSION" \
        --platform manylinux_2_28_x86_64 --platform manylinux_2_17_x86_64 \
        --platform manylinux2014_x86_64 --platform linux_x86_64 --requirement "$LOCK"
    echo "$MARK" >"$DIR/.peers"
fi
DIR=$(cd "$DIR" && pwd)
echo "export PYTHONPATH=\$PWD:$DIR CUDA_HOME=$DIR/nvidia/cu13 PATH=$DIR/nvidia/cu13/bin:\$PATH"
echo "python -m samebits.bench.gpu --only gdn --out bench.json  # and gdn-train, gdn-layer"
