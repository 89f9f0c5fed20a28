"""Tracing of a model without parameter values: parameters are on the meta device, and the batch's tensors are not.

An operation that takes a tensor on the meta device returns one there; all other operations compute. So code
may read values that it has computed from the batch alone, such as a mask. Code that asks a tensor of the
model for its device gets the meta device. A tensor that the code makes there from numbers alone, such as
positions, has values all the same.
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Iterator
from typing import Any

import torch
from torch.overrides import TorchFunctionMode

from smp_runtime.tensors.torch_private import TorchDispatchMode, tree_leaves, tree_map

_META = torch.device("meta")

#: What makes tensors of numbers alone.
_CONSTANTS = {
    torch.ops.aten.arange,
    torch.ops.aten.eye,
    torch.ops.aten.full,
    torch.ops.aten.linspace,
    torch.ops.aten.ones,
    torch.ops.aten.scalar_tensor,
    torch.ops.aten.zeros,
}

#: Functions that compare the devices of their arguments before any operation runs.
_RECURRENT = {"lstm", "gru", "rnn_tanh", "rnn_relu"}


@contextlib.contextmanager
def values_left_out(device: torch.device) -> Iterator[None]:
    """Run operations between tensors of the meta device and of others on the meta device.

    Args:
        device: where the model will be trained. PyTorch has no ``torch.autocast`` for the meta device, so that
            of this device is used.
    """
    with _autocast_of(device.type), _OnMeta(device), _BeforeAutocast(device):
        yield


class _BeforeAutocast(TorchFunctionMode):
    """A mode that moves floating point arguments to the meta device before autocast, which casts only those not on it."""

    def __init__(self, device: torch.device) -> None:
        super().__init__()
        self._kind = device.type

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        name = getattr(func, "__name__", "")
        may_cast = torch.is_autocast_enabled(self._kind) or name in _RECURRENT
        if may_cast and True in _kinds_of((args, kwargs)):
            args, kwargs = tree_map(_without_numbers, (args, kwargs))
        return func(*args, **kwargs)


class _OnMeta(TorchDispatchMode):
    """A mode that moves the other arguments of an operation to the meta device if one argument is on it."""

    def __init__(self, device: torch.device) -> None:
        super().__init__()
        self._device = device

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        kinds = _kinds_of((args, kwargs))
        is_mixed = kinds == {False, True}
        if is_mixed:
            args, kwargs = tree_map(_without_value, (args, kwargs))
        is_conversion = func is torch.ops.aten._to_copy.default  # noqa: SLF001 - its name as an operator
        if True in kinds and is_conversion:
            # x.to(device): there is no value that could move.
            kwargs = {**kwargs, "device": _META}
        is_constant = not kinds and getattr(func, "overloadpacket", None) in _CONSTANTS
        if is_constant and kwargs.get("device") == _META:
            kwargs = {**kwargs, "device": self._device}
        return func(*args, **kwargs)


def _kinds_of(arguments: Any) -> set[bool]:
    """Return whether tensors among the arguments are on the meta device, are elsewhere, or both."""
    return {leaf.is_meta for leaf in tree_leaves(arguments) if isinstance(leaf, torch.Tensor)}


def _without_value(leaf: Any) -> Any:
    return leaf.to(_META) if isinstance(leaf, torch.Tensor) else leaf


def _without_numbers(leaf: Any) -> Any:
    if not isinstance(leaf, torch.Tensor) or not leaf.is_floating_point():
        return leaf
    return leaf.to(_META)


@contextlib.contextmanager
def _autocast_of(kind: str) -> Iterator[None]:
    begin = torch.autocast.__init__

    @functools.wraps(begin)
    def begin_on(self: torch.autocast, device_type: str, *args: Any, **kwargs: Any) -> None:
        begin(self, kind if device_type == "meta" else device_type, *args, **kwargs)

    torch.autocast.__init__ = begin_on  # type: ignore[method-assign]
    try:
        yield
    finally:
        torch.autocast.__init__ = begin  # type: ignore[method-assign]
