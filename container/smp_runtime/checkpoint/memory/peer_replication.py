"""Copies of a host's state on the next host: what no other host has is sent there, so that any one host may be lost.

Rank ``i`` of a host sends to rank ``i`` of the next, the last host to the first. A thread does it while the training goes on, over
connections that nothing else uses. All ranks take part in each exchange, also those that have nothing to send, and begin the next
only when all have ended it: a generation that any rank writes over is one that is older than what all hosts have.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from smp_runtime.checkpoint.memory.host_folder import (
    Data,
    Generation,
    StoredTensor,
    head_path,
    of_rank,
    serialize,
    write_whole,
)
from smp_runtime.comm.control import timeout_seconds

logger = logging.getLogger("smp")

#: Bytes of a message; bounded, because received data is in memory twice.
_MESSAGE_BYTES = 2**26

#: In place of a generation: nothing this time; nothing any more.
_NOTHING, _OFF = 0, -1


@dataclass(frozen=True)
class Outgoing:
    """A copy for the buddy.

    Attributes:
        head: the content of its head.
        layout: the file that its head means.
        data: a view of its bytes, which stay as they are until the exchange has ended.
        data_number: in the name of the file of its data.
    """

    generation: Generation
    head: Mapping[str, Any]
    layout: Path
    data: torch.Tensor
    data_number: int


class _Mirror:
    """The last two copies of one rank of another host, kept on this host.

    Args:
        rank: that rank.
    """

    def __init__(self, folder: Path, rank: int) -> None:
        self._folder = folder
        self.rank = rank
        self._data: dict[int, tuple[Data, Path | None]] = {}  # with the head that means it, oldest first
        self._layouts: dict[str, None] = {}

    def room(self, start: int, number: int, size: int) -> torch.Tensor:
        """Discard the copy in buffer ``number``, and return ``size`` bytes for the next one.

        Raises OSError if there is not enough memory.
        """
        data, head = self._data.pop(number, (None, None))
        if head is not None:
            head.unlink()
        slots = (StoredTensor(0, (size,), torch.uint8),)
        if data is None or data.slots != slots:
            if data is not None:
                data.path.unlink()
            while len(self._data) > 1:
                self._forget(next(iter(self._data)))
            data = Data(self._folder / of_rank(start, self.rank, number, "data"), slots, new=True)
        self._data[number] = data, None
        return data.bytes[:size]

    def complete(self, number: int, generation: Generation, head: bytes, layout: tuple[str, str] | None) -> None:
        """Mark the data of a buffer as complete; ``layout`` is passed if this host does not have it yet."""
        if layout is not None:
            write_whole(self._folder / layout[0], layout[1].encode())
            self._layouts[layout[0]] = None
            while len(self._layouts) > 2:
                former = next(iter(self._layouts))
                (self._folder / former).unlink(missing_ok=True)
                del self._layouts[former]
        path = head_path(self._folder, generation, self.rank)
        write_whole(path, head)
        self._data[number] = self._data[number][0], path

    def clear(self) -> None:
        """Free the memory."""
        for number in list(self._data):
            self._forget(number)

    def _forget(self, number: int) -> None:
        data, head = self._data.pop(number)
        if head is not None:
            head.unlink(missing_ok=True)
        data.path.unlink(missing_ok=True)


class PeerReplication:
    """The exchanges of one rank; every rank of the job makes one, and begins the same exchanges.

    Args:
        hosts: by global rank, the number of its host; there are several.
        folder: of this rank's host.

    Attributes:
        sent: bytes that this rank has sent in the last exchange.
        is_over: whether all ranks know that there are no more exchanges.
    """

    def __init__(self, rank: int, hosts: Sequence[int], folder: Path) -> None:
        self._rank, self._size = rank, len(hosts)
        self._buddy = buddies_of(hosts)[rank]
        self._mirrors = [_Mirror(folder, other) for other, to in enumerate(buddies_of(hosts)) if to == rank]
        self._group = dist.new_group(
            list(range(self._size)), timeout=timedelta(seconds=timeout_seconds()), backend="gloo"
        )
        self._thread: threading.Thread | None = None
        self._layout = ""
        self._rooms: list[torch.Tensor] = []
        self.sent = 0
        self.is_over = False

    def begin(self, outgoing: Outgoing | None, *, ends: bool = False) -> None:
        """Begin an exchange, when the one before has ended; every rank calls it.

        Args:
            outgoing: None for nothing, where this rank has no copy.
            ends: this rank will have none any more.
        """
        self.wait()
        if not self.is_over:
            # A daemon: a buddy that is gone must not keep this process from ending.
            self._thread = threading.Thread(target=self._run, args=(outgoing, ends), name="smp-buddies", daemon=True)
            self._thread.start()

    def wait(self) -> None:
        """Return when the exchange under way, if any, has ended on all ranks."""
        if self._thread is not None:
            self._thread.join()
            self._thread = None

    def _run(self, outgoing: Outgoing | None, ends: bool) -> None:
        try:
            self._exchange(outgoing, ends)
        except Exception as error:
            # The training meets the same soon, or does not need this: other ranks are gone.
            self.is_over = True
            logger.debug("an exchange of memory checkpoints between hosts has failed: %s", error)

    @torch.no_grad()
    def _exchange(self, outgoing: Outgoing | None, ends: bool) -> None:
        head, layout = b"", b""
        if outgoing is not None:
            head = serialize(outgoing.head)
            if outgoing.layout.name != self._layout:
                layout = f"{outgoing.layout.name}\n{outgoing.layout.read_text()}".encode()
        size = 0 if outgoing is None else outgoing.data.numel()
        number = _OFF if ends else _NOTHING if outgoing is None else outgoing.generation.number
        file = 0 if outgoing is None else outgoing.data_number
        mine = torch.tensor([number, file, len(head), len(layout), size], device="cpu")
        table = torch.empty(self._size, len(mine), dtype=torch.int64, device="cpu")
        dist.all_gather(list(table.unbind()), mine, group=self._group)
        told = [[int(value) for value in row] for row in table.tolist()]
        if any(row[0] == _OFF for row in told):
            self._end()
            return
        if outgoing is None or len({row[0] for row in told}) > 1:
            return  # not all have this generation: there is nothing that a host could be replaced with
        if not self._have_room(outgoing.generation.start, told):
            self._end()
            return
        received = self._swap(_bytes(head + layout), outgoing.data, told)
        for mirror, text in zip(self._mirrors, received, strict=True):
            number, file, heads, _, _ = told[mirror.rank]
            name, _, content = text[heads:].decode().partition("\n")
            generation = Generation(outgoing.generation.start, number)
            mirror.complete(file, generation, text[:heads], (name, content) if name else None)
        self.sent = size + len(head) + len(layout)
        self._layout = outgoing.layout.name
        # Barrier: no rank overwrites an older copy before all ranks have this one.
        dist.all_reduce(torch.zeros(1, device="cpu"), group=self._group)

    def _swap(self, words: torch.Tensor, data: torch.Tensor, told: list[list[int]]) -> list[bytes]:
        """Send to the buddy, and receive from all ranks that have this rank as their buddy.

        Received data is written into ``_rooms``.

        Returns:
            The received texts, by mirror.
        """
        received = []
        for mirror in self._mirrors:
            sizes = told[mirror.rank]
            received.append(torch.empty(sizes[2] + sizes[3], dtype=torch.uint8, device="cpu"))
        # All sends and receives begin before any is waited for: buddies form rings, in which waiting in turn would block.
        work = []
        for part in (*_messages(words), *_messages(data)):
            work.append(dist.isend(part, self._buddy, group=self._group))
        for mirror, text, room in zip(self._mirrors, received, self._rooms, strict=True):
            for part in (*_messages(text), *_messages(room)):
                work.append(dist.irecv(part, mirror.rank, group=self._group))
        for each in work:
            if each is not None:
                each.wait()
        return [text.numpy().tobytes() for text in received]

    def _have_room(self, start: int, told: list[list[int]]) -> bool:
        """Make room for what comes; whether all ranks could."""
        had_room = torch.ones(1, device="cpu")
        try:
            self._rooms = [m.room(start, told[m.rank][1], told[m.rank][4]) for m in self._mirrors]
        except OSError as error:
            had_room.zero_()
            logger.warning(
                "copies of memory checkpoints on another host end: rank %d has no room in shared memory for two copies of %s bytes "
                "of ranks %s (%s); give the container more shared memory",
                self._rank,
                f"{sum(told[m.rank][4] for m in self._mirrors):,}",
                [m.rank for m in self._mirrors],
                error.strerror or error,
            )
        dist.all_reduce(had_room, op=dist.ReduceOp.MIN, group=self._group)
        return bool(had_room.item())

    def _end(self) -> None:
        self.is_over = True
        self._rooms = []
        for mirror in self._mirrors:
            mirror.clear()


def buddies_of(hosts: Sequence[int]) -> list[int]:
    """Return, by rank, the rank that keeps its copy.

    It has the same place on the next host; if that host has fewer ranks, places wrap around.

    Args:
        hosts: by global rank, the number of its host, from 0 without gaps.
    """
    members = [[rank for rank, host in enumerate(hosts) if host == number] for number in range(max(hosts) + 1)]
    found = []
    for rank, host in enumerate(hosts):
        others = members[(host + 1) % len(members)]
        found.append(others[members[host].index(rank) % len(others)])
    return found


def _bytes(content: bytes) -> torch.Tensor:
    return torch.frombuffer(bytearray(content), dtype=torch.uint8)


def _messages(flat: torch.Tensor) -> list[torch.Tensor]:
    """Split a tensor into parts of at most one message; none if it is empty."""
    return list(flat.split(_MESSAGE_BYTES)) if flat.numel() else []
