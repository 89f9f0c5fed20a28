"""``smp.amp.GradScaler``: torch's gradient scaler with the overflow agreed by all ranks of a replica and its copies."""

from __future__ import annotations

from typing import Any

import torch

from smp_config import Group
from smp_runtime import session as sessions


class GradScaler(torch.amp.GradScaler):
    """``torch.amp.GradScaler`` for distributed training: an overflow on any rank skips the step on all.

    Arguments are torch's; the device defaults to this rank's.
    """

    def __init__(self, device: str | None = None, **arguments: Any) -> None:
        super().__init__(device or sessions.current().device.type, **arguments)

    def _maybe_opt_step(
        self, optimizer: torch.optim.Optimizer, optimizer_state: dict[str, Any], *args: Any, **kwargs: Any
    ) -> Any:
        session = sessions.current()
        if session.size(Group.WORLD) > 1:
            for found in optimizer_state["found_inf_per_device"].values():
                session.collectives.all_reduce(found, session.groups.group(Group.WORLD)).wait()
        return super()._maybe_opt_step(optimizer, optimizer_state, *args, **kwargs)
