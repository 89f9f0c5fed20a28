"""Inputs and results of a module's call: the tensors in them, and copies of those that would not outlast the call."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from smp_config.errors import kind_of
from smp_runtime.errors import SMPUserError
from smp_runtime.tensors.nested import map_leaves, storage_of

if TYPE_CHECKING:
    from smp_runtime.sharding.flat_unit import ShardedUnit


def copy_views(output: Any, units: Sequence[ShardedUnit]) -> Any:
    """Return a call's output with views of its parameters copied, since their memory is freed after the call.

    Raises:
        SMPUserError: an object that cannot be copied has such a view.
    """
    keys = {unit.storage_key for unit in units}

    def is_view(leaf: Any) -> bool:
        return isinstance(leaf, torch.Tensor) and storage_of(leaf) in keys

    if not any(map(is_view, tensors_in(output))):
        return output
    output = map_leaves(lambda leaf: leaf.clone() if is_view(leaf) else leaf, output)
    if any(is_view(left) and not isinstance(left, nn.Parameter) for left in tensors_in(output)):
        raise SMPUserError(
            f"{units[0].name or 'the model'} returns {kind_of(output)} with a view of its parameter, whose memory is freed "
            "when the call has ended: return view.clone()",
            code="SMP308",
        )
    return output


def tensors_in(value: Any) -> list[torch.Tensor]:
    """Return all tensors in nested containers, dataclasses and other plain objects."""
    found: list[torch.Tensor] = []
    waiting, seen = [value], set()
    while waiting:
        item = waiting.pop()
        if isinstance(item, torch.Tensor):
            found.append(item)
        elif isinstance(item, str | bytes | int | float | bool | type(None) | nn.Module) or id(item) in seen:
            continue
        elif isinstance(item, Mapping):
            seen.add(id(item))
            waiting.extend(item.values())
        elif isinstance(item, list | tuple | set | frozenset):
            seen.add(id(item))
            waiting.extend(item)
        elif hasattr(item, "__dict__"):
            seen.add(id(item))
            waiting.extend(vars(item).values())
    return found
