"""One host of a job: its bootstrap process, the environment it starts with, and the thread that reads its output."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
import threading
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from smp_config.machine import emulation
from smp_config.machine.launchers import FOREIGN_PREFIXES
from smp_estimator.local.log import JobLog, LineSplitter
from smp_estimator.local.stop import TOKEN_VARIABLE
from smp_launch.sagemaker.environment import has_gpu

if TYPE_CHECKING:
    from smp_estimator.local.files.tree import HostTree, JobTree

#: Command of a host: the same module as the image's training program.
DEFAULT_LAUNCHER = (sys.executable, "-m", "smp_launch", "train")

#: What an enclosing job, mpirun or torchrun left in the notebook's environment would mislead the new job.
_FOREIGN_PREFIXES = (
    "SM_",
    "SMP_LAUNCH_",
    "SAGEMAKER_BASE_DIR",
    "OMPI_UNIVERSE",
    "PRTE_LAUNCHED",
    *FOREIGN_PREFIXES,
)
_FOREIGN_NAMES = frozenset(
    """RANK WORLD_SIZE LOCAL_RANK LOCAL_WORLD_SIZE GROUP_RANK MASTER_ADDR MASTER_PORT SMP_RANK SMP_WORLD_SIZE SMP_LOCAL_RANK
    SMP_LOCAL_SIZE SMP_HOST SMP_PROCESS_MODE SMP_CHECKPOINT_DIR SMP_JOB_TOKEN SMP_SCRIPT_ARGUMENTS SMP_JSON_ARGUMENTS""".split()
)


def is_foreign(name: str) -> bool:
    """Return whether a variable of this process must not be inherited by a job.

    These are variables that the job sets itself or must not have.
    """
    return name.startswith(_FOREIGN_PREFIXES) or name in _FOREIGN_NAMES


def environment_of(
    tree: HostTree, job: JobTree, *, job_name: str, token: str, region: str | None, user: Mapping[str, str]
) -> dict[str, str]:
    """Return the environment of one host's bootstrap.

    It has the notebook's variables, then the platform's, then the user's ``environment``; later ones override
    earlier.
    """
    inherited = {name: value for name, value in os.environ.items() if not is_foreign(name)}
    # A notebook kernel is often started without its environment's bin folder on PATH, and mpirun lies there.
    scripts = os.path.dirname(sys.executable)
    path = inherited.get("PATH", os.defpath)
    if scripts not in path.split(os.pathsep):
        path = scripts + os.pathsep + path
    platform = {
        "PATH": path,
        "PYTHONUNBUFFERED": "1",
        "SAGEMAKER_BASE_DIR": str(tree.base),
        "CURRENT_HOST": tree.host,
        "TRAINING_JOB_NAME": job_name,
        "SMP_LAUNCH_LIFELINE": "1",
        "SMP_LAUNCH_HOSTS_ON_ONE_MACHINE": "1",
        "SMP_LAUNCH_STATUS_DIR": str(job.status),
        "SMP_CHECKPOINT_DIR": str(tree.checkpoints),
    }
    if emulation.VARIABLE not in inherited and not has_gpu({**inherited, **user}):
        platform[emulation.VARIABLE] = "1"
    if region is not None:
        platform["AWS_REGION"] = region
    return {**inherited, **platform, **user, TOKEN_VARIABLE: token}


def with_emulation(environment: Mapping[str, Any] | None, instance_type: Any) -> dict[str, Any]:
    """Return the environment of containers on this machine, with CUDA emulation for ``instance_type="local"``.

    With it, scripts that call ``torch.cuda`` run on the CPU.

    Args:
        environment: the job's own variables. If it sets the emulation's variable, that value is used. Otherwise the
            value in this process's environment is used, if there is one.
        instance_type: Docker exposes GPUs only to containers of ``local_gpu``.
    """
    given = dict(environment or {})
    if instance_type == "local":
        given.setdefault(emulation.VARIABLE, os.environ.get(emulation.VARIABLE, "1"))
    return given


class Bootstrap:
    """A running host.

    Its standard input is a lifeline: the pipe ends when this process dies, however it dies, and the bootstrap
    then stops the job.
    """

    def __init__(
        self,
        tree: HostTree,
        *,
        command: Sequence[str],
        environment: Mapping[str, str],
        cwd: Path,
        log: JobLog,
        source: str,
        ended: Callable[[str, int], None],
    ) -> None:
        """Start the host.

        Args:
            source: prefix of its lines in the log; empty for the leader.
            ended: called with host name and exit code, from a thread, once the process is gone.
        """
        self.tree = tree
        self._heard = 0  # bytes of output, counted by the reader alone
        self._process = subprocess.Popen(
            list(command),
            env=dict(environment),
            cwd=cwd,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            # All processes of the job are found by this session when it is ended, and Ctrl-C does not reach it.
            start_new_session=True,
        )
        # Two threads: processes that it has started may hold the output open after its own end.
        self._reader = threading.Thread(target=self._read, args=(log, source), name=f"log-{tree.host}", daemon=True)
        self._waiter = threading.Thread(target=self._wait, args=(ended,), name=f"wait-{tree.host}", daemon=True)
        self._reader.start()
        self._waiter.start()

    @property
    def pid(self) -> int:
        """Return the process id, which is also the id of its session."""
        return self._process.pid

    def terminate(self) -> None:
        """Send SIGTERM to the bootstrap, which forwards it to its ranks."""
        self._process.send_signal(signal.SIGTERM)

    def release(self, timeout_seconds: float) -> None:
        """Read the rest of the output and close the pipes, after the process has ended.

        Args:
            timeout_seconds: longest wait without a new byte, if a process that could not be ended keeps the output
                open.
        """
        heard = -1
        while self._reader.is_alive() and heard != self._heard:
            heard = self._heard
            self._reader.join(timeout_seconds)
        pipes = [self._process.stdin]
        # Not under the thread that reads it: the number of a closed descriptor soon belongs to another file.
        if not self._reader.is_alive():
            pipes.append(self._process.stdout)
        for pipe in pipes:
            if pipe is not None:
                with contextlib.suppress(OSError):
                    pipe.close()

    def _read(self, log: JobLog, source: str) -> None:
        pipe = self._process.stdout
        if pipe is None:
            raise AssertionError("the bootstrap's output is a pipe")
        splitter = LineSplitter()
        # Keep reading even if the log's file fails: without a reader, the pipe would fill and the job would block.
        try:
            while data := os.read(pipe.fileno(), 65536):
                self._heard += len(data)
                log.write_all(splitter.feed(data), source)
        except Exception as error:
            log.give_up(error)
            while os.read(pipe.fileno(), 65536):
                pass
        for line in splitter.rest():
            log.write(line, source)

    def _wait(self, ended: Callable[[str, int], None]) -> None:
        ended(self.tree.host, self._process.wait())
