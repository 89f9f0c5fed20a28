"""Candidates for a split without a plan: columns share an input, and the maps that follow them are rows."""

from __future__ import annotations

import itertools
import math
import re
from collections.abc import Container, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

from smp_runtime.nn.split_in_place.linear import LinearSplit, features_of, is_linear, is_transposed

if TYPE_CHECKING:
    import torch
    from torch import nn

#: One part in this many of a block may stay whole, if splitting it would cost a collective of its own.
_WHOLE_SHARE = 12
#: With more maps before a unit than these, it is not tried with some of them replicated: their subsets are too many, as in a chain
#: of linear maps, each of which follows all before it.
_MOST_BEFORE = 8
#: A map before others is narrow if these have at least this many times its elements.
_NARROW = 4


@dataclass(frozen=True)
class SplitUnit:
    """Linear maps that are split together or not at all.

    Attributes:
        leaves: how each is split, by its path.
        replicated: maps before these that stay whole; each rank uses their results in its own way.
        views: modules around them that make views by the width of all ranks.
    """

    leaves: Mapping[str, LinearSplit]
    replicated: tuple[str, ...] = ()
    views: tuple[str, ...] = ()


def inferred_units(block: nn.Module, seen: Sequence[tuple[str, torch.Tensor]]) -> list[SplitUnit]:
    """Return the units that may be split together, the likelier first; some of them overlap.

    Args:
        seen: the linear maps of a block with what each was called with, in the order of the calls.
    """
    units: dict[tuple[object, ...], SplitUnit] = {}
    sources = _sources(block, seen)
    narrow = set().union(*sources.values())
    for runs in (_by_parent(seen, narrow), _by_input(seen), _by_parent(seen, set())):
        index = 0
        while index + 1 < len(runs):
            first, second = runs[index], runs[index + 1]
            before = set().union(*(sources.get(path, set()) for path in first)) - set(first)
            inside = {features_of(block.get_submodule(path))[0] for path in (*first, *before)}
            if len(second) == 1 and features_of(block.get_submodule(second[0]))[1] in inside:
                for renamed in _alike(block, {**dict.fromkeys(first, True), second[0]: False}):
                    for unit in (SplitUnit(renamed), *_behind_whole(renamed, sources)):
                        units.setdefault((*unit.leaves, unit.replicated), unit)
                index += 1
            index += 1
    return list(units.values())


def _behind_whole(leaves: Mapping[str, LinearSplit], sources: Mapping[str, set[str]]) -> Iterator[SplitUnit]:
    """Yield the unit with some maps before it replicated.

    Those maps give a rank more than it computes with its columns, such as keys of all heads.
    """
    sources_of_leaves = itertools.chain.from_iterable(sources.get(path, set()) for path in leaves)
    before = sorted(set(sources_of_leaves) - leaves.keys())
    if len(before) > _MOST_BEFORE:
        return
    for count in range(1, len(before) + 1):
        for replicated in itertools.combinations(before, count):
            found = {}
            for path, how in leaves.items():
                # Gradients are summed behind those maps, so not at what follows them.
                follows = not sources.get(path, set()).isdisjoint(replicated)
                found[path] = replace(how, local=True) if follows else how
            yield SplitUnit(found, replicated)


def _by_input(seen: Sequence[tuple[str, torch.Tensor]]) -> list[list[str]]:
    """Group maps that are called one after the other with the same tensor."""
    runs: list[list[str]] = []
    before = None
    for path, x in seen:
        if x is not before:
            runs.append([])
        runs[-1].append(path)
        before = x
    return runs


def _parent_of(path: str) -> str:
    return path.rpartition(".")[0]


def _by_parent(seen: Sequence[tuple[str, torch.Tensor]], within: set[str]) -> list[list[str]]:
    """Group maps of one module except the last one: queries, and keys and values of something else.

    Args:
        within: maps that others of the same module follow: these stay alone.
    """
    runs: list[list[str]] = []
    for parent, found in itertools.groupby((path for path, _ in seen), _parent_of):
        *front, last = found
        before = []
        for path in front:
            if path in within:
                runs.append([path])
            else:
                before.append(path)
        if before and parent:
            runs.append(before)
        else:
            runs += [[path] for path in before]
        runs.append([last])
    return runs


def _sources(block: nn.Module, seen: Sequence[tuple[str, torch.Tensor]]) -> dict[str, set[str]]:
    """Return for each map the maps of its module that its input depends on, as in latent attention.

    The last map of a module is left out.
    """
    weights = {id(block.get_submodule(path).weight): path for path, _ in seen}
    found: dict[str, set[str]] = {}
    for parent, calls in itertools.groupby(seen, lambda call: _parent_of(call[0])):
        *front, _ = calls
        for path, x in front:
            before = _maps_before(x, weights)
            found[path] = {source for source in before if _parent_of(source) == parent}
    return found


def _maps_before(x: torch.Tensor, weights: Mapping[int, str]) -> set[str]:
    leaves = {id(leaf) for leaf in _leaves_before(x)}
    return {path for weight, path in weights.items() if weight in leaves}


def _leaves_before(x: torch.Tensor) -> Iterator[torch.Tensor]:
    """Yield the leaves of the autograd graph that a tensor was computed from."""
    waiting: list[Any] = [x.grad_fn]
    seen: set[Any] = set()
    while waiting:
        node = waiting.pop()
        if node is None or node in seen:
            continue
        seen.add(node)
        if hasattr(node, "variable"):
            yield node.variable
        waiting += [before for before, _ in node.next_functions]


def _alike(block: nn.Module, columns: Mapping[str, bool]) -> Iterator[dict[str, LinearSplit]]:
    """Yield the unit itself, and those with names that differ in one number: experts that the sample did not call."""
    modules = dict(block.named_modules())
    linear = {path for path, part in modules.items() if is_linear(part)}
    numbers: set[tuple[int, int]] = set()
    for path in columns:
        numbers.update(match.span() for match in re.finditer(r"(?<=\.)\d+(?=\.)", path))
    seen: set[tuple[str, ...]] = set()
    for start, stop in [(0, 0), *numbers]:
        for renamed in _renamed(modules, columns, start, stop):
            paths = tuple(renamed)
            if paths in seen or not linear.issuperset(paths):
                continue
            seen.add(paths)
            yield _splits_of(modules, renamed)


def _splits_of(modules: Mapping[str, nn.Module], columns: Mapping[str, bool]) -> dict[str, LinearSplit]:
    leaves = {}
    for path, is_column in columns.items():
        leaves[path] = LinearSplit(columns=is_column, transposed=is_transposed(modules[path]))
    return leaves


def _renamed(
    modules: Mapping[str, nn.Module], columns: Mapping[str, bool], start: int, stop: int
) -> Iterator[Mapping[str, bool]]:
    """Yield the maps themselves, and their likes in all siblings of the module whose number is at that place of their names."""
    yield columns
    stems = {path[:stop] for path in columns}
    if stop == 0 or len(stems) != 1:
        return
    parent = next(iter(columns))[: start - 1]
    for number in range(len(modules[parent]._modules)):
        yield {f"{path[:start]}{number}{path[stop:]}": is_column for path, is_column in columns.items()}


def find_narrow(block: nn.Module, seen: Sequence[tuple[str, torch.Tensor]], split: Container[str]) -> set[str]:
    """Return small maps in front of maps that are split: it is better to keep them whole."""
    sources = _sources(block, seen)
    found: set[str] = set()
    for _, calls in itertools.groupby((path for path, _ in seen), _parent_of):
        inside = 0
        before: set[str] = set()
        for path in set(calls):
            if path in split:
                inside += _size(block, path)
                before |= sources.get(path, set())
        for path in before:
            is_narrow = _size(block, path) * _NARROW <= inside
            if is_narrow and path not in split:
                found.add(path)
    return found


def _size(block: nn.Module, path: str) -> int:
    return math.prod(features_of(block.get_submodule(path)))


def single_units(block: nn.Module, paths: Sequence[str]) -> Iterator[SplitUnit]:
    """Yield units of linear maps outside other units, each split separately with its output gathered.

    The units are all maps together, those of each module, and each map alone. Small ones are not worth it: together at
    most one part in twelve of the block stays whole.
    """
    how: dict[str, LinearSplit] = {}
    for path in _worth_splitting(block, paths):
        transposed = is_transposed(block.get_submodule(path))
        how[path] = LinearSplit(True, joins=True, transposed=transposed)
    yield SplitUnit(how)
    for _, found in itertools.groupby(how, _parent_of):
        yield SplitUnit({path: how[path] for path in found})
    for path, split in how.items():
        yield SplitUnit({path: split})


def _worth_splitting(block: nn.Module, paths: Sequence[str]) -> list[str]:
    """Return the paths without the smallest maps, which together hold at most a given share of the block's elements."""
    sizes = {path: _size(block, path) for path in paths}
    elements = sum(parameter.numel() for parameter in block.parameters())
    spare = elements // _WHOLE_SHARE
    for path in sorted(paths, key=sizes.__getitem__):
        spare -= sizes[path]
        if spare >= 0:
            del sizes[path]
    return list(sizes)
