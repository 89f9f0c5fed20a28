"""Messages with tensors between the ranks of a pipeline group: in order, without waiting for the receiver."""

from __future__ import annotations

import contextlib
import logging
import os
import pickle
import socket
import struct
import threading
import time
import weakref
from collections import deque
from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.distributed as dist

from smp_runtime.comm.control import ControlPlane, timeout_seconds
from smp_runtime.errors import DeadlineError, SMPRuntimeError
from smp_runtime.pipeline.connections import connect_all
from smp_runtime.pipeline.lanes import Announcement, Lane, announce, byte_count, bytes_of, choose_lanes, dense, lane_of

logger = logging.getLogger("smp")

#: Kind of a frame, then the bytes of its pickled part.
_FRAME = struct.Struct("!BQ")
_MESSAGE, _GOODBYE = 0, 1

_READ_AHEAD_BYTES = 2**16
#: The system takes at most 1,024 pieces in one call.
_MOST_PIECES = 512
_CLOSE_SECONDS = 10.0

_open_transports: weakref.WeakSet[Transport] = weakref.WeakSet()


class _Peer:
    """The way to and from one other stage."""

    def __init__(self, stage: int, rank: int, connection: socket.socket, out: Sequence[Lane], back: Sequence[Lane]):
        self.stage = stage
        self.rank = rank
        self.connection = connection
        self.out = out
        self.back = back
        #: Held while a message is announced and its tensors are posted: all lanes see one order.
        self.order = threading.Lock()
        #: Guards what follows; told when it changes.
        self.changed = threading.Condition()
        #: Pieces, and what must live as long as they do.
        self.backlog: deque[tuple[list[memoryview], Sequence[torch.Tensor]]] = deque()
        self.nudged = False  # there is something to tell that can wait
        self.broken: BaseException | None = None  # the connection is lost
        self.left = False  # the other side has said goodbye
        self.closed = False  # this side has
        self.reading = True

    def __str__(self) -> str:
        return f"stage {self.stage} (rank {self.rank})"

    def write(self, pieces: list[memoryview], lasting: list[bool], alive: Sequence[torch.Tensor] = ()) -> None:
        """Hand pieces to the system as far as it takes them at once, the rest to the sender thread.

        Args:
            lasting: for each piece whether nobody will change its memory; the rest of others is copied.
            alive: whose memory the pieces are.
        """
        with self.changed:
            if self.broken is not None:
                return  # reported already, and there is nobody to read it
            if not self.backlog:
                try:
                    pieces = _write(self.connection, pieces, socket.MSG_DONTWAIT)
                except OSError as error:
                    self.break_off(error)
                    return
            if pieces:
                lasting = lasting[len(lasting) - len(pieces) :]
                rest = [p if lasts else memoryview(bytes(p)) for p, lasts in zip(pieces, lasting, strict=True)]
                self.backlog.append((rest, alive))
                self.changed.notify_all()

    def break_off(self, error: BaseException) -> None:
        """Give up writing and wake the receiver thread, which reports the loss after what still came in."""
        with self.changed:
            if self.broken is None:
                self.broken = error
            self.backlog.clear()
            self.changed.notify_all()
        with contextlib.suppress(OSError):
            self.connection.shutdown(socket.SHUT_RDWR)


class Transport:
    """Messages between the ranks of one pipeline group.

    A message is a small picklable head and tensors of any dtype and shape. Messages from one stage arrive in the
    order of their ``send``. Collective over ``ranks``: all of them construct it.

    Args:
        control: used once, to exchange addresses.
        ranks: global ranks of the group; a stage is a position in it.
        device: where received tensors of an accelerator are put; tensors in host memory stay there.
        on_message: called as ``on_message(stage, head, tensors)`` on the receiver thread of that stage (on the
            sender's own thread for a message to the own stage); must be quick, since it holds up what comes after.
        on_lost: called as ``on_lost(stage, error)`` on the receiver thread, once when the connection to a stage that
            has not closed its transport breaks, and for every exception of ``on_message``.
        on_left: called as ``on_left(stage)`` on the receiver thread when a stage has closed its transport in good order,
            after its last message and before sending to it raises.
        afterthought: called as ``afterthought(stage)`` on a thread of its own after :meth:`nudge`; gives a head to send, or
            None when there is nothing left to say.
        make_group: ``make_group((source, destination))``, a process group for tensors of ``device`` from one global
            rank to another, such as :func:`~smp_runtime.pipeline.lanes.directed_groups` returns. None: they travel
            through host memory.
        consumer: CUDA stream that computes with received tensors; None for the default stream.
        delay: for tests: seconds by which the receiver holds back each message.

    Attributes:
        stage: position of this rank.
        bytes_sent: bytes of heads and tensors, by stage.
        messages_sent: by stage.

    Raises:
        DeadlineError, SMPRuntimeError: a rank of the group did not connect in time or cannot be reached.
    """

    def __init__(
        self,
        control: ControlPlane,
        ranks: Sequence[int],
        *,
        device: torch.device,
        on_message: Callable[[int, Any, list[torch.Tensor]], None],
        on_lost: Callable[[int, BaseException], None],
        on_left: Callable[[int], None] = lambda stage: None,
        afterthought: Callable[[int], Any] = lambda stage: None,
        make_group: Callable[[tuple[int, int]], dist.ProcessGroup] | None = None,
        consumer: torch.cuda.Stream | None = None,
        delay: Callable[[], float] | None = None,
    ) -> None:
        mine = control.rank
        self.stage = list(ranks).index(mine)
        self._device = device
        self._on_message = on_message
        self._on_lost = on_lost
        self._on_left = on_left
        self._afterthought = afterthought
        self._delay = delay
        self._closed = False
        self.bytes_sent = dict.fromkeys(range(len(ranks)), 0)
        self.messages_sent = dict.fromkeys(range(len(ranks)), 0)
        self._peers: dict[int, _Peer] = {}
        for stage, connection in sorted(connect_all(control, ranks, timeout_seconds()).items()):
            rank = ranks[stage]
            out = choose_lanes(device, rank, make_group and make_group((mine, rank)), consumer)
            back = choose_lanes(device, rank, make_group and make_group((rank, mine)), consumer)
            self._peers[stage] = _Peer(stage, rank, connection, out, back)
        _open_transports.add(self)
        for peer in self._peers.values():
            for work, name in ((self._receive, "from"), (self._work_off, "to")):
                threading.Thread(target=work, args=(peer,), name=f"smp-{name}-{peer.stage}", daemon=True).start()

    def send(self, stage: int, head: Any, tensors: Sequence[torch.Tensor] = (), *, copy: bool = True) -> None:
        """Send a message; returns without waiting for the receiver.

        A message to the own stage is delivered before this returns, tensors as they are. One to a stage whose
        connection is lost is dropped: ``on_lost`` has told, or is about to.

        Args:
            stage: receiver.
            head: small; pickled.
            tensors: sent detached, with their strides if they fill their memory.
            copy: False promises that nobody changes the tensors' memory any more, which saves a copy of what cannot be
                written at once.

        Raises:
            SMPRuntimeError: that stage or this one has closed its transport.
            SMPUserError: a sparse, quantized or meta tensor, or one on a foreign device.
        """
        if stage == self.stage:
            self.messages_sent[stage] += 1
            self._on_message(stage, head, list(tensors))
            return
        peer = self._peers[stage]
        announced: list[tuple] = []  # without their class, which would cost as much as all else
        posted: list[tuple[Lane, torch.Tensor, bool]] = []
        pieces = [memoryview(b"")]
        lasting = [True]
        alive = []
        size = 0
        for given in tensors:
            lane = lane_of(given, peer.out, self._device)
            tensor = dense(given)
            announced.append(tuple(announce(tensor, lane)))
            inline = peer.out[lane].inline(tensor)
            # Memory that was made on the way here belongs to nobody else.
            made = tensor if inline is None else inline
            ours = not copy or (made is not given and made.data_ptr() != given.data_ptr())
            count = byte_count(tensor)
            if inline is None:
                posted.append((peer.out[lane], tensor, not ours))
            elif count:
                pieces.append(bytes_of(inline, count))
                lasting.append(ours)
                alive.append(inline)
            size += count
        body = pickle.dumps((head, announced), protocol=5)
        pieces[0] = memoryview(_FRAME.pack(_MESSAGE, len(body)) + body)
        with peer.order:
            if self._closed:
                raise SMPRuntimeError(f"stage {self.stage} sends to {peer} after closing its transport")
            if peer.left:
                raise SMPRuntimeError(
                    f"stage {self.stage} sends to {peer}, which has closed its transport in good order; every stage must "
                    "finish the same steps before one of them leaves"
                )
            peer.write(pieces, lasting, alive)
            for out, tensor, shared in posted:
                out.post(tensor, shared)
            self.bytes_sent[stage] += len(pieces[0]) + size
            self.messages_sent[stage] += 1

    def nudge(self, stage: int) -> None:
        """Have the afterthought for a stage sent soon, while the calling thread goes on with what is more urgent."""
        peer = self._peers[stage]
        with peer.changed:
            peer.nudged = True
            peer.changed.notify_all()

    def flush(self, seconds: float) -> None:
        """Return when everything sent so far is out of this process's memory.

        Raises:
            DeadlineError: a stage did not take it within ``seconds``.
        """
        deadline = time.monotonic() + seconds
        for peer in self._peers.values():
            with peer.changed:
                out = peer.changed.wait_for(lambda peer=peer: not peer.backlog, deadline - time.monotonic())  # type: ignore[misc]
                waiting = sum(len(piece) for pieces, _ in peer.backlog for piece in pieces)
            if not out:
                raise DeadlineError(
                    f"{waiting:,} bytes for {peer} are still here after {seconds:g} s, because it does not read; check that "
                    "it still runs"
                )
            if peer.broken is None and not peer.left:
                for lane in peer.out:
                    lane.flush(deadline)

    def close(self) -> None:
        """Say goodbye to every stage and stop delivering; what was sent is given a few seconds to leave."""
        if self._closed:
            return
        self._closed = True
        goodbye = memoryview(_FRAME.pack(_GOODBYE, 0))
        for peer in self._peers.values():
            with peer.order:
                if not peer.left:
                    peer.write([goodbye], [True])
        try:
            self.flush(min(_CLOSE_SECONDS, timeout_seconds()))
        except Exception as error:
            logger.warning("closing the transport of stage %d: %s", self.stage, error)
        for peer in self._peers.values():
            with peer.changed:
                peer.closed = True
                peer.changed.notify_all()
                # The receiver thread still takes what comes, since closing on unread data would look like a crash.
                if peer.reading:
                    with contextlib.suppress(OSError):
                        peer.connection.shutdown(socket.SHUT_WR)
                else:
                    peer.connection.close()
        _open_transports.discard(self)

    def _work_off(self, peer: _Peer) -> None:
        """The sender thread: writes what could not be written at once, and what can wait."""
        while True:
            with peer.changed:
                peer.changed.wait_for(
                    lambda: bool(peer.backlog) or peer.nudged or peer.closed or peer.broken is not None
                )
                nudged, peer.nudged = peer.nudged, False
                if not peer.backlog and (peer.closed or peer.broken is not None):
                    return
                pieces = peer.backlog[0][0] if peer.backlog else []
            if nudged and (head := self._afterthought(peer.stage)) is not None:
                with contextlib.suppress(SMPRuntimeError):  # nobody is left who could hear it
                    self.send(peer.stage, head)
            if not pieces:
                continue
            try:
                _write(peer.connection, pieces, 0)
            except OSError as error:
                peer.break_off(error)
                return
            with peer.changed:
                if peer.backlog:
                    peer.backlog.popleft()
                peer.changed.notify_all()

    def _receive(self, peer: _Peer) -> None:
        """The receiver thread: hands on messages until the other side leaves or is lost."""
        reader = _Reader(peer.connection)
        try:
            while True:
                kind, size = _FRAME.unpack(reader.take(_FRAME.size))
                if kind == _GOODBYE:
                    self._on_left(peer.stage)
                    peer.left = True
                    return
                head, announced = pickle.loads(reader.take(size))
                tensors = [self._next_tensor(peer, Announcement(*each), reader) for each in announced]
                if self._delay is not None:
                    time.sleep(self._delay())
                if not self._closed:
                    self._hand_over(peer, head, tensors)
                del head, announced, tensors  # what was handed over must not live until the next message
        except BaseException as error:
            peer.break_off(error)
            if not self._closed:
                self._report(peer, _loss(peer))
        finally:
            with peer.changed:
                peer.reading = False
                if peer.closed:
                    peer.connection.close()

    @staticmethod
    def _next_tensor(peer: _Peer, announced: Announcement, reader: _Reader) -> torch.Tensor:
        return peer.back[announced.lane].receive(announced, reader.fill)

    def _hand_over(self, peer: _Peer, head: Any, tensors: list[torch.Tensor]) -> None:
        try:
            self._on_message(peer.stage, head, tensors)
        except Exception as error:
            self._report(peer, error)

    def _report(self, peer: _Peer, error: BaseException) -> None:
        try:
            self._on_lost(peer.stage, error)
        except Exception:
            logger.exception("handling the loss of %s failed", peer)

    def _forget(self) -> None:
        """In a forked child: its copies of the connections must not outlive the rank."""
        for peer in self._peers.values():
            peer.connection.close()


def _loss(peer: _Peer) -> SMPRuntimeError:
    cause = peer.broken
    said = "it ended the connection" if isinstance(cause, EOFError) else str(cause)
    error = SMPRuntimeError(
        f"the connection to {peer} is lost ({said}), and it had not closed it in good order; its process probably died: "
        f"look for the first error in the log of rank {peer.rank}"
    )
    error.__cause__ = cause
    return error


class _Reader:
    """Reads a connection ahead, so that a small message costs one call."""

    def __init__(self, connection: socket.socket) -> None:
        self._connection = connection
        self._memory = memoryview(bytearray(_READ_AHEAD_BYTES))
        self._start = self._end = 0

    def take(self, size: int) -> memoryview:
        """The next bytes, valid until the next call."""
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
        count = self._connection.recv_into(target, 0, flags)
        if not count:
            raise EOFError("the stream has ended")
        return count


def _write(connection: socket.socket, pieces: list[memoryview], flags: int) -> list[memoryview]:
    """Write pieces until all are out or, with ``MSG_DONTWAIT``, the system takes no more; returns what is left."""
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


def _forget_in_child() -> None:
    for transport in list(_open_transports):
        transport._forget()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_forget_in_child)
