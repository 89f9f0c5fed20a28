"""``smp.DistributedOptimizer``."""

from smp_runtime.optimizer import DistributedOptimizer

__all__ = ["DistributedOptimizer"]
