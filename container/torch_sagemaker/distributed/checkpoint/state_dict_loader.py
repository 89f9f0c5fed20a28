"""Names of scripts for version 2; the logic is in ``smp_version2.checkpoint.state_dict_loader``."""

from smp_version2.checkpoint.state_dict_loader import load

__all__ = [
    "load",
]
