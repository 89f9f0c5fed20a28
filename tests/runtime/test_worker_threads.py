"""Threads for a few calls: results in order, errors, and calls without any thread, as at the end of the interpreter."""

from __future__ import annotations

import subprocess
import sys
import threading

import pytest

from smp_runtime.tensors.host_memory.worker_threads import WorkerThreads

_AT_THE_END = """
import atexit
from smp_runtime.tensors.host_memory.worker_threads import WorkerThreads

def end():
    with WorkerThreads(2, "test") as workers:
        print(workers.map(str, range(5)))

atexit.register(end)
"""


def test_results_are_in_the_order_of_the_items():
    together = threading.Barrier(3)

    def wait(item):
        together.wait(20)
        return item * 2

    with WorkerThreads(3, "test") as workers:
        assert workers.map(wait, range(9)) == list(range(0, 18, 2))
    assert not any(thread.name.startswith("test-") for thread in threading.enumerate())


def test_the_first_error_is_raised_and_no_thread_stays():
    def divide(item):
        return 1 / item

    with pytest.raises(ZeroDivisionError), WorkerThreads(2, "test") as workers:
        workers.map(divide, [1, 0, 2, 3])
    assert not any(thread.name.startswith("test-") for thread in threading.enumerate())


def test_a_thread_that_cannot_begin_fails_its_calls():
    def fail():
        raise OSError("no device")

    with pytest.raises(OSError, match="no device"), WorkerThreads(2, "test", fail) as workers:
        workers.map(abs, [1, 2])


def test_calls_are_made_at_once_if_no_thread_starts(monkeypatch):
    def refuse(thread):
        raise RuntimeError("can't create new thread at interpreter shutdown")

    monkeypatch.setattr(threading.Thread, "start", refuse)
    with WorkerThreads(2, "test") as workers:
        assert workers.map(str, [1, 2]) == ["1", "2"]
        assert isinstance(workers.submit(int, "x").exception(), ValueError)


def test_calls_are_made_while_the_interpreter_ends():
    done = subprocess.run([sys.executable, "-c", _AT_THE_END], capture_output=True, text=True, timeout=60, check=True)
    assert done.stdout.strip() == "['0', '1', '2', '3', '4']"
