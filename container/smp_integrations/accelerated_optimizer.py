"""A wrapped optimizer behind Accelerate's interface: it waits until the accumulated gradients are complete."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from accelerate.optimizer import AcceleratedOptimizer

if TYPE_CHECKING:
    from accelerate.utils import GradScalerKwargs

    from smp_runtime.optim.distributed_optimizer import DistributedOptimizer


class AcceleratedDistributedOptimizer(AcceleratedOptimizer):
    """``smp.DistributedOptimizer`` as ``Accelerator.prepare`` returns it; its other methods can be called on it too."""

    optimizer: DistributedOptimizer

    @property
    def step_was_skipped(self) -> bool:
        """Return whether the last step was skipped because of an overflow."""
        return bool(self.optimizer.step_was_skipped if self.scaler is None else self._is_overflow)

    def __getattr__(self, name: str) -> Any:
        if name in ("optimizer", "scaler") or name.startswith("__"):
            raise AttributeError(name)
        return getattr(self.optimizer, name)


def loss_scale_of(handler: GradScalerKwargs | None, fp16: bool) -> dict[str, Any]:
    """Return arguments of ``smp.DistributedOptimizer`` for the loss scale of Accelerate's handler, or of its defaults."""
    if not fp16:
        return {}
    given = handler.to_kwargs() if handler is not None else {}
    if given.get("enabled") is False:
        return {}
    # The defaults are those of ``torch.amp.GradScaler``.
    scale = {
        "init_scale": given.get("init_scale", 65536.0),
        "scale_factor": given.get("growth_factor", 2.0),
        "scale_window": given.get("growth_interval", 2000),
    }
    return {"static_loss_scale": None, "dynamic_loss_scale": True, "dynamic_loss_args": scale}
