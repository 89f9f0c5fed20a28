"""Names of scripts for version 2; the logic is in ``smp_version2.checkpoint.constants``."""

from smp_version2.checkpoint.constants import SMP_IS_LOAD_INFO_KEY, SMP_IS_PARTIAL_KEY

__all__ = [
    "SMP_IS_LOAD_INFO_KEY",
    "SMP_IS_PARTIAL_KEY",
]
