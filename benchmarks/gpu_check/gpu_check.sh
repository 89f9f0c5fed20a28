#!/usr/bin/env bash
# Runs the checks on a machine with a GPU, in the repository's root: benchmarks/gpu_check/gpu_check.sh [options of drive]
# It needs Python with PyTorch there, and no network: `make gpu-wheels` fetches what else is missing into .gpu, which must be
# copied along. Prints one JSON line per finding, then a table.
# $OUT gets results.jsonl, failures.txt, logs.txt, head.txt (the machine) and pip.txt (its packages).
set -u
BEGIN=$(date +%s)
HERE=$(cd "$(dirname "${BASH_SOURCE[0]}")" && pwd)
ROOT=$(cd "$HERE/../.." && pwd)
TEMPORARY=${TMPDIR:-/tmp}
OUT=${OUT:-$TEMPORARY/gpu_check_out}
SITE=${SMPCHECK_SITE:-$TEMPORARY/smpcheck-site}
PYTHON=${SMPCHECK_PYTHON:-python3}
mkdir -p "$OUT"

# Beside the machine's own packages, which may be read-only, and once for all runs.
if ls "$ROOT"/.gpu/whl/*.whl > /dev/null 2>&1 && [ ! -e "$SITE/.complete" ]; then
    "$PYTHON" -m pip install --quiet --no-index --no-deps --no-compile --no-cache-dir --upgrade --target "$SITE" "$ROOT"/.gpu/whl/*.whl \
        && touch "$SITE/.complete" || echo '{"check": "wheels", "ok": false}'
fi

export OUT
export PYTHONPATH=$SITE:$ROOT/container:$ROOT${PYTHONPATH:+:$PYTHONPATH}
export PYTHONUNBUFFERED=1 TOKENIZERS_PARALLELISM=false HF_HUB_OFFLINE=1
export OMPI_ALLOW_RUN_AS_ROOT=1 OMPI_ALLOW_RUN_AS_ROOT_CONFIRM=1 PRTE_ALLOW_RUN_AS_ROOT=1 PRTE_ALLOW_RUN_AS_ROOT_CONFIRM=1
# Without a network no name can be looked up. torchrun asks for the name of each connection, and would wait for an answer.
export RES_OPTIONS="attempts:0"
export TORCHINDUCTOR_CACHE_DIR=$TEMPORARY/smpcheck-inductor

{
    date
    git -C "$ROOT" rev-parse HEAD
    nvidia-smi
    nvidia-smi topo -m
    ip -br a
} > "$OUT/head.txt" 2>&1
"$PYTHON" -m pip list --format=freeze > "$OUT/pip.txt" 2>&1 &
# The budget counts from the first line of this script.
"$PYTHON" "$HERE" drive --out "$OUT" --began "$BEGIN" "$@"
STATUS=$?
echo "whole: $(($(date +%s) - BEGIN)) s"
exit "$STATUS"
