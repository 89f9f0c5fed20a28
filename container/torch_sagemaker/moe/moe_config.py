"""The configuration of mixtures of experts."""

from smp_version2.moe.config import MoEConfig

__all__ = ["MoEConfig"]
