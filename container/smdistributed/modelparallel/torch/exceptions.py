"""The exceptions of the PyTorch library that the training toolkit looks for."""

from smp_runtime.errors import CheckpointError, SMPError, SMPRuntimeError, SMPUserError

__all__ = ["CheckpointError", "SMPError", "SMPRuntimeError", "SMPUserError"]
