"""The collectives interface of the strategies, and its plain implementation over ``torch.distributed``.

Another implementation (the hierarchical all-gather, a counter of bytes) replaces it by having the same methods.
"""

from __future__ import annotations

import hashlib
import struct
from collections.abc import Iterable, Sequence
from typing import Protocol, TypeAlias

import torch
import torch.distributed as dist

# Their names changed in PyTorch 2.13; the old ones warn there.
_all_gather = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
_reduce_scatter = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor


#: Host tensors of at least this size are compared before they are sent. A rehearsal of GPUs sets it to infinity: tensors that
#: stand for a GPU's lie in host memory there.
compared_bytes: float = 2**20

#: Apart from the messages of scripts that use the same groups.
_GATHER_TAG = 2**20


#: By member, elements of the part that comes from it, and of the part for it.
Sizes: TypeAlias = tuple[Sequence[int], Sequence[int]]


class Work(Protocol):
    """A collective under way."""

    def wait(self) -> object:
        """Return when the tensors can be used."""


class _Nothing:
    def wait(self) -> None:
        pass


#: A collective that is over.
NOTHING: Work = _Nothing()


class Collectives(Protocol):
    """Asynchronous collectives over a process group; tensors are contiguous and used in place."""

    def empty(self, elements: int, dtype: torch.dtype, device: torch.device, group: dist.ProcessGroup) -> torch.Tensor:
        """Return an uninitialized vector that reductions over the group can use without a copy.

        Do not write to it once a reduce-scatter of it has begun. Other ranks may read it even after this rank has
        waited.
        """
        ...

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

    def all_to_all(
        self, received: torch.Tensor, sent: torch.Tensor, group: dist.ProcessGroup, sizes: Sizes | None = None
    ) -> Work:
        """Give each member its part of ``sent``, ``[sent.numel() / size]``; ``received`` has one from each, in order.

        Args:
            sizes: elements of the part from each member, and of the part for each; None for equal parts.
        """
        ...


def _on_wire(tensor: torch.Tensor) -> torch.Tensor:
    """Return a tensor as it is sent: complex numbers as pairs of real ones, since NCCL has no complex types."""
    return torch.view_as_real(tensor) if tensor.is_complex() else tensor


class TorchCollectives:
    """NCCL or gloo, whichever the group's backend is for the tensor's device."""

    def empty(self, elements: int, dtype: torch.dtype, device: torch.device, group: dist.ProcessGroup) -> torch.Tensor:
        """See :class:`Collectives`."""
        return torch.empty(elements, dtype=dtype, device=device)

    def all_reduce(self, tensor: torch.Tensor, group: dist.ProcessGroup) -> Work:
        """See :class:`Collectives`."""
        return _started(dist.all_reduce(_on_wire(tensor), group=group, async_op=True))

    def broadcast(self, tensor: torch.Tensor, source: int, group: dist.ProcessGroup) -> Work:
        """See :class:`Collectives`."""
        return _started(dist.broadcast(_on_wire(tensor), src=source, group=group, async_op=True))

    def reduce_scatter(self, shard: torch.Tensor, full: torch.Tensor, group: dist.ProcessGroup) -> Work:
        """See :class:`Collectives`."""
        if not full.numel():
            return NOTHING
        shard, full = _on_wire(shard).view(-1), _on_wire(full).view(-1)
        if full.device.type != "cpu":
            return _started(_reduce_scatter(shard, full, group=group, async_op=True))
        # gloo's own reduce-scatter is slow; exchanging the parts and adding them here moves the same bytes.
        parts = torch.empty_like(full)
        return _AddParts(_started(dist.all_to_all_single(parts, full, group=group, async_op=True)), parts, shard)

    def all_gather(self, full: torch.Tensor, shard: torch.Tensor, group: dist.ProcessGroup) -> Work:
        """See :class:`Collectives`."""
        if not full.numel():
            return NOTHING
        size = group.size()
        full, shard = _on_wire(full).view(-1), _on_wire(shard).view(-1)
        if full.device.type != "cpu" or size == 1:
            return _started(_all_gather(full, shard, group=group, async_op=True))
        # gloo's own all-gather makes a second buffer of the full tensor and copies out of it. Separate sends and receives
        # move the same bytes, directly into place.
        parts, mine = full.view(size, -1), group.rank()
        others = [(mine + distance) % size for distance in range(1, size)]
        works = [group.recv([parts[other]], other, _GATHER_TAG) for other in reversed(others)]
        works += [group.send([shard], other, _GATHER_TAG) for other in others]
        if parts[mine].data_ptr() != shard.data_ptr():
            parts[mine].copy_(shard)
        return _AllOf(works)

    def all_to_all(
        self, received: torch.Tensor, sent: torch.Tensor, group: dist.ProcessGroup, sizes: Sizes | None = None
    ) -> Work:
        """See :class:`Collectives`."""
        if sizes is not None:  # a member without a part to send may have one to receive
            arriving, leaving = map(list, sizes)
            return _started(dist.all_to_all_single(received, sent, arriving, leaving, group, async_op=True))
        if not sent.numel():
            return NOTHING
        return _started(dist.all_to_all_single(_on_wire(received), _on_wire(sent), group=group, async_op=True))


class _AllOf:
    """Several messages under way."""

    def __init__(self, works: Sequence[Work]) -> None:
        self._works = works

    def wait(self) -> None:
        for work in self._works:
            work.wait()


class _AddParts:
    """An exchange of parts, completed by adding them."""

    def __init__(self, exchange: Work, parts: torch.Tensor, shard: torch.Tensor) -> None:
        self._exchange = exchange
        self._parts: torch.Tensor | None = parts
        self._shard = shard

    def wait(self) -> None:
        parts = self._parts
        if parts is None:  # waited for before: the shard may hold something else by now
            return
        self._exchange.wait()
        torch.sum(parts.view(-1, self._shard.numel()), 0, out=self._shard)
        self._parts = None


def _started(work: Work | None) -> Work:
    if work is None:
        raise AssertionError("this rank is not a member of the group it reduces over")
    return work


@torch.no_grad()
def broadcast_tensors(
    tensors: Iterable[torch.Tensor],
    source: int,
    group: dist.ProcessGroup,
    collectives: Collectives,
    *,
    chunk_bytes: int = 64 * 2**20,
) -> None:
    """Overwrite ``tensors`` on every rank of ``group`` with those of global rank ``source``.

    Tensors of one type travel together in buffers of up to ``chunk_bytes``; a larger tensor travels alone, without
    a copy when it is contiguous. Large ones in host memory that are equal on all ranks stay as they are: if they are a
    mapped file, as Transformers loads weights, writing would allocate memory for all of it.
    """
    by_kind: dict[tuple[torch.dtype, torch.device], list[torch.Tensor]] = {}
    for tensor in _differing([tensor for tensor in tensors if tensor.numel()], source, group, collectives):
        by_kind.setdefault((tensor.dtype, tensor.device), []).append(tensor)
    for members in by_kind.values():
        chunk: list[torch.Tensor] = []
        size = 0
        for tensor in members:
            if chunk and size + tensor.nbytes > chunk_bytes:
                _broadcast_together(chunk, source, group, collectives)
                chunk, size = [], 0
            chunk.append(tensor)
            size += tensor.nbytes
        _broadcast_together(chunk, source, group, collectives)


def _differing(
    tensors: list[torch.Tensor], source: int, group: dist.ProcessGroup, collectives: Collectives
) -> list[torch.Tensor]:
    """Return the tensors that must be broadcast.

    These are the small ones, those on an accelerator, and those that are not equal to the ones of ``source`` on
    all ranks.
    """
    compared = [t for t in tensors if t.device.type == "cpu" and t.nbytes >= compared_bytes]  # the same on every rank
    if not compared:
        return tensors
    digests = torch.tensor([_digest(tensor) for tensor in compared], dtype=torch.float64)  # [tensors, 8]
    wanted = digests.clone()
    collectives.broadcast(wanted, source, group).wait()
    differ = (digests != wanted).any(1).float()  # [tensors]
    collectives.all_reduce(differ, group).wait()
    equal = {id(tensor) for tensor, count in zip(compared, differ.tolist(), strict=True) if not count}
    return [tensor for tensor in tensors if id(tensor) not in equal]


def _digest(tensor: torch.Tensor) -> list[float]:
    """Return the SHA-256 of a tensor as eight numbers that floats represent exactly."""
    content = tensor.detach().reshape(-1).view(torch.uint8).numpy()
    return [float(number) for (number,) in struct.iter_unpack("<I", hashlib.sha256(content.data).digest())]


def _broadcast_together(
    tensors: list[torch.Tensor], source: int, group: dist.ProcessGroup, collectives: Collectives
) -> None:
    first = tensors[0]
    can_travel_as_it_is = first.is_contiguous() and first.is_floating_point()
    if len(tensors) == 1 and can_travel_as_it_is:
        collectives.broadcast(first.detach(), source, group).wait()
        return
    flat = torch.cat([tensor.detach().reshape(-1) for tensor in tensors])
    # gloo knows few other types, and older ones no complex numbers; bytes carry them all.
    wire = flat if flat.is_floating_point() else flat.view(torch.uint8)
    collectives.broadcast(wire, source, group).wait()
    for tensor, part in zip(tensors, flat.split([t.numel() for t in tensors]), strict=True):
        tensor.detach().copy_(part.view(tensor.shape))
