"""Whether any data parallel rank runs backward in a step: each tells the others as soon as it knows."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
import torch.distributed as dist

if TYPE_CHECKING:
    from smp_runtime.comm.collectives import Collectives, Work


class BackwardAgreement:
    """Keeps the ranks' collectives matched when a step of some runs no backward pass.

    A rank that runs one tells so before it sends gradients, and goes on without waiting. One that has run none learns
    at the end of the step whether it must answer the others' collectives. Every rank tells once per step, the first
    collective of the step's gradients, so the message needs no round trip of its own.
    """

    def __init__(self, collectives: Collectives, group: dist.ProcessGroup, position: int, size: int) -> None:
        self._collectives = collectives
        self._group = group
        self._position = position
        self._size = size
        self._is_open = False
        self._work: Work | None = None
        self._votes = torch.zeros(size, dtype=torch.int64, device="cpu")

    def open(self) -> None:
        """A step begins in which backward may run, on all ranks."""
        if self._work is not None:
            self._work.wait()  # has ended long ago: its memory may be used again
        self._work = None
        self._votes = torch.zeros(self._size, dtype=torch.int64, device="cpu")
        self._is_open = True

    def tell(self, ran: bool = True) -> None:
        """This rank runs backward, or has run none; only the first call of a step counts."""
        if not self._is_open or self._work is not None:
            return
        self._votes[self._position] = ran
        self._work = self._collectives.all_reduce(self._votes, self._group)

    def close(self, ran: bool) -> list[int]:
        """The step has ended; returns the positions of ranks that ran backward, of this one alone if it did.

        Outside the steps of :meth:`open` every rank decides for itself.
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
        """The step ends here, maybe with an error; the others get this rank's answer all the same."""
        self.tell(False)
        self._is_open = False
