"""The exceptions that the training toolkit looks for."""

from smp_runtime.errors import SMPError as SMDDPError

__all__ = ["SMDDPError"]
