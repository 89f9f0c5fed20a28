"""Failures of jobs in the local mode of SDK v2: ``fit()`` reports which rank failed in its container, and why."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager

from smp_estimator.local import container_failures
from smp_estimator.sdk.version_2 import LocalContainers, UnexpectedStatusException


class ContainerJobFailed(UnexpectedStatusException, RuntimeError):
    """A job in containers of this machine failed.

    The same exception as of every other failed job, and also a ``RuntimeError``, which the SDK's local mode raises.
    """


def failing_rank_told(job_name: Callable[[], str]) -> AbstractContextManager[None]:
    """Return a context for the SDK's ``fit()``; as :func:`smp_estimator.local.container_failures.failing_rank_told`.

    Raises:
        ContainerJobFailed: containers failed and left a failure file.
    """
    return container_failures.failing_rank_told(LocalContainers, job_name, _failed)


def _failed(message: str) -> ContainerJobFailed:
    return ContainerJobFailed(message, ["Completed", "Stopped"], "Failed")
