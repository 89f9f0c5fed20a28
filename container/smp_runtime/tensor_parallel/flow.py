"""How activations lie on the ranks between the layers of a distributed block: the seam behind ``optimize``.

Outside a block every rank has the whole batch (``prescaled_batch``) or a batch of its own. Inside, activations are
either *replicated*: every rank has all rows of all batches (``speed``), or *sliced*: every rank has a part of the
rows (``memory``). With a batch per rank the slices are these batches; with a common batch they are parts of the
sequence, padded if the number of ranks does not divide it.
"""

from __future__ import annotations

import contextlib
from collections.abc import Sequence
from typing import Protocol

import torch
import torch.nn.functional as F

from smp_runtime.tensor_parallel import collectives
from smp_runtime.tensor_parallel.group import TensorGroup
from smp_runtime.tensor_parallel.linear_functions import columns, rows
from smp_runtime.tensor_parallel.random import RandomTracker


class Flow(Protocol):
    """One way for activations to lie.

    Attributes:
        rows_see_all: whether what works on rows (layer norms, biases of outputs) sees all rows of the group's batch, or
            has its gradient summed as if it did; else its gradient is that of this rank's own batch.
    """

    rows_see_all: bool

    def enter(self, hidden: torch.Tensor) -> torch.Tensor:
        """``[batch, seq, hidden]`` as it is outside, laid as inside."""
        ...

    def leave(self, hidden: torch.Tensor, like: torch.Tensor) -> torch.Tensor:
        """The way back; ``like`` is what entered."""
        ...

    def enter_mask(self, mask: torch.Tensor | None, like: torch.Tensor, causal: bool) -> torch.Tensor | None:
        """An additive mask ``[batch or 1, 1, queries or 1, keys]`` for the whole of what ``like`` is a part of."""
        ...

    def enter_ids(self, ids: torch.Tensor | None, like: torch.Tensor) -> torch.Tensor | None:
        """Whole numbers ``[batch or 1, seq]`` for the whole of what ``like`` is a part of."""
        ...

    def columns(
        self, hidden: torch.Tensor, weights: Sequence[torch.Tensor], biases: Sequence[torch.Tensor | None]
    ) -> tuple[torch.Tensor, ...]:
        """This rank's features of all rows."""
        ...

    def rows(self, features: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
        """From this rank's features of all rows back to activations as they lie inside."""
        ...

    def shared(self, *parameters: torch.Tensor | None) -> list[torch.Tensor | None]:
        """Replicated parameters, made ready for use on activations as they lie inside."""
        ...

    def dropout(self, hidden: torch.Tensor, probability: float, training: bool) -> torch.Tensor:
        """Dropout of activations as they lie inside."""
        ...


class _Flow:
    """What both ways share."""

    #: Along which dim activations are sliced inside, or None.
    _dim: int | None = None

    def __init__(self, group: TensorGroup) -> None:
        self._group = group

    def columns(
        self, hidden: torch.Tensor, weights: Sequence[torch.Tensor], biases: Sequence[torch.Tensor | None]
    ) -> tuple[torch.Tensor, ...]:
        return columns(hidden, self._group, self._dim, weights, biases)

    def rows(self, features: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
        return rows(features, self._group, self._dim, weight, bias)

    def _for_all_batches(self, tensor: torch.Tensor, batch: int) -> torch.Tensor:
        """Every rank's masks or positions, each for a batch of its own."""
        if tensor.shape[0] == 1 and batch > 1:
            tensor = tensor.expand(batch, *tensor.shape[1:])
        return self._group.gather(tensor.detach(), 0)


class ReplicatedFlow(_Flow):
    """``speed``: all rows on every rank; one all-reduce forward and one backward per half block."""

    rows_see_all = True

    def enter(self, hidden: torch.Tensor) -> torch.Tensor:
        return hidden if self._group.prescaled else collectives.gathered(hidden, self._group, 0, partial=False)

    def leave(self, hidden: torch.Tensor, like: torch.Tensor) -> torch.Tensor:
        return hidden if self._group.prescaled else collectives.sliced(hidden, self._group, 0)

    def enter_mask(self, mask: torch.Tensor | None, like: torch.Tensor, causal: bool) -> torch.Tensor | None:
        return mask if mask is None or self._group.prescaled else self._for_all_batches(mask, like.shape[0])

    def enter_ids(self, ids: torch.Tensor | None, like: torch.Tensor) -> torch.Tensor | None:
        return ids if ids is None or self._group.prescaled else self._for_all_batches(ids, like.shape[0])

    def shared(self, *parameters: torch.Tensor | None) -> list[torch.Tensor | None]:
        return list(parameters)

    def dropout(self, hidden: torch.Tensor, probability: float, training: bool) -> torch.Tensor:
        if not training or probability == 0.0:
            return hidden
        with RandomTracker.of(self._group).replicated(hidden.device):
            return F.dropout(hidden, probability)


class SlicedFlow(_Flow):
    """``memory``: a part of the rows on every rank; gathered before each half block, and reduce-scattered behind it."""

    def __init__(self, group: TensorGroup) -> None:
        super().__init__(group)
        self._dim = 1 if group.prescaled else 0
        self.rows_see_all = group.prescaled

    def enter(self, hidden: torch.Tensor) -> torch.Tensor:
        if not self._group.prescaled:
            return hidden
        missing = self._missing(hidden.shape[1])
        return collectives.sliced(F.pad(hidden, (0, 0, 0, missing)) if missing else hidden, self._group, 1)

    def leave(self, hidden: torch.Tensor, like: torch.Tensor) -> torch.Tensor:
        if not self._group.prescaled:
            return hidden
        whole = collectives.gathered(hidden, self._group, 1, partial=False)
        return whole if whole.shape[1] == like.shape[1] else whole[:, : like.shape[1]]

    def enter_mask(self, mask: torch.Tensor | None, like: torch.Tensor, causal: bool) -> torch.Tensor | None:
        if not self._group.prescaled:
            return None if mask is None else self._for_all_batches(mask, like.shape[0])
        missing = self._missing(like.shape[1])
        if not missing or (mask is None and causal):  # padding comes last, where causal attention never looks
            return mask
        if mask is None:
            mask = like.new_zeros(1, 1, 1, like.shape[1])
        queries = missing if mask.shape[2] > 1 else 0
        return F.pad(F.pad(mask, (0, missing), value=torch.finfo(mask.dtype).min), (0, 0, 0, queries))

    def enter_ids(self, ids: torch.Tensor | None, like: torch.Tensor) -> torch.Tensor | None:
        if ids is None:
            return None
        if not self._group.prescaled:
            return self._for_all_batches(ids, like.shape[0])
        return F.pad(ids, (0, self._missing(like.shape[1])))

    def shared(self, *parameters: torch.Tensor | None) -> list[torch.Tensor | None]:
        # With a batch per rank, their gradients are averaged with those of ordinary layers, once per step.
        return collectives.shared(self._group, *parameters) if self._group.prescaled else list(parameters)

    def dropout(self, hidden: torch.Tensor, probability: float, training: bool) -> torch.Tensor:
        if not training or probability == 0.0:
            return hidden
        with RandomTracker.of(self._group).split(hidden.device):
            return F.dropout(hidden, probability)

    def _missing(self, length: int) -> int:
        return -length % self._group.size


def split_dropout(group: TensorGroup, device: torch.device, active: bool) -> contextlib.AbstractContextManager[None]:
    """Around attention on this rank's heads: its dropout is independent of the other ranks'."""
    return RandomTracker.of(group).split(device) if active and group.size > 1 else contextlib.nullcontext()


def choose_flow(group: TensorGroup) -> Flow:
    """The way that ``optimize`` asks for."""
    return SlicedFlow(group) if group.slices_activations and group.size > 1 else ReplicatedFlow(group)
