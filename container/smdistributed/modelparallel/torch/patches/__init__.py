"""Replacements of functions of PyTorch."""

from smdistributed.modelparallel.torch.patches import checkpoint

__all__ = ["checkpoint"]
