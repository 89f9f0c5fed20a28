"""Runs plain scripts as ``smp-estimator verify --plain`` does, with ranks forked from this process: they need not import PyTorch.

``python plain_forks.py FOLDER SCRIPT …`` writes the records of each script into a folder with the script's name.
"""

from __future__ import annotations

import contextlib
import importlib
import os
import signal
import socket
import sys
import time
import traceback
from pathlib import Path

from smp_records.numerics import TRIAL_VARIABLE, VARIABLE, Trial
from smp_tools.numerics.plain.run import PlainRun

#: What ranks would import one by one.
for _name in ("torch._dynamo", "torch.distributed.fsdp"):
    importlib.import_module(_name)

STEPS, RANKS = 4, 2
#: Seconds for the ranks of a script.
DEADLINE = 200.0


def _run_rank(rank: int, world: int, port: int, record: Path, trial: Trial, script: Path) -> None:
    """Become a rank; this process ends here."""
    code = 1
    try:
        with record.with_name(f"{record.name}-{rank}.log").open("w") as log:
            os.dup2(log.fileno(), 1)
            os.dup2(log.fileno(), 2)
            os.environ |= {
                "RANK": str(rank),
                "LOCAL_RANK": str(rank),
                "WORLD_SIZE": str(world),
                "MASTER_ADDR": "127.0.0.1",
                "MASTER_PORT": str(port),
                VARIABLE: str(record),
                TRIAL_VARIABLE: trial.to_text(),
            }
            try:
                PlainRun(os.environ).run(str(script), [], "get_batch" if "get_batch" in script.stem else "")
                code = 0
            except SystemExit as ended:
                code = int(ended.code or 0)
            except BaseException:
                traceback.print_exc()
    finally:
        os._exit(code)


def _run(name: str, world: int, folder: Path, trial: Trial, script: Path) -> list[int]:
    """Run all ranks, and return their exit codes; when the deadline is over, they are killed."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    alive = {}
    for rank in range(world):
        pid = os.fork()
        if not pid:
            _run_rank(rank, world, port, folder / name, trial, script)
        alive[pid] = rank
    codes, end = [-1] * world, time.monotonic() + DEADLINE
    while alive and time.monotonic() < end and not any(code > 0 for code in codes):
        pid, status = os.waitpid(-1, os.WNOHANG)
        if pid:
            codes[alive.pop(pid)] = os.waitstatus_to_exitcode(status)
        else:
            time.sleep(0.02)
    for pid in alive:
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)
        os.waitpid(pid, 0)
    return codes


def main(folder: Path, scripts: list[Path]) -> None:
    for script in scripts:
        place = folder / script.stem
        place.mkdir(parents=True)
        batches = str(place / "batches")
        codes = _run("ranks", RANKS, place, Trial(STEPS, save=batches), script)
        if not any(codes):
            codes = _run("one-process", 1, place, Trial(STEPS, replay=batches), script)
        print(script.stem, codes, flush=True)


if __name__ == "__main__":
    main(Path(sys.argv[1]), [Path(word) for word in sys.argv[2:]])
