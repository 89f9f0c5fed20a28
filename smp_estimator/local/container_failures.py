"""Failures of jobs in the local mode of either SDK: which rank failed in its container, and why.

The SDK's exception contains only the command of Docker Compose and its exit code. By the time it arrives, the
folders of the containers may be gone. So this module reads their failure files while the SDK collects the
artifacts.
"""

from __future__ import annotations

import functools
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from pathlib import Path
from typing import Any

from smp_estimator.local.failure_lines import shorten_reason
from smp_estimator.local.files.artifacts import failure_text
from smp_launch.sagemaker.tree import Tree

#: Collects the files and failures of the job that runs in this context; None if they are not collected.
_left: ContextVar[_Left | None] = ContextVar("left", default=None)


class _Left:
    """Files and failures that the containers of one job left.

    Attributes:
        failures: the text of each host's failure file, in the order of the hosts.
        interrupted: the Ctrl-C that has ended the SDK's watching, which the SDK would keep to itself.
        archive: the address of ``output.tar.gz``, where the SDK came so far.
    """

    def __init__(self) -> None:
        self.failures: dict[str, str] = {}
        self.archive: str | None = None
        self.interrupted: KeyboardInterrupt | None = None

    def read(self, containers: Any) -> None:
        for host in containers.hosts:
            if text := failure_text(Tree(Path(containers.container_root, host)).failure_file):
                self.failures[host] = text

    def reason(self) -> str:
        """Return the first host's failure text, and the first lines of other hosts' texts that differ from it.

        If another host fails for a reason of its own (requirements, memory), the first host fails with a different
        text.
        """
        first = next(iter(self.failures.values()))
        reason, said = shorten_reason(first), {_headline(first)}
        for host, text in self.failures.items():
            if _headline(text) not in said:
                said.add(_headline(text))
                reason += f"\n{host} failed with: {_headline(text)}"
        return reason


@contextmanager
def failing_rank_told(
    containers: type, job_name: Callable[[], str], failed: Callable[[str], Exception]
) -> Iterator[None]:
    """Run the block, and in local mode replace its exception by one with the failing rank's message.

    The block contains the SDK's call that runs a job.

    Args:
        containers: the SDK's class that runs a job's containers.
        job_name: called after the job has failed, because the SDK's call makes the name.
        failed: makes the exception from its message.

    Raises:
        KeyboardInterrupt: after Ctrl-C; Docker Compose, which received it too, stops the containers.
        Exception: the result of ``failed``, if containers failed and left a failure file. Every other exception
            passes unchanged: Docker itself failed, or a container was killed, and the SDK's message explains more.
    """
    _listen(containers)
    left = _Left()
    token = _left.set(left)
    try:
        yield
    except Exception as error:
        if not left.failures:
            raise
        archive = f"; what they left is in {left.archive}" if left.archive else ""
        raise failed(
            f"Error for Training job {job_name()}: Failed. Reason: {left.reason()}\n"
            f"The whole log is above, as the containers wrote it{archive}"
        ) from error
    finally:
        _left.reset(token)
    if left.interrupted is not None:
        raise left.interrupted


def _listen(containers: Any) -> None:
    """Patch the SDK's artifact collection to also record failures in the current context's ``_Left``, if one is set."""
    collect = getattr(containers, "retrieve_artifacts", None)
    if collect is None or hasattr(collect, "tells_what_is_left"):
        return

    @functools.wraps(collect)
    def and_tell(self: Any, *args: Any, **kwargs: Any) -> Any:
        left = _left.get()
        if left is not None:
            left.read(self)
            stopped = sys.exc_info()[1]
            if isinstance(stopped, KeyboardInterrupt):
                left.interrupted = stopped
                print(
                    "Ctrl-C: Docker Compose stops the containers; their ranks get SIGTERM and have its 10 s to save and exit. "
                    f"Ctrl-C again kills them. Their log is above; what they write lies in {self.container_root}",
                    flush=True,
                )
        model = collect(self, *args, **kwargs)
        if left is not None and isinstance(model, str):
            left.archive = f"{model.removesuffix('model.tar.gz')}output.tar.gz"
        return model

    and_tell.tells_what_is_left = True  # type: ignore[attr-defined]
    containers.retrieve_artifacts = and_tell


def _headline(text: str) -> str:
    return text.partition("\n")[0]
