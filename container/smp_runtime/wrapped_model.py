"""``smp.DistributedModel`` with all that waits for a model to be wrapped: whoever wraps one imports it from here."""

from smp_runtime.checkpoint import adapters as _adapters  # noqa: F401
from smp_runtime.checkpoint import export as _export  # noqa: F401
from smp_runtime.generation import generate as _generate  # noqa: F401
from smp_runtime.model.distributed_model import DistributedModel

__all__ = ["DistributedModel"]
