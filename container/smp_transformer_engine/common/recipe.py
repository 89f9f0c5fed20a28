"""Recipes of scales."""

from smp_runtime.fp8.recipe import DelayedScaling, Format

__all__ = ["DelayedScaling", "Format"]
