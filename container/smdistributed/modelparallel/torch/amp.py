"""``smp.amp.GradScaler``."""

from smp_runtime.amp import GradScaler

__all__ = ["GradScaler"]
