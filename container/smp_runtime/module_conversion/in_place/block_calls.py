"""What a block is called with, when splits of it are tried out."""

from __future__ import annotations

import copy
import functools
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any

import torch

#: The argument by which models of Transformers give a block its mask; without any, all tokens before one count.
_MASK = "attention_mask"


@dataclass(frozen=True)
class BlockCall:
    """What a block was called with."""

    args: tuple[Any, ...]
    kwargs: Mapping[str, Any]

    @property
    def signature(self) -> object:
        """Return a key that is equal for calls with tensors of the same shapes in the same places."""
        return tuple((place, getattr(value, "shape", type(value))) for place, value in self.given().items())

    def given(self) -> dict[int | str, Any]:
        """Return the arguments by position and keyword."""
        return dict([*enumerate(self.args), *self.kwargs.items()])


def other_mask(call: BlockCall) -> BlockCall | None:
    """Return a call with an attention mask if it was given without, or without it if it has one; None for other blocks."""
    if _MASK not in call.kwargs:
        return None
    if call.kwargs[_MASK] is not None:
        return replace(call, kwargs={**call.kwargs, _MASK: None})
    activations = [value for value in call.given().values() if isinstance(value, torch.Tensor) and value.dim() == 3]
    if not activations:
        return None
    batch, length, _ = activations[0].shape
    mask = torch.ones(batch, 1, length, length, dtype=torch.bool, device=activations[0].device).tril()
    return replace(call, kwargs={**call.kwargs, _MASK: mask})


def in_type(call: BlockCall, dtype: torch.dtype) -> BlockCall:
    """Return a call with its floating-point tensors in a type, detached."""

    def made(tensor: torch.Tensor) -> torch.Tensor:
        made = tensor.detach().to(dtype) if tensor.is_floating_point() else tensor.detach()
        return made.requires_grad_(tensor.requires_grad)

    args, kwargs = with_tensors((tuple(call.args), dict(call.kwargs)), made)
    return BlockCall(args, kwargs)


def with_tensors(value: Any, change: Callable[[torch.Tensor], torch.Tensor]) -> Any:
    """Return a structure of arguments with its tensors changed, and copies of what a block may change."""
    if isinstance(value, torch.Tensor):
        return change(value)
    change_inside = functools.partial(with_tensors, change=change)
    if isinstance(value, dict):
        return {key: change_inside(item) for key, item in value.items()}
    is_named_tuple = hasattr(value, "_fields")
    if isinstance(value, tuple) and not is_named_tuple:
        return tuple(map(change_inside, value))
    if isinstance(value, list):
        return list(map(change_inside, value))
    if isinstance(value, str | int | float | bool | None):
        return value
    return copy.deepcopy(value)  # a block may change it, such as a cache, and runs several times


def tensors(value: Any) -> list[torch.Tensor]:
    """Return the tensors in a structure of results."""
    if isinstance(value, torch.Tensor):
        return [value]
    if isinstance(value, Mapping):
        value = value.values()
    elif not isinstance(value, tuple | list):
        return []
    found = []
    for item in value:
        found += tensors(item)
    return found
