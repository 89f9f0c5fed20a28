"""Attention between positions: the queries stay cut, keys and values travel."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F

from smp_runtime.context.rules.pointwise import align
from smp_runtime.context.sequence import ShardedSequence, rule

_NAMES = ("query", "key", "value", "attn_mask", "dropout_p", "is_causal", "scale", "enable_gqa")


@rule("scaled_dot_product_attention", "F.scaled_dot_product_attention")
def _attend(func: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    given: dict[str, Any] = {
        "attn_mask": None,
        "dropout_p": 0.0,
        "is_causal": False,
        "scale": None,
        "enable_gqa": False,
    }
    given |= {**dict(zip(_NAMES, args, strict=False)), **kwargs}
    query, key, value = (given[name] for name in ("query", "key", "value"))
    if not _is_cut_by_row(query) or given["dropout_p"]:
        return NotImplemented
    mask = given["attn_mask"]
    held = -2
    if mask is not None:
        mask = align(mask, query.sequence_layout, held, query, "scaled_dot_product_attention")
    whole = [one.whole("attention") if isinstance(one, ShardedSequence) else one for one in (key, value)]
    if given["is_causal"]:
        rows = query.group.indices(query.sequence_layout, query.device)
        columns = torch.arange(whole[0].shape[-2], device=query.device)
        mask = rows[:, None] >= columns
    options = {"scale": given["scale"]} | ({"enable_gqa": True} if given["enable_gqa"] else {})
    return query.like(F.scaled_dot_product_attention(query.local, whole[0], whole[1], attn_mask=mask, **options))


def _is_cut_by_row(value: Any) -> bool:
    if not isinstance(value, ShardedSequence) or value.dim() < 3:
        return False
    return value.dim_held == value.dim() - 2 and value.sequence_layout.outer == value.sequence_layout.inner == 1
