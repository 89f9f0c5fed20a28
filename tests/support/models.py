"""Small models with what makes parallel training hard: tied weights, residuals, parameters used twice."""

from __future__ import annotations

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


def train_alone(model: nn.Module, optimizer: torch.optim.Optimizer, steps: int, batch: int) -> dict[str, list]:
    """The reference: one process, whole batches; losses and gradients of every step."""
    losses, gradients = [], []
    for step in range(steps):
        ids, targets = token_batch(step, batch)
        optimizer.zero_grad()
        loss = loss_of(model(ids), targets)
        loss.backward()
        gradients.append({name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None})
        optimizer.step()
        losses.append(float(loss.detach()))
    return {"losses": losses, "gradients": gradients}
