"""Stands in for SLURM's ``srun``: starts the tasks of a step with the variables that its manual gives to them.

Of its options it knows those that the recipes use. An allocation is described in ``FAKE_SLURM``, as JSON: ``hosts``, their
names; ``tasks_per_host``; and ``enter``, by host, the words that bring a command there. Addresses of this machine need none.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path

VARIABLE = "FAKE_SLURM"
JOB = 4711


def install(folder: Path) -> None:
    """Put an ``srun`` into a folder."""
    program = folder / "srun"
    program.write_text(f"#!{sys.executable}\n{Path(__file__).read_text()}")
    program.chmod(0o755)


def allocation(
    folder: Path, hosts: Sequence[str], tasks_per_host: int = 1, enter: Mapping[str, Sequence[str]] | None = None
) -> dict[str, str]:
    """The environment of a batch script, with an ``srun`` in its path."""
    described = {"hosts": list(hosts), "tasks_per_host": tasks_per_host, "enter": {**(enter or {})}}
    return {
        "PATH": f"{folder}{os.pathsep}{os.environ['PATH']}",
        VARIABLE: json.dumps(described),
        "SLURM_JOB_ID": str(JOB),
        "SLURM_JOB_NODELIST": ",".join(hosts),
        "SLURM_NNODES": str(len(hosts)),
        "SLURM_NTASKS": str(len(hosts) * tasks_per_host),
        # A batch script is task 0 of a step of its own, without a number of tasks.
        "SLURM_PROCID": "0",
    }


def main(words: list[str]) -> int:
    """Start the tasks; gives the greatest exit code, as srun does."""
    described = json.loads(os.environ[VARIABLE])
    hosts, per_host, ends_all = described["hosts"], described["tasks_per_host"], False
    while words and words[0].startswith("-"):
        option, _, value = words.pop(0).partition("=")
        if option == "--ntasks-per-node":
            per_host = int(value)
        elif option == "--kill-on-bad-exit":
            ends_all = value == "1"
        else:
            raise SystemExit(f"srun: this stand-in does not know {option}")
    tasks: dict[int, subprocess.Popen[bytes]] = {}
    for number in range(len(hosts) * per_host):
        host = hosts[number // per_host]
        of_step = {
            "SLURM_STEP_ID": "0",
            "SLURM_STEP_NODELIST": ",".join(hosts),
            "SLURM_STEP_NUM_NODES": str(len(hosts)),
            "SLURM_STEP_NUM_TASKS": str(len(hosts) * per_host),
            "SLURM_STEP_TASKS_PER_NODE": f"{per_host}(x{len(hosts)})",
            "SLURM_NTASKS": str(len(hosts) * per_host),
            "SLURM_PROCID": str(number),
            "SLURM_LOCALID": str(number % per_host),
            "SLURM_NODEID": str(number // per_host),
            "SLURMD_NODENAME": host,
        }
        task = subprocess.Popen([*described["enter"].get(host, []), *words], env={**os.environ, **of_step})
        tasks[task.pid] = task

    def pass_on(number: int, frame: object) -> None:
        for pid in tasks:  # not by Popen, which would collect the ended ones
            os.kill(pid, number)

    signal.signal(signal.SIGTERM, pass_on)
    signal.signal(signal.SIGALRM, lambda number, frame: pass_on(signal.SIGKILL, frame))
    worst = 0
    while tasks:
        pid, status = os.wait()
        task = tasks.pop(pid)
        task.returncode = code = os.waitstatus_to_exitcode(status)
        worst = max(worst, code if code >= 0 else 128 - code)
        if code and ends_all:
            pass_on(signal.SIGTERM, None)
            signal.setitimer(signal.ITIMER_REAL, 5.0)
    return worst


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
