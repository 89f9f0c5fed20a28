"""Which modules multiply in 8 bits, and how PyTorch's own get to do so."""

from __future__ import annotations

import contextlib
import threading
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from torch import nn

from smp_runtime.fp8 import current
from smp_runtime.tensors.torch_private import name_without_wrappers

#: Both sides of a weight are multiples of it: the products of GPUs in 8 bits need that.
MULTIPLE = 16

_FORWARDS: dict[type[nn.Module], Callable[..., torch.Tensor]] = {}
_lock = threading.Lock()


def find_layers(model: nn.Module) -> Iterator[tuple[str, nn.Module]]:
    """Yield the linear layers of a model that may multiply in 8 bits, with their paths in the unwrapped model.

    The layer that computes a language model's logits is left out. So are layers that share their weight with other modules, and
    layers with sizes that are not multiples of :data:`MULTIPLE`.
    """
    uses: Counter[int] = Counter()
    for module in model.modules():
        uses.update(map(id, module._parameters.values()))
    head = _find_head(model)
    for name, module in model.named_modules():
        if module is head or not may_multiply(module):
            continue
        weight = module._parameters["weight"]
        if uses[id(weight)] == 1:
            yield name_without_wrappers(name + ".").rstrip("."), module


def _find_head(model: nn.Module) -> nn.Module | None:
    """Return the layer of the logits of a model of Transformers, or None."""
    find = getattr(model, "get_output_embeddings", None)
    if find is None:
        return None
    with contextlib.suppress(NotImplementedError):
        found: nn.Module | None = find()
        return found
    return None


def may_multiply(module: nn.Module) -> bool:
    """Return whether a module is a linear map of weights of its own, with sizes that fit."""
    weight = module._parameters.get("weight")
    is_known = getattr(module, "multiplies_rows", False) or type(module).forward in _originals()
    if weight is None or not is_known:
        return False
    if weight.dim() != 2 or not weight.is_floating_point():
        return False
    for size in _shape(module, weight):
        if size == 0 or size % MULTIPLE:
            return False
    return True


def _shape(module: nn.Module, weight: nn.Parameter) -> Sequence[int]:
    """Return the shape of a linear map's weight on this rank."""
    if isinstance(module, nn.Linear):  # the flat shards of FSDP have no shape of their own
        return module.out_features, module.in_features
    split = getattr(module, "tensor_slices", {}).get("weight")
    return weight.shape if split is None else split.shape


def _originals() -> list[Callable[..., Any]]:
    return [kind.forward for kind in _kinds()]


def _kinds() -> list[type[nn.Module]]:
    """Return PyTorch's linear layer, and that of Transformers' GPT-2 if it is imported."""
    import sys

    found: list[type[nn.Module]] = [nn.Linear]
    transformers = sys.modules.get("transformers.pytorch_utils")
    if transformers is not None:
        found.append(transformers.Conv1D)
    return found


def install() -> None:
    """Let linear layers ask whether they multiply in 8 bits; :func:`uninstall` ends it."""
    with _lock:  # check and replacement are one: a second thread would wrap what the first has installed
        for kind in _kinds():
            if kind in _FORWARDS:
                continue
            _FORWARDS[kind] = kind.forward
            kind.forward = _make_forward(kind.forward, is_transposed=kind is not nn.Linear)


def uninstall() -> None:
    """Give linear layers their own forward passes back."""
    # The methods belong to classes, and thereby to all threads.
    with _lock:
        for kind, forward in _FORWARDS.items():
            kind.forward = forward
        _FORWARDS.clear()


def _make_forward(original: Callable[..., torch.Tensor], *, is_transposed: bool) -> Callable[..., torch.Tensor]:
    def forward(self: Any, input: torch.Tensor) -> torch.Tensor:
        __tracebackhide__ = True  # reports name the caller
        call = current.find_call(self)
        if call is None:
            return original(self, input)
        return call(input, self.weight.t() if is_transposed else self.weight, self.bias)

    forward.__doc__ = original.__doc__
    return forward
