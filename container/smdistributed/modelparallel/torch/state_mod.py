"""``smp.state``: the session as scripts see it, for example ``smp.state.cfg.microbatches``."""

from __future__ import annotations

from typing import Any

from smp_runtime.session import current


class _State:
    """Forwards every attribute to the current session."""

    def __getattr__(self, name: str) -> Any:
        return getattr(current(), name)


state = _State()
