"""Clipping of gradients."""

from smp_version2.clipping import clip_grad_norm_

__all__ = ["clip_grad_norm_"]
