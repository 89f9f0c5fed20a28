"""Errors of the machine or the platform, as opposed to those of the user's settings."""

from __future__ import annotations

from smp_config.error_codes import Coded

#: Exit code when the job's settings or this machine cannot work.
CANNOT_START = 2


class LaunchError(Coded, RuntimeError):
    """The job cannot start here: a program, a file or another host is missing."""


class Stopped(Coded, RuntimeError):
    """A request to stop came before the first rank ran, ``by`` the signal of this name."""

    code = "SMP204"

    def __init__(self, by: str) -> None:
        super().__init__(f"the job was stopped by {by} before its ranks had started")
        self.by = by
