"""The backward passes of functions of autograd on slices: proven to treat each position on its own, and given true gradients."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import torch

from smp_runtime.context.proofs.position_wise import Places, PositionWise, Sample, are_close, places_of, take_samples
from smp_runtime.context.sequence import ShardedSequence, cut_results, sequences_in
from smp_runtime.tensors.torch_private import tree_flatten, tree_map, tree_unflatten

if TYPE_CHECKING:
    from smp_runtime.context.exchange import ContextGroup
    from smp_runtime.context.layout import SequenceLayout


class FunctionOnSlices(PositionWise):
    """A function of autograd that is run on slices if both its passes treat each position on its own.

    A backward pass may do more than multiply, so it gets the gradients of one process: those of slices are as many times
    larger as there are ranks, until data parallelism takes the ranks' mean.
    """

    def __init__(self, call: Callable[..., Any]) -> None:
        super().__init__(call)
        self._complete: tuple[bool, ...] = ()

    def _agree(self, group: ContextGroup, args: Any, kwargs: Any) -> Places | None:
        self._complete = ()
        places = super()._agree(group, args, kwargs)
        if places is None:
            return None
        # Ranks without a proof of their own learn which gradients are whole.
        count = len(tree_flatten((args, kwargs))[0])
        mine = self._complete or (False,) * count
        device = sequences_in((args, kwargs))[0].device
        complete = group.add_up(torch.tensor([float(one) for one in mine], device=device)) > 0
        return *places, *(("whole" if one else None) for one in complete.tolist())

    def _prove(self, first: ShardedSequence, args: Any, kwargs: Any) -> Places | None:
        places = super()._prove(first, args, kwargs)
        if places is None or not any(_requires_grad(leaf) for leaf in tree_flatten((args, kwargs))[0]):
            return places
        with torch.enable_grad():
            trial = _BackwardTrial(self._call, first, places, args, kwargs)
            self._complete = trial.whole_gradients() or ()
        return places if self._complete else None

    def _call_on_slices(self, first: ShardedSequence, places: Places, args: Any, kwargs: Any) -> Any:
        leaves, structure = tree_flatten((args, kwargs))
        size, complete = first.group.size, places[len(places) - len(leaves) :]
        given = [_scale(leaf, size) if mark is None else leaf for leaf, mark in zip(leaves, complete, strict=True)]
        args, kwargs = tree_unflatten(given, structure)
        made = super()._call_on_slices(first, places[: len(places) - len(leaves)], args, kwargs)
        return tree_map(lambda leaf: _scale(leaf, 1 / size) if isinstance(leaf, ShardedSequence) else leaf, made)


def _requires_grad(leaf: Any) -> bool:
    return isinstance(leaf, torch.Tensor) and leaf.requires_grad


def _scale(leaf: Any, factor: float) -> Any:
    """Return a tensor whose gradient is multiplied on its way back."""
    needs_gradient = torch.is_grad_enabled() and _requires_grad(leaf)
    if not needs_gradient:
        return leaf
    if isinstance(leaf, ShardedSequence):
        return leaf.like(_ScaleOfGradient.apply(leaf.local, factor))
    return _ScaleOfGradient.apply(leaf, factor)


class _ScaleOfGradient(torch.autograd.Function):
    """Forward the same; backward the gradient times a factor."""

    @staticmethod
    def forward(ctx: Any, value: torch.Tensor, factor: float) -> torch.Tensor:
        ctx.factor = factor
        return value.view_as(value)

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> Any:
        return gradient * ctx.factor, None


def cut_with_true_gradients(result: Any, like: ShardedSequence) -> Any:
    """Return the results of a function that ran on whole sequences, cut again; backward it gets the gradients of one process."""
    group, dim, layout = like.group, like.dim_held, like.sequence_layout

    def cut(whole: torch.Tensor) -> ShardedSequence:
        return like.like(take_with_whole_gradient(whole, dim, layout, group))

    def keep(leaf: Any) -> Any:
        is_whole = isinstance(leaf, torch.Tensor) and not isinstance(leaf, ShardedSequence)
        return with_mean_gradient(leaf, group) if is_whole else leaf

    return tree_map(keep, cut_results(result, like, cut))


def take_with_whole_gradient(
    whole: torch.Tensor, dim: int, layout: SequenceLayout, group: ContextGroup
) -> torch.Tensor:
    """Return this rank's positions of a tensor, whose gradient is that of one process on each rank."""
    if not (whole.requires_grad and torch.is_grad_enabled()):
        return group.take(whole, dim, layout)
    return _TakeFromWhole.apply(whole, dim, layout, group)


def with_mean_gradient(whole: torch.Tensor, group: ContextGroup) -> torch.Tensor:
    """Return the same tensor, whose gradient is that of one process on each rank, though each uses it for its positions."""
    if not (whole.requires_grad and torch.is_grad_enabled()):
        return whole
    return _MeanGradient.apply(whole, group)


class _TakeFromWhole(torch.autograd.Function):
    """Forward this rank's positions; backward the whole gradient, as large as one process's."""

    @staticmethod
    def forward(ctx: Any, whole: torch.Tensor, dim: int, layout: SequenceLayout, group: ContextGroup) -> torch.Tensor:
        ctx.of = dim, layout, group
        return group.take(whole, dim, layout)

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> Any:
        dim, layout, group = ctx.of
        return group.gather(gradient, dim, layout) / group.size, None, None, None


class _MeanGradient(torch.autograd.Function):
    """Forward the same; backward the mean of the ranks' gradients, since each may have used what is whole for its positions."""

    @staticmethod
    def forward(ctx: Any, value: torch.Tensor, group: ContextGroup) -> torch.Tensor:
        ctx.group = group
        return value.view_as(value)

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> Any:
        return ctx.group.sum(gradient) / ctx.group.size, None


class _BackwardTrial:
    """Backward passes on some positions of a sample.

    Args:
        call: the function.
        first: one of its sequences.
        places: where its results have positions.
        args, kwargs: its arguments.
    """

    def __init__(
        self, call: Callable[..., Any], first: ShardedSequence, places: Places, args: Any, kwargs: Any
    ) -> None:
        self._call, self._first, self._places = call, first, places
        self._given = take_samples(first, (args, kwargs))
        self._requiring = [_requires_grad(leaf) for leaf in tree_flatten((args, kwargs))[0]]
        leaves = tree_flatten(self._given)[0]
        self._count = next(leaf.count for leaf in leaves if isinstance(leaf, Sample))
        self._upstream: list[torch.Tensor] = []

    def whole_gradients(self) -> tuple[bool, ...] | None:
        """Return for each argument whether its gradient is whole without other positions; None if positions are not independent."""
        every = torch.arange(self._count)
        all_of_them = self._gradients(every)
        parts = [every[::2], every[1::2]]
        some = [self._gradients(part) for part in parts]
        complete = []
        for leaf, whole, *others in zip(tree_flatten(self._given)[0], all_of_them, *some, strict=True):
            if isinstance(leaf, Sample):
                chosen = [leaf.apart_of(whole, self._count).index_select(leaf.dim, part) for part in parts]
                apart = [leaf.apart_of(other, len(part)) for other, part in zip(others, parts, strict=True)]
                if not all(are_close(one, other) for one, other in zip(chosen, apart, strict=True)):
                    return None
                complete.append(False)
            elif whole is None or are_close(whole, sum(others)):
                complete.append(False)
            elif all(are_close(whole, other) for other in others):
                complete.append(True)
            else:
                return None
        return tuple(complete)

    def _gradients(self, chosen: torch.Tensor) -> list[Any]:
        """Return the gradients of all arguments for some positions; None for those that need none."""
        leaves, structure = tree_flatten(self._given)
        given = [leaf.select(chosen) if isinstance(leaf, Sample) else leaf for leaf in leaves]
        given = [
            one.detach().clone().requires_grad_() if required else one
            for one, required in zip(given, self._requiring, strict=True)
        ]
        args, kwargs = tree_unflatten(given, structure)
        made = [leaf for leaf in tree_flatten(self._call(*args, **kwargs))[0] if isinstance(leaf, torch.Tensor)]
        if not self._upstream:
            self._upstream = [torch.randn_like(one) if one.is_floating_point() else one for one in made]
        trained = [
            (one, self._upstream_of(number, one, chosen)) for number, one in enumerate(made) if one.requires_grad
        ]
        inputs = [one for one, required in zip(given, self._requiring, strict=True) if required]
        results, upstream = zip(*trained, strict=True)
        found = iter(torch.autograd.grad(results, inputs, upstream, allow_unused=True))
        gradients = [next(found) if required else None for required in self._requiring]
        return [
            torch.zeros_like(one) if gradient is None and required else gradient
            for one, gradient, required in zip(given, gradients, self._requiring, strict=True)
        ]

    def _upstream_of(self, number: int, made: torch.Tensor, chosen: torch.Tensor) -> torch.Tensor:
        dim, outer = places_of(made, self._first, len(chosen))[self._places[number] or ""]
        apart = self._upstream[number].unflatten(dim, (outer, self._count))
        return apart.index_select(dim + 1, chosen.to(made.device)).flatten(dim, dim + 1)
