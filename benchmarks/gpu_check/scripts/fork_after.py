"""Imports something, forks, and computes in the child: ``python fork_after.py STATEMENTS DEVICE``.

Prints whether the child can use the device, and the device files that the statements have opened.
"""

from __future__ import annotations

import os
import sys

import torch


def list_open_files() -> set[str]:
    """Return the paths of all open files."""
    paths = (f"/proc/self/fd/{number}" for number in os.listdir("/proc/self/fd"))
    return {os.readlink(path) for path in paths if os.path.exists(path)}


statements, device = sys.argv[1:]
before = list_open_files()
exec(statements)
pid = os.fork()
if pid == 0:
    try:
        torch.zeros(1, device=device)
        word = "works"
    except Exception as error:
        word = str(error).splitlines()[0][:120]
    print("CHILD", torch.cuda._is_in_bad_fork(), word, flush=True)
    os._exit(0)
os.waitpid(pid, 0)
opened = sorted(path for path in list_open_files() - before if path.startswith("/dev/"))
print("OPENED", opened, "INIT", torch.cuda.is_initialized())
