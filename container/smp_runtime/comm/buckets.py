"""Gradient buckets: flat buffers that several gradients travel in, and the interface between reduction and transport."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Protocol

if TYPE_CHECKING:
    import torch
    import torch.distributed as dist

    from smp_runtime.comm.collectives import Collectives, Work


@dataclass(eq=False)
class Bucket:
    """A group of parameters that share one flat buffer for their gradients.

    Attributes:
        indices: indices of the parameters in the reducer's list.
        offsets: start of each gradient, in elements.
        elements: number of elements of all gradients together; the buffer may be longer by a tail.
        dtype: type in which the gradients are reduced.
        tail: elements behind the gradients.
        persistent: keep one buffer for all windows; otherwise each window has its own, which its gradients keep alive.
        pending: number of parameters that have no final gradient yet in this window.
    """

    indices: list[int]
    offsets: list[int]
    elements: int
    dtype: torch.dtype
    device: torch.device
    tail: int = 0
    persistent: bool = False
    pending: int = 0
    _buffer: torch.Tensor | None = field(default=None, repr=False)

    def fresh_buffer(self, collectives: Collectives, group: dist.ProcessGroup) -> torch.Tensor:
        """Return an uninitialized buffer for the next reduction over a group, ``[elements + tail]``."""
        if self._buffer is None or not self.persistent:
            self._buffer = collectives.empty(self.elements + self.tail, self.dtype, self.device, group)
        return self._buffer

    def release(self) -> None:
        """Release the buffer, unless it is kept for all windows."""
        if not self.persistent:
            self._buffer = None

    def views(self, buffer: torch.Tensor, parameters: Sequence[torch.Tensor]) -> list[torch.Tensor]:
        """Return each parameter's part of a buffer as a view with the parameter's shape."""
        return [
            buffer[offset : offset + parameters[index].numel()].view(parameters[index].shape)
            for index, offset in zip(self.indices, self.offsets, strict=True)
        ]


def make_buckets(
    parameters: Sequence[torch.Tensor],
    order: Sequence[int],
    cap_bytes: int,
    *,
    reduce_dtype: torch.dtype | None = None,
    persistent: bool = False,
) -> list[Bucket]:
    """Fill buckets of at most ``cap_bytes`` with parameters in ``order``; no padding, so exactly their elements.

    A parameter larger than the cap has a bucket of its own. Parameters of different type or device never share
    one. With ``reduce_dtype`` all gradients but complex ones are reduced in that type, else each in its parameter's.
    """
    buckets: list[Bucket] = []
    open_buckets: dict[tuple[torch.dtype, torch.device], Bucket] = {}
    for index in order:
        parameter = parameters[index]
        dtype = parameter.dtype if parameter.is_complex() else reduce_dtype or parameter.dtype
        kind = (parameter.dtype, parameter.device)
        bucket = open_buckets.get(kind)
        if bucket is None or (bucket.elements + parameter.numel()) * dtype.itemsize > cap_bytes:
            bucket = Bucket([], [], 0, dtype, parameter.device, persistent=persistent)
            open_buckets[kind] = bucket
            buckets.append(bucket)
        bucket.indices.append(index)
        bucket.offsets.append(bucket.elements)
        bucket.elements += parameter.numel()
    return buckets


class Travel(Protocol):
    """A bucket under way."""

    def finish(self) -> torch.Tensor:
        """Wait for the bucket, and return the flat result."""
        ...


class Reducing:
    """A bucket in a collective that leaves the result in a tensor."""

    def __init__(self, work: Work, result: torch.Tensor) -> None:
        self._work = work
        self._result = result

    def finish(self) -> torch.Tensor:
        """Wait for the collective, and return the flat result."""
        self._work.wait()
        return self._result


class BucketTransport(Protocol):
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
        """Accept a result that is not whole gradients; ``used`` marks the parameters that any rank used."""
        ...
