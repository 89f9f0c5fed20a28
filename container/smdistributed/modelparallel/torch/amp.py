"""``smp.amp.GradScaler``."""

from smp_runtime.optim.grad_scaler import GradScaler

__all__ = ["GradScaler"]
