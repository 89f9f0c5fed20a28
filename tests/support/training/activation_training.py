"""What the tests of activation checkpointing share: layers with dropout, and one training loop on every rank."""

from __future__ import annotations

import contextlib

import torch
import torch.nn.functional as F
from torch import nn

from support.models.models import VOCABULARY, token_batch
from support.training.rank_training import training_step

HIDDEN = 8


class Layer(nn.Module):
    """Norm, two linear layers, dropout and a residual connection."""

    def __init__(self, hidden: int = HIDDEN) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(hidden)
        self.widen = nn.Linear(hidden, 4 * hidden)
        self.narrow = nn.Linear(4 * hidden, hidden)
        self.dropout = nn.Dropout(0.2)
        #: How often its forward ran; not what it returns.
        self.runs = 0

    def forward(self, x: torch.Tensor) -> torch.Tensor:  # [batch, seq, hidden], unchanged
        self.runs += 1
        return x + self.dropout(self.narrow(F.gelu(self.widen(self.norm(x)))))


class Net(nn.Module):
    """Layers in an ``nn.Sequential`` between an embedding and a head.

    Args:
        stages: the pipeline stage of every layer, or how many layers there are.
        split: put the last layer's second half on another stage.
    """

    def __init__(self, stages: list[int] | int = 4, split: int | None = None) -> None:
        super().__init__()
        self.embedding = nn.Embedding(VOCABULARY, HIDDEN)
        layers = []
        for stage in stages if isinstance(stages, list) else [None] * stages:
            with _partition(stage):
                layers.append(Layer())
        if split is not None:
            with _partition(split):
                layers[-1].narrow = nn.Linear(4 * HIDDEN, HIDDEN)
        self.layers = nn.Sequential(*layers)
        self.head = nn.Linear(HIDDEN, VOCABULARY)

    def forward(self, ids: torch.Tensor) -> torch.Tensor:  # [batch, seq] -> [batch, seq, vocabulary]
        return self.head(self.layers(self.embedding(ids)))


def _partition(stage: int | None):
    import smdistributed.modelparallel.torch as smp

    return contextlib.nullcontext() if stage is None else smp.partition(stage)


def train(make, prepare=None, steps: int = 3, batch: int = 4, before: bool = False) -> dict:
    """One rank's losses and local gradients of every step, and what its offloader did in each.

    Args:
        prepare: called with the model, wrapped or (``before``) not yet.
    """
    import smdistributed.modelparallel.torch as smp
    from smp_runtime.activations.activations import Activations

    torch.manual_seed(5)
    net = make()
    if before and prepare is not None:
        prepare(net)
    model = smp.DistributedModel(net)
    optimizer = smp.DistributedOptimizer(torch.optim.SGD(model.parameters(), lr=0.1))
    if not before and prepare is not None:
        prepare(model)

    step = training_step(model)

    result: dict = {"losses": [], "gradients": [], "figures": [], "followed": [], "tapes": []}
    offloader = Activations.here().offloader
    torch.manual_seed(7)
    for index in range(steps):
        ids, targets = token_batch(index, batch)
        optimizer.zero_grad()
        if offloader is not None:
            offloader.figures.peak = offloader.figures.resident
            offloader.figures.left = offloader.figures.came = offloader.figures.late = 0
        result["losses"].append(float(step(ids, targets).reduce_mean()))
        named = {n: p.grad.clone() for n, p in model.local_named_parameters() if p.grad is not None}
        result["gradients"].append(named)
        if offloader is not None:
            result["figures"].append(dict(vars(offloader.figures)))
            result["followed"].append(offloader.tape.is_followed)
            result["tapes"].append(offloader.tape.entries)
        optimizer.step()
    result["runs"] = sum(module.runs for module in model.module.modules() if isinstance(module, Layer))
    return result


def same(one: list[dict], other: list[dict]) -> None:
    """Losses and gradients of all ranks are bitwise equal."""
    for mine, theirs in zip(one, other, strict=True):
        assert mine["losses"] == theirs["losses"]
        for step, (got, expected) in enumerate(zip(mine["gradients"], theirs["gradients"], strict=True)):
            assert list(got) == list(expected)
            for name, gradient in expected.items():
                assert torch.equal(got[name], gradient), f"step {step}: {name} differs"
