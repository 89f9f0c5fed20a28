"""Code that treats each position on its own, and may therefore run on slices: mixtures of experts, functions of autograd.

Inside, such code sorts and selects positions, which would gather the sequence. So a call is proven once, on a sample of this
rank's positions: the results for some of them must not depend on the others, and the call must leave nothing else behind, such
as a stored loss. Code with noise, capacities or other dependence between positions fails the proof, and runs on whole sequences
as before. Functions of autograd have a backward pass of their own, which is proven too.
"""

from __future__ import annotations

import re
import weakref
from collections.abc import Callable, Hashable, Iterable, Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from smp_runtime.context.proofs.channels import prepare_scans
from smp_runtime.context.proofs.side_effects import Followed, ModuleState, Observers, mode_of
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

#: All of so many positions are one in a part of the proof, which no capacity of an expert takes.
_CROWD = 1024

#: So many forms of calls are proven, as of each layer's quantized weights. What gets other objects all the time runs on whole
#: sequences then.
_MOST_PROOFS = 512

#: Relative difference between results that count as equal, by the size of a number in bytes.
_TOLERANCE = {8: 1e-9, 4: 1e-4, 2: 3e-2, 1: 0.0}


class PositionWise:
    """A callable that is run on slices if it is proven to treat each position on its own.

    Args:
        call: the callable.
        module: whose forward it is.
        knows_types: whether objects of a type among its arguments are all alike.
    """

    def __init__(self, call: Callable[..., Any], module: nn.Module | None = None, *, knows_types: bool = False) -> None:
        self._call = call
        self._knows_types = knows_types
        self._modules = [] if module is None else list(module.modules())
        self._observers = Observers(self._modules)
        self._proven: dict[tuple[Any, ...], Places | None] = {}

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Call it on slices if that is right, else on sequences."""
        found = sequences_in((args, kwargs))
        if not found or not _are_alike(found) or self._observers.change_something():
            return self._call(*args, **kwargs)
        first = found[0]
        form = *_form_of(args, kwargs, knows_types=self._knows_types), mode_of(self._modules), self._observers.count()
        if form not in self._proven and len(self._proven) < _MOST_PROOFS:
            self._proven[form] = self._agree(first.group, args, kwargs)
        places = self._proven.get(form)
        return self._call(*args, **kwargs) if places is None else self._call_on_slices(first, places, args, kwargs)

    def _call_on_slices(self, first: ShardedSequence, places: Places, args: Any, kwargs: Any) -> Any:
        left = iter(places)

        def show(hook: Callable[..., Any], module: nn.Module, *given: Any) -> Any:
            changed = hook(module, *_wrap_positions(given, first, left))
            return None if changed is None else _map_sequences(_local, changed)

        with self._observers.replaced(show):
            result = self._call(*_map_sequences(_local, args), **_map_sequences(_local, kwargs))
        return _wrap_positions(result, first, left)

    def _agree(self, group: ContextGroup, args: Any, kwargs: Any) -> Places | None:
        """Return where results have positions; None unless the proof succeeds on the ranks of the group.

        Ranks with too few positions for one follow the others. One rank at least must have enough.
        """
        first = sequences_in((args, kwargs))[0]
        state, modules = RandomState.of_now(first.device), ModuleState(self._modules)
        places: Places | None = None
        try:
            places = self._prove(first, args, kwargs)
            verdict = places is not None and not modules.counts_something()
        except _TooFewError:
            verdict = None
        except (RuntimeError, ValueError, IndexError, TypeError):  # it cannot run on some positions
            verdict = False
        finally:
            state.restore()
            modules.restore()
        votes = torch.tensor([float(verdict is True), float(verdict is False)], device=first.device)
        proven, refuted = group.add_up(votes).tolist()
        return places or () if proven and not refuted else None

    @torch.no_grad()
    def _prove(self, first: ShardedSequence, args: Any, kwargs: Any) -> Places | None:
        """Return where results have positions if these are independent of each other; else None.

        Raises:
            _TooFewError: this rank has too few positions to say.
        """
        sample = take_samples(first, (args, kwargs))
        count = next(leaf.count for leaf in tree_flatten(sample)[0] if isinstance(leaf, Sample))
        every = self._run_on(sample, None)
        # What depends on all positions, as on the largest number, shows in one of two halves at the latest.
        parts = [torch.arange(0, count, 2), torch.arange(1, count, 2), torch.arange(1)]
        alone = [self._run_on(sample, some) for some in parts]
        # Capacities show if all positions of all samples of the batch choose the same experts.
        size = min(_CROWD, first.sequence_layout.length)
        like_one = tree_map(lambda leaf: leaf.like_first() if isinstance(leaf, Sample) else leaf, sample)
        crowd = self._run_on(like_one, torch.zeros(size, dtype=torch.int64))
        member = self._run_on(like_one, torch.arange(1))
        runs = [(every, count), (crowd, size), (member, 1), *zip(alone, map(len, parts), strict=True)]
        if not every or any(len(results) != len(every) for results, _ in runs):
            return None
        places = tuple(
            _common_place([(results[number], shown) for results, shown in runs], first) for number in range(len(every))
        )
        pairs = [(every, count, some, results) for some, results in zip(parts, alone, strict=True)]
        pairs.append((crowd, size, torch.arange(size), member))
        return places if all(_are_equal(*pair, first, places) for pair in pairs) else None

    def _run_on(self, sample: Any, places: torch.Tensor | None) -> list[torch.Tensor]:
        """Return the results for some positions of a sample, or for all.

        Raises:
            RuntimeError: the call leaves more behind than its results.
        """

        def select(value: Any) -> Any:
            if not isinstance(value, Sample):
                return value
            return value.select(torch.arange(value.count) if places is None else places)

        args, kwargs = tree_map(select, sample)
        taken = [leaf for leaf in tree_flatten((args, kwargs))[0] if isinstance(leaf, torch.Tensor)]
        followed, seen = Followed(taken), []

        def note(_hook: Any, _module: nn.Module, *given: Any) -> None:
            seen.append(given)

        with followed, self._observers.replaced(note):
            made = self._call(*args, **kwargs)
        results = [leaf for leaf in tree_flatten((seen, made))[0] if isinstance(leaf, torch.Tensor)]
        if followed.leaves_something(results):
            raise _SideEffectError
        return results


class _SideEffectError(RuntimeError):
    """A call has left more behind than its results."""


class _TooFewError(RuntimeError):
    """A rank has too few positions for a proof."""


#: For each result, those that hooks see first, the key of its place in what :func:`places_of` returns; None without one.
Places = tuple[str | None, ...]


@dataclass(frozen=True)
class Sample:
    """Some positions of a slice: ``apart[…, outer, positions, inner, …]``."""

    apart: torch.Tensor
    dim: int  # with the positions

    @property
    def count(self) -> int:
        """Return the number of positions."""
        return self.apart.shape[self.dim]

    def select(self, places: torch.Tensor) -> torch.Tensor:
        """Return the slice of some of the positions."""
        chosen = self.apart.index_select(self.dim, places.to(self.apart.device))
        return chosen.flatten(self.dim - 1, self.dim + 1)

    def like_first(self) -> Sample:
        """Return a sample of positions that are equal in all samples of the batch, and all other dims before them."""
        first = self.apart
        for dim in range(self.dim):
            first = first.narrow(dim, 0, 1)
        return Sample(first.expand_as(self.apart), self.dim)

    def apart_of(self, selected: torch.Tensor, count: int) -> torch.Tensor:
        """Return what has the shape of a selection of so many positions, with a dim of these."""
        outer, _, inner = self.apart.shape[self.dim - 1 : self.dim + 2]
        return selected.unflatten(self.dim - 1, (outer, count, inner))


def take_samples(first: ShardedSequence, value: Any) -> Any:
    """Return arguments with a sample in place of each sequence.

    Raises:
        _TooFewError: this rank has too few positions for a proof.
    """
    count = min(_SAMPLE, len(first.sequence_layout.positions[first.group.rank]))
    if count < _FEWEST:
        raise _TooFewError
    return _map_sequences(lambda one: _take_sample(one, count), value)


def _take_sample(sequence: ShardedSequence, count: int) -> Any:
    """Return a sample of a slice, with noise: numbers that are all equal would hide what depends on others."""
    layout, held = sequence.sequence_layout, sequence.dim_held
    positions = len(layout.positions[sequence.group.rank])
    apart = sequence.local.unflatten(held, (layout.outer, positions, layout.inner)).narrow(held + 1, 0, count)
    if apart.is_floating_point():
        noise = torch.randn_like(apart)
        # A root or logarithm of numbers that are positive must get such.
        apart = apart + (noise.abs() if bool((apart > 0).all()) else noise)
    return Sample(apart, held + 1)


def _are_alike(sequences: list[ShardedSequence]) -> bool:
    return len({(one.sequence_layout.key, one.sequence_layout.inner) for one in sequences}) == 1


def _form_of(args: Any, kwargs: Any, *, knows_types: bool) -> tuple[Any, ...]:
    """Return what of a call decides how it treats positions: the dims of tensors, and all other values, or types of objects."""

    def describe(leaf: Any) -> Any:
        if isinstance(leaf, ShardedSequence):
            return leaf.dim_held, leaf.dim(), leaf.dtype
        if isinstance(leaf, torch.Tensor):
            return leaf.dim()
        if isinstance(leaf, int | float | str | bool | None):
            return leaf
        return type(leaf) if knows_types else _identity_of(leaf)

    leaves, structure = tree_flatten((args, kwargs))
    return *map(describe, leaves), str(structure)


def _identity_of(value: Any) -> Any:
    """Return what stands for an object without keeping what it refers to; another thing each time for one without a hash."""
    if not isinstance(value, Hashable):
        return object()
    try:
        return weakref.ref(value)
    except TypeError:  # as of a dtype
        return value


def _local(sequence: ShardedSequence) -> torch.Tensor:
    return sequence.local


def _map_sequences(change: Callable[[ShardedSequence], Any], value: Any) -> Any:
    return tree_map(lambda leaf: change(leaf) if isinstance(leaf, ShardedSequence) else leaf, value)


def _are_equal(
    every: list[torch.Tensor],
    count: int,
    some: torch.Tensor,
    alone: list[torch.Tensor],
    first: ShardedSequence,
    places: Places,
) -> bool:
    """Return whether results for ``count`` positions are, at some of them, those for these alone, or for one like all these."""
    for one, other, place in zip(every, alone, places, strict=True):
        if place is None or one.dtype != other.dtype:
            return False
        dim, outer = places_of(one, first, count)[place]
        chosen = one.unflatten(dim, (outer, count)).index_select(dim + 1, some.to(one.device))
        apart = other.unflatten(dim, (outer, other.shape[dim] // outer))
        if apart.shape[dim + 1] not in (1, len(some)) or not are_close(chosen, apart):
            return False
    return True


def are_close(one: torch.Tensor, other: torch.Tensor) -> bool:
    """Return whether a tensor is, but for rounding, another one or one that is broadcast to its shape."""
    if one.shape != torch.broadcast_shapes(one.shape, other.shape):
        return False
    if not one.is_floating_point():
        return bool((one == other).all())
    scale = float(one.abs().max()) or 1.0
    return float((one - other).abs().max()) <= _TOLERANCE[one.element_size()] * scale


def places_of(result: torch.Tensor, first: ShardedSequence, count: int) -> dict[str, tuple[int, int]]:
    """Return where a result may have positions: the dim, and how many other dims' elements come before them in it."""
    before, held = first.sequence_layout.outer, first.dim_held
    # Both may be true of one size by chance: other runs decide.
    places = {}
    if result.dim() > held and result.shape[held] == before * count:
        places["same dim"] = held, before
    samples = first.shape[0] if held == 1 else before
    if result.dim() and result.shape[0] == samples * count:
        places["merged with samples"] = 0, samples
    return places


def _common_place(runs: list[tuple[torch.Tensor, int]], first: ShardedSequence) -> str | None:
    """Return the place that fits a result of each run, with its number of positions: one run's sizes may be equal by chance."""
    found = [places_of(result, first, shown) for result, shown in runs]
    return next((place for place in found[0] if all(place in each for each in found)), None)


def _wrap_positions(result: Any, first: ShardedSequence, left: Iterator[str | None]) -> Any:
    """Return the results of position-wise code on slices as sequences.

    Args:
        left: the places of the results from here on; none on a rank that has not taken part in the proof.
    """
    count = len(first.sequence_layout.positions[first.group.rank])

    def wrap(leaf: Any) -> Any:
        if not isinstance(leaf, torch.Tensor):
            return leaf
        found = places_of(leaf, first, count)
        place = next(left, None) or next(iter(found), None)
        if place not in found:
            raise AssertionError(f"a result of shape {list(leaf.shape)} has no place for {count} positions")
        dim, outer = found[place]
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
            module.forward = PositionWise(module.forward, module)
