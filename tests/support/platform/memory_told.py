"""What the launcher tells ranks that keep their state in shared memory."""

from __future__ import annotations


def told(folder, start=0):
    """The variables of a rank.

    Args:
        folder: of its host.
        start: how often the job's ranks were started before.
    """
    return {
        "SMP_MEMORY_CHECKPOINT": "1",
        "SMP_MEMORY_CHECKPOINT_STEPS": "1",
        "SMP_MEMORY_FOLDER": str(folder),
        "SMP_RESTART_COUNT": str(start),
    }
