"""The process of a host that has made a job's imports, and forks into ranks: ``… smp_launch.warm.fork_server 3 4711``.

It waits for a rank's report of its imports. Then it becomes a new program with that rank's environment, and imports
the same modules, slowly as long as no process waits. From then on, each wrapper that mpirun starts may hand its place
over. Its descriptors, folder, environment and arguments go to a fork, which runs the script as the wrapper would.
The wrapper forwards its signals to the fork, and receives the fork's exit code.

If the two processes are not alike, or the imports have left something that a fork must not share, the server sends
the wrapper the reason. The wrapper then runs the script itself.
"""

from __future__ import annotations

import contextlib
import ctypes
import gc
import importlib
import json
import os
import select
import signal
import socket
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NoReturn

from smp_launch.isolated import isolated_command
from smp_launch.ranks import messages
from smp_launch.ranks.imports import SOCKET_VARIABLE, Shared, forget_draws, is_waited_for, prepare
from smp_launch.warm.conditions import other_condition, other_variable, read_conditions

#: Of prctl (linux/prctl.h).
_PR_SET_PDEATHSIG = 1

#: Seconds for the other side of a connection to finish a message that it has begun.
_PATIENCE = 5.0

#: Name of the memory file that carries the report to the new program of this process.
_REPORT_NAME = "smp-launch-report"


@dataclass
class Forked:
    """A rank that runs in a fork, seen from here.

    Attributes:
        connection: the connection to its wrapper; if it ends, the rank is ended.
        pid: process id; 0 once it was collected, when no signal may be sent to it any more.
        ended: descriptor that is readable when the process has ended.
        with_group: whether signals are also for the processes that it has started.
    """

    connection: socket.socket
    pid: int
    ended: int
    with_group: bool

    def signal(self, number: int) -> None:
        """Send it a signal."""
        if self.pid:
            with contextlib.suppress(ProcessLookupError, PermissionError):
                (os.killpg if self.with_group else os.kill)(self.pid, number)


@dataclass
class ForkServer:
    """Waits for wrappers, and forks.

    Args:
        listener: the socket that they connect to.
        environ: environment of this process when it began, which was that of a rank.
        why_not: why no wrapper can hand its place over; None if it can.
    """

    listener: socket.socket
    environ: Mapping[str, str]
    why_not: str | None
    _waiting: list[socket.socket] = field(default_factory=list)
    _forked: list[Forked] = field(default_factory=list)

    def serve(self) -> Callable[[], NoReturn]:
        """Fork for each wrapper, and forward the wrapper's signals to its fork.

        This returns in forks only, with the function that they are to run.
        """
        while True:
            sources: list[Any] = [self.listener, *self._waiting]
            for forked in self._forked:
                sources += (forked.connection, forked.ended)
            readable, _, _ = select.select(sources, [], [])
            for source in readable:
                if source is self.listener:
                    self._accept()
                elif source in self._waiting:
                    self._waiting.remove(source)
                    task = self._take(source)
                    if task is not None:
                        return task
                else:
                    self._attend(source)

    def _accept(self) -> None:
        connection, _ = self.listener.accept()
        # A wrapper that connects and sends nothing must not hold up the other ranks.
        connection.settimeout(_PATIENCE)
        if messages.is_own_user(connection):
            self._waiting.append(connection)
        else:
            connection.close()

    def _take(self, connection: socket.socket) -> Callable[[], NoReturn] | None:
        """Answer a wrapper that describes itself, or take over its place.

        Returns:
            In the fork, the function that runs the rank; otherwise None.
        """
        descriptors: list[int] = []
        try:
            told, descriptors = messages.receive(connection)
            if "asks" in told:
                messages.send(connection, {"refused": self._refused(told["asks"])})
                self._waiting.append(connection)
            elif "place" in told:
                return self._fork(connection, told["place"], descriptors)
            else:
                connection.close()
        except (OSError, EOFError, ValueError, KeyError, TypeError):
            connection.close()
        finally:
            for descriptor in descriptors:
                os.close(descriptor)
        return None

    def _refused(self, asked: Mapping[str, Any]) -> str | None:
        if self.why_not is not None:
            return self.why_not
        if (name := other_variable(self.environ, asked["environ"])) is not None:
            return f"its variable {name} is another than that of the start before"
        if (name := other_condition(read_conditions(), asked["conditions"])) is not None:
            return f"the system has given it another {name} than the process that has its imports"
        return None

    def _fork(
        self, connection: socket.socket, place: Mapping[str, Any], descriptors: Sequence[int]
    ) -> Callable[[], NoReturn] | None:
        parent, group = os.getpid(), bool(place["with_group"])
        with contextlib.suppress(OSError):  # nothing of it may stand in buffers that two processes write out
            sys.stdout.flush()
            sys.stderr.flush()
        # Imports that start threads get no fork server: no lock is held by a thread that the child would lack.
        pid = os.fork()
        if pid:
            # On both sides of the fork, so that the group exists before either uses it.
            with contextlib.suppress(OSError):  # it may have done so itself, or have ended
                os.setpgid(pid, pid)
            self._forked.append(Forked(connection, pid, os.pidfd_open(pid), group))
            return None
        _end_with_parent(signal.SIGKILL, parent)
        os.setpgid(0, 0)
        # The other side of a connection sees its end only when no fork has it open.
        for forked in self._forked:
            forked.connection.close()
            os.close(forked.ended)
        for other in (self.listener, connection, *self._waiting):
            other.close()
        # The wrapper's own input, output, errors and folder.
        for number in range(3):
            os.dup2(descriptors[number], number)
        os.fchdir(descriptors[3])
        return lambda: _become_rank(place)

    def _attend(self, source: Any) -> None:
        """Handle a signal from a wrapper for its rank, the end of a wrapper, or the end of a rank."""
        for forked in list(self._forked):
            if source == forked.ended:
                pid, status = os.waitpid(forked.pid, os.WNOHANG)
                if not pid:
                    continue  # the descriptor is a new one, with the number of one that was closed just now
                with contextlib.suppress(OSError):
                    messages.send(forked.connection, {"ended": os.waitstatus_to_exitcode(status)})
                forked.pid = 0
                self._forked.remove(forked)
                forked.connection.close()
                os.close(forked.ended)
            elif source is forked.connection:
                try:
                    told, descriptors = messages.receive(source)
                    for descriptor in descriptors:
                        os.close(descriptor)
                    forked.signal(int(told["signal"]))
                except (OSError, EOFError, ValueError, KeyError, TypeError):
                    # The process that stood in for the rank is gone.
                    # So nothing could report the rank's end to mpirun, or pass a signal on.
                    forked.signal(signal.SIGKILL)
                    os.waitpid(forked.pid, 0)
                    self._forked.remove(forked)
                    source.close()
                    os.close(forked.ended)


def _become_rank(place: Mapping[str, Any]) -> NoReturn:
    """Run the script as the wrapper that handed its place over would."""
    os.environ.clear()
    os.environ.update(place["environ"])
    sys.path[:] = place["path"]
    sys.argv = list(place["argv"])
    sys.orig_argv = list(place["orig_argv"])
    importlib.invalidate_caches()
    forget_draws()
    module = importlib.import_module(place["module"])
    sys.exit(module.main(place["arguments"]))


def _end_with_parent(number: int, parent: int) -> None:
    """Let the system send a signal to this process when its parent ends."""
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, number, 0, 0, 0)
    # The parent may have ended before the request, which then has no effect.
    if os.getppid() != parent:
        os._exit(1)


def wait_for_report(listener: socket.socket) -> NoReturn:
    """Become a new program with the environment of the first rank that reports.

    Wrappers that come before are refused without a reason. The job's own log gives it: no rank has begun a second step.
    """
    while True:
        connection, _ = listener.accept()
        with connection:
            connection.settimeout(_PATIENCE)
            try:
                if not messages.is_own_user(connection):
                    continue
                told, descriptors = messages.receive(connection)
                for descriptor in descriptors:
                    os.close(descriptor)
                if "asks" in told:
                    messages.send(connection, {"refused": ""})
                report = told.get("report")
            except (OSError, EOFError, ValueError, AttributeError):
                continue  # that wrapper has ended, or is none
        if report is not None:
            kept = os.memfd_create(_REPORT_NAME, 0)
            with open(kept, "w", encoding="ascii", closefd=False) as file:
                json.dump(report, file)
            os.lseek(kept, 0, os.SEEK_SET)
            # The new program goes on with the socket, at which wrappers may be waiting already.
            listener.set_inheritable(True)
            os.set_inheritable(kept, True)
            words = isolated_command(
                "smp_launch.warm.fork_server", str(listener.fileno()), str(os.getppid()), str(kept)
            )
            os.execve(words[0], words, report["environ"])


def make_ready(report: Mapping[str, Any], listener: socket.socket) -> str | None:
    """Make the rank's imports; return why no rank can be forked from this process then, or None if one can."""
    from smp_launch.ranks.script import RankPlace, whole_lines  # which has weight, and a job may never come so far

    before = Shared.now()
    wrapper = importlib.import_module(str(report["module"]))
    entered = wrapper.enter(RankPlace(), report["arguments"])
    whole_lines()
    entered.lead_imports()
    prepare(report["names"], is_waited_for(listener))
    if (name := other_variable(os.environ, report["now"])) is not None:
        return f"the script, or what it has used, sets the variable {name}, which imports may read"
    return before.unfit()


def main(arguments: Sequence[str]) -> NoReturn:
    """Listen at a socket, for a parent. Return in forks only, which run as ranks.

    Args:
        arguments: the socket's descriptor, the parent's process, and that of the report once there is one.
    """
    listener = socket.socket(fileno=int(arguments[0]))
    # What the ranks start must not hold the socket open after the server's end.
    listener.set_inheritable(False)
    _end_with_parent(signal.SIGKILL, int(arguments[1]))
    if len(arguments) == 2:
        wait_for_report(listener)
    environ = dict(os.environ)
    environ.pop(SOCKET_VARIABLE, None)
    with open(int(arguments[2]), encoding="ascii") as file:
        report = json.load(file)
    try:
        why_not = make_ready(report, listener)
    except BaseException as error:  # the script's packages may raise anything, or exit; the wrappers get the reason
        why_not = f"its imports failed: {type(error).__name__}: {error}"
    gc.collect()
    gc.freeze()  # collections of forks leave it alone, so that its pages stay shared
    task = ForkServer(listener, environ, why_not).serve()
    task()
