#!/usr/bin/env bash
# Sees to it that a Docker daemon runs; where none does and we are root on Debian or Ubuntu, installs and starts one.
# Says in one line why not when it cannot. A daemon that it started is left running, its process id in PIDFILE.
# Usage: docker/daemon.sh [PIDFILE]
set -euo pipefail

pidfile=${1:-/run/docker.pid}
log=${TMPDIR:-/tmp}/dockerd.log

give_up() {
    echo "no Docker here: $*" >&2
    exit 1
}

answers() { docker info >/dev/null 2>&1; }

if ! answers; then
    [ "$(id -u)" -eq 0 ] || give_up "no daemon answers, and starting one needs root"
fi
missing=()
command -v dockerd >/dev/null || answers || missing+=(docker.io)
command -v docker-compose >/dev/null || docker compose version >/dev/null 2>&1 || missing+=(docker-compose)
command -v debootstrap >/dev/null || missing+=(debootstrap)
if [ "${#missing[@]}" -gt 0 ]; then
    [ "$(id -u)" -eq 0 ] || give_up "${missing[*]} must be installed by root"
    command -v apt-get >/dev/null || give_up "${missing[*]} missing, and no apt-get to install it with"
    { apt-get update -qq && DEBIAN_FRONTEND=noninteractive apt-get install -qq -y "${missing[@]}"; } >"$log" 2>&1 ||
        give_up "${missing[*]} cannot be installed: $(tail -n 1 "$log")"
fi
answers && exit 0

setsid dockerd --pidfile "$pidfile" >"$log" 2>&1 </dev/null &
started=$!
for ((tries = 0; tries < 300; tries++)); do
    answers && exit 0
    kill -0 "$started" 2>/dev/null || break
    sleep 0.1
done
give_up "the daemon did not start: $(grep -v 'level=info' "$log" | tail -n 1)"
