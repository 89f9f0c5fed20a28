"""Running a model without a mark: what a forward pass changes in it is put back."""

from __future__ import annotations

import contextlib
import logging
import random
import sys
from collections.abc import Iterator
from typing import Any

import torch
from torch import nn
from torch.nn.modules.batchnorm import _NormBase

from smp_runtime.module_state.entries import REGISTRIES, Entries
from smp_runtime.tensors.nested import tensors_in

logger = logging.getLogger("smp")


class Snapshot:
    """A model as it was before it ran; until it is put back, its parameters have no gradients."""

    def __init__(self, model: nn.Module) -> None:
        modules = list(model.modules())
        self._owners = {id(vars(module)): module for module in modules}
        self._entries = Entries(modules, buffers=True, apart=REGISTRIES)
        self._buffers = {id(module): dict(module._buffers.items()) for module in modules}
        #: All buffers, and what modules keep like them without registering it, with a copy of each.
        kept = (taken.value for _, taken in self._entries.slots() if type(taken.value) is torch.Tensor)
        like_buffers = (tensor for tensor in kept if tensor.is_leaf and not tensor.requires_grad)
        self._values = {
            id(tensor): (tensor, _version(tensor), None if tensor.is_meta else tensor.detach().clone())
            for tensor in (*model.buffers(), *like_buffers)
        }
        self._parameters = [(parameter, parameter.grad, parameter._version) for parameter in model.parameters()]
        for parameter, _, _ in self._parameters:
            parameter.grad = None  # nothing can be added to it

    def changed_attributes(self) -> list[tuple[nn.Module, str]]:
        """Attributes with tensors, other than parameters and buffers, that are not what they were."""
        changed = []
        for slot, before in self._entries.slots():
            module, now = self._owners.get(id(slot.holder)), slot.take()
            if module is None or isinstance(now.value, nn.Module) or callable(now.value):
                continue
            if (not now.is_same(before) or self._is_changed(now.value)) and tensors_in(now.value):
                changed.append((module, slot.key))
        return changed

    def changed_buffers(self, module: nn.Module) -> Iterator[str]:
        """Names of a module's own buffers that are not what they were."""
        buffers = self._buffers[id(module)]
        for name, buffer in module._buffers.items():
            if buffer is None:
                continue
            counts = buffer.is_meta and isinstance(module, _NormBase) and module.training
            if buffer is not buffers.get(name) or self._is_changed(buffer) or counts:
                yield name

    def _is_changed(self, value: Any) -> bool:
        """Whether a tensor has other elements than it had."""
        if id(value) not in self._values:
            return False
        _, version, former = self._values[id(value)]
        if _version(value) != version:
            return True
        # Normalisation changes its buffers without counting that.
        if former is None or former.layout is not torch.strided:
            return False
        return former.shape != value.shape or not bool((former == value).all())

    def put_back(self) -> None:
        """The model becomes what it was; a warning says so if parameters have other values."""
        self._entries.put_back()
        with torch.no_grad():
            for tensor, _, former in self._values.values():
                if former is not None:
                    _put_back(tensor, former)
        for parameter, gradient, _ in self._parameters:
            parameter.grad = gradient
        if changed := sum(parameter._version != version for parameter, _, version in self._parameters):
            logger.warning(
                "the forward pass writes into %d parameters, and the tracing step ran it once; set skip_tracing if "
                "training must start from the exact initial values",
                changed,
            )


@contextlib.contextmanager
def restored(model: nn.Module) -> Iterator[Snapshot]:
    """Put back, at the end: buffers, attributes and flags of all modules, gradients, and all random generators.

    Parameters are expected to stay as they are; if a forward pass writes into them, a warning says so. Yields the
    model as it was, which tells what has changed since.
    """
    snapshot = Snapshot(model)
    try:
        with _random_states():
            yield snapshot
    finally:
        torch.clear_autocast_cache()
        snapshot.put_back()


def _version(tensor: torch.Tensor) -> int | None:
    return None if tensor.is_inference() else tensor._version


def _put_back(buffer: torch.Tensor, value: torch.Tensor) -> None:
    if buffer.shape != value.shape:  # resized in place
        buffer.resize_(value.shape)
    buffer.copy_(value)


@contextlib.contextmanager
def _random_states() -> Iterator[None]:
    python = random.getstate()
    numpy = sys.modules.get("numpy")
    numpy_state = None if numpy is None else numpy.random.get_state()
    cuda = torch.cuda.get_rng_state_all() if torch.cuda.is_available() and torch.cuda.is_initialized() else None
    cpu = torch.get_rng_state()
    try:
        yield
    finally:
        torch.set_rng_state(cpu)
        if cuda is not None:
            torch.cuda.set_rng_state_all(cuda)
        if numpy is not None and numpy_state is not None:
            numpy.random.set_state(numpy_state)
        random.setstate(python)
