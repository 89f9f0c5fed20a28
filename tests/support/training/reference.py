"""One process in plain PyTorch: what training over stages, replicas, shards and microbatches is compared with."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import torch
from torch import nn

from support.models.models import part, token_batches, token_loss

#: Of losses in half precision.
SCALE = 256.0


class Alone:
    """A model that one process trains.

    In half precision the optimizer has weights of its own, of the type that the model had, as is done by hand.

    Args:
        optimizer: makes one for parameters.
        half: the type in which the model computes, where that is another one.
        limit: to which the gradients are clipped.
        norm_type: of the norm that clipping takes.

    Attributes:
        weights: by name, those that the optimizer has.
        losses: of every step, the mean of its microbatches.
        gradients: of every step, by name, before clipping.
        norms: of the gradients, before clipping, at every call of :meth:`clip`.
    """

    def __init__(
        self,
        model: nn.Module,
        optimizer: Callable[[Any], torch.optim.Optimizer],
        *,
        half: torch.dtype | None = None,
        limit: float = math.inf,
        norm_type: float = 2.0,
    ) -> None:
        named = dict(model.named_parameters())
        if half is not None:
            named = {name: nn.Parameter(p.detach().clone(), p.requires_grad) for name, p in named.items()}
            model.to(half)
        self.model, self.weights, self.optimizer = model, named, optimizer(list(named.values()))
        self._half, self._limit, self._norm_type = half, limit, norm_type
        self.losses: list[float] = []
        self.gradients: list[dict[str, torch.Tensor]] = []
        self.norms: list[float] = []

    def step(self, pieces: Sequence[tuple], loss: Callable[..., torch.Tensor] = token_loss) -> None:
        """Train on the microbatches of a step, of which all count the same.

        Args:
            pieces: the arguments of every microbatch.
            loss: ``loss(model, *piece)``.
        """
        self.optimizer.zero_grad()
        self.losses.append(sum(self.backward(loss, *piece, count=len(pieces)) for piece in pieces))
        self.gradients.append({name: p.grad.clone() for name, p in self.weights.items() if p.grad is not None})
        self.clip()
        self.optimizer.step()

    def backward(self, loss: Callable[..., torch.Tensor], *piece: Any, count: int = 1) -> float:
        """Add the gradients of a microbatch's loss, divided by their number; gives the loss divided by it."""
        if self._half is not None:
            self._hand_over()
        found = loss(self.model, *piece) / count
        (found if self._half is None else found * SCALE).backward()
        if self._half is not None:
            self._take_back()
        return float(found.detach())

    def clip(self) -> None:
        """Clip the gradients to the limit, and note their norm."""
        self.norms.append(float(nn.utils.clip_grad_norm_(self.weights.values(), self._limit, self._norm_type)))

    @torch.no_grad()
    def _hand_over(self) -> None:
        """The model gets the optimizer's weights."""
        self.model.zero_grad()
        for name, parameter in self.model.named_parameters():
            parameter.copy_(self.weights[name])

    @torch.no_grad()
    def _take_back(self) -> None:
        """The optimizer's weights get the model's gradients."""
        for name, parameter in self.model.named_parameters():
            if parameter.grad is not None:
                weight = self.weights[name]
                gradient = parameter.grad.to(weight.dtype) / SCALE
                weight.grad = gradient if weight.grad is None else weight.grad + gradient


def divided(batch: tuple[torch.Tensor, ...], microbatches: int = 1, replicas: int = 1) -> list[tuple]:
    """The microbatches that all replicas together make of a batch."""
    return [part(part(batch, r, replicas), m, microbatches) for r in range(replicas) for m in range(microbatches)]


def train_alone(
    model: nn.Module,
    optimizer: Callable[[Any], torch.optim.Optimizer],
    batches: Iterable[tuple],
    loss: Callable[..., torch.Tensor] = token_loss,
    **options: Any,
) -> Alone:
    """Training on a whole batch in every step; ``options`` are those of :class:`Alone`."""
    trained = Alone(model, optimizer, **options)
    for batch in batches:
        trained.step([batch], loss)
    return trained


def tokens_alone(
    make: Callable[[], nn.Module],
    optimizer: Callable[[Any], torch.optim.Optimizer],
    steps: int,
    batch: int,
    dtype: torch.dtype = torch.float32,
    **options: Any,
) -> Alone:
    """Training a net over tokens, the weights that ``make`` draws with seed 0."""
    torch.manual_seed(0)
    return train_alone(make().to(dtype), optimizer, token_batches(0, steps, batch), **options)
