"""Ranks that do not all run backward: in a single step, or because some have fewer batches (``model.join()``)."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Protocol

import torch
import torch.distributed as dist
from torch.distributed.algorithms.join import Joinable, JoinHook

if TYPE_CHECKING:
    from smp_runtime.comm.collectives import Collectives, Work


class Replica(Protocol):
    """A wrapped model, as one of several."""

    def shadow_step(self) -> None:
        """Answer the collectives of one step of the others, with nothing to add."""

    def take_over(self, is_last: bool) -> None:
        """Copy the weights of a rank that was among the last to be done; every rank calls it."""


class JoinedModel(Joinable, JoinHook):
    """The ``Join`` hook of a wrapped model, for PyTorch's ``Join`` context.

    A rank that has run out of batches takes part in every step of the others with gradients of zero, then takes
    over their weights.
    """

    def __init__(self, model: Replica, group: dist.ProcessGroup, device: torch.device) -> None:
        super().__init__()
        self._model = model
        self._group = group
        self._device = device

    def join_hook(self, **kwargs: Any) -> JoinHook:
        """Return this object itself."""
        return self

    @property
    def join_device(self) -> torch.device:
        """Return the device for tensors of ``Join`` itself."""
        return self._device

    @property
    def join_process_group(self) -> dist.ProcessGroup:
        """Return the process group of the ranks that wait for each other."""
        return self._group

    def main_hook(self) -> None:
        """Take part in a step of the ranks that still have batches."""
        self._model.shadow_step()

    def post_hook(self, is_last_joiner: bool) -> None:
        """Take over the weights after all ranks have run out of batches."""
        self._model.take_over(is_last_joiner)


class BackwardAgreement:
    """An agreement that keeps the ranks' collectives matched if some ranks run no backward pass in a step.

    A rank that runs backward announces it before it sends gradients, and continues without waiting. A rank that
    has run none learns at the end of the step whether it must take part in the others' collectives. Every rank
    announces once per step. This is the first collective of the step's gradients, so it needs no round trip of
    its own.
    """

    def __init__(self, collectives: Collectives, group: dist.ProcessGroup, position: int, size: int) -> None:
        self._collectives = collectives
        self._group = group
        self._position = position
        self._size = size
        self._is_open = False
        self._work: Work | None = None
        self._votes = torch.zeros(size, dtype=torch.int64, device="cpu")

    @property
    def is_under_way(self) -> bool:
        """Return whether the exchange of the last step is still running; ranks that ran backward do not wait for it."""
        is_completed = getattr(self._work, "is_completed", None)
        return is_completed is not None and not is_completed()

    def open(self) -> None:
        """Begin a step in which backward may run; all ranks call it."""
        if self._work is not None:
            self._work.wait()  # has ended long ago: its memory may be used again
        self._work = None
        self._votes = torch.zeros(self._size, dtype=torch.int64, device="cpu")
        self._is_open = True

    def tell(self, ran: bool = True) -> None:
        """Announce that this rank runs backward, or has run none; only the first call of a step counts."""
        if not self._is_open or self._work is not None:
            return
        self._votes[self._position] = ran
        self._work = self._collectives.all_reduce(self._votes, self._group)

    def close(self, ran: bool) -> list[int]:
        """End the step and return the positions of ranks that ran backward; only this rank's position if it did.

        Outside the steps of :meth:`open` every rank decides on its own.
        """
        told = self._is_open and self._work is not None
        if ran or told:
            self.abandon()
            return [self._position]
        if not self._is_open:
            return []
        self.tell(False)
        if self._work is not None:
            self._work.wait()
        self._is_open = False
        return [position for position, vote in enumerate(self._votes.tolist()) if vote]

    def abandon(self) -> None:
        """End the step, possibly after an error; the other ranks still get this rank's answer."""
        self.tell(False)
        self._is_open = False
