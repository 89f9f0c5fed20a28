"""``smp.DistributedModel``."""

from smp_runtime.model import DistributedModel

__all__ = ["DistributedModel"]
