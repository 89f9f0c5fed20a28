"""``smp.DistributedOptimizer``."""

from smp_runtime.optim.distributed_optimizer import DistributedOptimizer

__all__ = ["DistributedOptimizer"]
