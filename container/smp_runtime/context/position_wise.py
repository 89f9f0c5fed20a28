"""Code that treats each position on its own, and may therefore run on slices: mixtures of experts, functions of autograd.

Inside, such code sorts and selects positions, which would gather the sequence. So a call is proven once, on a sample of this
rank's positions: the results for some of them must not depend on the others. Code with noise, capacities or other dependence
between positions fails the proof, and runs on whole sequences as before.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from smp_runtime.context.channels import prepare_scans
from smp_runtime.context.sequence import ShardedSequence, sequences_in
from smp_runtime.tensors.random_state import RandomState
from smp_runtime.tensors.torch_private import tree_flatten, tree_map

if TYPE_CHECKING:
    from smp_runtime.context.exchange import ContextGroup
    from smp_runtime.context.layout import SequenceLayout

#: Names of classes whose modules are tried: mixtures of experts, and their experts.
_TRIED = re.compile("expert|moe", re.IGNORECASE)

#: Modules with such parts see several positions.
_MIXING = re.compile("attention|attn|embedding|conv", re.IGNORECASE)

#: Positions of a rank that a proof computes on.
_SAMPLE = 64

#: With fewer, a rank's own proof says nothing.
_FEWEST = 4

#: Relative difference between results that count as equal, by the size of a number in bytes.
_TOLERANCE = {8: 1e-9, 4: 1e-4, 2: 3e-2, 1: 0.0}


class PositionWise:
    """A callable that is run on slices if it is proven to treat each position on its own.

    Args:
        call: the callable.
    """

    def __init__(self, call: Callable[..., Any]) -> None:
        self._call = call
        self._proven: dict[tuple[Any, ...], bool] = {}

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Call it on slices if that is right, else on sequences."""
        found = sequences_in((args, kwargs))
        if not found or not _are_alike(found):
            return self._call(*args, **kwargs)
        first = found[0]
        form = _form_of(args, kwargs)
        if form not in self._proven:
            self._proven[form] = self._agree(first.group, args, kwargs)
        if not self._proven[form]:
            return self._call(*args, **kwargs)
        result = self._call(*_map_sequences(_local, args), **_map_sequences(_local, kwargs))
        return wrap_positions(result, first)

    def _agree(self, group: ContextGroup, args: Any, kwargs: Any) -> bool:
        """Return whether the proof succeeds on the ranks of the group that have enough positions for one; on one at least."""
        first = sequences_in((args, kwargs))[0]
        state = RandomState.of_now(first.device)
        try:
            verdict = self._prove(first, args, kwargs)
        except (RuntimeError, ValueError, IndexError, TypeError):  # it cannot run on some positions
            verdict = False
        finally:
            state.restore()
        votes = torch.tensor([float(verdict is True), float(verdict is False)], device=first.device)
        proven, refuted = group.add_up(votes).tolist()
        return bool(proven and not refuted)

    @torch.no_grad()
    def _prove(self, first: ShardedSequence, args: Any, kwargs: Any) -> bool | None:
        """Return whether positions are independent of each other; None if there are too few to say."""
        count = min(_SAMPLE, len(first.sequence_layout.positions[first.group.rank]))
        if count < _FEWEST:
            return None
        sample = _map_sequences(lambda one: _take_sample(one, count), (args, kwargs))
        every = self._run_on(sample, None)
        # What depends on all positions, as on the largest number, shows in one of two halves at the latest.
        parts = (torch.arange(0, count, 2), torch.arange(1, count, 2), torch.arange(1))
        for some in parts:
            alone = self._run_on(sample, some)
            if not every or len(every) != len(alone):
                return False
            if not all(_agree_on(one, other, first, count, some) for one, other in zip(every, alone, strict=True)):
                return False
        return True

    def _run_on(self, sample: Any, places: torch.Tensor | None) -> list[torch.Tensor]:
        def select(value: Any) -> Any:
            if not isinstance(value, _Sample):
                return value
            chosen = (
                value.apart if places is None else value.apart.index_select(value.dim, places.to(value.apart.device))
            )
            return chosen.flatten(value.dim - 1, value.dim + 1)

        args, kwargs = tree_map(select, sample)
        return [leaf for leaf in tree_flatten(self._call(*args, **kwargs))[0] if isinstance(leaf, torch.Tensor)]


@dataclass(frozen=True)
class _Sample:
    """Some positions of a slice: ``apart[…, outer, positions, inner, …]``."""

    apart: torch.Tensor
    dim: int  # with the positions


def _take_sample(sequence: ShardedSequence, count: int) -> Any:
    """Return a sample of a slice, with noise: numbers that are all equal would hide what depends on others."""
    layout, held = sequence.sequence_layout, sequence.dim_held
    positions = len(layout.positions[sequence.group.rank])
    apart = sequence.local.unflatten(held, (layout.outer, positions, layout.inner)).narrow(held + 1, 0, count)
    if apart.is_floating_point():
        apart = apart + torch.randn_like(apart)
    return _Sample(apart, held + 1)


def _are_alike(sequences: list[ShardedSequence]) -> bool:
    return len({(one.sequence_layout.key, one.sequence_layout.inner) for one in sequences}) == 1


def _form_of(args: Any, kwargs: Any) -> tuple[Any, ...]:
    """Return what of a call decides how it treats positions: the dims of tensors, and all other values."""

    def describe(leaf: Any) -> Any:
        if isinstance(leaf, ShardedSequence):
            return leaf.dim_held, leaf.dim(), leaf.dtype
        if isinstance(leaf, torch.Tensor):
            return leaf.dim()
        return leaf if isinstance(leaf, int | float | str | bool | None) else type(leaf)

    leaves, structure = tree_flatten((args, kwargs))
    return *map(describe, leaves), str(structure)


def _local(sequence: ShardedSequence) -> torch.Tensor:
    return sequence.local


def _map_sequences(change: Callable[[ShardedSequence], Any], value: Any) -> Any:
    return tree_map(lambda leaf: change(leaf) if isinstance(leaf, ShardedSequence) else leaf, value)


def _agree_on(one: torch.Tensor, other: torch.Tensor, first: ShardedSequence, count: int, some: torch.Tensor) -> bool:
    """Return whether results for all positions of a sample, and for some, are equal for those."""
    placed = _place(one, first, count)
    if placed is None:
        return False
    dim, outer = placed
    index = some.to(one.device)
    chosen = one.unflatten(dim, (outer, count)).index_select(dim + 1, index).flatten(dim, dim + 1)
    if chosen.shape != other.shape or chosen.dtype != other.dtype:
        return False
    if not chosen.is_floating_point():
        return torch.equal(chosen, other)
    scale = float(chosen.abs().max()) or 1.0
    return float((chosen - other).abs().max()) <= _TOLERANCE[one.element_size()] * scale


def _place(result: torch.Tensor, first: ShardedSequence, count: int) -> tuple[int, int] | None:
    """Return the dim of a result with the positions, and how many other dims' elements come before them in it."""
    before = first.sequence_layout.outer
    held = first.dim_held
    if result.dim() > held and result.shape[held] == before * count:
        return held, before
    samples = first.shape[0] if held == 1 else before
    if result.dim() and result.shape[0] == samples * count:  # samples and positions in one dim
        return 0, samples
    return None


def wrap_positions(result: Any, first: ShardedSequence) -> Any:
    """Return the results of position-wise code on slices as sequences."""
    count = len(first.sequence_layout.positions[first.group.rank])

    def wrap(leaf: Any) -> Any:
        if not isinstance(leaf, torch.Tensor):
            return leaf
        placed = _place(leaf, first, count)
        if placed is None:
            raise AssertionError(f"a result of shape {list(leaf.shape)} has no place for {count} positions")
        dim, outer = placed
        layout: SequenceLayout = first.sequence_layout.merged(outer, 1)
        return first.like(leaf, dim, layout)

    return wrap(result) if isinstance(result, torch.Tensor) else tree_map(wrap, result)


def prepare(modules: Iterable[nn.Module]) -> None:
    """Let mixtures of experts run on slices, and scans by channel, where that is proven.

    Args:
        modules: of a model, all that this rank runs.
    """
    modules = list(modules)
    prepare_scans(modules)
    for module in modules:
        is_tried = _TRIED.search(type(module).__name__) is not None
        if is_tried and not any(_MIXING.search(type(part).__name__) for part in module.modules()):
            module.forward = PositionWise(module.forward)
