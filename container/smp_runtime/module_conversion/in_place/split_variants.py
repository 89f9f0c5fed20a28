"""Variants of a candidate split: by pieces of a packed map, with keys repeated, with one rank's numbers of heads."""

from __future__ import annotations

import itertools
import math
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, TypeGuard

from torch import nn

from smp_runtime.module_conversion.splitting import number_of
from smp_runtime.nn.split_in_place.linear import LinearSplit, features_of
from smp_runtime.nn.split_in_place.tables import Tables
from smp_runtime.parameters.registry import intervals

if TYPE_CHECKING:
    from smp_runtime.module_conversion.in_place.plan_inference import SplitUnit
    from smp_runtime.module_conversion.splitting import Number

#: Numbers of heads on a module, but not their sizes, nor how many share something.
_HEADS = re.compile(r"(^|_)(n_?)?heads?($|_)|^h$")
_NO_HEADS = re.compile(r"dim|size|groups|per|idx|mask")
#: Numbers that are no features, though they may be as many.
_NO_FEATURES = re.compile(r"bucket|num_|max|vocab|position|length|kernel|window|layer|idx|_id")
_HEAD_SIZE = re.compile(r"head_?(dim|size)|d_kv$|dim_head|size_per_head")


def list_variants(
    block: nn.Module, unit: SplitUnit, size: int
) -> Iterator[tuple[SplitUnit, tuple[Number, ...], dict[str, Tables]]]:
    """Yield variants of a unit over ``size`` ranks, the likelier first.

    The unit is used as it is, by pieces, or with keys repeated; each with numbers. Numbers of heads also come with
    embeddings of the same module that have a channel for each head, such as a relative bias. They also come with
    norms over the features of all heads.
    """
    as_it_is = replace(unit, views=())
    by_pieces = replace(unit, views=tuple(_owners_of(unit)))
    for variant in (as_it_is, by_pieces):
        for found, heads in _layouts(block, variant, size):
            for numbers in _numbers(block, found, size, heads):
                for tables in _tables(block, [unit], numbers, size):
                    yield found, numbers, tables


def _tables(
    block: nn.Module, units: Sequence[SplitUnit], numbers: tuple[Number, ...], size: int
) -> Iterator[dict[str, Tables]]:
    """Yield sets of modules next to some units with parameters to split: none, embeddings, embeddings and norms."""
    heads, norms = {}, {}
    for unit in units:
        heads.update(_tables_of_heads(block, unit, numbers, size))
        norms.update(_norms_of_features(block, unit, size))
    yield {}
    if heads:
        yield heads
    if norms:
        yield {**heads, **norms}


def _norms_of_features(block: nn.Module, unit: SplitUnit, size: int) -> dict[str, Tables]:
    """Return norms over all features that are split, such as of queries of all heads."""
    split_shapes: set[tuple[int, ...]] = set()
    for path, how in unit.leaves.items():
        features = features_of(block.get_submodule(path))[how.columns]
        if features % size == 0:
            split_shapes.add((features,))
    found = {}
    for path, child in _children_around(block, unit):
        if _has_one_shape_of(child, split_shapes):
            cuts = tuple((own, 0, ()) for own, _ in child.named_parameters())
            found[path] = Tables(cuts, is_norm=True)
    return found


def _has_one_shape_of(module: nn.Module, shapes: set[tuple[int, ...]]) -> bool:
    """Return whether a module without children has parameters, all of one of the shapes."""
    if any(module.children()):
        return False
    own = {tuple(parameter.shape) for parameter in module.parameters()}
    return len(own) == 1 and own <= shapes


def _tables_of_heads(block: nn.Module, unit: SplitUnit, numbers: tuple[Number, ...], size: int) -> dict[str, Tables]:
    heads = {number_of(block, path, name) for path, name, _ in numbers if _is_heads(name)}
    found = {}
    for path, child in _children_around(block, unit):
        if not isinstance(child, nn.Embedding):
            continue
        channels = child.embedding_dim
        if channels in heads and channels % size == 0:
            found[path] = Tables((("weight", 1, ()),))
    return found


def _owners_of(unit: SplitUnit) -> list[str]:
    """Return the paths of the modules that hold a unit's maps."""
    return sorted({path.rpartition(".")[0] for path in unit.leaves})


def _children_around(block: nn.Module, unit: SplitUnit) -> Iterator[tuple[str, nn.Module]]:
    """Yield the children, with their paths, of the modules that hold a unit's maps."""
    for owner in _owners_of(unit):
        for name, child in block.get_submodule(owner).named_children():
            yield f"{owner}.{name}".lstrip("."), child


@dataclass(frozen=True)
class _Heads:
    """Heads that the ranks do not divide.

    Attributes:
        queries: heads of queries, over all ranks.
        keys: heads of keys, over all ranks.
        shared: how many of a rank's heads of queries follow each other with the same keys.
        size: features of a head.
    """

    queries: int
    keys: int
    shared: int
    size: int

    def here(self, ranks: int) -> int:
        """Return the number of key heads that a rank needs."""
        return self.queries // ranks // self.shared

    def of_rank(self, rank: int, ranks: int) -> list[int]:
        """Return the key heads that a rank needs."""
        first, group = rank * (self.queries // ranks), self.queries // self.keys
        return [(first + n * self.shared) // group for n in range(self.here(ranks))]


def is_divisible(block: nn.Module, unit: SplitUnit, size: int) -> str | None:
    """Return why the ranks do not divide a unit's features; None if they do."""
    for path, how in unit.leaves.items():
        if how.runs:
            continue
        whole = features_of(block.get_submodule(path))[how.columns]
        pieces = how.pieces or (whole,)
        for features in pieces:
            if features % size:
                return f"{size} ranks do not divide the {features} features of {path}"
    return None


def _layouts(block: nn.Module, unit: SplitUnit, size: int) -> Iterator[tuple[SplitUnit, _Heads | None]]:
    if is_divisible(block, unit, size) is None:
        yield unit, None
    widths, outputs = [], {}
    for path, how in unit.leaves.items():
        if how.joins or how.pieces or how.runs:
            return  # it has a layout already
        inputs, features = features_of(block.get_submodule(path))
        if how.columns:
            outputs[path] = features
        else:
            widths.append(inputs)
    if len(widths) != 1:
        return
    width = widths[0]
    pieces = _pieces(outputs, width)
    is_packed = any(len(found) > 1 for found in pieces.values())
    if is_packed:
        packed = _packed(unit, pieces)
        if is_divisible(block, packed, size) is None:
            yield packed, None
    yield from _layouts_of_groups(block, unit, pieces, width, size)


def _packed(unit: SplitUnit, pieces: Mapping[str, tuple[int, ...]]) -> SplitUnit:
    leaves = dict(unit.leaves)
    for path, found in pieces.items():
        leaves[path] = replace(leaves[path], pieces=found)
    return replace(unit, leaves=leaves)


def _layouts_of_groups(
    block: nn.Module, unit: SplitUnit, pieces: Mapping[str, tuple[int, ...]], width: int, size: int
) -> Iterator[tuple[SplitUnit, _Heads]]:
    """Yield the unit with keys repeated, if its maps have pieces of two sizes: queries, and fewer keys."""
    sizes = set(itertools.chain.from_iterable(pieces.values()))
    keys = {features for features in sizes if features < width}
    if len(keys) != 1 or not sizes <= {width, *keys}:
        return
    for heads in _grouped(block, unit, width, min(keys), size):
        leaves = dict(unit.leaves)
        for path, found in pieces.items():
            leaves[path] = _repeated(leaves[path], found, width, heads, size)
        yield replace(unit, leaves=leaves), heads


def _pieces(outputs: Mapping[str, int], width: int) -> dict[str, tuple[int, ...]]:
    """Return each map's outputs as pieces that may be split separately.

    ``width`` is the number of input features of the map that follows. Only a single map can be packed.
    """
    if len(outputs) != 1:
        return {path: (features,) for path, features in outputs.items()}
    ((path, features),) = outputs.items()
    rest = features - width
    if features % width == 0:
        return {path: (width,) * (features // width)}
    if rest > 0 and rest % 2 == 0:
        return {path: (width, rest // 2, rest // 2)}
    return {path: (features,)}


def _grouped(block: nn.Module, unit: SplitUnit, width: int, keys: int, size: int) -> Iterator[_Heads]:
    """Yield head sizes with which the ranks divide the heads of queries, but not those of keys."""
    for features in dict.fromkeys((*_head_sizes(block, unit, width), keys)):
        if width % features or keys % features:
            continue
        many, few = width // features, keys // features
        divides_queries_only = many % size == 0 and few % size != 0
        if divides_queries_only and many % few == 0:
            shared = math.gcd(many // few, many // size)
            yield _Heads(many, few, shared, features)


def _head_sizes(block: nn.Module, unit: SplitUnit, width: int) -> list[int]:
    """Return the sizes of heads that the numbers around a unit give, the likelier first."""
    values = list(_values(block, unit))
    sizes = [value for _, name, value in values if _HEAD_SIZE.search(name)]
    counts = [value for _, name, value in values if _is_heads(name)]
    return sizes + [width // count for count in counts if width % count == 0]


def _repeated(how: LinearSplit, pieces: tuple[int, ...], width: int, heads: _Heads, size: int) -> LinearSplit:
    if pieces == (width,):
        return how
    runs: list[tuple[int, ...]] = []
    for rank in range(size):
        bounds: list[int] = []
        start = 0
        for piece in pieces:
            if piece == width:
                bounds += [start + rank * (width // size), start + (rank + 1) * (width // size)]
            else:
                for head in heads.of_rank(rank, size):
                    bounds += [start + head * heads.size, start + (head + 1) * heads.size]
            start += piece
        runs.append(tuple(bounds))
    return replace(how, runs=tuple(runs))


#: Which numbers may be those of one rank, the likelier first.
_LEVELS = ("", "heads", "heads features", "features", "heads config", "heads features config")


def joint_numbers(
    block: nn.Module, units: Sequence[SplitUnit], size: int
) -> Iterator[tuple[tuple[Number, ...], dict[str, Tables]]]:
    """Yield numbers and embeddings of several units at once, for numbers that the units share."""
    found = [_found_numbers(block, unit, size, None) for unit in units]
    tried: set[tuple[Number, ...]] = set()
    for level in _LEVELS:
        kinds = level.split()
        named = {number for of_unit in found for kind in kinds for number in of_unit[kind]}
        numbers = tuple(sorted(named))
        if numbers in tried:
            continue
        tried.add(numbers)
        tables: dict[str, Tables] = {}
        for unit in units:
            tables.update(_tables_of_heads(block, unit, numbers, size))
        yield numbers, tables


def _numbers(block: nn.Module, unit: SplitUnit, size: int, grouped: _Heads | None) -> Iterator[tuple[Number, ...]]:
    """Yield sets of numbers on the modules around a unit that may become those of one rank.

    The sets are none, heads, heads and features, features, and those with heads of a configuration.
    """
    found = _found_numbers(block, unit, size, grouped)
    tried: set[tuple[Number, ...]] = set()
    for level in _LEVELS:
        kinds = level.split()
        numbers = tuple(number for kind in kinds for number in found[kind])
        if numbers not in tried:
            tried.add(numbers)
            yield numbers


def _found_numbers(block: nn.Module, unit: SplitUnit, size: int, grouped: _Heads | None) -> dict[str, list[Number]]:
    """Return the numbers around a unit by kind: heads, features, or heads of a configuration."""
    # A rank's features, heads, and heads of queries for each of keys, by the numbers of the whole.
    local = _local_features(block, unit, size)
    heads: dict[int, int] = {}
    shared: dict[int, int] = {}
    if grouped is not None:
        local[grouped.keys * grouped.size] = grouped.here(size) * grouped.size
        heads = {grouped.keys: grouped.here(size), grouped.queries: grouped.queries // size}
        shared = {grouped.queries // grouped.keys: grouped.shared}
    found: dict[str, list[Number]] = {"heads": [], "features": [], "config": []}
    for owner, name, value in _values(block, unit):
        kind = "config" if "." in name else "heads"
        if _is_heads(name):
            if value in heads or value % size == 0:
                found[kind].append((owner, name, heads.get(value, value // size)))
        elif "groups" in name and value in shared:
            found[kind].append((owner, name, shared[value]))
        elif kind == "heads" and value in local and not _NO_FEATURES.search(name):
            found["features"].append((owner, name, local[value]))
    return found


def _local_features(block: nn.Module, unit: SplitUnit, size: int) -> dict[int, int]:
    """Return the features of one rank by the features of whole maps and of their pieces."""
    local: dict[int, int] = {}
    for path, how in unit.leaves.items():
        whole = features_of(block.get_submodule(path))[how.columns]
        for features in (whole, *how.pieces):
            local[features] = features // size
        if how.runs:
            local[whole] = sum(stop - start for start, stop in intervals(how.runs[0]))
    return local


def _is_heads(name: str) -> bool:
    last = name.rpartition(".")[2]
    return bool(_HEADS.search(last)) and not _NO_HEADS.search(last)


def _values(block: nn.Module, unit: SplitUnit) -> Iterator[Number]:
    """Yield the whole numbers of the modules around a unit and of their configurations."""
    for owner in _paths_around(unit):
        for name, value in _attributes_of(block.get_submodule(owner)):
            if _is_count(value):
                yield owner, name, value


def _is_count(value: Any) -> TypeGuard[int]:
    return type(value) is int and value > 0  # `isinstance` would take a flag for a number


def _attributes_of(module: nn.Module) -> Iterator[tuple[str, object]]:
    """Yield a module's own public attributes, and those of its configuration as ``config.…``."""
    for name, value in vars(module).items():
        if not name.startswith("_"):
            yield name, value
    config = vars(module).get("config")
    for name, value in getattr(config, "__dict__", {}).items():
        yield f"config.{name}", value


def _paths_around(unit: SplitUnit) -> list[str]:
    """Return the paths of all modules around a unit's maps, from the block down."""
    owners = {""}
    for path in unit.leaves:
        parts = path.split(".")[:-1]
        owners |= {".".join(parts[: n + 1]) for n in range(len(parts))}
    return sorted(owners)
