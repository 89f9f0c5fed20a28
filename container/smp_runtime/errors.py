"""The errors of the runtime: ``ValueError`` family for a script's inputs, ``RuntimeError`` family for the rest."""

from __future__ import annotations

from typing import TYPE_CHECKING

from smp_config import ConfigError as ConfigError
from smp_config.error_codes import Coded

if TYPE_CHECKING:
    from smp_records.records import FailureRecord


class SMPError(Coded):
    """Root of all errors that the runtime itself raises.

    Args:
        code: of the list that ``smp-estimator explain`` has; None for that of the class.

    Attributes:
        failure: record of the rank that failed first, if it is known here; the failure that the job is to report.

    Example:
        >>> try:
        ...     smp.send("hello", 5, smp.RankType.WORLD_RANK)  # no such rank
        ... except smp.exceptions.SMPError as error:
        ...     print(error.code)
        SMP311
    """

    failure: FailureRecord | None = None


class SMPUserError(SMPError, ValueError):
    """Something that the script passed cannot work.

    Args:
        code: of the list that ``smp-estimator explain`` has; None for that of the class.

    Example:
        >>> try:
        ...     smp.set_tensor_parallelism("no module")
        ... except smp.exceptions.SMPUserError as error:  # a ValueError, too
        ...     print(error)
        set_tensor_parallelism got a str; pass a module of the model
    """


class SMPRuntimeError(SMPError, RuntimeError):
    """The environment, a peer or the order of calls is not as it must be.

    Args:
        code: of the list that ``smp-estimator explain`` has; None for that of the class.

    Example:
        >>> issubclass(smp.exceptions.SMPRuntimeError, RuntimeError)
        True
    """

    code = "SMP505"


class SMPOperationError(SMPError, RuntimeError):
    """An operation that these values do not allow, for which PyTorch raises ``RuntimeError``, too."""


class SMPAttributeError(SMPError, AttributeError):
    """An object of the library has no such attribute."""


class SMPTypeError(SMPError, TypeError):
    """An object of the library was used, or a function called, as what it is not."""


class NotInitializedError(SMPRuntimeError):
    """A function that needs :func:`smp.init` was called before it."""

    code = "SMP301"


class DeadlineError(SMPRuntimeError):
    """A wait for another rank outlasted its deadline.

    Attributes:
        accused: the ranks that did not come, if known.
    """

    code = "SMP501"

    accused: tuple[int, ...] = ()


class RankLeftError(SMPRuntimeError):
    """Another rank has ended its script, or failed, while this one waits for it.

    Attributes:
        accused: the ranks that caused it, if known; an error of one of them is the cause.
    """

    code = "SMP502"

    accused: tuple[int, ...] = ()


class ConnectionLostError(SMPRuntimeError):
    """A connection to other ranks has ended, though they had not left the job.

    Attributes:
        accused: those ranks; empty if it is unknown to which ranks the connection led.
    """

    code = "SMP503"

    accused: tuple[int, ...] = ()


class NumericsError(SMPRuntimeError):
    """A number that must stop the training: not finite, far beyond the usual, or not the same on all replicas."""

    code = "SMP508"


class CheckpointError(SMPRuntimeError):
    """A checkpoint is missing, incomplete or belongs to another model.

    Args:
        code: of the list that ``smp-estimator explain`` has; None for that of the class.

    Example:
        >>> try:
        ...     smp.resume_from_checkpoint("nothing-here")
        ... except smp.exceptions.CheckpointError as error:
        ...     print("begins anew")
        begins anew
    """

    code = "SMP401"
