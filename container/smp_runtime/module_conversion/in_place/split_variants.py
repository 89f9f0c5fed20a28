"""Variants of a candidate split: by pieces of a packed map, with keys repeated, with one rank's numbers of heads."""

from __future__ import annotations

import math
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from torch import nn

from smp_runtime.module_conversion.splitting import number_of
from smp_runtime.nn.sharded.linear import LinearSplit, features_of
from smp_runtime.nn.sharded.tables import Tables
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
    around = tuple(sorted({path.rpartition(".")[0] for path in unit.leaves}))
    for views in ((), around):
        for found, heads in _layouts(block, replace(unit, views=views), size):
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
    columns = {features_of(block.get_submodule(path))[how.columns] for path, how in unit.leaves.items()}
    found = {}
    for owner in sorted({path.rpartition(".")[0] for path in unit.leaves}):
        for name, child in block.get_submodule(owner).named_children():
            shapes = {tuple(parameter.shape) for parameter in child.parameters()}
            if any(child.children()) or not any(shapes == {(features,)} for features in columns if not features % size):
                continue
            cuts = tuple((own, 0, ()) for own, _ in child.named_parameters())
            found[f"{owner}.{name}".lstrip(".")] = Tables(cuts, is_norm=True)
    return found


def _tables_of_heads(block: nn.Module, unit: SplitUnit, numbers: tuple[Number, ...], size: int) -> dict[str, Tables]:
    heads = {number_of(block, path, name) for path, name, _ in numbers if _is_heads(name)}
    found = {}
    for owner in sorted({path.rpartition(".")[0] for path in unit.leaves}):
        for name, child in block.get_submodule(owner).named_children():
            if isinstance(child, nn.Embedding) and child.embedding_dim in heads and not child.embedding_dim % size:
                found[f"{owner}.{name}".lstrip(".")] = Tables((("weight", 1, ()),))
    return found


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
        for features in how.pieces or (features_of(block.get_submodule(path))[how.columns],):
            if features % size and not how.runs:
                return f"{size} ranks do not divide the {features} features of {path}"
    return None


def _layouts(block: nn.Module, unit: SplitUnit, size: int) -> Iterator[tuple[SplitUnit, _Heads | None]]:
    if is_divisible(block, unit, size) is None:
        yield unit, None
    columns = {path: how for path, how in unit.leaves.items() if how.columns}
    rows = [path for path, how in unit.leaves.items() if not how.columns]
    if len(rows) != 1 or any(how.joins or how.pieces or how.runs for how in unit.leaves.values()):
        return
    width = features_of(block.get_submodule(rows[0]))[0]
    outputs = {path: features_of(block.get_submodule(path))[1] for path in columns}
    pieces = _pieces(outputs, width)
    if any(len(found) > 1 for found in pieces.values()):
        how = {path: replace(columns[path], pieces=pieces[path]) for path in columns}
        found = replace(unit, leaves={**unit.leaves, **how})
        if is_divisible(block, found, size) is None:
            yield found, None
    keys = {n for found in pieces.values() for n in found if n < width}
    if len(keys) == 1 and all(n in (width, *keys) for found in pieces.values() for n in found):
        for heads in _grouped(block, unit, width, min(keys), size):
            how = {path: _repeated(columns[path], pieces[path], width, heads, size) for path in columns}
            yield replace(unit, leaves={**unit.leaves, **how}), heads


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
    return {path: (width, rest // 2, rest // 2) if rest > 0 and rest % 2 == 0 else (features,)}


def _grouped(block: nn.Module, unit: SplitUnit, width: int, keys: int, size: int) -> Iterator[_Heads]:
    """Yield head sizes with which the ranks divide the heads of queries, but not those of keys."""
    values = list(_values(block, unit))
    sizes = [value for _, name, value in values if _HEAD_SIZE.search(name)]
    sizes += [width // value for _, name, value in values if _is_heads(name) and not width % value]
    for features in dict.fromkeys((*sizes, keys)):
        if width % features or keys % features:
            continue
        many, few = width // features, keys // features
        if not many % size and few % size and not many % few:
            yield _Heads(many, few, math.gcd(many // few, many // size), features)


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
        numbers = tuple(sorted({number for kinds in found for kind in level.split() for number in kinds[kind]}))
        if numbers not in tried:
            tried.add(numbers)
            yield (
                numbers,
                {path: how for unit in units for path, how in _tables_of_heads(block, unit, numbers, size).items()},
            )


def _numbers(block: nn.Module, unit: SplitUnit, size: int, grouped: _Heads | None) -> Iterator[tuple[Number, ...]]:
    """Yield sets of numbers on the modules around a unit that may become those of one rank.

    The sets are none, heads, heads and features, features, and those with heads of a configuration.
    """
    found = _found_numbers(block, unit, size, grouped)
    tried: set[tuple[Number, ...]] = set()
    for level in _LEVELS:
        numbers = tuple(number for kind in level.split() for number in found[kind])
        if numbers not in tried:
            tried.add(numbers)
            yield numbers


def _found_numbers(block: nn.Module, unit: SplitUnit, size: int, grouped: _Heads | None) -> dict[str, list[Number]]:
    """Return the numbers around a unit by kind: heads, features, or heads of a configuration."""
    local, many = _local_features(block, unit, size), {}
    if grouped is not None:
        local[grouped.keys * grouped.size] = grouped.here(size) * grouped.size
        many = {grouped.keys: grouped.here(size), grouped.queries: grouped.queries // size}
    found: dict[str, list[Number]] = {"heads": [], "features": [], "config": []}
    for owner, name, value in _values(block, unit):
        kind = "config" if "." in name else "heads"
        if _is_heads(name):
            if value in many or not value % size:
                found[kind].append((owner, name, many.get(value, value // size)))
        elif grouped is not None and "groups" in name and value == grouped.queries // grouped.keys:
            found[kind].append((owner, name, grouped.shared))
        elif value in local and kind == "heads" and not _NO_FEATURES.search(name):
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
    owners = {""}
    for path in unit.leaves:
        parts = path.split(".")[:-1]
        owners |= {".".join(parts[: n + 1]) for n in range(len(parts))}
    for owner in sorted(owners):
        module = block.get_submodule(owner)
        config = vars(module).get("config")
        given = [(name, value) for name, value in vars(module).items() if not name.startswith("_")]
        given += [(f"config.{name}", value) for name, value in getattr(config, "__dict__", {}).items()]
        yield from ((owner, name, value) for name, value in given if type(value) is int and value > 0)
