"""Indices: of other dims on slices; slices of the sequence are sequences with fewer positions."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from smp_runtime.context.rules.pointwise import align
from smp_runtime.context.sequence import ShardedSequence, compute_whole, gather_all, rule, write_back

_BASIC = (int, slice, type(None), type(Ellipsis))


def _expand_index(sequence: ShardedSequence, index: Any) -> list[Any] | None:
    """Return an index with an entry for each dim, and None entries for new ones; None if it is not of numbers and slices."""
    parts = list(index) if isinstance(index, tuple) else [index]
    if any(isinstance(part, bool) or not isinstance(part, _BASIC) for part in parts):
        return None
    named = sum(part is not None and part is not Ellipsis for part in parts)
    missing = [slice(None)] * (sequence.dim() - named)
    if Ellipsis in parts:
        place = parts.index(Ellipsis)
        return [*parts[:place], *missing, *parts[place + 1 :]]
    return [*parts, *missing]


def _place_of(parts: list[Any], dim: int) -> int:
    """Return the place of a dim in an index that may have entries for new dims."""
    seen = -1
    for place, part in enumerate(parts):
        seen += part is not None
        if seen == dim and part is not None:
            return place
    raise AssertionError(f"the index has no entry for dim {dim}")


@rule("__getitem__")
def _get(func: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    sequence, index = args
    if not isinstance(sequence, ShardedSequence):
        return NotImplemented
    parts = _expand_index(sequence, index)
    if parts is None:
        return _get_chosen(sequence, index)
    place = _place_of(parts, sequence.dim_held)
    taken = parts[place]
    dim = sum(not isinstance(part, int) for part in parts[:place])
    if isinstance(taken, int):
        return _get_position(sequence, parts, place)
    start, stop, step = taken.indices(sequence.sequence_layout.size)
    rest = tuple(slice(None) if other == place else part for other, part in enumerate(parts))
    local = sequence.local[rest]
    if (start, stop, step) == (0, sequence.sequence_layout.size, 1):
        return sequence.like(local, dim)
    if sequence.sequence_layout.outer != 1 or sequence.sequence_layout.inner != 1:
        return NotImplemented
    layout, places = sequence.sequence_layout.select(start, stop, step)
    selected = sequence.like(local.index_select(dim, places[sequence.group.rank].to(local.device)), dim, layout)
    selected.is_copy_of_view = True
    return selected


def _get_chosen(sequence: ShardedSequence, index: Any) -> Any:
    """Return the entries of one other dim with given numbers; all else of the index is taken whole."""
    parts = list(index) if isinstance(index, tuple) else [index]
    places = [place for place, part in enumerate(parts) if isinstance(part, list | torch.Tensor)]
    if len(places) != 1 or isinstance(parts[places[0]], ShardedSequence):
        return NotImplemented
    chosen = torch.as_tensor(parts[places[0]])
    if chosen.dim() != 1 or chosen.dtype in (torch.bool, torch.uint8):
        return NotImplemented
    plain = [slice(None) if place == places[0] else part for place, part in enumerate(parts)]
    expanded = _expand_index(sequence, tuple(plain))
    if expanded is None or any(part != slice(None) for part in expanded):
        return NotImplemented
    behind_ellipsis = Ellipsis in plain[: places[0]]
    dim = places[0] + (len(expanded) - len(parts) if behind_ellipsis else 0)
    if dim == sequence.dim_held:
        return NotImplemented
    numbers = chosen.to(sequence.local.device) % sequence.shape[dim]
    return sequence.like(sequence.local.index_select(dim, numbers))


def _get_position(sequence: ShardedSequence, parts: list[Any], place: int) -> Any:
    """Return the values at one position, which one rank has, on all ranks."""
    layout = sequence.sequence_layout
    if layout.outer != 1 or layout.inner != 1:
        return NotImplemented
    position = parts[place] % layout.length
    index = (layout.positions[sequence.group.rank] == position).nonzero()[:, 0].to(sequence.local.device)
    dim = sequence.dim_held
    # The sum over no element is zero, with a graph: all ranks take part in backward.
    mine = sequence.local.index_select(dim, index)
    is_integer = not (mine.is_floating_point() or mine.is_complex())
    total = sequence.group.sum(
        mine.sum(dim, keepdim=True) if not is_integer else mine.to(torch.int64).sum(dim, keepdim=True)
    )
    rest = tuple(0 if other == place else part for other, part in enumerate(parts))
    return total.to(sequence.dtype)[rest]


@rule("select", "narrow", "slice_copy")
def _select(func: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    sequence = args[0]
    names = ("dim", "index") if func.__name__ == "select" else ("dim", "start", "length")
    given = {**dict(zip(names, args[1:], strict=False)), **kwargs}
    if not isinstance(sequence, ShardedSequence) or not all(isinstance(given.get(name), int) for name in names):
        return NotImplemented
    dim = given["dim"] % sequence.dim()
    if func.__name__ == "select":
        chosen: Any = given["index"]
    else:
        start = given["start"] % max(1, sequence.shape[dim]) if given["start"] < 0 else given["start"]
        chosen = slice(start, start + given["length"])
    return sequence[tuple([slice(None)] * dim + [chosen])]


@rule("index_select", "gather", "take_along_dim")
def _index(func: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    names = ("indices", "dim") if func.__name__ == "take_along_dim" else ("dim", "index")
    given = {**dict(zip(names, args[1:], strict=False)), **kwargs}
    sequence, dim = args[0], given.get("dim")
    index: Any = given.get("index", given.get("indices"))
    if not isinstance(sequence, ShardedSequence) or not isinstance(dim, int) or "out" in kwargs:
        return NotImplemented
    if dim % sequence.dim() == sequence.dim_held:
        return NotImplemented
    if func.__name__ == "index_select":
        return sequence.like(torch.index_select(sequence.local, dim, gather_all(index, "index_select")))
    if index.dim() != sequence.dim() or index.shape[sequence.dim_held] != sequence.sequence_layout.size:
        return NotImplemented
    held = sequence.dim_held - sequence.dim()
    local_index = align(index, sequence.sequence_layout, held, sequence, func.__name__)
    found = (
        func(sequence.local, dim, local_index) if func.__name__ == "gather" else func(sequence.local, local_index, dim)
    )
    return sequence.like(found)


@rule("__setitem__")
def _set(func: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    changed, index, value = args
    if not isinstance(changed, ShardedSequence):
        func(changed, *gather_all((index, value), "__setitem__"))
        return
    parts = None if changed.is_copy_of_view else _expand_index(changed, index)
    if parts is not None:
        place = _place_of(parts, changed.dim_held)
        if parts[place] == slice(None):
            behind = sum(not isinstance(part, int) for part in parts[place + 1 :])
            changed.local[tuple(parts)] = align(value, changed.sequence_layout, -1 - behind, changed, "__setitem__")
            return
    whole = changed.whole("__setitem__").clone()
    whole[gather_all(index, "__setitem__")] = gather_all(value, "__setitem__")
    write_back(changed, whole, "__setitem__")


@rule(
    "tolist", "item", "__bool__", "__float__", "__int__", "__index__", "__contains__", "numpy", "__array__", "__iter__"
)
def _read(func: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    return compute_whole(func.__name__, func, args, kwargs)
