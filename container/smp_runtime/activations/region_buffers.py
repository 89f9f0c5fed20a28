"""Buffers of modules in a region, as its second run needs them.

A second run must find buffers as the forward pass did, and must not change them. A norm that counts batches would
count each twice, and running statistics would take each batch twice. If a module's result depends on such a buffer
(power iterations, codebooks), the second run would return another result. So a second run works on copies. A buffer
that is known to change is copied before the first run; for any other, the current elements are copied.
"""

from __future__ import annotations

import contextlib
import functools
import types
import weakref
from collections.abc import Iterator
from typing import Any, NamedTuple

import torch
from torch import nn

from smp_runtime.tensors.torch_private import NORMS_WITH_STATISTICS

#: By module, the buffers that its forward pass was seen to change; a module that is not here has not run in a region yet.
_changing: weakref.WeakKeyDictionary[nn.Module, set[str]] = weakref.WeakKeyDictionary()


class _NewBuffer(NamedTuple):
    """A buffer before the first run."""

    module: nn.Module
    name: str
    buffer: torch.Tensor
    version: int | None
    copy: torch.Tensor | None  # of its elements, if they may be needed


class RegionBuffers:
    """The buffers of the modules that a region calls.

    Args:
        function: what the region runs; modules are found in it, its arguments and its closure.
    """

    def __init__(self, function: Any) -> None:
        self._seen: list[_NewBuffer] = []
        #: Buffers that a second run gets copies of: the elements before the first run, or None for the current ones.
        self._apart: list[tuple[nn.Module, str, torch.Tensor | None]] = []
        for module in modules_of(function):
            if not module._buffers or not isinstance(module._buffers, dict):  # TorchScript keeps its own
                continue
            known = _changing.get(module)
            # Statistics do not enter the result while they are collected.
            is_norm = isinstance(module, NORMS_WITH_STATISTICS)
            for name, buffer in module._buffers.items():
                if buffer is None:
                    continue
                if is_norm:
                    if module.training:
                        self._apart.append((module, name, None))
                    continue
                copies = known is None or name in known
                copy = buffer.detach().clone() if copies else None
                self._seen.append(_NewBuffer(module, name, buffer, _version(buffer), copy))

    def forward_ended(self) -> None:
        """Find the buffers that the first run has changed."""
        for module, name, buffer, version, copy in self._seen:
            known = _changing.setdefault(module, set())
            now = module._buffers.get(name)
            if now is not buffer or _version(buffer) != version:
                known.add(name)
                before = buffer if now is not buffer and copy is None else copy
                self._apart.append((module, name, before))
            elif module.training and buffer.is_floating_point():
                # PyTorch's functions for norms change statistics without counting that as a change.
                self._apart.append((module, name, None))
        self._seen.clear()

    @contextlib.contextmanager
    def apart(self) -> Iterator[None]:
        """Run the block with copies in place of the buffers; then put the buffers back, unchanged."""
        held: list[tuple[nn.Module, str, torch.Tensor]] = []
        try:
            for module, name, before in self._apart:
                now = module._buffers.get(name)
                if now is not None:
                    held.append((module, name, now))
                    module._buffers[name] = (now if before is None else before).detach().clone()
            yield
        finally:
            for module, name, now in held:
                module._buffers[name] = now


def _version(buffer: torch.Tensor) -> int | None:
    return None if buffer.is_inference() else buffer._version


def modules_of(function: Any) -> Iterator[nn.Module]:
    """Yield the modules in a function, its arguments and its closure, each once."""
    waiting, seen = [function], set()
    while waiting:
        item = waiting.pop()
        if id(item) in seen:
            continue
        seen.add(id(item))
        if isinstance(item, nn.Module):
            yield item
            waiting.extend(item._modules.values())
        elif isinstance(item, functools.partial):
            waiting += [item.func, *item.args, *item.keywords.values()]
        elif isinstance(item, types.MethodType):
            waiting += [item.__self__, item.__func__]
        elif isinstance(item, types.FunctionType):
            waiting += [cell.cell_contents for cell in item.__closure__ or () if _is_filled(cell)]
        elif isinstance(item, list | tuple):
            waiting.extend(item)


def _is_filled(cell: types.CellType) -> bool:
    try:
        cell.cell_contents  # noqa: B018 - an empty one raises
    except ValueError:
        return False
    return True
