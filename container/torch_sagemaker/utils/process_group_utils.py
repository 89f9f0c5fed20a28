"""Functions on process groups."""

from smp_version2.state import get_global_ranks

__all__ = ["get_global_ranks"]
