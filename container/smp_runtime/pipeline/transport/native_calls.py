"""Calls of PyTorch on threads of their own, since they may take long; the end of the interpreter waits for them."""

from __future__ import annotations

import atexit
import threading
import time
import weakref
from collections.abc import Callable

#: Longest wait at the end of the interpreter, for all calls together.
_END_SECONDS = 10.0

_threads: weakref.WeakSet[threading.Thread] = weakref.WeakSet()
_lock = threading.Lock()
#: Set when the interpreter waits no longer.
_is_over = threading.Event()


def start_call(call: Callable[[], None], name: str) -> threading.Thread | None:
    """Run a call on a new thread, and return the thread, which may be joined or left alone; None at the interpreter's end.

    It is a daemon, since a call that never returns must not keep the process alive. But it must not return too late either. Before
    version 3.14, Python ends a daemon where it returns from C++ into an interpreter that is being finalized. The C++ frames of
    PyTorch cannot be left that way, so the whole process would end by SIGABRT, after a job without a fault. Therefore the
    interpreter waits for these calls before it is finalized, up to ten seconds. A call that another thread wants to start
    afterwards is left out: the end of the process frees all that it would have freed.
    """
    thread = threading.Thread(target=call, name=name, daemon=True)
    # Check and start are one: after the interpreter has begun to wait, no call may start.
    with _lock:
        if _is_over.is_set():
            return None
        _threads.add(thread)
        thread.start()
    return thread


def _wait_for_calls() -> None:
    deadline = time.monotonic() + _END_SECONDS
    while thread := _find_running_call():
        thread.join(max(0.0, deadline - time.monotonic()))
        if time.monotonic() >= deadline:
            break
    _is_over.set()


def _find_running_call() -> threading.Thread | None:
    """Return a call that has not ended; None, and no further call can start."""
    with _lock:
        for thread in _threads:
            if thread.is_alive():
                return thread
        _is_over.set()
        return None


atexit.register(_wait_for_calls)
