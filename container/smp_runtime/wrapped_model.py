"""``smp.DistributedModel`` with all hooks that run when a model is wrapped; import it from here to wrap a model."""

from smp_runtime.checkpoint import adapters as _adapters  # noqa: F401
from smp_runtime.checkpoint import export as _export  # noqa: F401
from smp_runtime.generation import generate as _generate  # noqa: F401
from smp_runtime.model.distributed_model import DistributedModel

__all__ = ["DistributedModel"]
