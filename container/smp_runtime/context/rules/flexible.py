"""``flex_attention``: a mask as a function of positions becomes a mask of this rank's rows; other scores see all keys at once."""

from __future__ import annotations

import inspect
import math
import types
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch.nn.attention import flex_attention as flex
from torch.utils.checkpoint import checkpoint
from torch.utils.weak import WeakIdKeyDictionary

from smp_runtime.context.attention import attend_with_logsumexp
from smp_runtime.context.rules.attention import is_cut_by_row
from smp_runtime.context.sequence import ShardedSequence, gather_all, sequences_in
from smp_runtime.errors import SMPUserError
from smp_runtime.tensors.torch_private import indexing_in_transforms, never_compiled

_NAME = "flex_attention"

#: Bytes of scores, and elements of a mask, that are computed at a time.
_SCORE_BYTES = 2**26
_MASK_ELEMENTS = 2**24

#: PyTorch's own function, in the code that it had before :func:`install`.
original: Callable[..., Any] = flex.flex_attention

#: By mask of blocks, the rows that this rank has of it.
_rows: WeakIdKeyDictionary = WeakIdKeyDictionary()


class _Places(NamedTuple):
    """Samples, heads, and positions of queries and keys at which a mask or score function is evaluated."""

    samples: torch.Tensor
    heads: torch.Tensor
    rows: torch.Tensor
    keys: torch.Tensor


def _replacement(*args: Any, **kwargs: Any) -> Any:
    """Run ``flex_attention``; its names are those of PyTorch's module, whose function has this code."""
    from smp_runtime.context.rules import flexible

    if flexible.concerns_sequences(args, kwargs):
        return flexible.attend_flexibly(args, kwargs)
    return flexible.original(*args, **kwargs)


def install() -> None:
    """Let ``flex_attention`` see sequences under each name that a model has for it, also in ``torch.compile(flex_attention)``."""
    global original
    if original is flex.flex_attention:
        original = _replace_code(flex.flex_attention, _replacement)


def _replace_code(function: Any, other: Any) -> Callable[..., Any]:
    """Let a Python function do what ``other`` does, with its own module's names, and return the function that it was.

    Names that other modules have for the function, and what ``torch.compile`` made of it, have the new code too.
    """
    kept = types.FunctionType(
        function.__code__, function.__globals__, function.__name__, function.__defaults__, function.__closure__
    )
    kept.__kwdefaults__ = function.__kwdefaults__
    function.__signature__ = inspect.signature(kept)
    function.__defaults__, function.__kwdefaults__ = None, None
    function.__code__ = other.__code__
    never_compiled(function, alone=True)  # PyTorch's own function may be compiled
    return kept


@never_compiled
def concerns_sequences(args: Any, kwargs: Any) -> bool:
    """Return whether there is a sequence among the arguments."""
    return bool(sequences_in((args, kwargs)))


@never_compiled
def attend_flexibly(args: Any, kwargs: Any) -> Any:
    """Return what ``flex_attention`` returns for sequences.

    Raises:
        SMPUserError: (a ``ValueError``) the arguments do not fit each other.
    """
    bound = inspect.signature(original).bind(*args, **kwargs)
    bound.apply_defaults()
    given = bound.arguments
    query, key, value, blocks = (given[name] for name in ("query", "key", "value", "block_mask"))
    _check(query, key, value, blocks, shares_heads=given["enable_gqa"])
    aux = given.get("return_aux")
    scale = 1 / math.sqrt(query.shape[-1]) if given["scale"] is None else given["scale"]
    score_mod = None if _returns_scores(given["score_mod"], query) else given["score_mod"]
    are_cut = all(is_cut_by_row(one) for one in (query, key, value)) and key.sequence_layout == value.sequence_layout
    if are_cut and score_mod is None and query.shape[0] == key.shape[0] and not (aux is not None and aux.max_scores):
        out, logsumexp = attend_with_logsumexp(
            query.local,
            key.local,
            value.local,
            query_index=query.sequence_layout.positions,
            key_index=key.sequence_layout.positions,
            group=query.group,
            mask=None if blocks is None else _rows_of(blocks, query, key),
            scale=scale,
            method=query.group.method,
            grouped=given["enable_gqa"],
            wants_logsumexp=aux is not None or given["return_lse"],
        )
        found = query.like(out), query.like(logsumexp, 2) if logsumexp.numel() else logsumexp, None
    else:
        found = _attend_to_all(query, key, value, score_mod, blocks, scale)
    return _returned(found, aux, returns_logsumexp=given["return_lse"])


def _returned(found: tuple[Any, Any, Any], aux: Any, *, returns_logsumexp: bool) -> Any:
    """Return the results in the form that the caller has asked for."""
    out, logsumexp, top = found
    if aux is not None:
        return out, flex.AuxOutput(lse=logsumexp if aux.lse else None, max_scores=top if aux.max_scores else None)
    return (out, logsumexp) if returns_logsumexp else out


def _check(query: Any, key: Any, value: Any, blocks: Any, *, shares_heads: bool) -> None:
    shapes = ", ".join(str(list(one.shape)) for one in (query, key, value))
    if any(one.dim() != 4 for one in (query, key, value)):
        raise SMPUserError(
            f"flex_attention takes tensors of 4 dims, not of the shapes {shapes}; add the missing ones", code="SMP310"
        )
    if query.shape[1] % key.shape[1] or (query.shape[1] != key.shape[1] and not shares_heads):
        raise SMPUserError(
            f"flex_attention got tensors of the shapes {shapes}; pass enable_gqa=True if heads share keys",
            code="SMP310",
        )
    if blocks is not None and not _is_empty(blocks) and tuple(blocks.shape[-2:]) != (query.shape[2], key.shape[2]):
        raise SMPUserError(
            f"flex_attention got a block_mask for {blocks.shape[-2]} queries and {blocks.shape[-1]} keys, and tensors of the "
            f"shapes {shapes}; create a block mask for these lengths",
            code="SMP310",
        )


def _is_empty(blocks: Any) -> bool:
    """Return whether a mask of blocks is the one that PyTorch makes where none is given."""
    return blocks.mask_mod is flex.noop_mask and blocks.kv_num_blocks.numel() == 1 == int(blocks.kv_num_blocks.sum())


@torch.no_grad()
def _returns_scores(score_mod: Callable[..., Any] | None, query: torch.Tensor) -> bool:
    """Return whether a function of scores returns the score itself: it has no branches that depend on numbers."""
    if score_mod is None:
        return True
    score, zero = torch.zeros((), device=query.device), torch.zeros((), dtype=torch.int32, device=query.device)
    try:
        with indexing_in_transforms():
            return score_mod(score, zero, zero, zero, zero) is score
    except (RuntimeError, IndexError, TypeError, ValueError):  # it cannot run on numbers like these
        return False


def _rows_of(blocks: Any, query: ShardedSequence, key: ShardedSequence) -> torch.Tensor:
    """Return this rank's rows of a mask; the same tensor for the same mask, since what it hides is exchanged once."""
    kept = _rows.setdefault(blocks, {})
    label = query.sequence_layout, key.sequence_layout.length, query.shape[:2], query.group
    if label not in kept:
        kept.clear()  # layers share masks of one length
        rows = query.group.indices(query.sequence_layout, query.device)
        with torch.no_grad():
            kept[label] = _visible(blocks, _places(query, rows, key.shape[2]))
    found: torch.Tensor = kept[label]
    return found


def _places(query: torch.Tensor, rows: torch.Tensor, keys: int) -> _Places:
    samples, heads, columns = (torch.arange(size, device=query.device) for size in (*query.shape[:2], keys))
    return _Places(samples, heads, rows, columns)


def _visible(blocks: Any, places: _Places) -> torch.Tensor:
    """Return which rows attend to which keys, ``[samples or 1, heads or 1, rows, keys]``."""
    wide = _wide(blocks.mask_mod, places)
    count = max(1, _MASK_ELEMENTS // max(1, len(places.keys) * math.prod(map(len, wide[:2]))))
    parts = [_evaluate(blocks.mask_mod, wide._replace(rows=rows)) for rows in places.rows.split(count)]
    mask = torch.cat(parts, 2)
    listed = blocks.to_dense().bool()
    if listed.all():
        return mask
    row_blocks, key_blocks = (each // size for each, size in zip(places[2:], blocks.BLOCK_SIZE, strict=True))
    return mask & listed[:, :, row_blocks][..., key_blocks]


def _wide(mask_mod: Callable[..., Any], places: _Places) -> _Places:
    """Return the places with the first sample or head alone, if a mask is the same for all of them."""
    some = places._replace(rows=places.rows[:1], keys=places.keys[:1])
    for by_sample in (False, True):
        try:
            _evaluate(mask_mod, some, by_sample=by_sample, by_head=False)
        except ValueError:  # from vmap: the result depends on the dim that this trial treats as the same for all
            continue
        return places._replace(heads=places.heads[:1], samples=places.samples[: None if by_sample else 1])
    return places


def _evaluate(
    function: Callable[..., Any], places: _Places, *, by_sample: bool = True, by_head: bool = True
) -> torch.Tensor:
    """Return a function of sample, head, query and key for all of them, ``[samples, heads, rows, keys]``.

    Raises:
        ValueError: from ``vmap``; the result depends on the sample or head although ``by_sample`` or ``by_head`` is false.
    """
    none = None, None, None
    mapped = torch.vmap(torch.vmap(function, (*none, 0)), (None, None, 0, None))
    mapped = torch.vmap(mapped, (0, *none), 0 if by_sample else None)
    mapped = torch.vmap(mapped, (None, 0, None, None), 0 if by_head else None)
    with indexing_in_transforms():
        found: torch.Tensor = mapped(*places)
    return found.transpose(0, 1) if by_sample and by_head else found


def _attend_to_all(
    query: Any, key: Any, value: Any, score_mod: Callable[..., Any] | None, blocks: Any, scale: float
) -> tuple[Any, Any, Any]:
    """Return attention of this rank's rows over all keys, which are gathered, with the log-sum-exp and the largest scores."""
    all_keys, all_values = gather_all((key, value), _NAME)
    is_cut = is_cut_by_row(query)
    q = query.local if is_cut else gather_all(query, _NAME)
    if is_cut:
        rows = query.group.indices(query.sequence_layout, query.device)
        most = max(query.sequence_layout.counts())
    else:
        most = q.shape[2]
        rows = torch.arange(most, device=q.device)
    pieces = [each.expand(q.shape[0], -1, -1, -1) for each in (all_keys, all_values)]
    k, v = (each.repeat_interleave(q.shape[1] // each.shape[1], 1) for each in pieces)
    per_row = q.shape[0] * q.shape[1] * k.shape[2] * 4
    # As many pieces on each rank: what a function of scores refers to may have to be gathered in each.
    count = -(-most // max(1, _SCORE_BYTES // max(1, per_row)))
    found = []
    for part, places in zip(q.tensor_split(count, 2), rows.tensor_split(count), strict=True):
        where = _places(q, places, k.shape[2])
        found.append(
            checkpoint(
                _attend_rows, part, k, v, where, score_mod, blocks, scale, use_reentrant=False, preserve_rng_state=False
            )
        )
    results = [torch.cat(parts, 2) for parts in zip(*found, strict=True)]
    if is_cut:
        out, logsumexp, top = (query.like(result, 2) for result in results)
        return out, logsumexp, top
    return results[0], results[1], results[2]


def _attend_rows(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    places: _Places,
    score_mod: Callable[..., Any] | None,
    blocks: Any,
    scale: float,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Return attention of some rows over all keys, computed as PyTorch's function does without a kernel."""
    dtype = torch.float64 if q.dtype is torch.float64 else torch.float32
    with torch.autocast(q.device.type, enabled=False):
        scores = q.to(dtype) @ k.to(dtype).transpose(-1, -2) * scale
        if score_mod is not None:
            scores = _rescored(score_mod, scores, places)
        if blocks is not None:
            scores = scores.masked_fill(~_visible(blocks, places), -torch.inf)
        top = scores.detach().amax(-1)
        is_hidden = top == -torch.inf
        finite = scores.masked_fill(is_hidden[..., None], 0.0)
        weights = finite.softmax(-1).masked_fill(is_hidden[..., None], 0.0)
        return (weights @ v.to(dtype)).to(q.dtype), finite.logsumexp(-1).masked_fill(is_hidden, -torch.inf), top


def _rescored(score_mod: Callable[..., Any], scores: torch.Tensor, places: _Places) -> torch.Tensor:
    none = None, None, None
    mapped = torch.vmap(torch.vmap(score_mod, (0, *none, 0)), (0, None, None, 0, None))
    mapped = torch.vmap(torch.vmap(mapped, (0, None, 0, None, None)), (0, 0, *none))
    with indexing_in_transforms():
        found: torch.Tensor = mapped(scores, *places)
    return found
