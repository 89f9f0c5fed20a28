"""A case trained by one process in plain PyTorch, without rounding to half precision."""

from __future__ import annotations

import functools
import math
from collections.abc import Callable
from typing import TYPE_CHECKING

import torch
from crossings.training import (
    LARGEST,
    LIMIT,
    SEED,
    Training,
    default_dtype,
    hook_gradients,
    mark_biases,
)
from support.models.models import part
from torch import nn

if TYPE_CHECKING:
    from crossings.case import Case
    from crossings.nets import Batch


class Alone(Training):
    """One process, in plain PyTorch and without rounding to half precision."""

    def __init__(self, case: Case) -> None:
        super().__init__(case)
        self._statistics: dict[int, list[torch.Tensor]] = {}
        torch.manual_seed(SEED)
        with default_dtype(case.dtype):
            self.model = self.net.make()
            mark_biases(self.model)
            if case.begins_frozen:
                self.net.blocks(self.model)[0].requires_grad_(False)
            if case.hooked:
                hook_gradients(self.last_block())
            self.optimizer = self.make_optimizer()
        self.record.parameters = {name for name, _ in self.model.named_parameters(remove_duplicate=False)}
        self.record.first = self.weights()

    @property
    def module(self) -> nn.Module:
        """See :class:`Training`."""
        return self.model

    def backward(self, batch: Batch) -> float:
        """See :class:`Training`; each replica begins with the running statistics of the first."""
        self._statistics.clear()
        return self._mean(batch, self.loss, lambda loss, pieces: (loss / pieces / self.case.passes).backward())

    def score(self, batch: Batch) -> float:
        """See :class:`Training`; each replica has the running statistics of its last batch."""
        return self._mean(batch, functools.partial(self.net.loss, self.model), lambda loss, pieces: None)

    def _mean(
        self, batch: Batch, loss_of: Callable[..., torch.Tensor], use: Callable[[torch.Tensor, int], None]
    ) -> float:
        replicas, microbatches = self.case.replicas(self.topology), self.case.microbatches
        first, total = self._written_values(), 0.0
        for replica in reversed(range(replicas)):  # those of the first stay
            own = self._statistics.get(replica, []) if replica else []
            self._take([*own, *first[len(own) :]])
            for number in range(microbatches):
                piece = part(part(batch, replica, replicas), number, microbatches)
                loss = loss_of(*piece)
                use(loss, replicas * microbatches)
                total += float(loss.detach()) / (replicas * microbatches)
            self._statistics[replica] = [buffer.clone() for buffer in self.model.buffers()]
        return total

    def _written(self) -> list[torch.Tensor]:
        """Return what forward passes may write into: first buffers, which each replica has for itself.

        Parameters are equal on all replicas, whether a forward pass or the script has written into them.
        """
        return [*self.model.buffers(), *(self.model.get_parameter(name).data for name in self.net.writes)]

    def _written_values(self) -> list[torch.Tensor]:
        return [tensor.clone() for tensor in self._written()]

    def _take(self, values: list[torch.Tensor]) -> None:
        for tensor, value in zip(self._written(), values, strict=True):
            tensor.copy_(value)

    def clip(self) -> None:
        """See :class:`Training`."""
        way = self.case.clipping
        if way == "value":
            nn.utils.clip_grad_value_(self.model.parameters(), LARGEST)
        elif way != "none":
            groups = self.optimizer.param_groups if way == "master" else [{"params": self.model.parameters()}]
            clipped = [p for group in groups for p in group["params"]]
            limit, order = (LARGEST, math.inf) if way == "largest" else (LIMIT, 2.0)
            self.record.norms.append(float(nn.utils.clip_grad_norm_(clipped, limit, order)))

    @torch.no_grad()
    def write_buffers(self, step: int) -> None:
        """See :class:`Training`; every replica writes into its own."""
        super().write_buffers(step)
        self._scale_statistics(0.75)

    def load_again(self, factor: float = 1.0) -> None:
        """See :class:`Training`; every replica loads its own buffers."""
        super().load_again(factor)
        self._scale_statistics(factor)

    def _scale_statistics(self, factor: float) -> None:
        for values in self._statistics.values():  # in new tensors: those of inference mode cannot be written
            values[:] = [value * factor if value.is_floating_point() else value for value in values]

    def resume_partial(self, step: int) -> None:
        """One process goes on, without gradients; replicas have the running statistics of the first."""
        self._statistics.clear()
        for p in self.model.parameters():  # a script that begins again has none, not those that it has set to zero
            p.grad = None

    resume_full = resume_async = resume_memory = reshape = resume_partial
