"""Modules that a rank has imported before its training: rank 0 reports them, the standby process imports them."""

from __future__ import annotations

import contextlib
import ctypes
import importlib
import os
import select
import signal
import socket
import sys
import sysconfig
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from importlib.machinery import ModuleSpec
from pathlib import Path
from types import ModuleType
from typing import Any

from smp_launch.ranks import messages

#: Names the socket of the process that makes ranks ready; only in the environment of a rank until its script begins.
SOCKET_VARIABLE = "SMP_LAUNCH_WARM"

#: A rank that begins this step has imported what its first steps need.
REPORTED_STEP = 2

#: Seconds for the report to be taken.
_PATIENCE = 2.0

#: The CUDA driver's library, and the error code of its calls before cuInit (CUDA_ERROR_NOT_INITIALIZED).
_DRIVER, _NOT_INITIALIZED = "libcuda.so", 3

#: Packages that join their job when they are imported.
_JOINS = ("mpi4py",)

#: Folder with this project's packages.
_OWN = str(Path(__file__).parents[2])

#: Seconds of rest for each second of imports, while no rank waits for them.
_REST = 3.0


def report(
    path: str, arguments: Sequence[str], module: str, environ: Mapping[str, str], folders: Iterable[str]
) -> None:
    """Report the modules that this rank has imported. If no process listens, do nothing.

    Args:
        path: path of the socket.
        arguments: arguments of the rank's wrapper.
        module: name of the wrapper's module.
        environ: the environment when the process began.
        folders: folders of the user's files. Nothing is imported ahead from them.
    """
    content = {
        "module": module,
        "arguments": list(arguments),
        "environ": dict(environ),
        "now": dict(os.environ),
        "names": list_installed(sys.modules, [os.path.realpath(folder) for folder in folders]),
    }
    try:
        with messages.connect(path, _PATIENCE) as connection:
            messages.send(connection, {"report": content})
    except (OSError, ValueError):
        pass  # a restart takes longer, and no more


def list_installed(modules: Mapping[str, ModuleType], folders: Sequence[str]) -> list[str]:
    """Return the names of imported modules that are installed, in the order of their import.

    They come from the standard library, an installed package or this project. Modules of the user's own folders are left
    out, and modules that join a job when they are imported.
    """
    scheme = ("stdlib", "platstdlib", "purelib", "platlib")
    roots = {os.path.realpath(sysconfig.get_path(name)) for name in scheme}
    roots.add(os.path.realpath(_OWN))
    names = []
    for name, module in list(modules.items()):
        if name == "__main__" or name.partition(".")[0] in _JOINS:
            continue
        spec = getattr(module, "__spec__", None)
        if not isinstance(spec, ModuleSpec) or spec.name != name:
            continue
        if spec.has_location:
            is_installed = _is_installed(str(spec.origin), roots, folders)
        else:
            is_installed = spec.origin in ("built-in", "frozen")
        if is_installed:
            names.append(name)
    return names


def _is_installed(file: str, roots: Iterable[str], folders: Sequence[str]) -> bool:
    """Return whether a module's file belongs to one of the roots of installed packages, not to the user's folders."""
    file = os.path.realpath(file)
    above = [len(folder) for folder in folders if file.startswith(folder + os.sep)]
    own = [len(root) for root in roots if file.startswith(root + os.sep)]
    # The environment may lie in the user's folder, or the other way round: the innermost folder owns the file.
    return max(own, default=0) > max(above, default=0)


class _Slowly:
    """A finder in front of all imports that finds nothing, but rests after each import.

    So the imports take a small part of a core as long as no process waits for them.

    Args:
        rest: sleeps at most the given number of seconds, and returns whether a process waits.
    """

    def __init__(self, rest: Callable[[float], bool]) -> None:
        self._rest = rest
        self._used = time.process_time()
        self._hurries = False

    def find_spec(self, name: str, path: Any = None, target: Any = None) -> None:
        """Find nothing, and rest for a time that depends on the last import."""
        if not self._hurries:
            self._hurries = self._rest(_REST * (time.process_time() - self._used))
            self._used = time.process_time()


def prepare(names: Iterable[str], rest: Callable[[float], bool]) -> None:
    """Import the modules in ``names`` that can be imported, in their order."""
    slowly = _Slowly(rest)
    sys.meta_path.insert(0, slowly)
    try:
        for name in names:
            if name not in sys.modules:
                try:
                    importlib.import_module(name)
                except Exception:  # the rank meets it again, or never imports it in this way
                    pass
    finally:
        sys.meta_path.remove(slowly)


@dataclass(frozen=True)
class Shared:
    """The state of a process before its imports, which its forks would share.

    Attributes:
        files: files that it has open, as the system names them.
        handlers: handlers of its signals.
    """

    files: frozenset[str]
    handlers: Mapping[int, Any]

    @classmethod
    def now(cls) -> Shared:
        """Return the open files and the signal handlers of this process."""
        handlers = {int(number): signal.getsignal(number) for number in signal.valid_signals()}
        return cls(frozenset(_open_files()), handlers)

    def unfit(self) -> str | None:
        """Return why this process cannot be forked into ranks after its imports, or None if it can."""
        threads = len(os.listdir("/proc/self/task"))
        if threads != 1:
            return f"what the script imports has started {threads - 1} thread(s)"
        now = Shared.now()
        for name in sorted(now.files - self.files):
            is_plain_file = name.startswith("/") and not name.startswith("/dev/")
            if not is_plain_file:
                return f"what the script imports has opened {name.partition(':')[0]}"
        if now.handlers != self.handlers:
            return "what the script imports handles signals"
        if "mpi4py.MPI" in sys.modules:
            return "what the script imports has joined MPI"
        if _uses_torch():
            return "what the script imports has begun to use a GPU, or joined a process group"
        if _has_begun_driver():
            return "what the script imports has initialized the CUDA driver"
        return None


def _has_begun_driver() -> bool:
    """Return whether this process has initialized the CUDA driver. A fork of it cannot use a GPU then.

    PyTorch does not notice if another library has done that.
    """
    if not any(os.path.basename(file).startswith(_DRIVER) for file in _mapped_files()):
        return False
    count = ctypes.c_int()
    return ctypes.CDLL(f"{_DRIVER}.1").cuDeviceGetCount(ctypes.byref(count)) != _NOT_INITIALIZED


def _uses_torch() -> bool:
    """Return whether PyTorch holds a GPU or a process group. Neither survives a fork."""
    torch = sys.modules.get("torch")
    if torch is None:
        return False
    return bool(torch.cuda.is_initialized() or torch.distributed.is_initialized())


def _mapped_files() -> Iterator[str]:
    """Yield the files that are mapped into this process, its libraries included."""
    with open("/proc/self/maps") as file:
        for line in file:
            # Address, permissions, offset, device and inode; anonymous memory has no sixth field.
            fields = line.rstrip().split(maxsplit=5)
            if len(fields) == 6:
                yield fields[5]


def _open_files() -> Iterator[str]:
    for name in os.listdir("/proc/self/fd"):
        with contextlib.suppress(OSError):  # the listing's own
            yield os.readlink(f"/proc/self/fd/{name}")


def forget_draws() -> None:
    """Seed NumPy anew after a fork, so that each process draws its own random numbers, as a new process does."""
    drawing = sys.modules.get("numpy.random")
    if drawing is not None:
        drawing.seed()


def is_waited_for(listener: socket.socket) -> Callable[[float], bool]:
    """Return a function that waits up to a number of seconds and returns whether a process wants to connect."""
    return lambda seconds: bool(select.select([listener], [], [], max(0.0, seconds))[0])
