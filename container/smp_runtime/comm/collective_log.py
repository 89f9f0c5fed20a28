"""Logging of collectives: name, group, sequence number in the group, and whether this rank waits for it."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist

if TYPE_CHECKING:
    from smp_records.rank_record import Notes
    from smp_runtime.comm.collectives import Collectives, Sizes, Work

_NAMES = ("all_reduce", "broadcast", "reduce_scatter", "all_gather", "all_to_all")


@dataclass
class _Group:
    """A process group with its ranks as logged, and the number of collectives that have begun in it.

    It is held so that its identifier stays its own.
    """

    group: dist.ProcessGroup
    size: int
    members: int
    begun: int = 0


class LoggedCollectives:
    """See :class:`~smp_runtime.comm.collectives.Collectives`.

    Args:
        inner: does the work.
        notes: of this process.
    """

    def __init__(self, inner: Collectives, notes: Notes) -> None:
        self._inner = inner
        self._notes = notes
        self._names = {name: notes.text(name) for name in _NAMES}
        self._groups: dict[int, _Group] = {}
        self._dtypes: dict[torch.dtype, int] = {}

    def empty(self, elements: int, dtype: torch.dtype, device: torch.device, group: dist.ProcessGroup) -> torch.Tensor:
        """See :class:`Collectives`."""
        return self._inner.empty(elements, dtype, device, group)

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

    def all_to_all(
        self, received: torch.Tensor, sent: torch.Tensor, group: dist.ProcessGroup, sizes: Sizes | None = None
    ) -> Work:
        """See :class:`Collectives`."""
        if sizes is None:
            return self._watched("all_to_all", sent, group, lambda: self._inner.all_to_all(received, sent, group))
        # Each member sends a number of its own, so that 0 stands for all: members are compared by it.
        start = lambda: self._inner.all_to_all(received, sent, group, sizes)  # noqa: E731
        return self._watched("all_to_all", sent, group, start, elements=0)

    def _watched(
        self,
        name: str,
        tensor: torch.Tensor,
        group: dist.ProcessGroup,
        start: Callable[[], Work],
        elements: int | None = None,
    ) -> Work:
        known = self._groups.get(id(group))
        if known is None:
            members = tuple(dist.get_process_group_ranks(group))
            known = self._groups[id(group)] = _Group(group, len(members), self._notes.ranks(members))
        if known.size == 1:
            return start()
        known.begun += 1
        dtype = tensor.dtype
        if (kind := self._dtypes.get(dtype)) is None:
            kind = self._dtypes[dtype] = self._notes.text(str(dtype).removeprefix("torch."))
        elements = tensor.numel() if elements is None else elements
        position = self._notes.collective(self._names[name], known.members, known.begun, elements, kind)
        return _LoggedWork(start, self._notes, position)


class _LoggedWork:
    """A collective under way."""

    def __init__(self, start: Callable[[], Work], notes: Notes, position: int) -> None:
        self._work = start()
        self._notes = notes
        self._position = position

    @property
    def unrecorded(self) -> Work:
        """Return the underlying work."""
        return self._work

    def wait(self) -> object:
        with self.recorded():
            return self._work.wait()

    @contextlib.contextmanager
    def recorded(self) -> Iterator[None]:
        """Record that the rank waits for this collective during the block."""
        self._notes.begin_wait(self._position)
        try:
            yield
        finally:
            self._notes.end_wait(self._position)

    def __getattr__(self, name: str) -> Any:
        """Return an attribute of the underlying work, other than ``wait``."""
        return getattr(self._work, name)


def without_record(work: Work) -> Work:
    """Return a collective for a thread of the library to wait for: the rank's record shows what the rank waits for."""
    return work.unrecorded if isinstance(work, _LoggedWork) else work


@contextlib.contextmanager
def record_wait(work: Work) -> Iterator[None]:
    """Record that the rank waits for a collective for which a thread of the library waits."""
    with work.recorded() if isinstance(work, _LoggedWork) else contextlib.nullcontext():
        yield
