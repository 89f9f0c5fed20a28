"""A replacement of mpirun for ranks of one host that need no MPI: ``… smp_launch.anywhere.local_ranks 4 -- program…``.

Each program is started with the number of its rank on this host as first argument. SIGUSR2 reaches all of them. The
first that fails ends the others. Its exit code is that of this process; for a signal it is 128 and the signal's number,
as a shell has it. The module imports nothing of weight: it only waits.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import signal
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

from smp_launch.machine.output import ENDED_PREFIX
from smp_launch.machine.rank_pipes import REPORT_VARIABLE, write_to

#: Seconds from SIGTERM to SIGKILL for ranks that outlive a failed one: they use them to report that a rank is gone.
_PATIENCE = 2.5

#: Stands for a rank's number among the words of the program.
LOCAL_RANK = "{}"

#: Of prctl (linux/prctl.h).
_PR_SET_PDEATHSIG = 1


def main(arguments: Sequence[str]) -> int:
    """Run the ranks to their end.

    Args:
        arguments: the number of ranks, ``--``, the program and its arguments. The first of them that is :data:`LOCAL_RANK`
            becomes the rank's number; later ones are the user's.

    Returns:
        0 if all ranks ended with 0, else the exit code of the first that failed.
    """
    number, _, *program = arguments
    pipes = Path(os.environ.get(REPORT_VARIABLE, os.devnull))
    _end_with_parent()
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)  # if it is ignored, os.wait() cannot return how a child ended
    alive: dict[int, int] = {}

    def pass_on(sent: int) -> None:
        for pid in list(alive):
            # A handler may run between os.wait() below and the removal of the process.
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, sent)

    def end(number: int, frame: object) -> None:
        pass_on(signal.SIGKILL)

    # Before the first rank is there, which inherits nothing of it: handlers go with the new program.
    for sent in (signal.SIGUSR2, signal.SIGTERM):
        signal.signal(sent, lambda number, frame: pass_on(number))
    signal.signal(signal.SIGALRM, end)
    for local in range(int(number)):
        words = _words_of(program, local)
        output, errors = write_to(pipes, local) or (None, None)
        process = subprocess.Popen(words, stdin=subprocess.DEVNULL, stdout=output, stderr=errors)
        process.returncode = 0  # collected below, in the order in which they end
        alive[process.pid] = local
        # The launcher sees the end of a rank's output only when no other process has the pipe open.
        for descriptor in (output, errors):
            if descriptor is not None:
                os.close(descriptor)
    first = 0
    while alive:
        pid, status = os.wait()
        local = alive.pop(pid, -1)
        code = os.waitstatus_to_exitcode(status)
        if code and not first:
            first = code
            with contextlib.suppress(OSError):
                os.write(2, f"{ENDED_PREFIX}{local} {code}\n".encode())
            pass_on(signal.SIGTERM)
            signal.setitimer(signal.ITIMER_REAL, _PATIENCE)
    return first if first >= 0 else 128 - first


def _words_of(program: Sequence[str], local: int) -> list[str]:
    """Return the words of a rank's program: the first :data:`LOCAL_RANK` becomes its number."""
    words = list(program)
    if LOCAL_RANK in words:
        words[words.index(LOCAL_RANK)] = str(local)
    return words


def _end_with_parent() -> None:
    """Let the system send SIGTERM to this process if the launcher is killed.

    SIGTERM reaches the ranks too. Without it they would never end.
    """
    with contextlib.suppress(OSError, AttributeError):  # not on this system
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGTERM, 0, 0, 0)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
