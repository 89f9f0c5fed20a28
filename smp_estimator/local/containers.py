"""Jobs in the SDK's own local mode, whose containers fail: ``fit()`` says which rank failed, and why.

The SDK's exception is made of the command of Docker Compose and its exit code, and by the time that it arrives the
folders of the containers are gone. So their failure files are read while the SDK collects the artifacts.
"""

from __future__ import annotations

import functools
import os
import sys
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from contextvars import ContextVar
from pathlib import Path
from typing import Any

from smp_config import emulation
from smp_estimator.local.artifacts import failure_text
from smp_estimator.sdk import LocalContainers, UnexpectedStatusException
from smp_launch.tree import Tree

#: What the job that runs in this context leaves; None where nobody asked.
_left: ContextVar[_Left | None] = ContextVar("left", default=None)


def with_emulation(environment: Mapping[str, Any] | None, instance_type: Any) -> dict[str, Any]:
    """The environment of containers on this machine: without a GPU, scripts that call ``torch.cuda`` run on the CPU.

    Args:
        environment: what else the job gets; what it, or this process's own, says of the emulation holds.
        instance_type: Docker gives GPUs to containers of ``local_gpu`` only.
    """
    given = dict(environment or {})
    if instance_type == "local":
        given.setdefault(emulation.VARIABLE, os.environ.get(emulation.VARIABLE, "1"))
    return given


class ContainerJobFailed(UnexpectedStatusException, RuntimeError):
    """A job in containers of this machine failed.

    The same exception as of every other failed job, and also a ``RuntimeError``, which the SDK's local mode raises.
    """


class _Left:
    """What the containers of one job left.

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
        """The first host's text, and the first lines of others that say something else.

        A host that fails by itself (its requirements, its memory) makes the first one fail with other words.
        """
        _, reason = next(iter(self.failures.items()))
        said = {_headline(reason)}
        for host, text in self.failures.items():
            if _headline(text) not in said:
                said.add(_headline(text))
                reason += f"\n{host} failed with: {_headline(text)}"
        return reason


@contextmanager
def failing_rank_told(job_name: Callable[[], str]) -> Iterator[None]:
    """Around the SDK's ``fit()``: in local mode its exception becomes one that holds the failing rank's message.

    Args:
        job_name: asked when the job has failed; ``fit()`` makes the name.

    Raises:
        KeyboardInterrupt: after Ctrl-C; Docker Compose, which got it too, stops the containers.
        ContainerJobFailed: containers failed and left a failure file. Every other exception passes as it is: Docker
            itself failed, or a container was killed, and the SDK's own words say more.
    """
    _listen()
    left = _Left()
    token = _left.set(left)
    try:
        yield
    except Exception as error:
        if not left.failures:
            raise
        archive = f"; what they left is in {left.archive}" if left.archive else ""
        raise ContainerJobFailed(
            message=f"Error for Training job {job_name()}: Failed. Reason: {left.reason()}\n"
            f"The whole log is above, as the containers wrote it{archive}",
            allowed_statuses=["Completed", "Stopped"],
            actual_status="Failed",
        ) from error
    finally:
        _left.reset(token)
    if left.interrupted is not None:
        raise left.interrupted


def _listen() -> None:
    """From now on the SDK's collecting of artifacts tells whoever has asked in its context, and nobody else."""
    collect = getattr(LocalContainers, "retrieve_artifacts", None)
    if collect is None or hasattr(collect, "tells_what_is_left"):
        return

    @functools.wraps(collect)
    def and_tell(self: Any, *args: Any, **kwargs: Any) -> Any:
        left = _left.get()
        if left is not None:
            left.read(self)
            if isinstance(stopped := sys.exc_info()[1], KeyboardInterrupt):
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
    LocalContainers.retrieve_artifacts = and_tell  # type: ignore[method-assign]


def _headline(text: str) -> str:
    return text.partition("\n")[0]
