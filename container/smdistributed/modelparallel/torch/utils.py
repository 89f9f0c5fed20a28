"""Helpers that older training scripts import."""

from smp_runtime.tensor_parallel.placement import get_distribution_axis

__all__ = ["get_distribution_axis"]
