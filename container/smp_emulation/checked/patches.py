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
        #: What modules get for what they have imported, until it is spread.
        self._imported: dict[Any, Any] = {}

    def set(self, owner: Any, name: str, value: Any) -> Any:
        """Set an attribute, and return its former value, inherited or not."""
        former = getattr(owner, name, None)
        self._before.append((owner, name, vars(owner).get(name, _MISSING)))
        setattr(owner, name, value)
        return former

    def everywhere(self, owner: Any, name: str, value: Any) -> None:
        """Set an attribute; :meth:`spread` sets it where modules of this library have imported it by name."""
        former = self.set(owner, name, value)
        self.in_modules(former, getattr(owner, name))

    def in_modules(self, former: Any, value: Any) -> None:
        """Let :meth:`spread` replace what modules of this library have imported by name."""
        self._imported[former] = value

    def spread(self) -> None:
        """Replace what modules have imported by name, all of it in one pass over them: there are thousands of names."""
        types = {type(former) for former in self._imported}
        # Copies, since other threads may import meanwhile.
        for module_name, module in list(sys.modules.items()):
            if not is_runtime_module(module_name):
                continue
            for name, held in list(vars(module).items()):
                # By type first: others may have no hash.
                if type(held) in types and held in self._imported:
                    self.set(module, name, self._imported[held])
        self._imported.clear()

    def undo(self) -> None:
        """Put everything back."""
        while self._before:
            owner, name, value = self._before.pop()
            if value is _MISSING:
                delattr(owner, name)
            else:
                setattr(owner, name, value)
