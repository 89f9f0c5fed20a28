#!/usr/bin/env bash
# Collects what the image installs, so that building it needs no package index and no compiler:
#   build/wheels/   what the project and the training toolkit depend on, with the versions of constraints/cpu.txt
#   build/project/  this project's own wheel, alone, because it changes most often
# Usage: docker/wheelhouse.sh PYTHON [only-project]
#   PYTHON        has the version of the image's Python (3.11 in Debian bookworm) and pip
#   only-project  for a base that has torch: everything else comes from the package index during the build
set -euo pipefail
cd "$(dirname "$0")/.."

python=${1:?usage: docker/wheelhouse.sh PYTHON [only-project]}
wanted=${IMAGE_PYTHON:-3.11}
TOOLKIT=${TOOLKIT:-sagemaker-training==5.1.4}
pip=("$python" -m pip --disable-pip-version-check --quiet)

mkdir -p build/wheels build/project
# What an earlier build left there would go into the wheel, also what has been deleted since.
rm -rf build/project/*.whl build/lib build/bdist.*
"${pip[@]}" wheel --no-deps --wheel-dir build/project .
if [ "${2:-}" = only-project ]; then
    # The toolkit is published as source with a C extension; a wheel spares the image a compiler.
    rm -f build/wheels/*.whl
    exit 0
fi

has=$("$python" -c 'import sys; print("%d.%d" % sys.version_info[:2])')
if [ "$has" != "$wanted" ]; then
    echo "docker/wheelhouse.sh: $python is Python $has, but the image has Python $wanted and wheels fit one version only;" \
        "run make image PYTHON=python$wanted" >&2
    exit 1
fi
stamp=$(cat setup.cfg constraints/cpu.txt "$0" | sha256sum | cut -c1-16)
if [ -e "build/wheels/.$stamp" ]; then
    exit 0
fi
rm -rf build/wheels
mkdir -p build/wheels
"${pip[@]}" wheel --constraint constraints/cpu.txt --wheel-dir build/wheels \
    "smp-estimator[runtime,checksums] @ file://$PWD" "$TOOLKIT"
rm -f build/wheels/smp_estimator-*.whl
touch "build/wheels/.$stamp"
