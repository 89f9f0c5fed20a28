"""Views that a module makes by the width of its input, of features that are shared out: the last dim is this rank's part.

``y.view(batch, length, width)`` behind attention asks for the features of all heads, and a rank has those of its own. Nothing
on the module tells that number, so that none can be changed; but what is asked for is the group's size too much.
"""

from __future__ import annotations

import math
from typing import Any

import torch

from smp_runtime.tensor_parallel.during_calls import DuringCalls

_VIEWS = (torch.Tensor.view, torch.Tensor.reshape, torch.reshape)


class LocalViews(DuringCalls):
    """Divides the last dim that the ranks divide of views which ask for the elements of all ranks."""

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
