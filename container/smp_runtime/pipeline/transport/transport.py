"""Messages with tensors between the ranks of a pipeline group: in order, without waiting for the receiver."""

from __future__ import annotations

import contextlib
import functools
import logging
import os
import pickle
import secrets
import struct
import threading
import time
import weakref
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

from smp_runtime.comm.control import ControlPlane, timeout_seconds
from smp_runtime.errors import ConnectionLostError, DeadlineError, SMPRuntimeError
from smp_runtime.pipeline.transport.connections import connect_all
from smp_runtime.pipeline.transport.peer import ConnectionReader, Ended, Peer, write_pieces
from smp_runtime.pipeline.transport.tensor_channels import (
    Announcement,
    GroupChannel,
    MakeGroup,
    TensorChannel,
    announce,
    bytes_of,
    channel_of,
    choose_channels,
    open_channel,
    to_dense,
    use_device,
)
from smp_runtime.tensors.nested import tensor_bytes

if TYPE_CHECKING:
    import torch

logger = logging.getLogger("smp")

#: Kind of a frame, then the bytes of its pickled part.
_FRAME = struct.Struct("!BQ")
_MESSAGE, _GOODBYE, _LAST_WORDS, _OPEN = 0, 1, 2, 3

_CLOSE_SECONDS = 10.0
#: The same for a stage that has left, which has waited for its part already.
_CLOSE_SECONDS_LEFT = 2.0

#: Position of the channel for tensors of the device while its process group is not connected.
_UNTIL_OPEN = 2

_open_transports: weakref.WeakSet[PipelineTransport] = weakref.WeakSet()


def _is_over(peer: Peer) -> bool:
    """Return whether no more bytes may be written to a peer; the caller holds ``peer.changed``."""
    return peer.closed or peer.broken is not None


class StageFailed(SMPRuntimeError):
    """The error of a stage that has reported a failure; ``words``: the result of its ``on_failed``."""

    code = "SMP504"

    def __init__(self, stage: str, words: Any) -> None:
        super().__init__(f"{stage} cannot go on, as its last message says: {words}")
        self.words = words


class PipelineTransport:
    """The transport of messages between the ranks of one pipeline group.

    A message is a small picklable head and tensors of any dtype and shape. Messages from one stage arrive in the
    order of their ``send``. Collective over ``ranks``: all of them construct it.

    Each stage has a thread that receives from it and one that writes the bytes that the system did not take at
    once. Callers send on their own threads. Locks are taken in one order only: a caller's own (it may hold the
    pipeline's lock, if the message has no tensors of an accelerator), then ``Peer.order``, then
    ``Peer.changed``. Neither is held while ``on_message`` or another callback runs, which may take the
    caller's, nor while bytes are written that the other side has to read first.

    Args:
        control: used once, to exchange addresses.
        ranks: global ranks of the group; a stage is a position in it.
        device: where received tensors of an accelerator are put; tensors in host memory stay there.
        on_message: called as ``on_message(stage, head, tensors)`` on the receiver thread of that stage (on the
            sender's own thread for a message to the own stage). It must be quick, since it holds up later
            messages.
        on_lost: called as ``on_lost(stage, error)`` on the receiver thread, once when the connection to a stage
            that has not closed its transport breaks, and for every exception of ``on_message``. The error is
            :class:`StageFailed` if that stage has reported the reason.
        on_failed: called as ``on_failed(error, doing)``, once, on the thread where this rank itself fails to
            send to or receive from a stage, for example because memory for a tensor is missing. ``doing``
            describes the action in words. Nothing can be sent or received any more. Returns the report for the
            other stages, picklable.
        on_left: called as ``on_left(stage)`` on the receiver thread when a stage has closed its transport in
            good order, after its last message and before sending to it raises.
        afterthought: called as ``afterthought(stage)`` on a thread of its own after :meth:`nudge`; returns a
            head to send, or None if nothing is left to send.
        make_group: makes the process group for tensors of ``device`` from one rank to another, see
            :func:`~smp_runtime.pipeline.transport.pair_groups.pair_groups`. It is called on both ranks when the first such
            tensor is sent; tensors travel through host memory until the group is connected. None: they always do.
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
        on_failed: Callable[[BaseException, str], Any] = lambda error, doing: (
            f"{doing}: {type(error).__name__}: {error}"
        ),
        on_left: Callable[[int], None] = lambda stage: None,
        afterthought: Callable[[int], Any] = lambda stage: None,
        make_group: MakeGroup | None = None,
        delay: Callable[[], float] | None = None,
    ) -> None:
        self._rank = mine = control.rank
        self.stage = list(ranks).index(mine)
        self._device = device
        self._on_message = on_message
        self._on_lost = on_lost
        self._on_failed = on_failed
        self._on_left = on_left
        self._afterthought = afterthought
        self._delay = delay
        self._closed = False
        self._failing = threading.Lock()  # sender and receiver threads may fail at once: the first failure is reported
        self._failed = False
        self.bytes_sent = dict.fromkeys(range(len(ranks)), 0)
        self.messages_sent = dict.fromkeys(range(len(ranks)), 0)
        self._peers: dict[int, Peer] = {}
        for stage, connection in sorted(connect_all(control, ranks, timeout_seconds()).items()):
            rank = ranks[stage]
            out = choose_channels(device, rank, make_group, sends=True)
            back = choose_channels(device, rank, make_group, sends=False)
            self._peers[stage] = Peer(stage, rank, connection, out, back)
        _open_transports.add(self)
        for peer in self._peers.values():
            for work, name in ((self._receive, "from"), (self._work_off, "to")):
                # Two threads per peer: if a blocked write kept a rank from reading, two ranks could wait for each other.
                threading.Thread(target=work, args=(peer,), name=f"smp-{name}-{peer.stage}", daemon=True).start()

    def send(self, stage: int, head: Any, tensors: Sequence[torch.Tensor] = (), *, copy: bool = True) -> None:
        """Send a message, without waiting for the receiver.

        A message to the own stage is delivered before this returns, tensors as they are. If the connection to a
        stage is lost, a message to it is dropped: ``on_lost`` has reported that, or is about to.

        Args:
            head: small; pickled.
            tensors: sent detached, with their strides if they fill their memory.
            copy: False promises that the tensors' memory does not change any more, which saves a copy of the bytes that
                cannot be written at once.

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
        posted: list[tuple[TensorChannel, torch.Tensor]] = []
        pieces = [memoryview(b"")]
        lasting = [True]
        alive = []
        size = 0
        staging: set[TensorChannel] = set()
        for given in tensors:
            channel = channel_of(given, peer.out, self._device)
            if channel == _UNTIL_OPEN:
                self._open_out(peer)
            tensor = to_dense(given)
            announced.append(tuple(announce(tensor, channel)))
            inline = peer.out[channel].inline(tensor)
            # Memory that was made here has no other owner, so it needs no copy.
            made = tensor if inline is None else inline
            ours = not copy or (made is not given and made.data_ptr() != given.data_ptr())
            count = tensor_bytes(tensor)
            if inline is None:
                posted.append((peer.out[channel], tensor if ours else tensor.detach().clone()))
            elif count:
                pieces.append(bytes_of(inline, count))
                lasting.append(ours)
                alive.append(inline)
                staging.add(peer.out[channel])
            size += count
        for each in staging:  # one wait of the host, however many tensors there are
            each.settle()
        body = pickle.dumps((head, announced), protocol=5)
        pieces[0] = memoryview(_FRAME.pack(_MESSAGE, len(body)) + body)
        size += len(pieces[0])
        put = functools.partial(self._put, peer, pieces, lasting, alive, size)
        if posted:
            self._post(peer, posted, put)
        else:
            put()

    def _post(self, peer: Peer, tensors: list[tuple[TensorChannel, torch.Tensor]], put: Callable[[], None]) -> None:
        """Post tensors and put their message, in one go."""
        try:
            with peer.order:
                self._check_open(peer)
                if peer.broken is None:
                    for out, tensor in tensors:
                        out.post(tensor)
                put()
        except SMPRuntimeError:
            raise
        except BaseException as error:
            # The receiver would take this message's posted tensors for those of the next message.
            if not peer.has_ended(error):
                self._fail(error, f"sending to stage {peer.stage}")
                raise
            peer.break_off(error)

    def _put(
        self,
        peer: Peer,
        pieces: list[memoryview],
        lasting: list[bool],
        alive: Sequence[torch.Tensor],
        size: int,
    ) -> None:
        with peer.changed:
            self._check_open(peer)
            peer.write(pieces, lasting, alive)
            self.bytes_sent[peer.stage] += size
            self.messages_sent[peer.stage] += 1

    def _check_open(self, peer: Peer) -> None:
        if self._closed:
            raise SMPRuntimeError(f"stage {self.stage} sends to {peer} after closing its transport")
        if peer.left:
            raise SMPRuntimeError(
                f"stage {self.stage} sends to {peer}, which has closed its transport in good order; every stage must "
                "finish the same steps before one of them leaves"
            )

    def nudge(self, stage: int) -> None:
        """Have the afterthought for a stage sent soon, while the calling thread goes on with more urgent work."""
        peer = self._peers[stage]
        with peer.changed:
            peer.nudged = True
            peer.changed.notify_all()

    def flush(self, seconds: float) -> None:
        """Block until everything sent so far is out of this process's memory.

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
            if peer.broken is None:
                # A stage that has left has received all; NCCL may still have to notice that at this end.
                until = min(deadline, time.monotonic() + _CLOSE_SECONDS_LEFT) if peer.left else deadline
                for opening in peer.opening:
                    opening.join(max(0.0, until - time.monotonic()))
                for channel in peer.out:
                    channel.flush(until)

    def prune(self) -> None:
        """Free the device memory of sent tensors, which otherwise stays until the next message to the same stage."""
        for peer in self._peers.values():
            for channel in peer.out:
                channel.prune()

    def _open_out(self, peer: Peer) -> None:
        """Begin to connect the process group to a stage, unless that has begun already."""
        name = f"{self._rank}-{peer.rank}-{secrets.token_hex(8)}"
        # With the condition: several threads send, and only the first of them may open the group.
        with peer.changed:
            is_gone = self._closed or peer.left or peer.broken is not None
            if peer.opens or is_gone:
                return
            peer.opens = True
            self._begin_opening(peer, peer.out, name, (self._rank, peer.rank))
            body = name.encode()
            peer.write([memoryview(_FRAME.pack(_OPEN, len(body)) + body)], [True])

    def _begin_opening(self, peer: Peer, channels: Sequence[TensorChannel], name: str, ends: tuple[int, int]) -> None:
        """Connect one end of a process group on a thread that only :meth:`flush` waits for; the caller holds ``peer.changed``."""
        opening = threading.Thread(
            target=self._open, args=(peer, channels[1], name, ends), name=f"smp-open-{peer.stage}", daemon=True
        )
        peer.opening.append(opening)
        opening.start()

    def _open(self, peer: Peer, channel: GroupChannel, name: str, ends: tuple[int, int]) -> None:
        try:
            open_channel(channel, name, ends, timeout_seconds())
        except BaseException as error:
            # If the other side has ended, its receiver thread reports that.
            cause = error.__cause__ or error
            is_reported = peer.left or peer.has_ended(cause)
            if not is_reported:
                self._fail(error, f"connecting to stage {peer.stage}")

    def close(self) -> None:
        """Send goodbye to every stage and stop delivering; sent messages get a few seconds to leave."""
        if self._closed:
            return
        self._closed = True
        # Before the goodbye, at which the other side frees what these tensors need. The flush below reports what has not left.
        with contextlib.suppress(Exception):
            self.flush(min(_CLOSE_SECONDS, timeout_seconds()))
        time.sleep(max((peer.quiet_seconds or 0.0 for peer in self._peers.values()), default=0.0))
        goodbye = memoryview(_FRAME.pack(_GOODBYE, 0))
        for peer in self._peers.values():
            with peer.order:
                if not peer.left:
                    peer.write([goodbye], [True])
        try:
            self.flush(_CLOSE_SECONDS_LEFT)
        except Exception as error:  # the other connections still have to be closed
            logger.warning("closing the transport of stage %d: %s", self.stage, error)
        for peer in self._peers.values():
            peer.close()
        for peer in self._peers.values():
            peer.free_channels(_CLOSE_SECONDS_LEFT)
        _open_transports.discard(self)

    def _work_off(self, peer: Peer) -> None:
        """Run the sender thread: write bytes that could not be written at once, and messages that can wait."""
        try:
            use_device(self._device)
            self._drain(peer)
        except BaseException as error:  # else this thread would end unseen, and other stages would wait
            self._fail(error, f"sending to stage {peer.stage}")

    def _drain(self, peer: Peer) -> None:
        while True:
            with peer.changed:
                peer.changed.wait_for(lambda: bool(peer.backlog) or peer.nudged or _is_over(peer))
                nudged, peer.nudged = peer.nudged, False
                # The backlog is still sent after this side's goodbye.
                if not peer.backlog and _is_over(peer):
                    return
                pieces = peer.backlog[0][0] if peer.backlog else []
            # Without the lock: a write may block, and the thread that adds to the backlog must not wait for it.
            if nudged:
                self._send_afterthought(peer)
            if pieces and not self._write_waiting(peer, pieces):
                return

    def _send_afterthought(self, peer: Peer) -> None:
        # Without the condition: the callback takes the pipeline's lock, and a holder of that lock may wait for the
        # condition to send. Holding both would deadlock.
        head = self._afterthought(peer.stage)
        if head is not None:
            with contextlib.suppress(SMPRuntimeError):  # no receiver is left
                self.send(peer.stage, head)

    def _write_waiting(self, peer: Peer, pieces: list[memoryview]) -> bool:
        """Write the first message of the backlog, and return whether the connection still exists."""
        # Without the condition: the write blocks while the other side does not read, and other threads must not.
        try:
            write_pieces(peer.connection, pieces, 0)
        except OSError as error:
            peer.break_off(error)
            return False
        with peer.changed:
            if peer.backlog:
                peer.backlog.popleft()
            peer.changed.notify_all()
        return True

    def _receive(self, peer: Peer) -> None:
        """Run the receiver thread: hand on messages until the other side leaves or is lost."""
        reader = ConnectionReader(peer.connection)
        try:
            use_device(self._device)
            while True:
                kind, size = _FRAME.unpack(reader.take(_FRAME.size))
                if kind == _MESSAGE:
                    self._receive_message(peer, reader, size)
                elif kind == _OPEN:
                    name = bytes(reader.take(size)).decode()
                    with peer.changed:
                        self._begin_opening(peer, peer.back, name, (peer.rank, self._rank))
                else:
                    self._part(peer, kind, reader.take(size))
                    return
        except Ended as ended:
            self._lose(peer, ended.args[0])
        except BaseException as error:
            if peer.has_ended(error):
                self._lose(peer, error)
            else:
                self._fail(error, f"receiving from stage {peer.stage}")
        finally:
            peer.end_reading()

    def _receive_message(self, peer: Peer, reader: ConnectionReader, size: int) -> None:
        """Receive a message and hand it on. A function, so that received tensors do not live until the next message."""
        head, announced = pickle.loads(reader.take(size))
        tensors = []
        # In the order of announcement, which is the order of the bytes in the stream.
        for each in announced:
            announcement = Announcement(*each)
            channel = peer.back[announcement.channel]
            tensors.append(channel.receive(announcement, reader.fill))
        if self._delay is not None:
            time.sleep(self._delay())
        if not self._closed:
            self._hand_over(peer, head, tensors)

    def _part(self, peer: Peer, kind: int, body: memoryview) -> None:
        """Handle the last frame of the other side: a goodbye, or the report of a failure."""
        if kind == _GOODBYE:
            self._on_left(peer.stage)
            peer.left = True
            return
        error = StageFailed(str(peer), pickle.loads(body))
        peer.break_off(error)
        if not (self._closed or self._failed):
            self._report(peer, error)

    def _lose(self, peer: Peer, error: BaseException) -> None:
        peer.break_off(error)
        if not (self._closed or self._failed):
            self._report(peer, _loss(peer))

    def _fail(self, error: BaseException, doing: str) -> None:
        """Report an error of this rank, here and to the other stages, and send nothing after it."""
        with self._failing:
            if self._failed or self._closed:
                return
            self._failed = True
        words = "its own log says why"
        try:
            words = self._on_failed(error, doing)
        except Exception:  # the other stages must hear of the failure all the same
            logger.exception("handling an error failed, which was: %r", error)
        body = pickle.dumps(words, protocol=5)
        for peer in self._peers.values():
            peer.write_last(_FRAME.pack(_LAST_WORDS, len(body)) + body, error)

    def _hand_over(self, peer: Peer, head: Any, tensors: list[torch.Tensor]) -> None:
        try:
            self._on_message(peer.stage, head, tensors)
        except Exception as error:  # the handlers are the pipeline's; this thread goes on reading
            self._report(peer, error)

    def _report(self, peer: Peer, error: BaseException) -> None:
        try:
            self._on_lost(peer.stage, error)
        except Exception:  # likewise
            logger.exception("handling the loss of %s failed", peer)

    def forget(self) -> None:
        """Close this process's copies of the connections; in a forked child, they must not outlive the rank."""
        for peer in self._peers.values():
            peer.connection.close()


def _loss(peer: Peer) -> SMPRuntimeError:
    cause = peer.broken
    said = "it ended the connection" if isinstance(cause, EOFError) else str(cause)
    error = ConnectionLostError(
        f"the connection to {peer} is lost ({said}), and it had not closed it in good order; its process probably died: "
        f"look for the first error in the log of rank {peer.rank}"
    )
    error.__cause__ = cause
    error.accused = (peer.rank,)
    return error


def _forget_in_child() -> None:
    for transport in list(_open_transports):
        transport.forget()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_forget_in_child)
