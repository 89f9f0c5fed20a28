"""Indices: of other dims on slices; slices of the sequence are sequences with fewer positions."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from smp_runtime.context.copies import note_copy
from smp_runtime.context.rules.pointwise import align, run_aligned
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
        return _look_up(sequence, index)
    parts = _expand_index(sequence, index)
    if parts is None:
        return _get_chosen(sequence, index)
    place = _place_of(parts, sequence.dim_held)
    taken = parts[place]
    dim = sum(not isinstance(part, int) for part in parts[:place])
    if isinstance(taken, int):
        made = _get_position(sequence, parts, place)
        if made is NotImplemented:
            made = compute_whole("__getitem__", func, args, kwargs)
        note_copy(sequence, made, index)
        return made
    start, stop, step = taken.indices(sequence.sequence_layout.size)
    rest = tuple(slice(None) if other == place else part for other, part in enumerate(parts))
    local = sequence.local[rest]
    if (start, stop, step) == (0, sequence.sequence_layout.size, 1):
        return sequence.like(local, dim)
    if sequence.sequence_layout.outer != 1 or sequence.sequence_layout.inner != 1:
        made = compute_whole("__getitem__", func, args, kwargs)
        note_copy(sequence, made, index)
        return made
    layout, places = sequence.sequence_layout.select(start, stop, step)
    selected = sequence.like(local.index_select(dim, places[sequence.group.rank].to(local.device)), dim, layout)
    note_copy(sequence, selected, index)
    return selected


def _look_up(table: Any, index: Any) -> Any:
    """Return the rows of a whole table with the numbers of a sequence."""
    if not isinstance(index, ShardedSequence) or index.dtype in (torch.bool, torch.uint8):
        return NotImplemented
    return index.like(table[index.local])


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
        return _get_positions(sequence, chosen)
    index_of_local = [slice(None)] * dim + [chosen.to(sequence.local.device)]  # raises as on the whole
    return sequence.like(sequence.local[tuple(index_of_local)])


def _get_positions(sequence: ShardedSequence, chosen: torch.Tensor) -> Any:
    """Return a few positions, each of which one rank has, on all ranks."""
    layout, local = sequence.sequence_layout, sequence.local
    # A sum sends each element twice.
    if (
        layout.outer != 1
        or layout.inner != 1
        or not 0 < 2 * len(chosen) <= layout.length
        or chosen.device.type != "cpu"
    ):
        return NotImplemented
    if bool((chosen >= layout.length).any() | (chosen < -layout.length).any()):
        return NotImplemented  # on the whole it is an error
    wanted = (chosen % layout.length)[:, None]
    targets, places = (wanted == layout.positions[sequence.group.rank]).nonzero(as_tuple=True)
    held = local.index_select(sequence.dim_held, places.to(local.device))
    shape = [*local.shape[: sequence.dim_held], len(chosen), *local.shape[sequence.dim_held + 1 :]]
    summed = held if held.is_floating_point() or held.is_complex() else held.to(torch.int64)
    # The sum over no element is zero, with a graph: all ranks take part in backward.
    mine = summed.new_zeros(shape).index_add(sequence.dim_held, targets.to(local.device), summed)
    return sequence.group.sum(mine).to(sequence.dtype)


def _get_position(sequence: ShardedSequence, parts: list[Any], place: int) -> Any:
    """Return the values at one position, which one rank has, on all ranks."""
    layout = sequence.sequence_layout
    if layout.outer != 1 or layout.inner != 1 or not -layout.length <= parts[place] < layout.length:
        return NotImplemented  # on the whole it may be an error
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
        if start + given["length"] > sequence.shape[dim]:
            return NotImplemented  # on the whole it is an error
        chosen = slice(start, start + given["length"])
    return sequence[tuple([slice(None)] * dim + [chosen])]


@rule("index_select", "gather", "take_along_dim")
def _index(func: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    names = ("indices", "dim") if func.__name__ == "take_along_dim" else ("dim", "index")
    given = {**dict(zip(names, args[1:], strict=False)), **kwargs}
    sequence, dim = args[0], given.get("dim")
    index: Any = given.get("index", given.get("indices"))
    if not isinstance(dim, int) or "out" in kwargs:
        return NotImplemented
    if not isinstance(sequence, ShardedSequence):
        return _pick_of_table(func, sequence, dim, index)
    if dim % sequence.dim() == sequence.dim_held:
        return _pick_positions(sequence, index) if func.__name__ == "gather" else NotImplemented
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


def _pick_positions(sequence: ShardedSequence, index: torch.Tensor) -> Any:
    """Return a few elements at positions that a whole index has, on all ranks."""
    layout, dim = sequence.sequence_layout, sequence.dim_held
    # A sum sends each element twice.
    if (
        isinstance(index, ShardedSequence)
        or layout.outer != 1
        or layout.inner != 1
        or 2 * index.shape[dim] > layout.length
    ):
        return NotImplemented
    place = torch.full((layout.length,), -1, dtype=torch.int64, device=index.device)
    own = sequence.group.indices(layout, index.device)
    place[own] = torch.arange(len(own), device=index.device)
    places = place[index]
    found = sequence.local.gather(dim, places.clamp(min=0)).masked_fill(places < 0, 0)
    is_number = found.is_floating_point() or found.is_complex()
    return sequence.group.sum(found if is_number else found.to(torch.int64)).to(sequence.dtype)


@rule("scatter", "scatter_", "scatter_add", "scatter_add_")
def _scatter(func: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Set elements along another dim: each rank those at its positions, also of a whole tensor."""
    given = {**dict(zip(("input", "dim", "index", "src"), args, strict=False)), **kwargs}
    tensors = [value for value in given.values() if isinstance(value, torch.Tensor)]
    first = next(value for value in tensors if isinstance(value, ShardedSequence))
    in_place = func.__name__.endswith("_")
    if in_place:
        first = given["input"]
    if "out" in kwargs or not isinstance(given.get("dim"), int) or not isinstance(first, ShardedSequence):
        return NotImplemented
    is_apart = given["dim"] % first.dim() != first.dim_held
    size, dims = first.sequence_layout.size, first.dim()
    if not is_apart or any(value.dim() != dims or value.shape[first.dim_held] != size for value in tensors):
        return NotImplemented
    made = run_aligned(func.__name__, func, args, kwargs, first)
    return first if in_place else made


def _pick_of_table(func: Callable[..., Any], table: torch.Tensor, dim: int, index: ShardedSequence) -> Any:
    """Return elements of a whole table with the numbers of a sequence."""
    dim %= table.dim()
    if func.__name__ == "index_select":
        return index.like(torch.index_select(table, dim, index.local), dim)
    if func.__name__ != "gather" or dim != index.dim_held:
        return NotImplemented
    return index.like(torch.gather(table, dim, index.local))


@rule("__setitem__")
def _set(func: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    changed, index, value = args
    if not isinstance(changed, ShardedSequence):
        func(changed, *gather_all((index, value), "__setitem__"))
        return
    if _set_slices(changed, index, value):
        return
    whole = changed.whole("__setitem__").clone()
    whole[gather_all(index, "__setitem__")] = gather_all(value, "__setitem__")
    write_back(changed, whole, "__setitem__")


def _set_slices(changed: ShardedSequence, index: Any, value: Any) -> bool:
    """Set elements in the slices that hold them; return whether that could be done."""
    if _is_mask_of(changed, index, value):
        held = changed.dim_held - changed.dim()
        changed.local[align(index, changed.sequence_layout, held, changed, "__setitem__")] = value
        return True
    parts = _expand_index(changed, index)
    if parts is None:
        return False
    place = _place_of(parts, changed.dim_held)
    behind = sum(not isinstance(part, int) for part in parts[place + 1 :])
    if parts[place] == slice(None):
        changed.local[tuple(parts)] = align(value, changed.sequence_layout, -1 - behind, changed, "__setitem__")
        return True
    return _set_positions(changed, parts, place, value)


def _is_mask_of(changed: ShardedSequence, index: Any, value: Any) -> bool:
    """Return whether a number is to be set where a mask of the sequence's shape is true."""
    is_number = not isinstance(value, torch.Tensor) or (value.dim() == 0 and not isinstance(value, ShardedSequence))
    if not is_number or not isinstance(index, torch.Tensor):
        return False
    return index.dtype is torch.bool and index.shape == changed.shape


def _set_positions(changed: ShardedSequence, parts: list[Any], place: int, value: Any) -> bool:
    """Set one position or a slice of positions; each rank sets those that it holds."""
    layout, taken = changed.sequence_layout, parts[place]
    if layout.outer != 1 or layout.inner != 1:
        return False
    behind = sum(not isinstance(part, int) for part in parts[place + 1 :])
    if isinstance(taken, int):
        if not -layout.length <= taken < layout.length or isinstance(value, ShardedSequence):
            return False  # the first is an error, on the whole too
        taken = slice(taken % layout.length, taken % layout.length + 1)
        if isinstance(value, torch.Tensor) and value.dim() > behind:
            value = value.unsqueeze(value.dim() - behind)
    selected, places = layout.select(*taken.indices(layout.length))
    before = sum(not isinstance(part, int) for part in parts[:place])
    at_all_positions = (*parts[:place], slice(None), *parts[place + 1 :])
    target = changed.local[at_all_positions]
    here = places[changed.group.rank].to(target.device)
    mine = align(value, selected, -1 - behind, changed, "__setitem__")
    filled = torch.as_tensor(mine, dtype=target.dtype, device=target.device)
    filled = filled.flatten(0, filled.dim() - target.dim()) if filled.dim() > target.dim() else filled
    shape = [*target.shape[:before], len(here), *target.shape[before + 1 :]]
    target.index_copy_(before, here, filled.expand(shape))
    return True


@rule(
    "tolist", "item", "__bool__", "__float__", "__int__", "__index__", "__contains__", "numpy", "__array__", "__iter__"
)
def _read(func: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    return compute_whole(func.__name__, func, args, kwargs)
