"""Saving and loading, going over to other degrees, recording numbers: functions that work on the current session."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable
from typing import Concatenate, ParamSpec, TypeVar

from smp_runtime.checkpoint import object_files as objects
from smp_runtime.checkpoint import save_and_resume as checkpoints
from smp_runtime.job.session import Session, current_session
from smp_runtime.preemption import auto_resume as preemption
from smp_runtime.reshape import reshape as reshaping
from smp_tools.numerics import start as numerics

_Arguments = ParamSpec("_Arguments")
_Result = TypeVar("_Result")


def _of_current_session(function: Callable[Concatenate[Session, _Arguments], _Result]) -> Callable[_Arguments, _Result]:
    @functools.wraps(function)
    def call(*args: _Arguments.args, **kwargs: _Arguments.kwargs) -> _Result:
        session = current_session()
        with session.ranks.control.doing(f"smp.{function.__name__}"):
            return function(session, *args, **kwargs)

    # Scripts do not pass the session, so help() must not show it.
    del call.__wrapped__
    signature = inspect.signature(function)
    call.__signature__ = signature.replace(parameters=list(signature.parameters.values())[1:])  # type: ignore[attr-defined]
    return call


save = _of_current_session(objects.save)
load = _of_current_session(objects.load)
save_checkpoint = _of_current_session(checkpoints.save_checkpoint)
resume_from_checkpoint = _of_current_session(checkpoints.resume_from_checkpoint)
wait_for_checkpoint = _of_current_session(checkpoints.wait_for_checkpoint)
memory_checkpoint = _of_current_session(checkpoints.memory_checkpoint)
newest_memory_checkpoint = _of_current_session(checkpoints.newest_memory_checkpoint)
auto_resume = _of_current_session(preemption.auto_resume)
record_numerics = _of_current_session(numerics.record_numerics)
reshape = _of_current_session(reshaping.reshape)
