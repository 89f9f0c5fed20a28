"""CUDA contexts: which devices a process has used, and whether one of them is not its own."""

from __future__ import annotations

import os
import threading
from collections.abc import Callable, Mapping, MutableMapping
from dataclasses import dataclass

from smp_config.machine.launchers import LOCAL_RANK_VARIABLES
from smp_records.script_lines import script_line

#: Set by the first process that uses a device, for the processes that it starts: its id and the number of the device.
OWNER_VARIABLE = "SMP_EMULATE_CUDA_OWNER"


@dataclass(frozen=True)
class Context:
    """The first use of a device by a process.

    Attributes:
        line: the line of the script, or an empty string if there is none.
    """

    device: int
    what: str
    thread: str
    line: str


class Contexts:
    """The devices that this process uses.

    Args:
        count: number of devices.
        environ: the variables of this process; child processes inherit them.

    Attributes:
        found: the uses, by device.
        heard: called with the sentence for a wrong use in a process that another rank has started. Such a process may end
            without the functions of ``atexit``.
    """

    def __init__(self, count: int, environ: MutableMapping[str, str] | None = None) -> None:
        self._count = count
        self._environ = os.environ if environ is None else environ
        # Any thread may use a device first.
        self._lock = threading.Lock()
        self._chosen: int | None = None
        self.heard: Callable[[str], None] = lambda sentence: None
        self._begin()

    def _begin(self) -> None:
        """Begin to count for this process, which may be a fork of another one."""
        self._pid = os.getpid()
        self.found: dict[int, Context] = {}
        pid, _, device = self._environ.get(OWNER_VARIABLE, "").partition(":")
        #: The process above this one that uses a device, and the device; None if there is none.
        self._owner = (int(pid), int(device)) if pid.isdigit() and device.isdigit() else None

    @property
    def own(self) -> int | None:
        """Return the device of the rank: the one that the main thread has chosen, else that of the local rank."""
        return self._chosen if self._chosen is not None else _device_of_rank(self._environ, self._count)

    def choose(self, device: int) -> None:
        """Note that ``torch.cuda.set_device`` was called, which makes a context as well."""
        if threading.current_thread() is threading.main_thread():
            self._chosen = device
        self.use(device, "torch.cuda.set_device")

    def use(self, device: int, what: str) -> None:
        """Note that this process uses a device."""
        if self._pid != os.getpid():
            self._begin()
        if device in self.found:
            return
        # Two threads may use a device for the first time at once: one context counts.
        with self._lock:
            file, line = script_line()
            where = f"{os.path.basename(file)}:{line}" if file else ""
            context = self.found.setdefault(device, Context(device, what, threading.current_thread().name, where))
            self._environ.setdefault(OWNER_VARIABLE, f"{self._pid}:{device}")
        sentence = self._judge(context) if self._owner is not None else ""
        if sentence:
            self.heard(sentence)

    def findings(self) -> list[str]:
        """Return a sentence for each context that a rank should not have."""
        return list(filter(None, map(self._judge, self.found.values())))

    def _judge(self, context: Context) -> str:
        at = f" at {context.line}" if context.line else ""
        use = f"{context.what}{at}, on the thread {context.thread}"
        own = self.own
        if own is not None and context.device != own:
            return (
                f"a second CUDA context: process {self._pid} uses cuda:{context.device}, while its rank's device is cuda:{own}: "
                f"{use}. A context takes some hundred MiB of that GPU; call torch.cuda.set_device({own}) first on every thread "
                "and in every process, or name the device"
            )
        if self._owner is not None and self._owner[0] != self._pid:
            return (
                f"a second CUDA context: process {self._pid} uses cuda:{context.device}, and process {self._owner[0]}, which "
                f"started it, uses cuda:{self._owner[1]}: {use}. A context takes some hundred MiB of the GPU; leave such work to "
                "the rank"
            )
        return ""

    def close(self) -> None:
        """Let processes that begin later not count as parts of this one."""
        if self._environ.get(OWNER_VARIABLE, "").startswith(f"{self._pid}:"):
            del self._environ[OWNER_VARIABLE]


def _device_of_rank(environ: Mapping[str, str], count: int) -> int | None:
    for name in LOCAL_RANK_VARIABLES:
        if environ.get(name, "").isdigit():
            return int(environ[name]) % count
    return None
