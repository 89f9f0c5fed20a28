"""The layout of activations on the ranks between the layers of a distributed block, chosen by ``optimize``.

Outside a block every rank has the whole batch (``prescaled_batch``) or a batch of its own. Inside, activations
are either *replicated*: every rank has all rows of all batches (``speed``), or *sliced*: every rank has a part of
the rows (``memory``). With a batch per rank the slices are these batches. With a common batch they are parts of
the sequence, padded if the number of ranks does not divide it.
"""

from __future__ import annotations

import abc
import contextlib
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Any

import torch
import torch.nn.functional as F

from smp_runtime.tensor_parallel import collectives, traced
from smp_runtime.tensor_parallel.masks import agree_on_mask, agree_on_shape, to_additive
from smp_runtime.tensor_parallel.random_tracker import RandomTracker
from smp_runtime.tensor_parallel.split_functions import multiply_columns, multiply_rows

if TYPE_CHECKING:
    from torch import nn

    from smp_runtime.tensor_parallel.group import TensorGroup


class ActivationFlow(abc.ABC):
    """One layout of activations inside a block.

    Attributes:
        rows_see_all: whether operations on rows (layer norms, biases of outputs) see all rows of the group's batch,
            or have their gradient summed as if they did; else the gradient is that of this rank's own batch.
    """

    rows_see_all = True
    #: Along which dim activations are sliced inside, or None.
    _dim: int | None = None

    def __init__(self, group: TensorGroup) -> None:
        self._group = group
        #: The id of the tensor for which the ranks have just agreed on a shape.
        self._agreed: int | None = None

    @abc.abstractmethod
    def enter(self, hidden: torch.Tensor) -> torch.Tensor:
        """Lay out ``[batch, seq, hidden]`` as inside the block."""

    @abc.abstractmethod
    def leave(self, hidden: torch.Tensor, like: torch.Tensor) -> torch.Tensor:
        """Lay out activations as outside the block; ``like`` is the tensor that entered."""

    @abc.abstractmethod
    def enter_mask(
        self, mask: torch.Tensor | None, like: torch.Tensor, causal: bool, positions: torch.Tensor | None = None
    ) -> torch.Tensor | None:
        """Return an additive mask ``[batch or 1, 1, queries or 1, keys]`` for all rows that ``like`` is a part of.

        With a batch per rank, the ranks check that their batches have one shape. They do it here, or in
        :meth:`enter` if that is called first.

        Args:
            mask: additive, or boolean with True for a position that takes part.
            like: the activations; their positions are the mask's keys.
            causal: whether attention never looks ahead.
            positions: the argument of :meth:`enter_ids` for the same activations; all ranks have them, or none.

        Raises:
            SMPUserError: batches of different shapes, positions on some ranks only, or a mask of whole numbers.
        """

    @abc.abstractmethod
    def enter_ids(self, ids: torch.Tensor | None, like: torch.Tensor) -> torch.Tensor | None:
        """Return whole numbers ``[batch or 1, seq]`` for all rows that ``like`` is a part of."""

    def columns(
        self, hidden: torch.Tensor, weights: Sequence[torch.Tensor], biases: Sequence[torch.Tensor | None]
    ) -> tuple[torch.Tensor, ...]:
        """Compute this rank's features of all rows."""
        return multiply_columns(hidden, self._group, self._dim, weights, biases)

    def rows(self, features: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
        """Turn this rank's features of all rows into activations as they are laid out inside the block."""
        return multiply_rows(features, self._group, self._dim, weight, bias)

    @abc.abstractmethod
    def shared(self, *parameters: torch.Tensor | None) -> list[torch.Tensor | None]:
        """Return replicated parameters, prepared for use on activations as they are laid out inside the block."""

    def dropout(self, hidden: torch.Tensor, probability: float, training: bool) -> torch.Tensor:
        """Apply dropout to activations as they are laid out inside the block."""
        if not training or probability == 0.0:
            return hidden
        is_replicated = self._dim is None
        if torch.compiler.is_compiling():
            return traced.dropout(hidden, probability, replicated=is_replicated)
        # Where all ranks have the same activations, they must drop the same elements.
        tracker = RandomTracker.of(self._group)
        family = tracker.replicated if is_replicated else tracker.split
        with family(hidden.device):
            return F.dropout(hidden, probability)

    def _check_shape(self, hidden: torch.Tensor) -> None:
        """Check that the batches have one shape, unless it was checked with the mask: one exchange is enough."""
        known, self._agreed = self._agreed, None
        if known != id(hidden):
            agree_on_shape(self._group, hidden)

    def _mask_for_all_batches(
        self, mask: torch.Tensor | None, like: torch.Tensor, positions: torch.Tensor | None
    ) -> torch.Tensor | None:
        mask = agree_on_mask(self._group, mask, like, positions=positions)
        self._agreed = id(like)
        return None if mask is None else self._for_all_batches(mask, like.shape[0])

    def _for_all_batches(self, tensor: torch.Tensor, batch: int) -> torch.Tensor:
        """Gather every rank's masks or positions, each for a batch of its own."""
        if tensor.shape[0] == 1 and batch > 1:
            tensor = tensor.expand(batch, *tensor.shape[1:])
        return self._group.gather(tensor.detach(), 0)


class ReplicatedFlow(ActivationFlow):
    """``speed``: all rows on every rank; one all-reduce forward and one backward per half block."""

    def enter(self, hidden: torch.Tensor) -> torch.Tensor:
        """See :class:`ActivationFlow`."""
        if self._group.prescaled:
            return hidden
        self._check_shape(hidden)
        return collectives.gather_slices(hidden, self._group, 0, partial=False)

    def leave(self, hidden: torch.Tensor, like: torch.Tensor) -> torch.Tensor:
        """See :class:`ActivationFlow`."""
        return hidden if self._group.prescaled else collectives.take_slice(hidden, self._group, 0)

    def enter_mask(
        self, mask: torch.Tensor | None, like: torch.Tensor, causal: bool, positions: torch.Tensor | None = None
    ) -> torch.Tensor | None:
        """See :class:`ActivationFlow`."""
        mask = to_additive(mask, like.dtype)
        return mask if self._group.prescaled else self._mask_for_all_batches(mask, like, positions)

    def enter_ids(self, ids: torch.Tensor | None, like: torch.Tensor) -> torch.Tensor | None:
        """See :class:`ActivationFlow`."""
        if ids is None or self._group.prescaled:
            return ids
        return self._for_all_batches(ids, like.shape[0])

    def shared(self, *parameters: torch.Tensor | None) -> list[torch.Tensor | None]:
        """See :class:`ActivationFlow`."""
        return list(parameters)


class SlicedFlow(ActivationFlow):
    """``memory``: a part of the rows on every rank; gathered before each half block, and reduce-scattered behind it."""

    def __init__(self, group: TensorGroup) -> None:
        super().__init__(group)
        # Parts of the sequences of a common batch; otherwise each rank's own sequences.
        self._dim = 1 if group.prescaled else 0
        self.rows_see_all = group.prescaled

    def enter(self, hidden: torch.Tensor) -> torch.Tensor:
        """See :class:`ActivationFlow`."""
        if not self._group.prescaled:
            self._check_shape(hidden)
            return hidden
        # Collectives need parts of one length.
        missing = self._missing(hidden.shape[1])
        return collectives.take_tokens(F.pad(hidden, (0, 0, 0, missing)) if missing else hidden, self._group, 1)

    def leave(self, hidden: torch.Tensor, like: torch.Tensor) -> torch.Tensor:
        """See :class:`ActivationFlow`."""
        if not self._group.prescaled:
            return hidden
        whole = collectives.gather_tokens(hidden, self._group, 1)
        return whole if whole.shape[1] == like.shape[1] else whole[:, : like.shape[1]]

    def enter_mask(
        self, mask: torch.Tensor | None, like: torch.Tensor, causal: bool, positions: torch.Tensor | None = None
    ) -> torch.Tensor | None:
        """See :class:`ActivationFlow`."""
        mask = to_additive(mask, like.dtype)
        if not self._group.prescaled:
            return self._mask_for_all_batches(mask, like, positions)
        missing = self._missing(like.shape[1])
        if mask is None:
            if not missing or causal:  # padding comes last, so causal attention never sees it
                return None
            mask = like.new_zeros(1, 1, 1, like.shape[1])
        # Under cross attention there are as many queries as the other states have positions.
        queries = self._missing(mask.shape[2]) if mask.shape[2] > 1 else 0
        return F.pad(F.pad(mask, (0, missing), value=torch.finfo(mask.dtype).min), (0, 0, 0, queries))

    def enter_ids(self, ids: torch.Tensor | None, like: torch.Tensor) -> torch.Tensor | None:
        """See :class:`ActivationFlow`."""
        if ids is None:
            return None
        if not self._group.prescaled:
            return self._for_all_batches(ids, like.shape[0])
        return F.pad(ids, (0, self._missing(like.shape[1])))

    def shared(self, *parameters: torch.Tensor | None) -> list[torch.Tensor | None]:
        """See :class:`ActivationFlow`."""
        # With a batch per rank, their gradients are averaged with those of ordinary layers, once per step.
        return collectives.use_shared(self._group, *parameters) if self._group.prescaled else list(parameters)

    def _missing(self, length: int) -> int:
        return -length % self._group.size


def split_dropout(group: TensorGroup, device: torch.device, active: bool) -> contextlib.AbstractContextManager[None]:
    """Run attention on this rank's heads with dropout that is independent of the other ranks'.

    A compiled block is called in such a context as a whole, since the compiler draws for all of it at once.
    """
    if torch.compiler.is_compiling():
        return contextlib.nullcontext()
    return RandomTracker.of(group).split(device) if active and group.size > 1 else contextlib.nullcontext()


def choose_flow(group: TensorGroup) -> ActivationFlow:
    """Return the activation flow for the ``optimize`` option."""
    if group.slices_activations and group.size > 1:
        return SlicedFlow(group)
    return ReplicatedFlow(group)


@contextlib.contextmanager
def replicated_rows(module: nn.Module, group: TensorGroup) -> Iterator[None]:
    """Run the block with one batch on all ranks, and replicated activations in ``module``, as ``optimize: speed``.

    So each rank has the keys and values of all tokens for its heads, as a cache needs them. A single token is
    not padded.
    """
    layers: list[Any] = [part for part in module.modules() if isinstance(getattr(part, "flow", None), SlicedFlow)]
    flows = [part.flow for part in layers]
    with group.one_batch():
        for part in layers:
            part.flow = ReplicatedFlow(group)
        try:
            yield
        finally:
            for part, flow in zip(layers, flows, strict=True):
                part.flow = flow
