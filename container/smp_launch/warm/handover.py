"""A stand-in for a rank's wrapper when ranks are restarted: ``… smp_launch.warm.handover SOCKET smp_launch.ranks.rank …``.

It hands its place over to a fork of the host's process that has made the imports, passes signals on, and ends as the
fork does. If that is not possible, it is the rank itself. It imports nothing of weight.
"""

from __future__ import annotations

import contextlib
import importlib
import importlib.util
import os
import resource
import select
import signal
import socket
import sys
from collections.abc import Sequence
from typing import NoReturn

from smp_config.machine.launchers import is_first_rank
from smp_launch.ranks import messages
from smp_launch.ranks.imports import SOCKET_VARIABLE
from smp_launch.warm.conditions import read_conditions

#: Seconds for imports that are still under way: as long as the same would take here, on a busy machine.
_PATIENCE = 30.0

#: Signals that are not passed on to the rank: no process can handle them, or they concern this process itself.
_OWN_SIGNALS = frozenset(
    getattr(signal, name)
    for name in "SIGKILL SIGSTOP SIGCHLD SIGPIPE SIGSEGV SIGBUS SIGFPE SIGILL SIGABRT SIGTRAP SIGSYS".split()
)


def main(arguments: Sequence[str]) -> int:
    """Have the rank run in a fork, or run it.

    Args:
        arguments: the socket; ``group`` if signals are also for the processes that the rank starts, else ``process``;
            the wrapper's module; and its arguments.

    Returns:
        The exit code. If a fork has ended by a signal, this process ends by it.
    """
    path, whose, module, *words = arguments
    before = [name for name in os.listdir("/proc/self/fd") if int(name) > 2 and _is_inherited(int(name))]
    if before:
        return _run(module, words, f"it has inherited descriptors ({', '.join(before)})")
    environ = dict(os.environ)
    environ.pop(SOCKET_VARIABLE, None)
    try:
        connection = messages.connect(path, _PATIENCE)
    except OSError as error:
        return _run(module, words, f"nobody has its imports ({error.strerror or error})")
    try:
        messages.send(connection, {"asks": {"environ": environ, "conditions": read_conditions()}})
        refused = messages.receive(connection)[0]["refused"]
    except (OSError, EOFError, ValueError, KeyError, TypeError) as error:
        refused = f"the process that has its imports does not answer ({type(error).__name__})"
    if refused is not None:
        connection.close()
        return _run(module, words, refused)
    spec = importlib.util.find_spec(module)
    own = sys.orig_argv.index("smp_launch.warm.handover")  # with its first two words: the rest is the wrapper's
    place = {
        "module": module,
        "arguments": words,
        "environ": environ,
        "path": sys.path,
        "argv": [spec.origin if spec else module, *words],
        "orig_argv": [*sys.orig_argv[:own], *sys.orig_argv[own + 3 :]],
        "with_group": whose == "group",
    }
    _follow(connection, place)


def _is_inherited(descriptor: int) -> bool:
    try:
        return os.get_inheritable(descriptor)
    except OSError:
        return False  # the listing's own


def _run(module: str, words: Sequence[str], why: str) -> int:
    """Be the rank, from its imports on."""
    if why and is_first_rank(os.environ):
        with contextlib.suppress(OSError):
            os.write(2, f"smp-launch: ranks make their imports anew: {why}\n".encode())
    return int(importlib.import_module(module).main(words))


def _follow(connection: socket.socket, place: dict[str, object]) -> NoReturn:
    """Hand the place over, pass signals on, and end as the fork does."""
    # Python writes the numbers of signals into it, so that one select() waits for them and for the fork.
    told, tell = os.pipe()
    for end in (told, tell):
        os.set_blocking(end, False)
    for each in signal.valid_signals() - _OWN_SIGNALS:
        if signal.getsignal(each) is not signal.SIG_IGN:
            with contextlib.suppress(OSError, ValueError):  # one that the system keeps for itself
                signal.signal(each, lambda number, frame: None)
    signal.set_wakeup_fd(tell, warn_on_full_buffer=False)
    folder = os.open(".", os.O_RDONLY | os.O_DIRECTORY)
    try:
        # From here on the answer is the fork's end, which comes when the script is done.
        connection.settimeout(None)
        messages.send(connection, {"place": place}, (0, 1, 2, folder))
        null = os.open(os.devnull, os.O_RDWR)
        for number in range(3):  # only the rank may hold the pipes, so that their reader sees the rank's end
            os.dup2(null, number)
        while True:
            ready = select.select([told, connection.fileno()], [], [])[0]
            if connection.fileno() in ready:
                _end(int(messages.receive(connection)[0]["ended"]))
            for signalled in os.read(told, 4096):
                messages.send(connection, {"signal": signalled})
    except (OSError, EOFError, ValueError, KeyError, TypeError):
        _end(-signal.SIGKILL)  # the fork has ended with its parent


def _end(code: int) -> NoReturn:
    """End this process with the given exit code, or by that signal if it is negative, without a core dump."""
    # The rank has run the exit handlers and flushed its files: nothing of that is left to do here.
    if code >= 0:
        os._exit(code)
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    if -code not in (signal.SIGKILL, signal.SIGSTOP):
        signal.signal(-code, signal.SIG_DFL)
        signal.pthread_sigmask(signal.SIG_UNBLOCK, {-code})
    os.kill(os.getpid(), -code)
    os._exit(128 - code)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
