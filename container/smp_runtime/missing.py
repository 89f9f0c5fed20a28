"""Names of the original library that this version does not have yet: an error that says so, instead of a bare one."""

from __future__ import annotations

from typing import Any

_LATER: dict[str, str] = {}


def __getattr__(name: str) -> Any:
    """What a module that imports this function answers for a name that it does not have."""
    if name in _LATER:
        raise AttributeError(
            f"smp.{name} belongs to {_LATER[name]}, which this version of the library does not have yet"
        )
    raise AttributeError(f"module 'smdistributed.modelparallel.torch' has no attribute {name!r}")
