"""``smp.DistributedModel``."""

from smp_runtime.wrapped_model import DistributedModel

__all__ = ["DistributedModel"]
