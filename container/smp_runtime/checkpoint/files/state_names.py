"""Whole states: which names are one tensor, and what names from elsewhere mean in the wrapped module."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from typing import Any

import torch
from torch import nn

from smp_runtime.checkpoint.files.manifest import TensorRecord

#: Causal masks and the like that older versions of Transformers saved and newer ones compute.
_COMPUTED = re.compile(
    r"(^|\.)(attn|attn\.attention|attention|self_attn)\.(masked_)?bias$|(^|\.)rotary_emb\.inv_freq$|"
    r"(^|\.)embeddings\.position_ids$"
)


def renamed(state: Mapping[str, Any], module: nn.Module) -> dict[str, Any]:
    """``state`` under the names of ``module``, as far as prefixes tell.

    States of other wrappers have ``module.`` in front; those of Transformers may lack the name of the model inside one
    with a head, or have it where the module is that model itself. Masks that the module computes are left out. Other
    names stay, so that a strict load complains about them.
    """
    own = set(module.state_dict(keep_vars=True))
    candidates = _candidates(dict(state), module, own)
    chosen = max(candidates, key=lambda candidate: len(own & candidate.keys()))
    return {name: value for name, value in chosen.items() if name in own or not _COMPUTED.search(name)}


def _candidates(state: dict[str, Any], module: nn.Module, own: set[str]) -> Iterator[dict[str, Any]]:
    """Ways to read the names, the most literal first."""
    if all(name.startswith("module.") for name in state) and not any(name.startswith("module.") for name in own):
        state = {name.removeprefix("module."): value for name, value in state.items()}
    yield state
    root = getattr(module, "base_model_prefix", None)
    if not root:
        return
    inside = getattr(module, root, None)
    if isinstance(inside, nn.Module):
        names = set(inside.state_dict(keep_vars=True))
        yield {f"{root}.{name}" if name in names else name: value for name, value in state.items()}
    yield {name.removeprefix(f"{root}."): value for name, value in state.items()}


def each_once(state: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """``state`` with every tensor under the first of its names only, as safetensors files hold it."""
    return {names[0]: state[names[0]] for names in names_of_each(state)}


def names_of_each(state: Mapping[str, torch.Tensor]) -> list[tuple[str, ...]]:
    """The names of every tensor in ``state``.

    Tensors that share memory and shape are one; those without values are one if they are the same object.
    """
    found: dict[tuple[Any, ...], list[str]] = {}
    for name, value in state.items():
        place: tuple[Any, ...] = (id(value),)
        if not value.is_meta and value.numel():
            place = (value.data_ptr(), value.dtype, tuple(value.shape), value.stride())
        found.setdefault(place, []).append(name)
    return [tuple(names) for names in found.values()]


def record_of(tensor: torch.Tensor, aliases: tuple[str, ...] = ()) -> TensorRecord:
    """What a manifest says of a whole tensor."""
    return TensorRecord(tuple(tensor.shape), str(tensor.dtype).removeprefix("torch."), aliases)
