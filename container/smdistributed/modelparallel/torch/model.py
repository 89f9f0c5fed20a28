"""``smp.DistributedModel``."""

from smp_runtime.model.distributed_model import DistributedModel

__all__ = ["DistributedModel"]
