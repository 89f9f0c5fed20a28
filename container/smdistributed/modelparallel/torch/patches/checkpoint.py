"""``checkpoint`` and ``checkpoint_sequential`` for use inside a model's forward."""

from smp_runtime.activations.functional import checkpoint, checkpoint_sequential

__all__ = ["checkpoint", "checkpoint_sequential"]
