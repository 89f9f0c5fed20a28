"""The failure file of a host: why its part of a job failed, in the launcher's (or the script's) words."""

from __future__ import annotations

from pathlib import Path

#: Most of the failure file that an error message carries, in characters.
_REASON_CHARACTERS = 8000


def failure_text(path: Path) -> str | None:
    """What a failure file says, cut where an error message would become unreadable; None without one."""
    try:
        text = path.read_text(encoding="utf-8", errors="replace").strip()
    except OSError:
        return None
    if not text:
        return None
    return text if len(text) <= _REASON_CHARACTERS else f"{text[:_REASON_CHARACTERS]} …"
