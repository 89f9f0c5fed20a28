"""Faults in a program's use of streams, and the list of all faults that a run has found."""

from __future__ import annotations

from smp_config.error_codes import Coded


class StreamFault(Coded, RuntimeError):
    """Work on a GPU would not be ordered as the program needs it."""

    code = "SMP602"

    def __init__(self, message: str) -> None:
        super().__init__(message)
        found.append(message)


#: Of this process since the emulation was installed, in order: a program may catch errors, and a thread may end with one.
found: list[str] = []
