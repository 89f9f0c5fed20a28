"""Small models with what makes parallel training hard: tied weights, residuals, parameters used twice."""

from __future__ import annotations

from collections.abc import Iterator

import torch
import torch.nn.functional as F
from torch import nn

VOCABULARY = 11
HIDDEN = 8


class TiedNet(nn.Module):
    """A residual net over tokens whose head shares the embedding's weight, with one layer used twice."""

    def __init__(self, layers: int = 2) -> None:
        super().__init__()
        self.embedding = nn.Embedding(VOCABULARY, HIDDEN)
        self.layers = nn.ModuleList(nn.Linear(HIDDEN, HIDDEN) for _ in range(layers))
        self.shared = nn.Linear(HIDDEN, HIDDEN)
        self.norm = nn.LayerNorm(HIDDEN)
        self.head = nn.Linear(HIDDEN, VOCABULARY)
        self.head.weight = self.embedding.weight

    def forward(self, ids: torch.Tensor) -> torch.Tensor:  # [batch, seq] -> [batch, seq, vocabulary]
        x = self.embedding(ids)
        for layer in self.layers:
            x = x + torch.tanh(self.shared(layer(x)))
        return self.head(self.norm(x))


def loss_of(logits: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
    """Mean cross entropy of ``[batch, seq, vocabulary]`` against ``[batch, seq]``."""
    return F.cross_entropy(logits.flatten(0, 1), targets.flatten())


def token_batch(step: int, batch: int, seq: int = 5) -> tuple[torch.Tensor, torch.Tensor]:
    """Tokens and targets, each ``[batch, seq]``, the same on every rank for the same step."""
    generator = torch.Generator().manual_seed(1000 + step)
    ids = torch.randint(VOCABULARY, (batch, seq + 1), generator=generator)
    return ids[:, :-1], ids[:, 1:]


def token_batches(first: int, last: int, batch: int) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
    """The batches of the steps ``first`` to ``last``."""
    return (token_batch(step, batch) for step in range(first, last))


def token_loss(model: nn.Module, ids: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
    """The loss of a batch of tokens; logits in half precision are compared in float32."""
    logits = model(ids)
    return loss_of(logits.float() if logits.dtype.itemsize == 2 else logits, targets)


def part(batch: tuple[torch.Tensor, ...], index: int, count: int) -> tuple[torch.Tensor, ...]:
    """One of ``count`` equal parts of a batch."""
    return tuple(tensor.chunk(count)[index] for tensor in batch)
