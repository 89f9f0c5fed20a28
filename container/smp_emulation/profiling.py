"""Marks and switches for profilers and tuners: nobody reads them here."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Iterator
from typing import Any

from smp_emulation.calls import Call, instead


class _Depth(threading.local):
    """How many ranges of the thread are open."""

    value = 0


_depth = _Depth()


def _push(msg: str) -> int:
    _depth.value += 1
    return _depth.value - 1


def _pop() -> int:
    _depth.value -= 1
    return _depth.value


@contextlib.contextmanager
def _range(msg: str, *args: Any, **kwargs: Any) -> Iterator[None]:
    _push(msg)
    try:
        yield
    finally:
        _pop()


@contextlib.contextmanager
def _profile(*args: Any, **kwargs: Any) -> Iterator[None]:
    yield


def _nothing(*args: object, **kwargs: object) -> None:
    return None


CALLS: tuple[Call, ...] = (
    instead("torch.cuda.nvtx.range_push", "counts the depth", _push),
    instead("torch.cuda.nvtx.range_pop", "counts the depth", _pop),
    instead("torch.cuda.nvtx.range_start", "0", lambda msg: 0),
    instead("torch.cuda.nvtx.range_end", "nothing", _nothing),
    instead("torch.cuda.nvtx.mark", "nothing", _nothing),
    instead("torch.cuda.nvtx.range", "counts the depth", _range),
    instead("torch.cuda.profiler.start", "nothing", _nothing),
    instead("torch.cuda.profiler.stop", "nothing", _nothing),
    instead("torch.cuda.profiler.profile", "nothing", _profile),
)
