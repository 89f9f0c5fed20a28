#!/usr/bin/env bash
# Builds the training image with BuildKit, which mounts the wheels instead of copying them into a layer.
# Usage: docker/build.sh IMAGE BASE_IMAGE    (BUILD_OPTIONS: further options of docker build, such as --no-cache)
set -euo pipefail
cd "$(dirname "$0")/.."

image=${1:?usage: docker/build.sh IMAGE BASE_IMAGE}
base=${2:?usage: docker/build.sh IMAGE BASE_IMAGE}

# A client before 23 speaks to BuildKit by itself; a later one needs its buildx plug-in.
client=
while read -r found; do
    if "$found" buildx version >/dev/null 2>&1; then
        client=$found
        break
    fi
    major=$("$found" version --format '{{.Client.Version}}' 2>/dev/null | cut -d. -f1 || true)
    if [ "${major:-99}" -lt 23 ]; then
        client=$found
        break
    fi
done < <(type -ap docker)
if [ -z "$client" ]; then
    echo "docker/build.sh: no Docker client with BuildKit: install docker-buildx-plugin, or Debian's docker.io" >&2
    exit 1
fi

version=$(sed -n 's/^__version__ = "\(.*\)"$/\1/p' container/smp_config/version.py)
commit=$(git describe --always --dirty --abbrev=12 2>/dev/null || echo unknown)
mkdir -p build/wheels build/project
read -r -a options <<<"${BUILD_OPTIONS:-}"
DOCKER_BUILDKIT=1 "$client" build \
    --build-arg BASE_IMAGE="$base" \
    --build-arg VERSION="$version" \
    --build-arg COMMIT="$commit" \
    --tag "$image" \
    "${options[@]}" \
    .
docker image inspect --format "built $image ({{.Size}} bytes)" "$image"
