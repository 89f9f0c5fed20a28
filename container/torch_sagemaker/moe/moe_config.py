"""The configuration of mixtures of experts."""

from smp_version2.experts import MoEConfig

__all__ = ["MoEConfig"]
