"""``smp.state``: the session as scripts see it, for example ``smp.state.cfg.microbatches``."""

from __future__ import annotations

from typing import Any

from smp_runtime.job.session import current_session
from smp_runtime.optim.whole_state import names_by_index


class _State:
    """The state of the current job; every attribute is the current session's.

    Example:
        >>> inputs = inputs.to(smp.state.device)
        >>> microbatches = smp.state.cfg.microbatches
    """

    @property
    def param_index_to_name_tp_group(self) -> list[dict[int, str]]:
        """Return, for each tensor parallel rank, a dict from parameter index in the optimizer to parameter name."""
        return names_by_index(current_session())

    @property
    def param_name_to_index_tp_group(self) -> list[dict[str, int]]:
        """Return, for each tensor parallel rank, a dict from parameter name to parameter index in the optimizer."""
        return [{name: index for index, name in names.items()} for names in names_by_index(current_session())]

    def __getattr__(self, name: str) -> Any:
        return getattr(current_session(), name)


state = _State()
"""What the current job knows of itself, such as ``smp.state.device`` and ``smp.state.cfg``, its settings by their documented names.

Example:
    >>> inputs = inputs.to(smp.state.device)
"""
