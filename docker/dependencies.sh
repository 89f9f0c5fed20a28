#!/usr/bin/env bash
# Runs while the image is built: installs what the project depends on, and keeps what the base has already.
# From the wheels in WHEELS when there are any; else from the package index, and then with a compiler for the toolkit
# where the base has none, because the toolkit is published as source.
# Usage: docker/dependencies.sh WHEELS TOOLKIT REQUIREMENT...
set -euo pipefail

wheels=$1
toolkit=$2
shift 2
wanted=("$@")

export PIP_BREAK_SYSTEM_PACKAGES=1 PIP_ROOT_USER_ACTION=ignore PIP_DISABLE_PIP_VERSION_CHECK=1
pip=(python3 -m pip install --no-cache-dir)

python3 -c 'import torch' 2>/dev/null || wanted+=("torch>=2.4")
compiler=(gcc libc6-dev python3-dev)
if python3 -c 'import sagemaker_training' 2>/dev/null || command -v gcc >/dev/null; then
    compiler=()
fi
python3 -c 'import sagemaker_training' 2>/dev/null || wanted+=("$toolkit")

if compgen -G "$wheels/*.whl" >/dev/null; then
    "${pip[@]}" --no-index --find-links "$wheels" "${wanted[@]}"
elif [ "${#compiler[@]}" -eq 0 ]; then
    "${pip[@]}" "${wanted[@]}"
else
    apt-get update
    DEBIAN_FRONTEND=noninteractive apt-get install --yes --no-install-recommends "${compiler[@]}"
    "${pip[@]}" "${wanted[@]}"
    apt-get purge --yes --auto-remove "${compiler[@]}"
    rm -rf /var/lib/apt/lists/* /var/cache/apt/* /var/log/apt /var/log/dpkg.log
fi
