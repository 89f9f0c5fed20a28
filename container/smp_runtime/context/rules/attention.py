"""Attention between positions: the queries stay cut, keys and values travel."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F

from smp_runtime.context.attention import attend
from smp_runtime.context.sequence import ShardedSequence, rule
from smp_runtime.errors import SMPUserError
from smp_runtime.tensors.torch_private import taken_apart

_NAMES = ("query", "key", "value", "attn_mask", "dropout_p", "is_causal", "scale", "enable_gqa")
_DEFAULTS: dict[str, Any] = {
    "attn_mask": None,
    "dropout_p": 0.0,
    "is_causal": False,
    "scale": None,
    "enable_gqa": False,
}


@rule("scaled_dot_product_attention", "F.scaled_dot_product_attention")
def _attend(func: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    given = {**_DEFAULTS, **dict(zip(_NAMES, args, strict=False)), **kwargs}
    query, key, value = (given[name] for name in _NAMES[:3])
    if not is_cut_by_row(query):
        return NotImplemented
    if not isinstance(key, ShardedSequence) and not isinstance(value, ShardedSequence):
        return _attend_to_whole(func, given, query)
    if any(not is_cut_by_row(one) for one in (key, value)) or key.sequence_layout != value.sequence_layout:
        return NotImplemented
    if given["attn_mask"] is not None and given["is_causal"]:
        raise SMPUserError(
            "scaled_dot_product_attention got is_causal=True and an attn_mask: pass one of the two", code="SMP303"
        )
    parts = _cast_by_autocast(query.local, key.local, value.local)
    batched, before = _with_four_dims(*parts, grouped=given["enable_gqa"])
    mask = _rows_of_mask(given["attn_mask"], query)
    out = attend(
        *batched,
        query_index=query.sequence_layout.positions,
        key_index=key.sequence_layout.positions,
        group=query.group,
        mask=None if mask is None else _mask_of_four_dims(mask, before),
        causal=given["is_causal"],
        scale=given["scale"],
        dropout=given["dropout_p"],
        # All ranks of the group draw the same number: their generators agree.
        dropout_seed=int(torch.randint(2**31, ())) if given["dropout_p"] else None,
        method=query.group.method,
        grouped=given["enable_gqa"],
    )
    return query.like(out.reshape(*before, *out.shape[1:]), len(before) + 1)


_ATTENTION_OF_MODULES = taken_apart(F.multi_head_attention_forward)


@rule("F.multi_head_attention_forward")
def _compose_attention(func: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Run the attention of ``nn.MultiheadAttention``, which is made of operations with rules."""
    return _ATTENTION_OF_MODULES(*args, **kwargs)


def _attend_to_whole(func: Callable[..., Any], given: dict[str, Any], query: ShardedSequence) -> Any:
    """Return attention to keys that every rank has whole, as to another input's."""
    if given["dropout_p"]:
        return NotImplemented
    mask = _rows_of_mask(given["attn_mask"], query)
    if given["is_causal"]:
        rows = query.group.indices(query.sequence_layout, query.device)
        mask = rows[:, None] >= torch.arange(given["key"].shape[-2], device=query.device)
    options = {"scale": given["scale"]} | ({"enable_gqa": True} if given["enable_gqa"] else {})
    return query.like(func(query.local, given["key"], given["value"], attn_mask=mask, **options))


def is_cut_by_row(value: Any) -> bool:
    """Return whether a value is a sequence whose rows, in the dim before the last, are its positions."""
    if not isinstance(value, ShardedSequence) or value.dim() < 3:
        return False
    return value.dim_held == value.dim() - 2 and value.sequence_layout.outer == value.sequence_layout.inner == 1


def _cast_by_autocast(*parts: torch.Tensor) -> list[torch.Tensor]:
    """Return tensors in the type in which autocast runs attention, as it does behind this rule; it leaves float64 alone."""
    kind = parts[0].device.type
    if not torch.is_autocast_enabled(kind):
        return list(parts)
    dtype = torch.get_autocast_dtype(kind)
    cast = []
    for each in parts:
        cast.append(each if each.dtype is torch.float64 else each.to(dtype))
    return cast


def _with_four_dims(*parts: torch.Tensor, grouped: bool) -> tuple[list[torch.Tensor], torch.Size]:
    """Return queries, keys and values as ``[samples, heads, rows, width]``, and the dims that their samples stand for."""
    before = torch.broadcast_shapes(*(each.shape[:-3] for each in parts))
    samples = math.prod(before)  # not -1: a rank may have no rows
    query, key, value = (each.expand(*before, *each.shape[-3:]).reshape(samples, *each.shape[-3:]) for each in parts)
    if query.shape[1] == 1 and not grouped:
        query = query.expand(-1, key.shape[1], -1, -1)
    if key.shape[1] != value.shape[1] and grouped:
        key, value = (each.repeat_interleave(query.shape[1] // each.shape[1], 1) for each in (key, value))
    return [query, key, value], before


def _mask_of_four_dims(mask: torch.Tensor, before: torch.Size) -> torch.Tensor:
    """Return a mask of four dims at most; the same tensor if it has them.

    Args:
        before: dims of the result before the heads.
    """
    if mask.dim() > len(before) + 3:
        raise SMPUserError(
            f"scaled_dot_product_attention got an attn_mask of {mask.dim()} dims for queries and keys of {len(before) + 3}: "
            "leave out its first dims",
            code="SMP303",
        )
    if mask.dim() < 2:
        return mask.reshape(1, -1)
    if len(before) < 2 or mask.dim() < 4:
        return mask
    if math.prod(mask.shape[:-3]) == 1:
        return mask.reshape(1, *mask.shape[-3:])
    return mask.expand(*before, *mask.shape[-3:]).flatten(0, len(before) - 1)


def _rows_of_mask(mask: torch.Tensor | None, query: ShardedSequence) -> torch.Tensor | None:
    """Return this rank's rows of a mask; the same tensor for the same mask, since what it hides is exchanged once."""
    if mask is None:
        return None
    if isinstance(mask, ShardedSequence):
        if mask.dim_held == mask.dim() - 2 and mask.sequence_layout == query.sequence_layout:
            return mask.local
        mask = mask.whole("attention mask")
    if mask.dim() < 2 or mask.shape[-2] != query.shape[-2]:
        return mask
    return query.group.take_kept(mask, mask.dim() - 2, query.sequence_layout)
