"""The log."""

from smp_version2.logs import get_logger

__all__ = ["get_logger"]
