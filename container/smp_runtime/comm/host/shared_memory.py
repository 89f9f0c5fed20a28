"""Shared memory of the ranks of one host: each writes to its own arena, and reads those of the others.

An arena begins with a list of entries for the tensors that its rank has published. An entry holds the readers, the
group, the sequence number in that group, and the offset. A reader waits for an entry, reads the tensor in place, and
marks the entry as read. Then the writer may reuse the memory. The only system call is the one that wakes a reader.
"""

from __future__ import annotations

import ctypes
import mmap
import os
import platform
import select
import struct
import sys
import threading
import time
import weakref
from collections import deque
from collections.abc import Sequence
from typing import NamedTuple

import torch

from smp_runtime.comm.waiting import timeout_seconds

#: Most ranks of a host, as many as an entry has bits for.
MOST_RANKS = 62

#: Most entries that some reader has not read. A rank with this many waits before it publishes more.
_ENTRIES = 4096
#: Words of 8 bytes before the entries: a token, how many were published, whether the rank has left.
_HEAD_WORDS, _TOKEN, _PUBLISHED, _LEFT = 8, 0, 1, 2
#: Words of an entry: number, group, sequence number in the group, bits of its readers, offset, bytes.
#: Then one word for each rank of the host: the entry's number + 1 once that rank has read it.
_NUMBER, _GROUP, _PLACE, _READERS, _OFFSET, _BYTES, _READ = range(7)

_PAGE = 4096
#: Bytes of free blocks that stay in memory for the next collectives. The rest goes back to the system.
_KEPT_BYTES = 64 * 2**20

#: Seconds after which a waiting rank looks whether the other one is still there.
_LOOK_SECONDS = 0.1
_FUTEX, _FUTEX_WAIT, _FUTEX_WAKE = 202, 0, 1
_TIMESPEC = struct.Struct("qq")


def is_possible() -> bool:
    """Return whether this system supports collectives over shared memory.

    One requirement is an x86-64 processor, which makes writes visible to other cores in order.
    """
    return sys.platform == "linux" and platform.machine() == "x86_64" and hasattr(os, "pidfd_open")


class Invitation(NamedTuple):
    """Data that a rank sends to others so that they can map its arena.

    It is a plain tuple, so that it can be sent in a job without a secret too.
    """

    process: int
    descriptor: int
    token: int


class Published(NamedTuple):
    """A tensor that another rank has published."""

    by: Neighbour
    number: int
    offset: int
    nbytes: int

    def tensor(self, dtype: torch.dtype, begin: int, elements: int) -> torch.Tensor:
        """Return some of the published elements as a vector, in place."""
        return self.by.tensor(self.offset + begin * dtype.itemsize, dtype, elements)

    def has_been_read(self) -> None:
        """Let the other rank use the memory again."""
        self.by.words[self.by.entry_at(self.number) + _READ + self.by.position] = self.number + 1


class _Words:
    """A mapped arena: its words, and tensors in it."""

    def __init__(self, mapped: mmap.mmap) -> None:
        self.mapped = mapped
        self.words = memoryview(mapped).cast("q")
        counter = ctypes.c_uint32.from_buffer(mapped, 8 * _PUBLISHED)
        self._counter = counter
        self.counter_address = ctypes.addressof(counter)

    def tensor(self, offset: int, dtype: torch.dtype, elements: int) -> torch.Tensor:
        """Return elements in the arena as a vector."""
        return torch.frombuffer(self.mapped, dtype=dtype, count=elements, offset=offset)


class Arena(_Words):
    """This rank's arena.

    Args:
        position: of this rank among those of its host.
        size: their number.
    """

    def __init__(self, position: int, size: int) -> None:
        self.position = position
        self._entry_words = _READ + size
        self._entries = _ENTRIES
        self._begin = -(-8 * (_HEAD_WORDS + self._entries * self._entry_words) // _PAGE) * _PAGE
        # Address space only: pages are there once they are written to.
        self._bytes = self._begin + os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
        self._descriptor = os.memfd_create("smp-collectives")
        os.ftruncate(self._descriptor, self._bytes)
        super().__init__(mmap.mmap(self._descriptor, self._bytes))
        # Seven bytes: the words are signed.
        self.words[_TOKEN] = int.from_bytes(os.urandom(7), "little")
        self._base = ctypes.addressof(ctypes.c_char.from_buffer(self.mapped))
        self._end = self._begin
        #: By size in bytes: the offset of each unused block, and whether it is in memory.
        self._free: dict[int, list[tuple[int, bool]]] = {}
        self._free_bytes = 0  # in memory
        self._returned: deque[tuple[int, int]] = deque()  # blocks of tensors that are gone
        #: By number, entries that some reader has not read: the tensor, which keeps its block, and the readers' positions.
        self._unread: dict[int, tuple[torch.Tensor, Sequence[int]]] = {}
        self._lock = threading.Lock()

    @property
    def invitation(self) -> Invitation:
        """Return the data by which the other ranks of the host map this arena."""
        return Invitation(os.getpid(), self._descriptor, self.words[_TOKEN])

    def empty(self, elements: int, dtype: torch.dtype) -> torch.Tensor:
        """Return an uninitialized vector in the arena.

        Its memory is reused when no tensor refers to it any more, and all ranks for which it was published have read it.
        """
        wanted = block_bytes(elements * dtype.itemsize)
        # Several threads of a rank take memory, such as a step's and autograd's.
        with self._lock:
            self._tidy()
            blocks = self._free.get(wanted)
            if blocks:
                offset, is_there = blocks.pop()
                self._free_bytes -= wanted * is_there
            else:
                offset, self._end = self._end, self._end + wanted
                if self._end > self._bytes:
                    raise MemoryError("the ranks of this host share more than the machine's memory")
        block = (ctypes.c_char * max(1, elements * dtype.itemsize)).from_buffer(self.mapped, offset)
        # Not under the lock: the last tensor can go wherever Python tidies up.
        weakref.finalize(block, self._returned.append, (offset, wanted)).atexit = False
        return torch.frombuffer(block, dtype=dtype, count=elements)

    def offset_of(self, tensor: torch.Tensor) -> int | None:
        """Return the offset of a tensor in the arena, or None if it is not in the arena."""
        offset = tensor.data_ptr() - self._base
        return offset if self._begin <= offset < self._bytes else None

    def publish(self, group: int, place: int, readers: Sequence[int], tensor: torch.Tensor) -> None:
        """Let the other ranks at these positions read a tensor of the arena, which is not to be changed before they have."""
        offset = self.offset_of(tensor)
        if offset is None:
            raise AssertionError("only what lies in the arena can be read by others")
        deadline = time.monotonic() + timeout_seconds()
        while not self._publish(group, place, readers, tensor, offset):
            if time.monotonic() > deadline:
                raise RuntimeError(f"timed out: other ranks of this host have not read {self._entries} tensors")
            # Readers do not wake the writer: a full list is rare, and a wake-up costs each read a system call.
            time.sleep(0.001)
        _call(self.counter_address, _FUTEX_WAKE, 2**31 - 1, None)

    def _publish(self, group: int, place: int, readers: Sequence[int], tensor: torch.Tensor, offset: int) -> bool:
        with self._lock:
            words, number = self.words, self.words[_PUBLISHED]
            if words[_LEFT]:
                raise RuntimeError("Connection closed by peer: this rank has left the collectives of its host")
            if number - self._entries in self._unread:
                self._tidy()
                if number - self._entries in self._unread:
                    return False
            at = self._entry(number)
            words[at + _NUMBER] = -1  # a reader that is far behind sees that it is another's
            words[at + _GROUP], words[at + _PLACE] = group, place
            words[at + _READERS] = sum(1 << reader for reader in readers)
            words[at + _OFFSET], words[at + _BYTES] = offset, tensor.nbytes
            # Last the number, then the count: readers take an entry when these show it, and stores become visible in order.
            words[at + _NUMBER] = number
            self._unread[number] = (tensor, tuple(readers))
            words[_PUBLISHED] = number + 1
            return True

    def leave(self) -> None:
        """Stop publishing; other ranks can still read the tensors published so far."""
        self.words[_LEFT] = 1
        _call(self.counter_address, _FUTEX_WAKE, 2**31 - 1, None)
        if self._descriptor >= 0:
            os.close(self._descriptor)
            self._descriptor = -1

    def _entry(self, number: int) -> int:
        return _HEAD_WORDS + number % self._entries * self._entry_words

    def _tidy(self) -> None:
        """Free the entries that all readers have read, and the blocks that no tensor uses any more."""
        for number in list(self._unread):
            at = self._entry(number) + _READ
            if all(self.words[at + reader] == number + 1 for reader in self._unread[number][1]):
                del self._unread[number]
        while self._returned:
            offset, size = self._returned.popleft()
            stays = self._free_bytes + size <= _KEPT_BYTES
            if stays:
                self._free_bytes += size
            else:
                self.mapped.madvise(mmap.MADV_REMOVE, offset, size)
            self._free.setdefault(size, []).append((offset, stays))


class Neighbour(_Words):
    """The arena of another rank of this host.

    Args:
        rank: its global number, for messages.
        position: of the rank that reads.
        size: ranks of the host.

    Raises:
        OSError: it cannot be reached.
    """

    def __init__(self, invitation: Invitation, rank: int, position: int, size: int) -> None:
        self.rank = rank
        self.position = position
        self._entry_words = _READ + size
        self._entries = _ENTRIES
        descriptor = os.open(f"/proc/{invitation.process}/fd/{invitation.descriptor}", os.O_RDWR | os.O_CLOEXEC)
        try:
            super().__init__(mmap.mmap(descriptor, 0))
        finally:
            os.close(descriptor)
        if self.words[_TOKEN] != invitation.token:
            raise OSError(f"process {invitation.process} is not rank {rank}")
        self._process = os.pidfd_open(invitation.process)
        weakref.finalize(self, os.close, self._process)
        self._found: dict[tuple[int, int], Published] = {}
        self._seen = 0
        # Groups of this rank may run on several threads, and all read one list of what the other rank publishes.
        self._lock = threading.Lock()

    def published(self, group: int, place: int, nbytes: int) -> Published:
        """Wait for the tensor that the rank publishes as the ``place``-th of a group, and return it.

        Raises:
            RuntimeError: it has ended, or does not come in time, worded as gloo would; or it has other than ``nbytes`` bytes.
        """
        deadline = time.monotonic() + timeout_seconds()
        while True:
            # Before the look, so that what the rank published last, just before it left, is still found.
            has_left = bool(self.words[_LEFT]) or _has_ended(self._process)
            with self._lock:
                self._look()
                found, count = self._found.pop((group, place), None), self._seen
            if found is not None:
                if found.nbytes != nbytes:
                    raise RuntimeError(
                        f"rank {self.rank} takes part with {found.nbytes:,} bytes in a collective in which this rank has "
                        f"{nbytes:,}; let every rank make the same calls in the same order"
                    )
                return found
            if has_left:
                raise RuntimeError(f"Connection closed by peer: rank {self.rank} has left a collective of this host")
            left = deadline - time.monotonic()
            if left <= 0:
                raise RuntimeError(
                    f"Timed out waiting {timeout_seconds():g} s for rank {self.rank} in a collective of this host"
                )
            _call(self.counter_address, _FUTEX_WAIT, count & 0xFFFFFFFF, min(left, _LOOK_SECONDS))

    def entry_at(self, number: int) -> int:
        """Return the index of the word at which an entry begins."""
        return _HEAD_WORDS + number % self._entries * self._entry_words

    def _look(self) -> None:
        words, count = self.words, self.words[_PUBLISHED]
        while self._seen < count:
            number, self._seen = self._seen, self._seen + 1
            at = self.entry_at(number)
            # One that is for this rank stays until it has read it; another may have been written over meanwhile.
            if words[at + _NUMBER] == number and words[at + _READERS] >> self.position & 1:
                key = (words[at + _GROUP], words[at + _PLACE])
                self._found[key] = Published(self, number, words[at + _OFFSET], words[at + _BYTES])


def block_bytes(nbytes: int) -> int:
    """Return the size in bytes of the block for ``nbytes``: whole pages, and normally at most an eighth more.

    Few sizes so serve all tensors.
    """
    step = max(_PAGE, 1 << max(0, nbytes.bit_length() - 4))
    return max(_PAGE, -(-nbytes // step) * step)


_libc = ctypes.CDLL(None, use_errno=True) if sys.platform == "linux" else None


def _call(address: int, operation: int, value: int, seconds: float | None) -> None:
    """Wait while the number there is ``value``, or wake who does; returns early now and then."""
    timeout = None if seconds is None else _TIMESPEC.pack(int(seconds), int(seconds % 1 * 1e9))
    if _libc is not None:
        _libc.syscall(
            ctypes.c_long(_FUTEX),
            ctypes.c_void_p(address),
            ctypes.c_int(operation),
            ctypes.c_uint32(value),
            timeout,
            None,
            0,
        )


def _has_ended(process: int) -> bool:
    return bool(select.select([process], [], [], 0)[0]) if process < 1024 else bool(_polled(process))


def _polled(process: int) -> list[tuple[int, int]]:
    poll = select.poll()
    poll.register(process, select.POLLIN)
    return poll.poll(0)
