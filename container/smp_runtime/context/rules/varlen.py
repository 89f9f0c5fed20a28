"""``varlen_attn``: packed documents are ranges of keys, for which nothing but keys and values travels."""

from __future__ import annotations

from typing import Any

import torch
from torch.utils.weak import WeakIdKeyDictionary

from smp_runtime.context.attention import attend_with_logsumexp
from smp_runtime.context.sequence import ShardedSequence, rule
from smp_runtime.tensors.torch_private import schema_of

#: For inference with a cache; one process computes these.
_OF_CACHES = ("seqused_k", "block_table")

_Range = tuple[torch.Tensor, torch.Tensor]

#: By the ends of the queries' documents, the range of keys of each query.
_ranges: WeakIdKeyDictionary = WeakIdKeyDictionary()


@rule("_varlen_attn")
def _attend(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    names = [argument.name for argument in schema_of(func.default).arguments]
    given = {**dict(zip(names, args, strict=False)), **kwargs}
    query, key, value = (given[name] for name in ("query", "key", "value"))
    if not all(map(_is_packed, (query, key, value))) or key.sequence_layout != value.sequence_layout:
        return NotImplemented
    if given.get("cu_seq_k") is None or any(given.get(name) is not None for name in _OF_CACHES):
        return NotImplemented
    window = list(given.get("window_size") or (-1, -1))
    if given.get("is_causal"):
        window[1] = 0
    out, logsumexp = attend_with_logsumexp(
        *(one.local.transpose(0, 1)[None] for one in (query, key, value)),
        query_index=query.sequence_layout.positions,
        key_index=key.sequence_layout.positions,
        group=query.group,
        key_range=_range_of(given["cu_seq_q"], given["cu_seq_k"], query.shape[0], window),
        scale=given.get("scale"),
        method=query.group.method,
        grouped=query.shape[1] != key.shape[1],
    )
    no_seed = torch.zeros(2, dtype=torch.uint64, device=query.device)
    return query.like(out[0].transpose(0, 1)), query.like(logsumexp[0], 1), no_seed


def _is_packed(value: Any) -> bool:
    """Return whether a value is a sequence ``[tokens, heads, width]``."""
    if not isinstance(value, ShardedSequence) or value.dim() != 3 or value.dim_held != 0:
        return False
    return value.sequence_layout.outer == value.sequence_layout.inner == 1


def _range_of(ends_q: Any, ends_k: Any, length: int, window: list[int]) -> _Range:
    """Return the first and the last key of each query; the same tensors for the same documents, since plans are kept with them."""
    kept = _ranges.setdefault(ends_q, {})
    versions = (0 if one.is_inference() else one._version for one in (ends_q, ends_k))
    label = id(ends_k), *versions, length, *window
    if label not in kept:
        kept.clear()
        ends = [one.whole("varlen_attn") if isinstance(one, ShardedSequence) else one for one in (ends_q, ends_k)]
        # The second tensor too, so that no other gets its identity.
        kept[label] = _make_range(ends[0].cpu().long(), ends[1].cpu().long(), length, window), ends_k
    found: _Range = kept[label][0]
    return found


def _make_range(ends_q: torch.Tensor, ends_k: torch.Tensor, length: int, window: list[int]) -> _Range:
    rows = torch.arange(length)
    document = torch.searchsorted(ends_q, rows, right=True) - 1
    is_outside = document >= len(ends_q) - 1  # what was padded to a length attends to nothing
    document = document.clamp(max=len(ends_q) - 2)
    first, behind = ends_k[document], ends_k[document + 1]
    # The last query of a document is at its last key.
    place = rows - ends_q[document + 1] + behind
    before, after = window
    begin = first if before < 0 else torch.maximum(first, place - before)
    last = behind - 1 if after < 0 else torch.minimum(behind - 1, place + after)
    return begin, last.masked_fill(is_outside, -1)
