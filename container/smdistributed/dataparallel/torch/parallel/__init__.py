"""``DistributedDataParallel`` of the library's older interface."""

from smp_runtime.smddp.older import DistributedDataParallel

__all__ = ["DistributedDataParallel"]
