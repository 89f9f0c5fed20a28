"""Marks on modules that a script constructs inside a context: entries of their ``__dict__``, so copies keep them."""

from __future__ import annotations

import contextlib
import functools
import threading
from collections.abc import Callable, Iterator
from typing import Any

from torch import nn

#: Guards the two below. ``nn.Module`` is patched while a context of any thread is open, and acts for that thread only.
_lock = threading.Lock()
_contexts = 0
_undo: list[Callable[[], None]] = []


class _Open(threading.local):
    """The contexts that the calling thread is in, outermost first: name, mark, and whether copies get it."""

    marks: tuple[tuple[str, Any, bool], ...] = ()


_open = _Open()


@contextlib.contextmanager
def mark_constructed(name: str, mark: Any, *, copies: bool = False) -> Iterator[None]:
    """Mark modules that this thread constructs inside the block with the entry ``name``.

    In nested contexts the innermost one counts. With ``copies``, modules that are copied or unpickled inside are
    marked too.
    """
    global _contexts
    # The patched methods are all threads'; the marks are this thread's own.
    with _lock:
        _contexts += 1
        if _contexts == 1:
            _undo[:] = [_patch("__init__", of_copies=False), _patch("__setstate__", of_copies=True)]
    outer, _open.marks = _open.marks, (*_open.marks, (name, mark, copies))
    try:
        yield
    finally:
        _open.marks = outer
        with _lock:
            _contexts -= 1
            if not _contexts:
                for undo in _undo:
                    undo()


def _patch(method: str, *, of_copies: bool) -> Callable[[], None]:
    found = getattr(nn.Module, method)

    @functools.wraps(found)
    def marked(module: nn.Module, *args: Any, **kwargs: Any) -> None:
        found(module, *args, **kwargs)
        for name, mark, copies in _open.marks:
            if copies or not of_copies:
                vars(module)[name] = mark

    def undo() -> None:
        if getattr(nn.Module, method) is marked:  # another library's patch over it stays
            setattr(nn.Module, method, found)

    setattr(nn.Module, method, marked)
    return undo
