"""``smp.amp.GradScaler``: torch's gradient scaler with the overflow agreed by all ranks of a replica and its copies."""

from __future__ import annotations

from typing import Any

import torch

from smp_config import Group
from smp_runtime.job import session as sessions
from smp_runtime.optim.distributed_optimizer import DistributedOptimizer


class GradScaler(torch.amp.GradScaler):
    """``torch.amp.GradScaler`` for distributed training: an overflow on any rank skips the step on all.

    With pipeline parallelism only the stage that runs the step function scales the loss; the others unscale, step and update all
    the same.

    Args:
        device: default: the type of this rank's.
        arguments: torch's, such as ``init_scale`` and ``growth_interval`` (steps).

    Example:
        >>> scaler = smp.amp.GradScaler(init_scale=1024.0)
        >>> scaler.scale(module(inputs).sum()).backward()  # model.backward(scaler.scale(loss)) in a step
        >>> update = torch.optim.SGD(module.parameters(), lr=0.1)
        >>> finite = scaler.step(update)  # left out, on all ranks, where a gradient of any is not finite
        >>> scaler.update()
    """

    def __init__(self, device: str | None = None, **arguments: Any) -> None:
        super().__init__(device or sessions.current_session().ranks.device.type, **arguments)

    def unscale_(self, optimizer: torch.optim.Optimizer) -> None:
        """Divide the gradients by the scale; with sharded state those of this rank's share."""
        self._begin()
        if isinstance(optimizer, DistributedOptimizer):
            optimizer.update_master_grads()
        super().unscale_(optimizer)

    def step(self, optimizer: torch.optim.Optimizer, *args: Any, **kwargs: Any) -> float | None:
        """Unscale, unless that was done, and update, unless a gradient on any rank is not finite."""
        self._begin()
        return super().step(optimizer, *args, **kwargs)

    def update(self, new_scale: float | torch.Tensor | None = None) -> None:
        """Raise or lower the scale, the same on every rank."""
        self._begin()
        super().update(new_scale)

    def _begin(self) -> None:
        """Initialize as PyTorch does when the first loss is scaled, since other stages never scale one."""
        if self._enabled and self._scale is None:
            self._lazy_init_scale_growth_tracker(sessions.current_session().ranks.device)

    def _unscale_grads_(self, optimizer: torch.optim.Optimizer, *args: Any, **kwargs: Any) -> Any:
        found = super()._unscale_grads_(optimizer, *args, **kwargs)
        if found:
            return found
        # A rank without parameters of its own finds nothing.
        # It must still take part in the all-reduce of the found flags.
        device = sessions.current_session().ranks.device
        return {device: torch.zeros((), device=device)}

    def _maybe_opt_step(
        self, optimizer: torch.optim.Optimizer, optimizer_state: dict[str, Any], *args: Any, **kwargs: Any
    ) -> Any:
        session = sessions.current_session()
        if session.ranks.size(Group.WORLD) > 1:
            for found in optimizer_state["found_inf_per_device"].values():
                session.ranks.collectives.all_reduce(found, session.ranks.groups.group(Group.WORLD)).wait()
        return super()._maybe_opt_step(optimizer, optimizer_state, *args, **kwargs)
