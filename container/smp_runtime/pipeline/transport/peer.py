"""The connection to one other stage: written without waiting for the other side, read ahead."""

from __future__ import annotations

import contextlib
import select
import socket
import threading
from collections import deque
from collections.abc import Sequence
from typing import TYPE_CHECKING

import torch

if TYPE_CHECKING:
    from smp_runtime.pipeline.transport.tensor_channels import TensorChannel

_READ_AHEAD_BYTES = 2**16
#: The system takes at most 1,024 pieces in one call.
_MOST_PIECES = 512
#: How much later than an error of a process group the end of the connection may show, when a rank has died.
_DEATH_SECONDS = 2.0
#: For freeing one process group.
_FREE_SECONDS = 2.0


class Ended(Exception):
    """The end of a connection; its argument is the reason."""


class Peer:
    """The connection to and from one other stage."""

    def __init__(
        self,
        stage: int,
        rank: int,
        connection: socket.socket,
        out: Sequence[TensorChannel],
        back: Sequence[TensorChannel],
    ):
        self.stage = stage
        self.rank = rank
        self.connection = connection
        self.out = out
        self.back = back
        #: Held while tensors are posted and their message is written, so that all channels see one order. Messages
        #: without such tensors do not take it: their sender may hold the pipeline's lock, which a receiver thread needs.
        self.order = threading.Lock()
        #: Guards the attributes below; notified when they change.
        self.changed = threading.Condition()
        #: Unwritten pieces, and the tensors that must live as long.
        self.backlog: deque[tuple[list[memoryview], Sequence[torch.Tensor]]] = deque()
        self.nudged = False  # a message that can wait is pending
        self.broken: BaseException | None = None  # the connection is lost
        self.left = False  # the other side has sent its goodbye
        self.closed = False  # this side has
        self.reading = True
        self.opens = False  # the process group to the other side is connected, or about to be
        self.opening: list[threading.Thread] = []  # connect process groups, in either direction
        self._frees = False  # the channels are closed, or about to be
        self._freed = threading.Event()

    def __str__(self) -> str:
        return f"stage {self.stage} (rank {self.rank})"

    def write(self, pieces: list[memoryview], lasting: list[bool], alive: Sequence[torch.Tensor] = ()) -> None:
        """Write the pieces that the system accepts at once, and leave the rest to the sender thread.

        Args:
            lasting: for each piece whether its memory stays unchanged; the unwritten rest of other pieces is copied.
            alive: tensors that own the memory of the pieces.
        """
        with self.changed:
            if self.broken is not None:
                return  # reported already, and no reader is left
            if not self.backlog:
                try:
                    pieces = write_pieces(self.connection, pieces, socket.MSG_DONTWAIT)
                except OSError as error:
                    self.break_off(error)
                    return
            if pieces:
                lasting = lasting[len(lasting) - len(pieces) :]
                rest = [p if lasts else memoryview(bytes(p)) for p, lasts in zip(pieces, lasting, strict=True)]
                self.backlog.append((rest, alive))
                self.changed.notify_all()

    def write_last(self, words: bytes, error: BaseException) -> None:
        """Write ``words`` after the pending bytes, and nothing afterwards."""
        with self.changed:
            self.write([memoryview(words)], [True])
            self.broken = self.broken or error
            self.changed.notify_all()

    def has_ended(self, error: BaseException) -> bool:
        """Return whether the other side's end explains an error in the transfer of a tensor."""
        if self.broken is not None:
            return True
        if not isinstance(error, RuntimeError) or isinstance(error, torch.cuda.OutOfMemoryError):
            return False  # no error of a process group
        ended = select.poll()
        try:
            ended.register(self.connection, getattr(select, "POLLRDHUP", 0))
        except (OSError, ValueError):
            return True  # closed
        return bool(ended.poll(_DEATH_SECONDS * 1000))

    @property
    def quiet_seconds(self) -> float | None:
        """Return the time between the last tensor and this side's goodbye; None if no process group is connected."""
        known = [channel.quiet_seconds for channel in (*self.out, *self.back)]
        return max((seconds for seconds in known if seconds is not None), default=None)

    def close(self) -> None:
        """End this side after its goodbye."""
        with self.changed:
            self.closed = True
            self.changed.notify_all()
            # The receiver thread still reads: closing a connection with unread data would look like a crash.
            if self.reading:
                with contextlib.suppress(OSError):
                    self.connection.shutdown(socket.SHUT_WR)
            else:
                self.connection.close()

    def end_reading(self) -> None:
        """End the other side, at the end of the receiver thread."""
        with self.changed:
            self.reading = False
            closed = self.closed
            if closed:
                self.connection.close()
            self.changed.notify_all()
        if closed:
            self.free_channels(0.0)

    def free_channels(self, patience: float) -> None:
        """Free the process groups, once.

        Both sides have said goodbye by then, so all tensors have arrived. Otherwise a rank would free memory from which the other
        one still receives.

        Args:
            patience: seconds to wait for the other side's goodbye. A stage that goes on without this one does not say it.
                With 0 the call also returns at once if another thread frees the groups.
        """
        channels = (*self.out, *self.back)
        with self.changed:
            if self.quiet_seconds is not None:
                self.changed.wait_for(lambda: not self.reading, patience)
            # The closing thread and the receiver thread both come here; a process group is freed once.
            is_first = not self._frees
            self._frees = True
        if is_first:
            try:
                for channel in channels:
                    channel.close(_FREE_SECONDS)
            finally:
                self._freed.set()
        elif patience:
            # The receiver thread frees them. The script may end behind this call, and with it the driver that NCCL needs.
            self._freed.wait(_FREE_SECONDS * len(channels))

    def break_off(self, error: BaseException) -> None:
        """Give up writing and wake the receiver thread, which reports the loss after what still came in."""
        with self.changed:
            if self.broken is None:
                self.broken = error
            self.backlog.clear()
            self.changed.notify_all()
        with contextlib.suppress(OSError):
            self.connection.shutdown(socket.SHUT_RDWR)


class ConnectionReader:
    """A reader that reads a connection ahead, so that a small message costs one call."""

    def __init__(self, connection: socket.socket) -> None:
        self._connection = connection
        self._memory = memoryview(bytearray(_READ_AHEAD_BYTES))
        self._start = self._end = 0

    def take(self, size: int) -> memoryview:
        """Return the next bytes, valid until the next call."""
        if size > len(self._memory):
            large = memoryview(bytearray(size))
            self.fill(large)
            return large
        have = self._end - self._start
        if have < size:
            self._memory[:have] = self._memory[self._start : self._end]
            self._start, self._end = 0, have
            while self._end < size:
                self._end += self._more(self._memory[self._end :])
        self._start += size
        return self._memory[self._start - size : self._start]

    def fill(self, target: memoryview) -> None:
        """Fill ``target`` with the next bytes."""
        done = min(len(target), self._end - self._start)
        target[:done] = self._memory[self._start : self._start + done]
        self._start += done
        while done < len(target):
            done += self._more(target[done:], socket.MSG_WAITALL)

    def _more(self, target: memoryview, flags: int = 0) -> int:
        try:
            count = self._connection.recv_into(target, 0, flags)
        except OSError as error:
            raise Ended(error) from error
        if not count:
            raise Ended(EOFError("the stream has ended"))
        return count


def write_pieces(connection: socket.socket, pieces: list[memoryview], flags: int) -> list[memoryview]:
    """Write pieces until all are out or, with ``MSG_DONTWAIT``, the system takes no more; return the rest."""
    first = 0
    pieces = list(pieces)
    while first < len(pieces):
        try:
            count = connection.sendmsg(pieces[first : first + _MOST_PIECES], (), flags)
        except BlockingIOError:
            break
        while first < len(pieces) and count >= len(pieces[first]):
            count -= len(pieces[first])
            first += 1
        if count:
            pieces[first] = pieces[first][count:]
    return pieces[first:]
