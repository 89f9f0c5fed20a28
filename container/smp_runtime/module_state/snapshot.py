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

from smp_runtime.module_state.containers import contents_of, holds_same, refill
from smp_runtime.tensors.nested import tensors_in
from smp_runtime.tensors.torch_private import NORMS_WITH_STATISTICS

logger = logging.getLogger("smp")

#: Entries of a module that PyTorch manages; parameters, buffers and flags are put back one by one.
_MANAGED = {"_parameters", "_buffers", "_modules"}


class Former:
    """A model as it was before it ran."""

    def __init__(self, model: nn.Module) -> None:
        self.modules = list(model.modules())
        self._parameters = [(p, p.requires_grad, p.grad, p._version) for p in model.parameters()]
        self._attributes = [{k: v for k, v in vars(m).items() if k not in _MANAGED} for m in self.modules]
        self._contents = {
            id(value): (value, contents)
            for held in self._attributes
            for value in held.values()
            if (contents := contents_of(value)) is not None
        }
        self._buffers = {id(m): dict(m._buffers.items()) for m in self.modules}
        self._values = {
            id(tensor): (tensor, _version(tensor), None if tensor.is_meta else tensor.detach().clone())
            for tensor in self._tensors()
        }

    def _tensors(self) -> Iterator[torch.Tensor]:
        """All buffers, and what modules keep like them without registering it."""
        for buffers in self._buffers.values():
            yield from (buffer for buffer in buffers.values() if buffer is not None)
        for held in self._attributes:
            for value in held.values():
                if type(value) is torch.Tensor and value.is_leaf and not value.requires_grad:
                    yield value

    def changed_attributes(self) -> list[tuple[nn.Module, str]]:
        """Attributes with tensors, other than parameters and buffers, that are not what they were."""
        changed = []
        for module, before in zip(self.modules, self._attributes, strict=True):
            for name, value in vars(module).items():
                if name in _MANAGED or isinstance(value, nn.Module) or callable(value):
                    continue
                is_same = name in before and before[name] is value and not self._is_changed(value)
                if not is_same and tensors_in(value):
                    changed.append((module, name))
        return changed

    def changed_buffers(self, module: nn.Module) -> Iterator[str]:
        """Names of a module's own buffers that are not what they were."""
        buffers = self._buffers[id(module)]
        for name, buffer in module._buffers.items():
            if buffer is None:
                continue
            counts = buffer.is_meta and isinstance(module, NORMS_WITH_STATISTICS) and module.training
            if buffer is not buffers.get(name) or self._is_changed(buffer) or counts:
                yield name

    def _is_changed(self, value: Any) -> bool:
        if id(value) in self._contents:
            return not holds_same(value, self._contents[id(value)][1])
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
        for module, before in zip(self.modules, self._attributes, strict=True):
            kept = {name: vars(module)[name] for name in _MANAGED}
            if isinstance(kept["_buffers"], dict):  # a ScriptModule can get and lose none
                kept["_buffers"].clear()
                kept["_buffers"].update(self._buffers[id(module)])
            vars(module).clear()
            vars(module).update(before, **kept)
        for value, contents in self._contents.values():
            refill(value, contents)
        with torch.no_grad():
            for tensor, _, former in self._values.values():
                if former is not None:
                    _put_back(tensor, former)
        for parameter, requires_grad, gradient, _ in self._parameters:
            parameter.grad = gradient
            parameter.requires_grad_(requires_grad)
        changed = sum(parameter._version != version for parameter, _, _, version in self._parameters)
        if changed:
            logger.warning(
                "the forward pass writes into %d parameters, and the tracing step ran it once; set skip_tracing if "
                "training must start from the exact initial values",
                changed,
            )


@contextlib.contextmanager
def restored(model: nn.Module) -> Iterator[Former]:
    """Put back, at the end: buffers, attributes and flags of all modules, gradients, and all random generators.

    Parameters are expected to stay as they are; if a forward pass writes into them, a warning says so. Yields the
    model as it was, which tells what has changed since.
    """
    former = Former(model)
    try:
        with _random_states():
            yield former
    finally:
        torch.clear_autocast_cache()
        former.put_back()


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


@contextlib.contextmanager
def no_backward() -> Iterator[None]:
    """``loss.backward()`` does nothing inside."""
    original = torch.autograd.backward

    def nothing(*args: Any, **kwargs: Any) -> None:
        return None

    torch.autograd.backward = nothing
    try:
        yield
    finally:
        torch.autograd.backward = original
