"""The name by which scripts recognize mixtures of experts."""

from smp_version2.layer_classes import MoELayer

__all__ = ["MoELayer"]
