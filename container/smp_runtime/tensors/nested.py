"""Tensors in the arguments and results of calls, and their sizes."""

from __future__ import annotations

import copy
import dataclasses
import math
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import nn

from smp_runtime.tensors.lazy_tensor import LazyTensor
from smp_runtime.tensors.torch_private import storage_key, tree_map

#: Containers and the attributes of objects are followed this deep in search of tensors.
_DEPTH = 6


def tensors_in(value: Any) -> list[torch.Tensor]:
    """The tensors in a structure, each once: containers, dataclasses and plain objects are looked into."""
    found: dict[int, torch.Tensor] = {}
    _look(value, _DEPTH, found, set())
    return list(found.values())


def _look(item: Any, depth: int, found: dict[int, torch.Tensor], seen: set[int]) -> None:
    # Not inside of the function above: one that calls itself there would keep what was found until garbage is collected.
    if isinstance(item, torch.Tensor):
        found[id(item)] = item
        return
    if item is None or isinstance(item, str | bytes | int | float | complex | bool | torch.dtype | torch.device):
        return
    if depth == 0 or id(item) in seen or isinstance(item, type | nn.Module) or callable(item):
        return
    seen.add(id(item))
    if isinstance(item, Mapping):
        inside = list(item.values())
    elif isinstance(item, list | tuple | set | frozenset):
        inside = list(item)
    elif dataclasses.is_dataclass(item):
        inside = [getattr(item, field.name, None) for field in dataclasses.fields(item)]
    else:
        inside = list(getattr(item, "__dict__", {}).values())
    for part in inside:
        _look(part, depth - 1, found, seen)


def rows_of(tensor: torch.Tensor) -> torch.Tensor:
    """Return ``[…, n]`` as ``[rows, n]``, also where there are no elements, so that PyTorch cannot tell how many rows."""
    return tensor.reshape(math.prod(tensor.shape[:-1]), tensor.shape[-1])


def argument_tensors(value: Any) -> list[torch.Tensor]:
    """As :func:`tensors_in`, but only in what operations take: quick, for it sees every one of them."""
    if isinstance(value, torch.Tensor):
        return [value]
    if isinstance(value, tuple | list):
        return [tensor for item in value for tensor in argument_tensors(item)]
    if isinstance(value, dict):
        return [tensor for item in value.values() for tensor in argument_tensors(item)]
    return []


def storage_of(tensor: torch.Tensor) -> int:
    """A number for the memory that a tensor lies in, the same for all its views."""
    if isinstance(tensor, LazyTensor):  # it has none yet
        return id(tensor)
    try:
        return storage_key(tensor)
    except (NotImplementedError, RuntimeError):  # sparse and wrapper tensors have none
        return id(tensor)


def total_bytes(tensors: list[torch.Tensor]) -> int:
    """Bytes of several tensors, each counted once."""
    return sum(tensor_bytes(tensor) for tensor in {id(tensor): tensor for tensor in tensors}.values())


def tensor_bytes(tensor: torch.Tensor) -> int:
    """Bytes of the elements of a tensor."""
    return tensor.numel() * tensor.element_size()


def leaves_of(value: Any) -> list[Any]:
    """What is in nested containers, objects as they are."""
    if isinstance(value, Mapping):
        return [leaf for v in value.values() for leaf in leaves_of(v)]
    if isinstance(value, list | tuple | set | frozenset):
        return [leaf for v in value for leaf in leaves_of(v)]
    return [value]


def mapped(change: Callable[[Any], Any], value: Any) -> Any:
    """A structure of containers with other leaves; objects, such as caches, stay the objects that they are."""
    if isinstance(value, tuple) and hasattr(value, "_fields"):
        return type(value)(*(mapped(change, item) for item in value))
    if isinstance(value, list | tuple):
        return type(value)(mapped(change, item) for item in value)
    if isinstance(value, Mapping):
        changed = {key: mapped(change, item) for key, item in value.items()}
        if type(value) is dict or not isinstance(value, dict):
            return changed
        value = copy.copy(value)  # the caller keeps its own
        for key, item in changed.items():  # Transformers' outputs are dictionaries with fields of the same names
            value[key] = item
        return value
    return change(value)


def unshared(value: Any) -> Any:
    """An object whose tensors do not lie in a mapped file any more, wherever they are in it."""
    return tree_map(lambda leaf: leaf.clone() if isinstance(leaf, torch.Tensor) else leaf, value)
