"""The errors of the runtime: ``ValueError`` family for what a script gave, ``RuntimeError`` family for the rest."""

from __future__ import annotations

from typing import TYPE_CHECKING

from smp_config import ConfigError as ConfigError

if TYPE_CHECKING:
    from smp_config.records import FailureRecord


class SMPError(Exception):
    """Root of everything that the runtime raises by itself.

    Attributes:
        failure: of the rank that met it first, where this one was told: what the job's failure is to say.
    """

    failure: FailureRecord | None = None


class SMPUserError(SMPError, ValueError):
    """Something that the script passed cannot work."""


class SMPRuntimeError(SMPError, RuntimeError):
    """The environment, a peer or the order of calls is not as it must be."""


class NotInitializedError(SMPRuntimeError):
    """A function that needs :func:`smp.init` was called before it."""


class DeadlineError(SMPRuntimeError):
    """A wait for another rank outlasted its deadline."""


class RankLeftError(SMPRuntimeError):
    """Another rank has ended its script, or failed, while this one waits for it."""


class CheckpointError(SMPRuntimeError):
    """A checkpoint is missing, incomplete or belongs to another model."""
