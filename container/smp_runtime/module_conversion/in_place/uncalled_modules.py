"""Split modules that the trial run did not call like an identical module that it did: a decoder's second attention."""

from __future__ import annotations

import contextlib
from collections.abc import Container, Iterator, Mapping
from dataclasses import replace
from typing import TYPE_CHECKING

from smp_runtime.module_conversion.in_place.equivalence_check import EquivalenceCheck, NotEqualError
from smp_runtime.module_conversion.splitting import BlockSplit
from smp_runtime.nn.split_in_place.linear import is_linear

if TYPE_CHECKING:
    from torch import nn


def with_twins(proof: EquivalenceCheck, split: BlockSplit, size: int) -> BlockSplit:
    """Extend a split to modules that were not called, each split and tried out like one of the same class."""
    for path, like in _twins(proof):
        mine = _inside(split, like)
        if not mine.leaves:
            continue
        with contextlib.suppress(Exception):  # whatever a module raises that is called as another was
            own = EquivalenceCheck(proof.block.get_submodule(path), proof.call_of(like), size, proof.dtype)
            split = _beside(split, _right(own, mine), path)
    return split


def _right(proof: EquivalenceCheck, split: BlockSplit) -> BlockSplit:
    """Return a correct split; if the block slices a bias already, the single module gets the whole and slices it."""
    try:
        return proof.prove(split)
    except NotEqualError:
        return proof.prove(replace(split, arguments=proof.slices_of_arguments(split.numbers)))


def _twins(proof: EquivalenceCheck) -> Iterator[tuple[str, str]]:
    """Yield paths of modules with linear maps that were not called, each with that of a similar called module."""
    called = {path for path, _ in proof.seen}
    maps = _maps_by_path(proof.block)
    for path, names in maps.items():
        was_called = any(f"{path}.{name}" in called for name in names)
        if was_called:
            continue
        other = _called_twin(proof.block, path, maps, called)
        if other is not None:
            yield path, other


def _called_twin(block: nn.Module, path: str, maps: Mapping[str, list[str]], called: Container[str]) -> str | None:
    kind = _kind(block.get_submodule(path))
    for other, names in maps.items():
        if names != maps[path]:
            continue
        was_called = all(f"{other}.{name}" in called for name in names)
        is_same_kind = _kind(block.get_submodule(other)) == kind
        if was_called and is_same_kind:
            return other
    return None


def _maps_by_path(block: nn.Module) -> dict[str, list[str]]:
    """Return the names of the linear maps inside each inner module that has any."""
    found: dict[str, list[str]] = {}
    for path, part in block.named_modules():
        if path == "":  # the block itself
            continue
        inside = [(name, inner) for name, inner in part.named_modules() if name]
        names = [name for name, inner in inside if is_linear(inner)]
        if names:
            found[path] = names
    return found


def _kind(module: nn.Module) -> object:
    return type(module), [(name, tuple(parameter.shape)) for name, parameter in module.named_parameters()]


def _inside(split: BlockSplit, path: str) -> BlockSplit:
    """Return the part of a split that concerns one inner module."""

    def has(name: str) -> bool:
        return name == path or name.startswith(f"{path}.")

    def cut(name: str) -> str:
        return name[len(path) + 1 :]

    return BlockSplit(
        {cut(name): how for name, how in split.leaves.items() if has(name)},
        tuple((cut(owner), name, value) for owner, name, value in split.numbers if has(owner)),
        tables={cut(name): how for name, how in split.tables.items() if has(name)},
        replicated=tuple(cut(name) for name in split.replicated if has(name)),
        views=tuple(cut(name) for name in split.views if has(name)),
    )


def _beside(split: BlockSplit, other: BlockSplit, path: str) -> BlockSplit:
    """Return a split extended by the split of an inner module."""

    def full(name: str) -> str:
        return f"{path}.{name}".rstrip(".")

    return replace(
        split,
        leaves={**split.leaves, **{full(name): how for name, how in other.leaves.items()}},
        numbers=tuple(sorted({*split.numbers, *((full(owner), name, n) for owner, name, n in other.numbers)})),
        tables={**split.tables, **{full(name): how for name, how in other.tables.items()}},
        summed=tuple(sorted({*split.summed, *map(full, other.summed)})),
        replicated=tuple(sorted({*split.replicated, *map(full, other.replicated)})),
        views=tuple(sorted({*split.views, *map(full, other.views)})),
        arguments=(*split.arguments, *(replace(part, module=full(part.module)) for part in other.arguments)),
        results=(*split.results, *(replace(part, module=full(part.module)) for part in other.results)),
    )
