"""Collectives that autograd differentiates, for the activations of tensor parallel layers.

There are two kinds of gradient. A *replicated* tensor is the same on all ranks of the group. So is its gradient,
and each rank has all of it. A *partial* one is a different summand on every rank. Each function is named after
its forward pass; its comment describes the gradient.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, ClassVar

import torch

from smp_runtime.tensor_parallel import traced
from smp_runtime.tensor_parallel.masks import agree_on_shape
from smp_runtime.tensor_parallel.traced import traced_group

if TYPE_CHECKING:
    from smp_runtime.tensor_parallel.group import TensorGroup


class ActivationFunction(torch.autograd.Function):
    """A function whose results for a token are of that token alone, so that context parallelism runs it on a rank's own tokens.

    Attributes:
        token_arguments: so many of the first arguments have tokens.
        joins, divides: the places of the arguments with the dim along which the parts of the group are joined, or a tensor is
            divided over it. The group is the second argument then.
        may_move_tokens: whether that dim may be the one with the tokens.
        mixes_features: whether the last dim must not have the tokens.
    """

    token_arguments: ClassVar[int] = 1
    joins: ClassVar[int | None] = None
    divides: ClassVar[int | None] = None
    may_move_tokens: ClassVar[bool] = False
    mixes_features: ClassVar[bool] = False


class _Replicated(ActivationFunction):
    """Forward nothing; backward the sum of the ranks' partial gradients."""

    @staticmethod
    def forward(ctx: Any, tensor: torch.Tensor, group: TensorGroup) -> torch.Tensor:
        ctx.group = group
        return tensor.view_as(tensor)

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> Any:
        # A copy: autograd may hand the same tensor to other functions, and the sum is written in place.
        return traced_group(ctx.group).all_reduce(gradient.clone(memory_format=torch.contiguous_format)), None


class _SumPartialTensors(ActivationFunction):
    """Forward the sum of partial tensors; backward nothing, since the sum's gradient is replicated."""

    @staticmethod
    def forward(ctx: Any, tensor: torch.Tensor, group: TensorGroup) -> torch.Tensor:
        # A copy: the caller's tensor is this rank's summand, which other code may read.
        return traced_group(group).all_reduce(tensor.clone(memory_format=torch.contiguous_format))

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> Any:
        return gradient, None


class _Once(ActivationFunction):
    """Forward nothing; backward this rank's share of a replicated gradient, which others sum to the whole."""

    @staticmethod
    def forward(ctx: Any, tensor: torch.Tensor, group: TensorGroup) -> torch.Tensor:
        ctx.size = group.size
        return tensor.view_as(tensor)

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> Any:
        return gradient / ctx.size, None


class _GatherSlices(ActivationFunction):
    """Forward all ranks' slices; backward this rank's slice of a replicated gradient, or of the sum of partial ones."""

    joins = 2

    @staticmethod
    def forward(ctx: Any, tensor: torch.Tensor, group: TensorGroup, dim: int, partial: bool) -> torch.Tensor:
        ctx.group, ctx.dim, ctx.partial = group, dim, partial
        return traced_group(group).gather(tensor, dim)

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> Any:
        group = traced_group(ctx.group)
        take = group.scatter_sum if ctx.partial else group.slice
        return take(gradient, ctx.dim), None, None, None


class _GatherTokens(_GatherSlices):
    """The same along the tokens."""

    may_move_tokens = True


class _Slice(ActivationFunction):
    """Forward this rank's slice of a replicated tensor; backward all ranks' slices."""

    divides = 2

    @staticmethod
    def forward(ctx: Any, tensor: torch.Tensor, group: TensorGroup, dim: int) -> torch.Tensor:
        ctx.group, ctx.dim = group, dim
        # Not a view, which would keep the whole in memory.
        return traced_group(group).slice(tensor, dim).contiguous()

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> Any:
        return traced_group(ctx.group).gather(gradient, ctx.dim), None, None


class _SliceTokens(_Slice):
    """The same along the tokens."""

    may_move_tokens = True


class _ScatterSum(_Slice):
    """Forward this rank's slice of the sum of partial tensors; backward all ranks' slices."""

    @staticmethod
    def forward(ctx: Any, tensor: torch.Tensor, group: TensorGroup, dim: int) -> torch.Tensor:
        ctx.group, ctx.dim = group, dim
        return traced_group(group).scatter_sum(tensor, dim)


class _Exchange(ActivationFunction):
    """Forward slices along one dim become slices along another; backward the way back."""

    divides, joins = 2, 3

    @staticmethod
    def forward(ctx: Any, tensor: torch.Tensor, group: TensorGroup, split: int, joined: int) -> torch.Tensor:
        ctx.group, ctx.split, ctx.joined = group, split, joined
        return traced_group(group).exchange(tensor, split, joined)

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> Any:
        return traced_group(ctx.group).exchange(gradient, ctx.joined, ctx.split), None, None, None


class _SumSharedGradients(torch.autograd.Function):
    """Forward nothing; backward the sum of the ranks' partial gradients of several parameters, in one collective."""

    @staticmethod
    def forward(ctx: Any, group: TensorGroup, *parameters: torch.Tensor) -> tuple[torch.Tensor, ...]:
        ctx.group = group
        return tuple(parameter.view_as(parameter) for parameter in parameters)

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> Any:
        flat = traced_group(ctx.group).all_reduce(torch.cat([gradient.reshape(-1) for gradient in gradients]))
        parts = flat.split([gradient.numel() for gradient in gradients])
        return None, *(part.view(gradient.shape) for part, gradient in zip(parts, gradients, strict=True))


def agreeing_on_shape(tensor: torch.Tensor, group: TensorGroup) -> torch.Tensor:
    """Return ``tensor`` after a check that the ranks' tensors, each of its own batch, have one shape."""
    if torch.compiler.is_compiling():
        return traced.check_agreement(tensor)
    agree_on_shape(group, tensor)
    return tensor


def whole_batch(ids: torch.Tensor, group: TensorGroup) -> torch.Tensor:
    """Gather all ranks' ids along the first dim; they have no gradient."""
    return traced_group(group).gather(ids, 0)


def use_replicated(tensor: torch.Tensor, group: TensorGroup) -> torch.Tensor:
    """Return a replicated tensor for uses that differ between ranks: its gradients are summed."""
    return tensor if group.size == 1 else _Replicated.apply(tensor, group)


def sum_partials(tensor: torch.Tensor, group: TensorGroup) -> torch.Tensor:
    """Return the sum of partial tensors, replicated."""
    return tensor if group.size == 1 else _SumPartialTensors.apply(tensor, group)


def use_once(tensor: torch.Tensor, group: TensorGroup) -> torch.Tensor:
    """Return a replicated tensor from a region with partial gradients: the ranks' gradients add up to the whole."""
    return tensor if group.size == 1 else _Once.apply(tensor, group)


def gather_slices(tensor: torch.Tensor, group: TensorGroup, dim: int, *, partial: bool) -> torch.Tensor:
    """Gather all ranks' slices along ``dim``; with ``partial``, the ranks use the whole in different ways."""
    return tensor if group.size == 1 else _GatherSlices.apply(tensor, group, dim, partial)


def gather_tokens(tensor: torch.Tensor, group: TensorGroup, dim: int) -> torch.Tensor:
    """Gather all ranks' tokens, which lie along ``dim``; the ranks use the whole in the same way."""
    return tensor if group.size == 1 else _GatherTokens.apply(tensor, group, dim, False)


def take_tokens(tensor: torch.Tensor, group: TensorGroup, dim: int) -> torch.Tensor:
    """Return this rank's part of the tokens, which lie along ``dim``, of a replicated tensor."""
    return tensor if group.size == 1 else _SliceTokens.apply(tensor, group, dim)


def take_slice(tensor: torch.Tensor, group: TensorGroup, dim: int) -> torch.Tensor:
    """Return this rank's slice along ``dim`` of a replicated tensor."""
    return tensor if group.size == 1 else _Slice.apply(tensor, group, dim)


def scatter_summed(tensor: torch.Tensor, group: TensorGroup, dim: int) -> torch.Tensor:
    """Return this rank's slice along ``dim`` of the sum of partial tensors."""
    return tensor if group.size == 1 else _ScatterSum.apply(tensor, group, dim)


def exchange_parts(tensor: torch.Tensor, group: TensorGroup, split: int, joined: int) -> torch.Tensor:
    """Send each rank its part along ``split``; join the received parts along ``joined``."""
    return tensor if group.size == 1 else _Exchange.apply(tensor, group, split, joined)


def use_shared(group: TensorGroup, *parameters: torch.Tensor | None) -> list[torch.Tensor | None]:
    """Return replicated parameters for use on each rank's own slice of the activations.

    Their gradients are summed over the ranks.
    """
    found = list(parameters)
    places = [place for place, parameter in enumerate(parameters) if parameter is not None]
    if group.size == 1 or not places:
        return found
    # One call for all of them, so that backward has one collective.
    views = _SumSharedGradients.apply(group, *(parameters[place] for place in places))
    for place, view in zip(places, views, strict=True):
        found[place] = view
    return found
