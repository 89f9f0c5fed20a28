"""The program of every login of the leader to a worker: ``python -m smp_launch.remote.login PID HOST STATUS_DIR``.

It passes on the environment of this host's own launcher, read from the running process, to mpirun's daemon and so to
the ranks. So nothing has to be written to a file or sent over the network for that, credentials least of all.
"""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Sequence
from pathlib import Path

from smp_config import recovery
from smp_launch.machine.locked_folders import LeaderStatus, StatusDir
from smp_launch.mpirun.command import as_root, without_scheduler
from smp_launch.sagemaker.environment import HOST_VARIABLE
from smp_launch.watch.other_hosts import RECORDS, answer
from smp_records.rank_record import FOLDER_VARIABLE

#: The request of the leader to be followed: its standard input stays open until it ends.
FOLLOW = "smp-launch-follow"

#: The answer once this host follows.
READY = "ready"


def main(arguments: Sequence[str]) -> int:
    """Serve one login; the launcher's process id, this host's name and the folder of the leader's status are given.

    Returns:
        The exit code, for :data:`FOLLOW`; any other request replaces this process.
    """
    pid, host, status_dir = arguments
    wanted = os.environ.get("SSH_ORIGINAL_COMMAND", "")
    if wanted == FOLLOW:
        return follow(StatusDir(Path(status_dir)))
    if not wanted:
        print("there is no shell to log in to on a host of a running job", file=sys.stderr)
        return 1
    os.chdir("/")
    environ = without_scheduler(as_root(environment_of(int(pid))))
    own = {HOST_VARIABLE: host}
    records = records_of(status_dir)
    if records.is_dir():
        own[FOLDER_VARIABLE] = str(records)
    memory = memory_of(status_dir)
    if memory.is_symlink():
        own[recovery.FOLDER_VARIABLE] = os.readlink(memory)
    os.execve("/bin/bash", ["bash", "-c", wanted], {**environ, **own})


def records_of(status_dir: str) -> Path:
    """Return the folder of this host's rank records, which exists if the ranks are watched."""
    return Path(status_dir).with_name(RECORDS)


def memory_of(status_dir: str) -> Path:
    """Return a link to the folder in shared memory for the state of this host's ranks, if they keep it."""
    return Path(status_dir).with_name("memory")


def follow(status_dir: StatusDir) -> int:
    """Be the leader's stand-in on this host for as long as it lives.

    The leader asks, line by line, where the ranks of this host are. Its last message reports how it ended.
    """
    words = ""
    with status_dir.leading():
        print(READY, flush=True)
        for line in sys.stdin:
            answered = answer(line.strip(), records_of(str(status_dir.path)))
            if answered is None:
                words += line
            else:
                print(answered, flush=True)
        if words:
            status_dir.publish(LeaderStatus(**json.loads(words)))
    return 0


def environment_of(pid: int) -> dict[str, str]:
    """Return the environment that a process was started with."""
    entries = Path(f"/proc/{pid}/environ").read_bytes().split(b"\0")
    pairs = (entry.decode("utf-8", "surrogateescape").partition("=") for entry in entries if b"=" in entry)
    return {name: value for name, _, value in pairs}


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
