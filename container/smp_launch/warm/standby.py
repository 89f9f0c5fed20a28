"""The launcher's side: a process of this host that is ready to fork ranks when they are started again, as long as the job runs."""

from __future__ import annotations

import contextlib
import os
import socket
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from smp_config.errors import ConfigError, show_value
from smp_launch import isolated
from smp_launch.machine.locked_folders import private_dir
from smp_launch.ranks.imports import SOCKET_VARIABLE

#: ``0`` lets ranks that are started again make their imports anew.
WARM_VARIABLE = "SMP_WARM_RESTARTS"

#: Name of the server's socket in the job's private folder.
_SOCKET = "warm"

#: Ranks that may connect before the server accepts the first.
_BACKLOG = 1024


@dataclass(frozen=True)
class Standby:
    """The process that makes the imports of a job's ranks, or a placeholder for none if ``path`` is empty.

    Attributes:
        path: path of the socket.
        pids: id of the process, which outlives a start of the ranks; its forks do not.
    """

    path: str = ""
    pids: tuple[int, ...] = ()

    def variables(self) -> dict[str, str]:
        """Return the variable that makes the first rank report its imports; empty without a standby process."""
        return {SOCKET_VARIABLE: self.path} if self.path else {}

    def program(self, program: Sequence[str], *, is_restart: bool, whose: str) -> list[str]:
        """Return the command line to start for each rank.

        Args:
            program: the command line that :func:`smp_launch.isolated.isolated_command` returns for a rank's wrapper.
            whose: the receivers of a rank's signals: ``group`` if they include the processes that it has started, and
                ``process`` otherwise.
        """
        if not (self.path and is_restart):
            return list(program)
        python, runs, *rest = program
        return [python, runs, "smp_launch.warm.handover", self.path, whose, *rest]

    def hurry(self) -> None:
        """Make imports that are still under way stop resting, because the ranks are about to start again."""
        if self.path:
            with contextlib.suppress(OSError), socket.socket(socket.AF_UNIX) as connection:
                connection.connect(self.path)


@contextlib.contextmanager
def keep_standby(
    environ: Mapping[str, str], script: str, cwd: str | os.PathLike[str], *, wanted: bool
) -> Iterator[Standby]:
    """Have a standby process ready in the block, if it is useful and possible.

    Args:
        script: only Python has imports.
        cwd: the folder in which ranks are started.
        wanted: whether ranks are started again, all on this machine.

    Raises:
        ConfigError: ``SMP_WARM_RESTARTS`` is neither 0 nor 1.
    """
    text = environ.get(WARM_VARIABLE, "") or "1"
    if text not in ("0", "1"):
        raise ConfigError(
            f"{WARM_VARIABLE} is {show_value(text)}; it says whether a process keeps the imports of ranks that are started "
            "again ready: "
            "set 0, or 1 for yes",
            code="SMP205",
        )
    if not wanted or text == "0" or not script.endswith(".py") or not sys.platform.startswith("linux"):
        yield Standby()
        return
    with contextlib.ExitStack() as stack:
        folder = stack.enter_context(private_dir(Path(tempfile.gettempdir())))
        listener = stack.enter_context(socket.socket(socket.AF_UNIX))
        try:
            listener.bind(str(folder / _SOCKET))
            listener.listen(_BACKLOG)
            # A session of its own: signals for the job must not end it between two attempts.
            process = subprocess.Popen(
                isolated.isolated_command("smp_launch.warm.fork_server", str(listener.fileno()), str(os.getpid())),
                env=dict(environ),
                cwd=cwd,
                pass_fds=[listener.fileno()],
                stdin=subprocess.DEVNULL,
                stdout=subprocess.DEVNULL,
                stderr=subprocess.DEVNULL,
                start_new_session=True,  # Ctrl-C in the terminal ends the job in order, and then the server
            )
        except OSError:  # a restart takes longer, and no more
            yield Standby()
            return
        listener.close()  # only the server holds it now, so no rank waits for a server that has ended
        try:
            yield Standby(str(folder / _SOCKET), (process.pid,))
        finally:
            # Its session is its own, so no signal to this one would end it.
            process.kill()
            process.wait()
