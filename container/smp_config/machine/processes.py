"""What the system says of a process of this machine: its memory and its processor time."""

from __future__ import annotations

import os
from pathlib import Path


def memory_of(pid: int) -> int:
    """Resident bytes; 0 for a process that is gone, or where the system does not say."""
    try:
        return int(Path(f"/proc/{pid}/statm").read_text(encoding="ascii").split()[1]) * os.sysconf("SC_PAGE_SIZE")
    except (OSError, ValueError, IndexError):
        return 0


def processor_seconds_of(pid: int) -> float:
    """That its threads have computed for, and those of its children that have ended; 0 for a process that is gone."""
    try:
        words = Path(f"/proc/{pid}/stat").read_bytes().rpartition(b")")[2].split()
        return sum(int(word) for word in words[11:15]) / os.sysconf("SC_CLK_TCK")
    except (OSError, ValueError, IndexError):
        return 0.0
