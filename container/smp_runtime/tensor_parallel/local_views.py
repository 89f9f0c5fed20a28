"""Views by the width of a module's input, of features that are split: the last dim becomes this rank's part.

``y.view(batch, length, width)`` behind attention asks for the features of all heads, but a rank has only those of
its own. No attribute of the module holds that number, so none can be changed. But the requested size is too
large by exactly the group's size.
"""

from __future__ import annotations

import math
from typing import Any

import torch

from smp_runtime.tensor_parallel.during_calls import DuringCalls

#: Functions that get the sizes of a view as arguments.
_VIEWS = (torch.Tensor.view, torch.Tensor.reshape, torch.reshape)


def _sizes_of_view(func: Any, args: Any, kwargs: Any) -> list[int] | None:
    """Return the sizes that a call asks a view to have; None for other calls, and for sizes that only a compiler knows."""
    if func not in _VIEWS or kwargs:
        return None
    _, *sizes = args
    if len(sizes) == 1 and isinstance(sizes[0], tuple | list):
        sizes = list(sizes[0])
    return sizes if all(type(length) is int for length in sizes) else None


class LocalViews(DuringCalls):
    """A mode in which views with the size of all ranks' elements get this rank's part of the last divisible dim."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        sizes = _sizes_of_view(func, args, kwargs)
        if sizes is None:
            return func(*args, **kwargs)
        x = args[0]
        return func(x, self._of_rank(x.numel(), sizes))

    def _of_rank(self, elements: int, sizes: list[int]) -> list[int]:
        if math.prod(sizes) != elements * self.group.size:
            return sizes
        last = max((dim for dim, length in enumerate(sizes) if not length % self.group.size), default=None)
        return [length // self.group.size if dim == last else length for dim, length in enumerate(sizes)]
