"""Threads for a few calls, which work while the interpreter ends, too."""

from __future__ import annotations

import contextlib
import queue
import threading
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from types import TracebackType
from typing import Any, TypeVar

_Item = TypeVar("_Item")
_Result = TypeVar("_Result")


class WorkerThreads:
    """Threads that make calls beside their creator; leaving the context waits for all calls.

    ``ThreadPoolExecutor`` takes no calls once the interpreter ends, and a save that the end of the process waits for still makes
    some. From Python 3.12 on no thread starts then, either: without threads, whoever submits a call makes it.

    Args:
        count: how many threads.
        name: of the threads, with a number behind it.
        begin: each thread calls it first.
    """

    def __init__(self, count: int, name: str, begin: Callable[[], object] = lambda: None) -> None:
        self._calls: queue.SimpleQueue[tuple[Future[Any], Callable[[], Any]] | None] = queue.SimpleQueue()
        self._threads: list[threading.Thread] = []
        for number in range(count):
            # A daemon, since the context waits for it: Python would wait for others before it lets a save be waited for.
            thread = threading.Thread(target=self._work, args=(begin,), name=f"{name}-{number}", daemon=True)
            try:
                thread.start()
            except RuntimeError:
                break
            self._threads.append(thread)

    def __enter__(self) -> WorkerThreads:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if error is not None:
            with contextlib.suppress(queue.Empty):
                while (call := self._calls.get_nowait()) is not None:
                    call[0].cancel()
        for _ in self._threads:
            self._calls.put(None)
        for thread in self._threads:
            thread.join()

    def submit(self, function: Callable[..., _Result], *args: Any) -> Future[_Result]:
        """Have a thread call ``function(*args)``."""
        future: Future[_Result] = Future()

        def call() -> _Result:
            return function(*args)

        if self._threads:
            self._calls.put((future, call))
        else:
            _settle(future, call)
        return future

    def map(self, function: Callable[[_Item], _Result], items: Sequence[_Item]) -> list[_Result]:
        """Return ``function`` of each item, in their order; the first error is raised."""
        futures = [self.submit(function, item) for item in items]
        return [future.result() for future in futures]

    def _work(self, begin: Callable[[], object]) -> None:
        problem: BaseException | None = None
        try:
            begin()
        except Exception as error:  # every call of this thread fails with it
            problem = error
        while (call := self._calls.get()) is not None:
            future, function = call
            if problem is not None:
                future.set_exception(problem)
            else:
                _settle(future, function)


def _settle(future: Future[Any], function: Callable[[], Any]) -> None:
    try:
        future.set_result(function())
    except BaseException as error:  # raised by whoever asks for the result
        future.set_exception(error)
