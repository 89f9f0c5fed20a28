"""Functions of ``torch.autograd.Function`` on sequences, which their call does not hand to subclasses of tensors.

They would keep the gradients of a slice from it: their own graph begins at the wrapper, which has none.
"""

from __future__ import annotations

import functools
import weakref
from typing import Any

import torch

from smp_runtime.context.position_wise import PositionWise
from smp_runtime.context.sequence import cut_results, gather_all, sequences_in

#: What is known of each function's class.
_position_wise: weakref.WeakKeyDictionary[type[torch.autograd.Function], PositionWise] = weakref.WeakKeyDictionary()

_original = torch.autograd.Function.__dict__["apply"]


def _apply(cls: type[torch.autograd.Function], *args: Any, **kwargs: Any) -> Any:
    """Run a function on slices or on whole sequences, if there are any among its arguments."""
    call = _original.__get__(None, cls)
    found = sequences_in((args, kwargs))
    if not found:
        return call(*args, **kwargs)
    if cls not in _position_wise:
        _position_wise[cls] = PositionWise(functools.partial(_call_whole, cls))
    return _position_wise[cls](*args, **kwargs)


def _call_whole(cls: type[torch.autograd.Function], *args: Any, **kwargs: Any) -> Any:
    """Run a function on whole tensors, or on slices that stand for them."""
    call = _original.__get__(None, cls)
    found = sequences_in((args, kwargs))
    if not found:
        return call(*args, **kwargs)
    name, first = cls.__name__, found[0]
    return cut_results(call(*gather_all(args, name), **gather_all(kwargs, name)), first)


def install() -> None:
    """Let functions see sequences; once in a process with context parallelism, since others pay nothing."""
    if torch.autograd.Function.__dict__["apply"] is _original:
        torch.autograd.Function.apply = classmethod(_apply)  # type: ignore[assignment]
