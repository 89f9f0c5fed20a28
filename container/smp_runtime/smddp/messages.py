"""The all-gather in phases on CPU: messages between hosts, passed on inside each as they arrive."""

from __future__ import annotations

import queue
import threading
import weakref
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import torch

from smp_runtime.smddp.buffers import BufferPiece, RingBuffer
from smp_runtime.smddp.work import MessageWork

if TYPE_CHECKING:
    from smp_config.smddp import BufferSizes
    from smp_runtime.smddp.items import GatherItem
    from smp_runtime.smddp.layout import HostGrid

#: Far above the tags that scripts choose.
_FIRST_TAG = 2**30
_LAST_TAG = 2**31 - 1

#: A shard travels in parts, so that the network is busy while parts that came are handed on; more and smaller ones
#: cost more than they gain.
_PARTS = 4
_LEAST_PART = 256 * 1024

#: Seconds for the thread to end.
_PATIENCE = 5.0

#: Shards of at most this many bytes are handed on together.
_SMALL = 128 * 1024


@dataclass
class _PendingAllGather:
    """One all-gather under way.

    Attributes:
        arriving: from other hosts, in the order in which they are awaited: the message, the host, where in a shard
            its bytes belong, and the tag with which they are handed on.
        works: all messages that are not awaited before the end.
        blocks: by neighbour, all shards that it hands on at once; empty if they come one by one.
    """

    item: GatherItem
    work: MessageWork
    scratch: BufferPiece
    sort: BufferPiece
    first_tag: int
    arriving: list[tuple[Any, int, slice, int]] = field(default_factory=list)
    works: list[Any] = field(default_factory=list)
    blocks: dict[int, torch.Tensor] = field(default_factory=dict)


class MessageGather:
    """An all-gather in phases, made of messages over a backend that can send and receive.

    Every rank copies its shard into its scratch buffer, and sends it from there to the ranks with its local
    number on other hosts. Shards from other hosts arrive in the sort buffer. From there they are copied into
    their places by rank order, and handed on to this host's other ranks. A large shard travels in parts, which
    are handed on one by one. Its owner gives it to its neighbours at once, and they receive it in its place. A
    small shard is handed on together with all shards that have arrived: fewer messages.

    Args:
        backend: of the group, with a full mesh of connections.
    """

    def __init__(self, backend: Any, grid: HostGrid, sizes: BufferSizes) -> None:
        self._backend = backend
        self._grid = grid
        self._other_hosts = _others(grid.host, grid.hosts)
        self._neighbours = [grid.row[number] for number in _others(grid.local, grid.ranks_per_host)]
        cpu = torch.device("cpu")
        self.scratch = RingBuffer(sizes.scratch, cpu)
        self.sort = RingBuffer(sizes.sort, cpu)
        self._tag = _FIRST_TAG
        self._queue: queue.SimpleQueue[_PendingAllGather | None] = queue.SimpleQueue()
        self._thread: threading.Thread | None = None
        # Callbacks begin all-gathers too, on threads of their own; it guards those that wait for room as well.
        self._starting = threading.Lock()
        self._later: deque[tuple[GatherItem, MessageWork]] = deque()
        self._stop = weakref.finalize(self, self._queue.put, None)

    def start(self, items: Sequence[GatherItem], *, here: bool = False) -> MessageWork:
        """Begin all-gathers; all ranks of the group begin their all-gathers in the same order.

        If the buffers have no room for one, it begins after earlier ones have freed some.

        Args:
            here: the caller waits anyway, so bring them to their end on its thread, unless earlier ones are under way.

        Returns:
            The work to wait for. Its future has, by rank, the data from that rank: a tensor, or for several items a
                list.

        Raises:
            RuntimeError: an earlier one failed, or a connection was lost.
        """

        def report() -> Any:
            if len(items) == 1:
                return items[0].report()
            return [list(parts) for parts in zip(*(item.report() for item in items), strict=True)]

        # They end in the order of their beginning, and after one that failed all others do.
        return [self._start(item, MessageWork(report), here) for item in items][-1]

    def _start(self, item: GatherItem, work: MessageWork, here: bool) -> MessageWork:
        with self._starting:
            if self._later or not self._has_room(item):
                self._later.append((item, work))
                return work
            here = here and not self.scratch.in_use
            try:
                gather = self._begin(item, work)
            except BaseException as error:  # no all-gather after it can complete
                self.fail(error)
                raise
            if not here:
                self._hand_over(gather)
        if here:
            _finish(self, gather)
        return work

    def begin_later(self) -> None:
        """Begin all-gathers that had to wait for room, in their order, while there is room."""
        with self._starting:
            while self._later and self._has_room(self._later[0][0]):
                item, work = self._later.popleft()
                try:
                    self._hand_over(self._begin(item, work))
                except BaseException as error:  # likewise; the caller has gone on, and sees it in its work
                    self.fail(error)
                    work.finish(self.failure(error))

    def _has_room(self, item: GatherItem) -> bool:
        size = item.shard.numel()
        return self.scratch.has_room(size) and self.sort.has_room(self._grid.hosts * size)

    def _hand_over(self, gather: _PendingAllGather) -> None:
        """Let the thread bring the all-gather to its end."""
        if self._thread is None:
            # The thread holds this object weakly, so that it ends with it.
            self._thread = threading.Thread(
                target=_pass_on, args=(weakref.ref(self), self._queue), name="smddp-all-gather", daemon=True
            )
            self._thread.start()
        self._queue.put(gather)

    def _begin(self, item: GatherItem, work: MessageWork) -> _PendingAllGather:
        """Take pieces, and start all messages that wait for no other."""
        grid, size = self._grid, item.shard.numel()
        scratch = self.scratch.take(size)
        gather = _PendingAllGather(
            item, work, scratch, self.sort.take(grid.hosts * size), self._tags(_PARTS * grid.hosts)
        )
        parts = _parts(size)
        self._exchange(gather, parts)
        if size <= _SMALL:
            self._expect_blocks(gather)
        else:
            self._share(gather, parts)
        mine = item.outputs[grid.row[grid.local]]
        if mine.data_ptr() != item.shard.data_ptr():
            mine.copy_(item.shard)
        return gather

    def _exchange(self, gather: _PendingAllGather, parts: Sequence[slice]) -> None:
        """Exchange shards between hosts.

        This comes first, because other work can be done while these bytes travel.
        """
        grid, rows, sent = self._grid, self._rows(gather), gather.scratch.bytes
        for number, part in enumerate(parts):
            for host in reversed(self._other_hosts):
                tag = self._tag_of(gather, number, host)
                received = self._backend.recv([rows[host, part]], grid.column[host], tag)
                gather.arriving.append((received, host, part, tag))
        sent.copy_(gather.item.shard)
        for number, part in enumerate(parts):
            tag = self._tag_of(gather, number, grid.host)
            for host in self._other_hosts:
                gather.works.append(self._backend.send([sent[part]], grid.column[host], tag))

    def _share(self, gather: _PendingAllGather, parts: Sequence[slice]) -> None:
        """Send the own shard to the neighbours, and start to receive everything that they send."""
        grid, outputs = self._grid, gather.item.outputs
        for number, part in enumerate(parts):
            tag = self._tag_of(gather, number, grid.host)
            for neighbour in self._neighbours:
                gather.works.append(self._backend.send([gather.scratch.bytes[part]], neighbour, tag))
        for number, part in enumerate(parts):
            for host in (grid.host, *reversed(self._other_hosts)):
                tag = self._tag_of(gather, number, host)
                for neighbour in reversed(self._neighbours):
                    place = outputs[grid.rows[host][grid.row.index(neighbour)]][part]
                    gather.works.append(self._backend.recv([place], neighbour, tag))

    def _expect_blocks(self, gather: _PendingAllGather) -> None:
        """Start to receive one message from each neighbour, with its shard and those that it got from other hosts."""
        for neighbour in reversed(self._neighbours):
            block = torch.empty(self._grid.hosts, gather.item.shard.numel(), dtype=torch.uint8, device="cpu")
            gather.blocks[neighbour] = block
            gather.works.append(self._backend.recv([block], neighbour, gather.first_tag))

    def pass_on(self, gather: _PendingAllGather) -> None:
        """Bring one all-gather to its end.

        Raises:
            RuntimeError: it failed, or an earlier one did.
        """
        self.scratch.check()
        self._hand_on(gather)
        for work in gather.works:
            work.wait()
        grid, item = self._grid, gather.item
        for neighbour, block in gather.blocks.items():
            for row, shard in zip(grid.rows, block, strict=True):
                item.outputs[row[grid.row.index(neighbour)]].copy_(shard)
        if item.finish is not None:
            item.finish()
        self.sort.give_back(gather.sort)
        self.scratch.give_back(gather.scratch)

    def _hand_on(self, gather: _PendingAllGather) -> None:
        """Send the neighbours the data from the other hosts."""
        grid, item, rows = self._grid, gather.item, self._rows(gather)
        if gather.blocks:
            rows[grid.host].copy_(gather.scratch.bytes)
        for received, host, part, tag in gather.arriving:
            received.wait()
            if not gather.blocks:
                for neighbour in self._neighbours:
                    gather.works.append(self._backend.send([rows[host, part]], neighbour, tag))
                item.outputs[grid.column[host]][part].copy_(rows[host, part])
        if gather.blocks:
            for neighbour in self._neighbours:
                gather.works.append(self._backend.send([rows], neighbour, gather.first_tag))
            for host in self._other_hosts:
                item.outputs[grid.column[host]].copy_(rows[host])

    def failure(self, error: BaseException) -> str:
        """Return the error text for those that wait for a failed all-gather."""
        return f"the all-gather over {self._grid.size} ranks failed: {error}"

    def close(self) -> None:
        """End the thread; all-gathers under way may end first."""
        self._stop()
        if self._thread is not None:
            # A thread that is still inside gloo when the interpreter ends would abort the process.
            self._thread.join(_PATIENCE)

    def abort(self) -> None:
        """Stop all waits for pieces; messages end with their backend."""
        self.fail(RuntimeError("the group was aborted"))

    def fail(self, error: BaseException) -> None:
        """Record that no all-gather can complete any more."""
        self.scratch.fail(error)
        self.sort.fail(error)

    def _rows(self, gather: _PendingAllGather) -> torch.Tensor:
        """Return the sort buffer's piece, ``[hosts, bytes]``."""
        return gather.sort.bytes.view(self._grid.hosts, -1)

    def _tags(self, needed: int) -> int:
        """Return the first of enough tags for one all-gather, the same on all ranks."""
        if self._tag + needed > _LAST_TAG:
            self._tag = _FIRST_TAG
        first, self._tag = self._tag, self._tag + needed
        return first

    def _tag_of(self, gather: _PendingAllGather, part: int, host: int) -> int:
        return gather.first_tag + part * self._grid.hosts + host


def _pass_on(weak: weakref.ref[MessageGather], waiting: queue.SimpleQueue[_PendingAllGather | None]) -> None:
    """Complete all-gathers in their order, on one thread, so that all ranks hand on in the same order."""
    while True:
        gather, owner = waiting.get(), weak()
        if owner is None or (gather is None and waiting.empty()):
            return
        if gather is None:  # the all-gathers that had to wait for room are behind it
            waiting.put(None)
        else:
            _finish(owner, gather)
        del owner, gather


def _finish(owner: MessageGather, gather: _PendingAllGather) -> None:
    try:
        owner.pass_on(gather)
    except BaseException as error:  # on a thread of its own: the wait for the work raises it
        owner.fail(error)
        gather.work.finish(owner.failure(error))
    else:
        gather.work.finish()
    owner.begin_later()


def _parts(size: int) -> list[slice]:
    step = max(_LEAST_PART, -(-size // _PARTS))
    return [slice(first, min(first + step, size)) for first in range(0, size, step)]


def _others(me: int, size: int) -> list[int]:
    """Return all numbers but ``me``, the next one first, so that not all ranks send to the same one."""
    return [(me + distance) % size for distance in range(1, size)]
