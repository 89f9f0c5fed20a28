"""Names that are given other meanings for a time, and get their own back."""

from __future__ import annotations

import sys
from typing import Any

from smp_records.script_lines import is_runtime_module

#: Stands for a name that an object does not have; None may be a value.
_MISSING = object()


class Patches:
    """Attributes that were set, and what they were before."""

    def __init__(self) -> None:
        self._before: list[tuple[Any, str, Any]] = []

    def set(self, owner: Any, name: str, value: Any) -> Any:
        """Set an attribute, and return its former value, inherited or not."""
        former = getattr(owner, name, None)
        self._before.append((owner, name, vars(owner).get(name, _MISSING)))
        setattr(owner, name, value)
        return former

    def everywhere(self, owner: Any, name: str, value: Any) -> None:
        """Set an attribute, also where modules of this library have imported it by name."""
        former = self.set(owner, name, value)
        self.in_modules(former, getattr(owner, name))

    def in_modules(self, former: Any, value: Any) -> None:
        """Replace what modules of this library have imported by name."""
        # Copies, since other threads may import meanwhile.
        for module_name, module in list(sys.modules.items()):
            if not is_runtime_module(module_name):
                continue
            for name, held in list(vars(module).items()):
                # By type first: a tensor's ``==`` is no truth value.
                is_former = type(held) is type(former) and held == former
                if is_former:
                    self.set(module, name, value)

    def undo(self) -> None:
        """Put everything back."""
        while self._before:
            owner, name, value = self._before.pop()
            if value is _MISSING:
                delattr(owner, name)
            else:
                setattr(owner, name, value)
