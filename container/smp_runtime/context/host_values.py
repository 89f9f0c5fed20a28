"""Positions and plans: numbers on the host that decide what is sent and computed.

They are computed in fact where a mode of PyTorch would not: a rehearsal only allocates the results of large operations.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import ParamSpec, TypeVar

from smp_runtime.tensors.torch_private import dispatch_modes, without_modes

P = ParamSpec("P")
R = TypeVar("R")


def always_computed(function: Callable[P, R]) -> Callable[P, R]:
    """Return a function that computes outside of all modes of this thread."""

    @functools.wraps(function)
    def compute(*args: P.args, **kwargs: P.kwargs) -> R:
        if not dispatch_modes():
            return function(*args, **kwargs)
        with without_modes():
            return function(*args, **kwargs)

    return compute
