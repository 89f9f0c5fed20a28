"""Memory and processor time of a process of this machine, as the system reports them."""

from __future__ import annotations

import os
from pathlib import Path


def memory_of(pid: int) -> int:
    """Return the resident bytes of a process; 0 if it is gone or the system does not report them."""
    try:
        return int(Path(f"/proc/{pid}/statm").read_text(encoding="ascii").split()[1]) * os.sysconf("SC_PAGE_SIZE")
    except (OSError, ValueError, IndexError):
        return 0


def processor_seconds_of(pid: int) -> float:
    """Return the processor seconds of a process, with those of its ended children; 0 if it is gone."""
    try:
        # The program's name, in parentheses, may contain spaces: count behind it. Words 11 to 14 are the user and system time of
        # the process and of its ended children.
        words = Path(f"/proc/{pid}/stat").read_bytes().rpartition(b")")[2].split()
        return sum(int(word) for word in words[11:15]) / os.sysconf("SC_CLK_TCK")
    except (OSError, ValueError, IndexError):
        return 0.0
