"""The collectives seam: what the strategies call, and the plain implementation over ``torch.distributed``.

Another implementation (the hierarchical all-gather, a counter of bytes) stands in by having these methods.
"""

from __future__ import annotations

from typing import Protocol

import torch
import torch.distributed as dist


class Work(Protocol):
    """A collective under way."""

    def wait(self) -> object: ...


class Collectives(Protocol):
    """Asynchronous collectives over a process group; tensors are contiguous and used in place."""

    def all_reduce(self, tensor: torch.Tensor, group: dist.ProcessGroup) -> Work:
        """Sum ``tensor`` over the group, in place."""
        ...

    def broadcast(self, tensor: torch.Tensor, source: int, group: dist.ProcessGroup) -> Work:
        """Copy ``tensor`` from global rank ``source`` to every member."""
        ...


class TorchCollectives:
    """NCCL or gloo, whichever the group's backend is for the tensor's device."""

    def all_reduce(self, tensor: torch.Tensor, group: dist.ProcessGroup) -> Work:
        return _started(dist.all_reduce(tensor, group=group, async_op=True))

    def broadcast(self, tensor: torch.Tensor, source: int, group: dist.ProcessGroup) -> Work:
        return _started(dist.broadcast(tensor, src=source, group=group, async_op=True))


def _started(work: Work | None) -> Work:
    if work is None:
        raise AssertionError("this rank is not a member of the group it reduces over")
    return work
