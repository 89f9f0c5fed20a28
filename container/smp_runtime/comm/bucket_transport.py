"""How a bucket of gradients travels: the seam between reduction and what moves the bytes."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Protocol

if TYPE_CHECKING:
    import torch

    from smp_runtime.comm.buckets import Bucket


class Travel(Protocol):
    """A bucket under way."""

    def land(self) -> torch.Tensor:
        """Wait; returns the flat result."""
        ...


class Transport(Protocol):
    """Averages buckets over a group of ranks.

    Attributes:
        carries_tail: whether what stands behind the gradients arrives summed too.
        divides: whether gradients are to be divided by the number of ranks before they are launched.
        lands_in_gradients: whether the result is the parameters' gradients, whole; otherwise ``deliver`` takes it.
    """

    carries_tail: bool
    divides: bool
    lands_in_gradients: bool

    def launch(self, bucket: Bucket, buffer: torch.Tensor, position: int, is_last: bool) -> Travel:
        """Send ``buffer``; every rank of the group launches the same buckets in the same order."""
        ...

    def deliver(self, position: int, result: torch.Tensor, used: Sequence[bool]) -> None:
        """Take a result that is not whole gradients; ``used`` tells which parameters any rank used."""
        ...
