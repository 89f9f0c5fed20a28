"""The collectives seam: what the strategies call, and the plain implementation over ``torch.distributed``.

Another implementation (the hierarchical all-gather, a counter of bytes) stands in by having these methods.
"""

from __future__ import annotations

from typing import Protocol

import torch
import torch.distributed as dist

# Their names changed in PyTorch 2.13; the old ones warn there.
_all_gather = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
_reduce_scatter = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor


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

    def reduce_scatter(self, shard: torch.Tensor, full: torch.Tensor, group: dist.ProcessGroup) -> Work:
        """Sum ``full`` over the group and leave each member its part, ``[full.numel() / size]``, in ``shard``."""
        ...

    def all_gather(self, full: torch.Tensor, shard: torch.Tensor, group: dist.ProcessGroup) -> Work:
        """Put every member's ``shard`` into ``full``, in group order; ``shard`` may be this member's part of it."""
        ...


class TorchCollectives:
    """NCCL or gloo, whichever the group's backend is for the tensor's device."""

    def all_reduce(self, tensor: torch.Tensor, group: dist.ProcessGroup) -> Work:
        return _started(dist.all_reduce(tensor, group=group, async_op=True))

    def broadcast(self, tensor: torch.Tensor, source: int, group: dist.ProcessGroup) -> Work:
        return _started(dist.broadcast(tensor, src=source, group=group, async_op=True))

    def reduce_scatter(self, shard: torch.Tensor, full: torch.Tensor, group: dist.ProcessGroup) -> Work:
        if full.device.type != "cpu":
            return _started(_reduce_scatter(shard, full, group=group, async_op=True))
        # gloo's own reduce-scatter is slow; exchanging the parts and adding them here moves the same bytes.
        parts = torch.empty_like(full)
        return _AddParts(_started(dist.all_to_all_single(parts, full, group=group, async_op=True)), parts, shard)

    def all_gather(self, full: torch.Tensor, shard: torch.Tensor, group: dist.ProcessGroup) -> Work:
        return _started(_all_gather(full, shard, group=group, async_op=True))


class _AddParts:
    """An exchange of parts, completed by adding them."""

    def __init__(self, exchange: Work, parts: torch.Tensor, shard: torch.Tensor) -> None:
        self._exchange = exchange
        self._parts = parts
        self._shard = shard

    def wait(self) -> None:
        self._exchange.wait()
        torch.sum(self._parts.view(-1, self._shard.numel()), 0, out=self._shard)


def _started(work: Work | None) -> Work:
    if work is None:
        raise AssertionError("this rank is not a member of the group it reduces over")
    return work
