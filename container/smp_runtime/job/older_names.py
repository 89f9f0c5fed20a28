"""Names that only the oldest training scripts have: of Horovod, and of the first library's own tests."""

from __future__ import annotations

from typing import Any, NoReturn

from smp_config import Group
from smp_runtime.errors import SMPUserError
from smp_runtime.job import session as sessions


def rmsg(message: object) -> str:
    """Return a log message with this rank in front of it.

    Args:
        message: any object; it is converted to text.

    Returns:
        ``[rank] message``.

    Example:
        >>> smp.utils.rmsg("half of the steps are done")
        '[0] half of the steps are done'
    """
    return f"[{sessions.current_session().ranks.rank}] {message}" if sessions.is_initialized() else str(message)


def hvd_average_grads() -> None:
    """Do nothing but log a warning: with ``ddp``, gradients are averaged when the step ends.

    Raises:
        SMPUserError: gradients are not averaged: there are several data parallel ranks, and ``ddp`` is false.

    Example:
        >>> smp.hvd_average_grads()  # where an older script has it, after the step
    """
    ranks = sessions.current_session().ranks
    if not ranks.cfg.ddp and ranks.size(Group.DP) > 1:
        raise SMPUserError(
            f"smp.hvd_average_grads() was to average gradients over {ranks.size(Group.DP)} ranks by Horovod, which this library "
            'does not have; set "ddp": True, which averages them when the step ends, and remove the call',
            code="SMP303",
        )
    sessions.say_once("smp.hvd_average_grads() ignored: the gradients are averaged when the step ends; remove the call")


def verify(*args: Any, **kwargs: Any) -> NoReturn:
    """Raise an error: this name belongs to the first library's own tests.

    Scripts import it, but do not call it.

    Raises:
        SMPUserError: always; it names a function that compares models.
    """
    raise SMPUserError(_OF_TESTS.format(name="verify"), code="SMP303")


def dump_model(*args: Any, **kwargs: Any) -> NoReturn:
    """Raise an error: this name, too, belongs to the first library's own tests.

    Raises:
        SMPUserError: always; it names a function that writes models.
    """
    raise SMPUserError(_OF_TESTS.format(name="dump_model"), code="SMP303")


_OF_TESTS = (
    "{name} belonged to the tests of the first model parallel library, which scripts import without calling it; to write a model "
    "use smp.save(model.state_dict(), path, partial=False), to compare two states torch.testing.assert_close"
)
