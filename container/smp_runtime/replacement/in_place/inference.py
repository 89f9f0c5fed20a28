"""Candidates for a split that nobody has planned: columns share an input, and what follows them is rows."""

from __future__ import annotations

import itertools
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from smp_runtime.nn.planned.linear import LinearSplit, features_of, is_linear, is_transposed

if TYPE_CHECKING:
    import torch
    from torch import nn


@dataclass(frozen=True)
class Unit:
    """Linear maps that are split together or not at all.

    Attributes:
        leaves: how each is split, by its path.
    """

    leaves: Mapping[str, LinearSplit]


def inferred_units(block: nn.Module, seen: Sequence[tuple[str, torch.Tensor]]) -> list[Unit]:
    """What may be split together, the likelier first; some of it overlaps.

    Args:
        seen: the linear maps of a block with what each was called with, in the order of the calls.
    """
    units: dict[tuple[str, ...], Unit] = {}
    for runs in (_by_input(seen), _by_parent(seen)):
        index = 0
        while index + 1 < len(runs):
            first, second = runs[index], runs[index + 1]
            inside = {features_of(block.get_submodule(path))[0] for path in first}
            if len(second) == 1 and features_of(block.get_submodule(second[0]))[1] in inside:
                for leaves in _alike(block, {**dict.fromkeys(first, True), second[0]: False}):
                    units.setdefault(tuple(leaves), Unit(leaves))
                index += 1
            index += 1
    return list(units.values())


def _by_input(seen: Sequence[tuple[str, torch.Tensor]]) -> list[list[str]]:
    """Maps that are called one after the other with the same tensor, together."""
    runs: list[list[str]] = []
    before = None
    for path, x in seen:
        if x is not before:
            runs.append([])
        runs[-1].append(path)
        before = x
    return runs


def _by_parent(seen: Sequence[tuple[str, torch.Tensor]]) -> list[list[str]]:
    """Maps of one module together, but for the last one: queries, and keys and values of something else."""
    runs: list[list[str]] = []
    for parent, found in itertools.groupby((path for path, _ in seen), lambda path: path.rpartition(".")[0]):
        *before, last = found
        runs += [before, [last]] if before and parent else [[path] for path in (*before, last)]
    return runs


def _alike(block: nn.Module, columns: Mapping[str, bool]) -> Iterator[dict[str, LinearSplit]]:
    """The unit itself, and those whose names differ in one number: experts that the sample did not call."""
    modules = dict(block.named_modules())
    numbers = {match.span() for path in columns for match in re.finditer(r"(?<=\.)\d+(?=\.)", path)}
    seen: set[tuple[str, ...]] = set()
    for start, stop in [(0, 0), *numbers]:
        renamed: list[dict[str, bool]] = [dict(columns)]
        if stop and len({path[:stop] for path in columns}) == 1:
            renamed += [
                {f"{path[:start]}{number}{path[stop:]}": is_column for path, is_column in columns.items()}
                for number in range(len(modules[next(iter(columns))[: start - 1]]._modules))
            ]
        for paths in renamed:
            if tuple(paths) not in seen and all(path in modules and is_linear(modules[path]) for path in paths):
                seen.add(tuple(paths))
                yield {
                    path: LinearSplit(columns=c, transposed=is_transposed(modules[path])) for path, c in paths.items()
                }


def single(block: nn.Module, paths: Sequence[str]) -> Iterator[Unit]:
    """Linear maps that are in no unit, each split by itself with its output gathered: all, those of each module, or each."""
    how = {path: LinearSplit(True, joins=True, transposed=is_transposed(block.get_submodule(path))) for path in paths}
    yield Unit(how)
    for _, found in itertools.groupby(paths, lambda path: path.rpartition(".")[0]):
        yield Unit({path: how[path] for path in found})
    yield from (Unit({path: how[path]}) for path in paths)
