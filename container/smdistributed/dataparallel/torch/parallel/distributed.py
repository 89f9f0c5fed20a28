"""The same class under the longer name that scripts also use."""

from smp_runtime.smddp.older import DistributedDataParallel

__all__ = ["DistributedDataParallel"]
