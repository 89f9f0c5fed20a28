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

logger = logging.getLogger("smp")

#: Entries of a module that PyTorch manages; parameters, buffers and flags are put back one by one.
_MANAGED = {"_parameters", "_buffers", "_modules"}


@contextlib.contextmanager
def restored(model: nn.Module) -> Iterator[None]:
    """Put back, at the end: buffers, attributes and flags of all modules, gradients, and all random generators.

    Parameters are expected to stay as they are; if a forward pass writes into them, a warning says so.
    """
    modules = list(model.modules())
    parameters = [(p, p.requires_grad, p.grad, p._version) for p in model.parameters()]
    attributes = [{k: _copy(v) for k, v in vars(m).items() if k not in _MANAGED} for m in modules]
    registered = [dict(m._buffers) for m in modules]
    values = {
        id(b): (b, None if b.is_meta else b.detach().clone())
        for held in registered
        for b in held.values()
        if b is not None
    }
    try:
        with _random_states():
            yield
    finally:
        torch.clear_autocast_cache()
        for module, before, buffers in zip(modules, attributes, registered, strict=True):
            kept = {name: vars(module)[name] for name in _MANAGED}
            kept["_buffers"].clear()
            kept["_buffers"].update(buffers)
            vars(module).clear()
            vars(module).update(before, **kept)
        with torch.no_grad():
            for buffer, value in values.values():
                if value is not None:
                    _put_back(buffer, value)
        for parameter, requires_grad, gradient, _ in parameters:
            parameter.grad = gradient
            parameter.requires_grad_(requires_grad)
        changed = sum(parameter._version != version for parameter, _, _, version in parameters)
        if changed:
            logger.warning(
                "the forward pass writes into %d parameters, and the tracing step ran it once; set skip_tracing if "
                "training must start from the exact initial values",
                changed,
            )


def _copy(value: Any) -> Any:
    """Hooks and other dictionaries of a module are changed in place, so they are copied; other values are not."""
    return type(value)(value) if type(value) in (dict, set) else value


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
