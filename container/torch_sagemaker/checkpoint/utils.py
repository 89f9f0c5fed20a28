"""Names of scripts for version 2; the logic is in ``smp_version2.checkpoint.rotation``."""

from smp_version2.checkpoint.rotation import SORT_BY_LAST_INT, limit_num_subdirs

__all__ = [
    "SORT_BY_LAST_INT",
    "limit_num_subdirs",
]
