"""Collectives of the tensor parallel group as operations that a compiler can include in its graph.

Python code of a collective would interrupt a compiled block. An operation of ``torch.library`` is one node of
the graph, forward and backward, with a fake implementation that computes the output's shape. No node holds the
group or this rank's place in it. So the graphs of all ranks are equal, and one rank's compiled code serves the
others.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import torch
import torch.nn.functional as F

from smp_runtime.tensor_parallel.masks import agree_on_shape
from smp_runtime.tensor_parallel.random_tracker import RandomTracker

if TYPE_CHECKING:
    from smp_runtime.tensor_parallel.group import TensorGroup

#: Operations of compiled graphs; the compiler takes each as a whole.
_LIBRARY = torch.library.Library("smp", "DEF")
#: The group of the job that this process is in, under one name; weak, since a job may end before its process.
_groups: weakref.WeakValueDictionary[str, TensorGroup] = weakref.WeakValueDictionary()


def serve(served: TensorGroup) -> None:
    """Set the group for the collectives of these operations."""
    _groups["tp"] = served


def group() -> TensorGroup:
    """Return the group that the operations are collectives of."""
    return _groups["tp"]


def define(schema: str, tags: tuple[torch.Tag, ...] = ()) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    """Define an operation that the decorated function implements.

    Args:
        schema: its name, arguments and results, as ``torch.library`` writes them.
    """
    _LIBRARY.define(schema, tags=tags)
    name = schema.partition("(")[0]

    def decorate(function: Callable[..., Any]) -> Callable[..., Any]:
        _LIBRARY.impl(name, function, "CompositeExplicitAutograd")
        return function

    return decorate


def register_fake(name: str) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    """Register the decorated function as the fake implementation of the operation of this name.

    It makes tensors of the shapes that the operation returns.
    """
    return torch.library.register_fake(f"smp::{name}", lib=_LIBRARY)


def _longer(x: torch.Tensor, dim: int, size: int) -> list[Any]:
    shape = list(x.shape)
    shape[dim] *= size
    return shape


def _shorter(x: torch.Tensor, dim: int, size: int) -> list[Any]:
    shape = list(x.shape)
    shape[dim] //= size
    return shape


@define("all_reduce(Tensor x) -> Tensor")
def _all_reduce(x: torch.Tensor) -> torch.Tensor:
    return group().all_reduce(x.clone(memory_format=torch.contiguous_format))


@register_fake("all_reduce")
def _(x: torch.Tensor) -> torch.Tensor:
    return torch.empty_like(x, memory_format=torch.contiguous_format)


@define("gather(Tensor x, int dim, int size) -> Tensor")
def _gather(x: torch.Tensor, dim: int, size: int) -> torch.Tensor:
    return group().gather(x, dim).contiguous()


@register_fake("gather")
def _(x: torch.Tensor, dim: int, size: int) -> torch.Tensor:
    return x.new_empty(_longer(x, dim, size))


@define("scatter_sum(Tensor x, int dim, int size) -> Tensor")
def _scatter_sum(x: torch.Tensor, dim: int, size: int) -> torch.Tensor:
    return group().scatter_sum(x, dim).contiguous()


@define("slice(Tensor x, int dim, int size) -> Tensor")
def _slice(x: torch.Tensor, dim: int, size: int) -> torch.Tensor:
    return group().slice(x, dim).clone(memory_format=torch.contiguous_format)


@register_fake("scatter_sum")
@register_fake("slice")
def _(x: torch.Tensor, dim: int, size: int) -> torch.Tensor:
    return x.new_empty(_shorter(x, dim, size))


@define("exchange(Tensor x, int split, int joined, int size) -> Tensor")
def _exchange(x: torch.Tensor, split: int, joined: int, size: int) -> torch.Tensor:
    return group().exchange(x, split, joined).contiguous()


@register_fake("exchange")
def _(x: torch.Tensor, split: int, joined: int, size: int) -> torch.Tensor:
    shape = _longer(x, joined, size)
    shape[split] //= size
    return x.new_empty(shape)


@define("agreed(Tensor x) -> Tensor")
def _agreed(x: torch.Tensor) -> torch.Tensor:
    agree_on_shape(group(), x)
    return x.clone()


@register_fake("agreed")
def _(x: torch.Tensor) -> torch.Tensor:
    return torch.empty_like(x)


class _Agreed(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        return torch.ops.smp.agreed(x)

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> Any:
        return gradient


def check_agreement(x: torch.Tensor) -> torch.Tensor:
    """Return ``x`` after a check that the ranks' tensors have its shape.

    Use the result, or the compiler drops the check.
    """
    return _Agreed.apply(x) if x.is_floating_point() else torch.ops.smp.agreed(x)


@define(
    "dropout_factors(Tensor like, float probability, bool replicated) -> Tensor", (torch.Tag.nondeterministic_seeded,)
)
def _dropout_factors(like: torch.Tensor, probability: float, replicated: bool) -> torch.Tensor:
    tracker = RandomTracker.of(group())
    with (tracker.replicated if replicated else tracker.split)(like.device):
        return F.dropout(torch.ones_like(like, memory_format=torch.contiguous_format), probability)


@register_fake("dropout_factors")
def _(like: torch.Tensor, probability: float, replicated: bool) -> torch.Tensor:
    return torch.empty_like(like, memory_format=torch.contiguous_format)


def dropout(x: torch.Tensor, probability: float, *, replicated: bool) -> torch.Tensor:
    """Apply dropout in a compiled graph to the elements that an eager call drops.

    The random numbers are an operation of their own. The compiler draws for a whole graph at once, and could not
    draw the same numbers on every rank for some tensors only. The product is the compiler's.

    Args:
        replicated: drop the same elements on every rank.
    """
    return x * torch.ops.smp.dropout_factors(x.detach(), probability, replicated)


class TracedGroup:
    """The methods of a group, for code that is being compiled."""

    def __init__(self, size: int) -> None:
        self._size = size

    def all_reduce(self, tensor: torch.Tensor) -> torch.Tensor:
        """See :class:`TensorGroup`; ``tensor`` stays as it was."""
        return torch.ops.smp.all_reduce(tensor)

    def gather(self, tensor: torch.Tensor, dim: int) -> torch.Tensor:
        """See :class:`TensorGroup`."""
        return torch.ops.smp.gather(tensor, dim, self._size)

    def scatter_sum(self, tensor: torch.Tensor, dim: int) -> torch.Tensor:
        """See :class:`TensorGroup`."""
        return torch.ops.smp.scatter_sum(tensor, dim, self._size)

    def slice(self, tensor: torch.Tensor, dim: int) -> torch.Tensor:
        """See :class:`TensorGroup`."""
        return torch.ops.smp.slice(tensor, dim, self._size)

    def exchange(self, tensor: torch.Tensor, split: int, joined: int) -> torch.Tensor:
        """See :class:`TensorGroup`."""
        return torch.ops.smp.exchange(tensor, split, joined, self._size)


def traced_group(found: TensorGroup) -> TensorGroup | TracedGroup:
    """Return the group, or its traced operations while code that calls it is being compiled."""
    if torch.compiler.is_compiling() and found.size > 1:
        return TracedGroup(found.size)
    return found
