"""Tensors in the arguments and results of calls, and their sizes."""

from __future__ import annotations

import copy
import dataclasses
import math
from collections.abc import Callable, Mapping
from typing import Any

import torch

from smp_runtime.tensors.lazy_tensor import LazyTensor
from smp_runtime.tensors.torch_private import storage_key, tree_map

#: Containers and the attributes of objects are followed this deep in search of tensors.
_DEPTH = 6

#: Frequent types without tensors inside. Types and modules are left out as callables are.
_WITHOUT_TENSORS = str | bytes | int | float | complex | bool | torch.dtype | torch.device


def tensors_in(value: Any) -> list[torch.Tensor]:
    """Return the tensors in a structure, each once; search containers, dataclasses and plain objects."""
    found: dict[int, torch.Tensor] = {}
    _look(value, _DEPTH, found, set())
    return list(found.values())


def _look(item: Any, depth: int, found: dict[int, torch.Tensor], seen: set[int]) -> None:
    # Not nested in the function above: a recursive closure is a reference cycle, which would keep ``found`` until the
    # next garbage collection.
    if isinstance(item, torch.Tensor):
        found[id(item)] = item
        return
    if item is None or isinstance(item, _WITHOUT_TENSORS) or callable(item):
        return
    # Objects may refer to each other in a circle.
    if depth == 0 or id(item) in seen:
        return
    seen.add(id(item))
    for part in _parts_of(item):
        _look(part, depth - 1, found, seen)


def _parts_of(item: Any) -> list[Any]:
    if isinstance(item, Mapping):
        return list(item.values())
    if isinstance(item, list | tuple | set | frozenset):
        return list(item)
    if dataclasses.is_dataclass(item):
        # Its fields may be slots, or not set yet.
        return [getattr(item, field.name, None) for field in dataclasses.fields(item)]
    return list(getattr(item, "__dict__", {}).values())


def rows_of(tensor: torch.Tensor) -> torch.Tensor:
    """Return ``[…, n]`` as ``[rows, n]``; this also works without elements, where PyTorch cannot infer the rows."""
    return tensor.reshape(math.prod(tensor.shape[:-1]), tensor.shape[-1])


def argument_tensors(value: Any) -> list[torch.Tensor]:
    """Return the tensors in the arguments of an operation.

    Unlike :func:`tensors_in`, search only the structures that operations accept. This is fast, because it runs
    for every operation.
    """
    if isinstance(value, torch.Tensor):
        return [value]
    found: list[torch.Tensor] = []
    if isinstance(value, tuple | list):
        for item in value:
            found += argument_tensors(item)
    elif isinstance(value, dict):
        for item in value.values():
            found += argument_tensors(item)
    return found


def storage_of(tensor: torch.Tensor) -> int:
    """Return a number that identifies a tensor's memory, the same for all its views."""
    if isinstance(tensor, LazyTensor):  # it has none yet
        return id(tensor)
    try:
        return storage_key(tensor)
    except (NotImplementedError, RuntimeError):  # sparse and wrapper tensors have none
        return id(tensor)


def total_bytes(tensors: list[torch.Tensor]) -> int:
    """Return the bytes of several tensors, each counted once."""
    distinct = {id(tensor): tensor for tensor in tensors}
    return sum(map(tensor_bytes, distinct.values()))


def tensor_bytes(tensor: torch.Tensor) -> int:
    """Return the bytes of a tensor's elements."""
    return tensor.numel() * tensor.element_size()


def leaves_of(value: Any) -> list[Any]:
    """Return the leaves of nested containers; other objects are leaves."""
    if isinstance(value, Mapping):
        value = list(value.values())
    elif not isinstance(value, list | tuple | set | frozenset):
        return [value]
    leaves: list[Any] = []
    for item in value:
        leaves += leaves_of(item)
    return leaves


def map_leaves(change: Callable[[Any], Any], value: Any) -> Any:
    """Return nested containers with changed leaves; objects such as caches are leaves and are not copied."""
    if isinstance(value, list | tuple):
        items = [map_leaves(change, item) for item in value]
        is_named_tuple = isinstance(value, tuple) and hasattr(value, "_fields")
        return type(value)(*items) if is_named_tuple else type(value)(items)
    if isinstance(value, Mapping):
        return _map_values(change, value)
    return change(value)


def _map_values(change: Callable[[Any], Any], value: Mapping[Any, Any]) -> Any:
    changed = {key: map_leaves(change, item) for key, item in value.items()}
    is_plain = type(value) is dict or not isinstance(value, dict)
    if is_plain:
        return changed
    made: Any = copy.copy(value)  # the caller keeps its own
    for key, item in changed.items():  # Transformers' outputs are dictionaries with fields of the same names
        made[key] = item
    return made


def copy_tensors(value: Any) -> Any:
    """Return an object with its tensors copied, so that none of them is in a mapped file."""
    return tree_map(lambda leaf: leaf.clone() if isinstance(leaf, torch.Tensor) else leaf, value)


def clone_inference_tensors(value: Any) -> Any:
    """Return a structure with copies of its tensors of inference mode, made as the mode is now.

    Pipelines check whether tensors were changed, and tensors of inference mode do not record that.
    """

    def clone(leaf: Any) -> Any:
        is_of_inference = isinstance(leaf, torch.Tensor) and leaf.is_inference()
        return leaf.clone() if is_of_inference else leaf

    return tree_map(clone, value)


def cast_as_autocast(*tensors: Any) -> list[Any]:
    """Cast a linear map's tensors as autocast would; inside an autograd function it only sees forward."""
    device = tensors[0].device.type
    if device == "meta" or not torch.is_autocast_enabled(device):
        return list(tensors)
    dtype = torch.get_autocast_dtype(device)
    return [tensor if tensor is None else tensor.to(dtype) for tensor in tensors]
