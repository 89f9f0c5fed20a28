"""The exceptions that the training toolkit looks for."""

from smp_runtime.errors import ConfigError, DeadlineError, NotInitializedError, SMPError, SMPRuntimeError

__all__ = ["ConfigError", "DeadlineError", "NotInitializedError", "SMPError", "SMPRuntimeError"]
