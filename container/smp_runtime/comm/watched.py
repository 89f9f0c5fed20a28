"""Collectives that leave a note of themselves: which, in which group, the how-manieth there, and whether this rank waits for them."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist

from smp_config.whereabouts import Notes
from smp_runtime.comm.collectives import Collectives, Work


@dataclass
class _Group:
    """A process group (held, so that its identifier stays its own), its ranks, and how many collectives have begun in it."""

    group: dist.ProcessGroup
    members: tuple[int, ...]
    begun: int = 0


class WatchedCollectives:
    """See :class:`~smp_runtime.comm.collectives.Collectives`.

    Args:
        inner: does the work.
        notes: of this process.
    """

    def __init__(self, inner: Collectives, notes: Notes) -> None:
        self._inner = inner
        self._notes = notes
        self._groups: dict[int, _Group] = {}

    def all_reduce(self, tensor: torch.Tensor, group: dist.ProcessGroup) -> Work:
        """See :class:`Collectives`."""
        return self._watched("all_reduce", tensor, group, lambda: self._inner.all_reduce(tensor, group))

    def broadcast(self, tensor: torch.Tensor, source: int, group: dist.ProcessGroup) -> Work:
        """See :class:`Collectives`."""
        return self._watched("broadcast", tensor, group, lambda: self._inner.broadcast(tensor, source, group))

    def reduce_scatter(self, shard: torch.Tensor, full: torch.Tensor, group: dist.ProcessGroup) -> Work:
        """See :class:`Collectives`."""
        return self._watched("reduce_scatter", full, group, lambda: self._inner.reduce_scatter(shard, full, group))

    def all_gather(self, full: torch.Tensor, shard: torch.Tensor, group: dist.ProcessGroup) -> Work:
        """See :class:`Collectives`."""
        return self._watched("all_gather", full, group, lambda: self._inner.all_gather(full, shard, group))

    def all_to_all(self, received: torch.Tensor, sent: torch.Tensor, group: dist.ProcessGroup) -> Work:
        """See :class:`Collectives`."""
        return self._watched("all_to_all", sent, group, lambda: self._inner.all_to_all(received, sent, group))

    def _watched(
        self, name: str, tensor: torch.Tensor, group: dist.ProcessGroup, start: Callable[[], Work]
    ) -> Work:
        known = self._groups.get(id(group))
        if known is None:
            known = self._groups[id(group)] = _Group(group, tuple(dist.get_process_group_ranks(group)))
        known.begun += 1
        if len(known.members) == 1:
            return start()
        number, notes = known.begun, self._notes
        notes.collective(name, known.members, number, tensor.numel(), str(tensor.dtype).removeprefix("torch."))
        slot = notes.open_wait(name, known.members, number)  # to begin may wait, too
        try:
            work = start()
        finally:
            notes.close_wait(slot)
        return _WatchedWork(work, notes, name, known.members, number)


class _WatchedWork:
    """A collective under way."""

    def __init__(self, work: Work, notes: Notes, name: str, members: tuple[int, ...], number: int) -> None:
        self._work = work
        self._notes = notes
        self._wait = name, members, number

    def wait(self) -> object:
        slot = self._notes.open_wait(*self._wait)
        try:
            return self._work.wait()
        finally:
            self._notes.close_wait(slot)

    def __getattr__(self, name: str) -> Any:
        """What kinds of work have beside ``wait``."""
        return getattr(self._work, name)
