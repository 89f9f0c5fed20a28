"""Recomputing of activations."""

from smp_runtime.fp8.autocast import checkpoint

__all__ = ["checkpoint"]
