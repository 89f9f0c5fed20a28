"""A checkpoint whose whole content is one number, and a bound for whatever reads it."""

from __future__ import annotations

import functools
from collections.abc import Iterator
from pathlib import Path

import torch
from torch import nn

import smdistributed.modelparallel.torch as smp
from support.faults.hostile import alarm

#: Seconds that reading a small checkpoint may take on a loaded machine; a hang takes longer.
SECONDS = 20

#: Around the reading: raises what nothing on the way catches where it takes longer.
bounded = functools.partial(alarm, SECONDS)


class SmallModel:
    """A model whose whole state is one number, and that number in checkpoints 1 and 2, partial and full."""

    def __init__(self, path: Path) -> None:
        self.model = smp.DistributedModel(nn.Linear(3, 2))
        self.optimizer = smp.DistributedOptimizer(torch.optim.AdamW(self.model.parameters()))
        self.model(torch.ones(1, 3)).sum().backward()
        self.optimizer.step()
        for number in (1, 2):
            self.fill(number)
            smp.save_checkpoint(str(path), tag=str(number), user_content=number)
            smp.save_checkpoint(str(path), tag=f"full{number}", partial=False, user_content=number)

    def tensors(self) -> Iterator[torch.Tensor]:
        """Its weights and the optimizer's state."""
        yield from self.model.module.parameters()
        for state in self.optimizer.state.values():
            yield from (state[key] for key in ("exp_avg", "exp_avg_sq") if isinstance(state.get(key), torch.Tensor))

    @torch.no_grad()
    def fill(self, number: float) -> None:
        """Make all of it this number."""
        for tensor in self.tensors():
            tensor.fill_(number)

    def numbers(self) -> set[float]:
        """What it holds."""
        return {float(value) for tensor in self.tensors() for value in tensor.detach().reshape(-1)}
