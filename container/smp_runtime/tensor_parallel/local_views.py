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

_VIEWS = (torch.Tensor.view, torch.Tensor.reshape, torch.reshape)


class LocalViews(DuringCalls):
    """A mode in which views with the size of all ranks' elements get this rank's part of the last divisible dim."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func in _VIEWS and not kwargs:
            x, *shape = args
            sizes = list(shape[0]) if len(shape) == 1 and isinstance(shape[0], tuple | list) else shape
            if all(type(length) is int for length in sizes):
                return func(x, self._of_rank(x.numel(), sizes))
        return func(*args, **(kwargs or {}))

    def _of_rank(self, elements: int, sizes: list[int]) -> list[int]:
        if math.prod(sizes) != elements * self.group.size:
            return sizes
        last = max((dim for dim, length in enumerate(sizes) if not length % self.group.size), default=None)
        return [length // self.group.size if dim == last else length for dim, length in enumerate(sizes)]
