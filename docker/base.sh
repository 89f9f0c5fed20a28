#!/usr/bin/env bash
# Builds a base image without any registry: Debian by debootstrap, imported under the given name.
# Usage: docker/base.sh NAME:TAG    (root, Debian's archive reachable; about 40 s; does nothing when the image exists)
set -euo pipefail

name=${1:?usage: docker/base.sh NAME:TAG}
suite=${SUITE:-bookworm}

if docker image inspect "$name" >/dev/null 2>&1; then
    exit 0
fi
for program in docker debootstrap; do
    if ! command -v "$program" >/dev/null; then
        echo "docker/base.sh: $program is missing; install it with: apt-get install docker.io debootstrap" >&2
        exit 1
    fi
done
if [ "$(id -u)" -ne 0 ]; then
    echo "docker/base.sh: debootstrap needs root; run as root, or give make image a BASE_IMAGE that exists" >&2
    exit 1
fi

root=$(mktemp -d)
trap 'rm -rf --one-file-system "$root"' EXIT
debootstrap --variant=minbase --include=ca-certificates "$suite" "$root" >"$root.log" 2>&1 || {
    tail -n 20 "$root.log" >&2
    rm -f "$root.log"
    exit 1
}
# Package lists and archives are fetched again by whoever needs them.
rm -rf "$root.log" "$root"/var/lib/apt/lists/* "$root"/var/cache/apt/archives/*.deb "$root"/var/log/*.log
tar --directory "$root" --create . | docker import --change 'CMD ["/bin/bash"]' - "$name" >/dev/null
echo "built $name from Debian $suite"
