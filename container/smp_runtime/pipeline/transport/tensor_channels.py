"""Transfer of a tensor's bytes to another rank, once the stream between the two has announced its shape.

Tensors in host memory travel inside the stream itself; those of an accelerator go from device to device through
``torch.distributed``. :func:`choose_channels` is the one place that decides.
"""

from __future__ import annotations

import contextlib
import ctypes
import logging
import math
import queue
import threading
import time
import weakref
from collections import deque
from collections.abc import Callable, Sequence
from datetime import timedelta
from typing import NamedTuple, Protocol

import torch
import torch.distributed as dist

from smp_runtime.comm.control import timeout_seconds
from smp_runtime.errors import DeadlineError, SMPRuntimeError, SMPUserError
from smp_runtime.pipeline.transport.native_calls import start_call
from smp_runtime.pipeline.transport.pair_groups import PairGroup

logger = logging.getLogger("smp")

#: Between two looks at a send of an accelerator.
_POLL_SECONDS = 0.001

#: Fills a piece of memory with the next bytes of the stream.
Reader = Callable[[memoryview], None]

_view_of_memory = ctypes.pythonapi.PyMemoryView_FromMemory
_view_of_memory.argtypes = (ctypes.c_void_p, ctypes.c_ssize_t, ctypes.c_int)
_view_of_memory.restype = ctypes.py_object
_READ, _WRITE = 0x100, 0x200


class Announcement(NamedTuple):
    """The facts that a receiver must know about a tensor before its bytes come."""

    channel: int  # position in the receiver's channels
    dtype: str  # name inside ``torch``
    shape: tuple[int, ...]
    stride: tuple[int, ...] | None  # in elements; None for a contiguous tensor

    def allocate(self, device: torch.device, *, pinned: bool = False) -> torch.Tensor:
        """Return uninitialized memory for the announced tensor."""
        dtype = _DTYPES[self.dtype]
        if self.stride is None:
            return torch.empty(self.shape, dtype=dtype, device=device, pin_memory=pinned)
        return torch.empty_strided(self.shape, self.stride, dtype=dtype, device=device, pin_memory=pinned)

    @property
    def nbytes(self) -> int:
        """Return the number of bytes of the elements."""
        return math.prod(self.shape) * _DTYPES[self.dtype].itemsize


_DTYPES = {name: value for name, value in sorted(vars(torch).items()) if isinstance(value, torch.dtype)}
_DTYPE_NAMES = {value: name for name, value in _DTYPES.items()}
_QUANTIZED = {torch.qint8, torch.quint8, torch.qint32, torch.quint4x2, torch.quint2x4}
_CPU = torch.device("cpu")


def announce(tensor: torch.Tensor, channel: int) -> Announcement:
    """Return the announcement of a tensor that :func:`to_dense` returned."""
    stride = None if tensor.is_contiguous() else tensor.stride()
    return Announcement(channel, _DTYPE_NAMES[tensor.dtype], tuple(tensor.shape), stride)


def to_dense(tensor: torch.Tensor) -> torch.Tensor:
    """Return the tensor if its elements fill one piece of memory, in any order of dimensions, else a dense copy.

    Raises:
        SMPUserError: a sparse, quantized or meta tensor, which has no such memory, or a parameter of another stage.
    """
    # Small messages are many, and each of these questions costs: not one more than is needed.
    dtype = tensor.dtype
    if tensor.layout is not torch.strided or dtype in _QUANTIZED or tensor.is_meta:
        raise _error_without_memory(tensor)
    # Flags that stand for a change of the elements: the memory holds them unchanged.
    is_flagged = tensor.is_neg() or (dtype.is_complex and tensor.is_conj())
    if is_flagged:
        tensor = tensor.detach().resolve_conj().resolve_neg()
    is_dense = tensor.is_contiguous() or _fills_memory(tensor)
    return tensor if is_dense else tensor.detach().clone()


def _error_without_memory(tensor: torch.Tensor) -> SMPUserError:
    name = getattr(tensor, "absent_name", None)
    if name is not None:
        return SMPUserError(
            f"{name}, of shape {tuple(tensor.shape)}, is handed to a module of another stage or returned from one here, but "
            f"its elements are on pipeline stage {getattr(tensor, 'absent_stage', '?')}; put both on one stage with "
            "smp.set_partition, or use it inside a module of that stage",
            code="SMP306",
        )
    if tensor.is_meta:
        what = "meta"
    elif tensor.dtype in _QUANTIZED:
        what = "quantized"
    else:
        what = str(tensor.layout)
    return SMPUserError(
        f"a {what} tensor of shape {tuple(tensor.shape)} cannot travel between stages, because only dense memory "
        "does; convert it first (to_dense(), dequantize(), or make it on a real device)",
        code="SMP306",
    )


def _fills_memory(tensor: torch.Tensor) -> bool:
    expected = 1
    for stride, size in sorted(zip(tensor.stride(), tensor.shape, strict=True)):
        if size != 1:
            if stride != expected:
                return False
            expected *= size
    return True


def bytes_of(tensor: torch.Tensor, size: int, *, writable: bool = False) -> memoryview:
    """Return the memory of a dense CPU tensor of ``size`` bytes.

    The caller keeps the tensor alive while it uses the view.
    """
    return _view_of_memory(tensor.data_ptr(), size, _WRITE if writable else _READ)


class TensorChannel(Protocol):
    """A channel for tensors of one direction between two ranks.

    For each tensor in order, the sender calls :meth:`inline` and, if that returns None, :meth:`post`. It calls
    both before the announcement is written: a receiver must never wait for a tensor that could not be sent. The
    receiver calls :meth:`receive` for each announcement in the same order.
    """

    @property
    def is_open(self) -> bool:
        """Return whether the channel can be used now."""
        return True

    def inline(self, tensor: torch.Tensor) -> torch.Tensor | None:
        """Return the CPU tensor to write as bytes after the announcement in the stream; None if nothing follows it.

        Its elements may be there only after :meth:`settle`.
        """

    def settle(self) -> None:
        """Block until the tensors that :meth:`inline` has returned on this thread have their elements."""
        return

    def post(self, tensor: torch.Tensor) -> None:
        """Start to send a tensor that :meth:`inline` left out; its memory must not change any more."""

    def receive(self, announced: Announcement, read: Reader) -> torch.Tensor:
        """Return the next tensor: the default stream of the device may use it, and every stream that waits for that one."""

    def flush(self, deadline: float) -> None:
        """Block until everything posted has been sent, at the latest until ``deadline`` of ``time.monotonic()``."""

    def prune(self) -> None:
        """Free the memory of tensors that have been sent."""

    @property
    def quiet_seconds(self) -> float | None:
        """Return the time between the last tensor and :meth:`close` at the other rank; None if close has nothing to free."""
        return None

    def close(self, seconds: float) -> None:
        """Free what the channel has made, in about ``seconds`` at most; tensors that are under way are given up."""
        return


class InlineChannel(TensorChannel):
    """A channel inside the stream. Tensors of an accelerator are copied to pinned host memory and back on the way.

    All copies run on the current stream of the calling thread. On a thread that receives, that is the default stream, on which
    all tasks compute, so a received tensor needs no wait of the host.

    Args:
        device: where received tensors shall be.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._staged = device.type != "cpu"

    def inline(self, tensor: torch.Tensor) -> torch.Tensor | None:
        """See :class:`TensorChannel`."""
        if not self._staged:
            return tensor
        # Pinned: a copy to other memory would block here, for each tensor, where :meth:`settle` waits once for all.
        host = torch.empty_like(tensor.detach(), device=_CPU, pin_memory=True)
        return host.copy_(tensor.detach(), non_blocking=True)

    def settle(self) -> None:
        """See :class:`TensorChannel`."""
        if self._staged:
            copied = torch.cuda.Event()
            copied.record(torch.cuda.current_stream(self._device))
            copied.synchronize()

    def post(self, tensor: torch.Tensor) -> None:
        """Do nothing; it is not called, since all tensors are inline."""

    def receive(self, announced: Announcement, read: Reader) -> torch.Tensor:
        """See :class:`TensorChannel`."""
        host = announced.allocate(_CPU, pinned=self._staged)
        if size := announced.nbytes:
            read(bytes_of(host, size, writable=True))
        # PyTorch keeps pinned memory until copies from it are over.
        return announced.allocate(self._device).copy_(host, non_blocking=True) if self._staged else host

    def flush(self, deadline: float) -> None:
        """Return at once, since nothing waits."""

    def prune(self) -> None:
        """Do nothing, since nothing is kept."""


#: Makes a process group: ``make(name, sends)``; see :func:`~smp_runtime.pipeline.transport.pair_groups.pair_groups`.
MakeGroup = Callable[[str, bool], PairGroup]
_Leaving = deque[tuple[dist.Work, torch.Tensor]]

#: Sends that did not end before their channel did, because the other rank failed. NCCL may still read the memory of their
#: tensors, so it must not be used again. They stay until the process ends.
_unfinished: list[tuple[dist.Work, torch.Tensor]] = []


class GroupChannel(TensorChannel):
    """``torch.distributed`` messages in a process group that only this direction between two ranks uses.

    It is closed until :meth:`open` has run on both ranks. Until then tensors take another channel.

    On CUDA a receiver thread allocates and receives on a stream of its own and waits for it on the host, so that a
    tensor that is handed on is complete for every stream; the memory is also marked as used by the device's default
    stream, which computes with it, so that it is not reused too early. The sender's message is ordered behind what its
    current stream has queued.

    Args:
        make_group: makes the process group of both ranks.
        peer: the other global rank.
        device: of the tensors.
        sends: whether this rank is the one that sends.
    """

    def __init__(self, make_group: MakeGroup, peer: int, device: torch.device, *, sends: bool) -> None:
        self._make_group = make_group
        self._peer = peer
        self._sends = sends
        self.device = device
        self._group: PairGroup | None = None
        self._is_open = threading.Event()
        self._stream = torch.cuda.Stream(device) if device.type == "cuda" else None
        # A tensor must live until its message has left.
        self._leaving: _Leaving = deque()
        self._lock = threading.Lock()
        if self._stream is not None:
            weakref.finalize(self, _unfinished.extend, self._leaving).atexit = False

    @property
    def is_open(self) -> bool:
        """Return whether tensors can be posted."""
        return self._is_open.is_set()

    def open(self, name: str, deadline: float) -> None:
        """Make the group and send one element through it; both ranks call it with the same name.

        NCCL connects at the first message, and blocks both ranks until it has. So this runs on a thread that nothing else waits
        for: if two ranks each connected on the thread that receives from the other, they would wait forever.
        """
        self._group = self._make_group(name, self._sends)
        element = torch.zeros((1,), dtype=torch.uint8, device=self.device)
        if self._sends:
            self.post(element)
            self.flush(deadline)
        else:
            self._take(announce(element, 1))
        self._is_open.set()

    def inline(self, tensor: torch.Tensor) -> torch.Tensor | None:
        """Return None, since no tensor is inline."""

    def post(self, tensor: torch.Tensor) -> None:
        """See :class:`TensorChannel`."""
        if not tensor.numel():
            return
        flat = _flat_bytes(tensor)
        work = self._pair.send(flat)
        with self._lock:
            self._leaving.append((work, flat))
        self.prune()

    def prune(self) -> None:
        """See :class:`TensorChannel`."""
        with self._lock:
            while self._leaving and self._leaving[0][0].is_completed():
                self._leaving.popleft()

    def receive(self, announced: Announcement, read: Reader) -> torch.Tensor:
        """See :class:`TensorChannel`."""
        # The sender's end has opened, so this end is about to.
        if not self._is_open.wait(timeout_seconds()):
            raise DeadlineError(
                f"a tensor came from rank {self._peer}, but its process group was not connected here in time"
            )
        return self._take(announced)

    def _take(self, announced: Announcement) -> torch.Tensor:
        if self._stream is None:
            return self._receive(announced)
        with torch.cuda.stream(self._stream):
            tensor = self._receive(announced)
        self._stream.synchronize()
        tensor.record_stream(torch.cuda.default_stream(self.device))
        return tensor

    def _receive(self, announced: Announcement) -> torch.Tensor:
        tensor = announced.allocate(self.device)
        if tensor.numel():
            work = self._pair.receive(_flat_bytes(tensor))
            work.wait()
        return tensor

    @property
    def _pair(self) -> PairGroup:
        if self._group is None:
            raise AssertionError("the channel is not open")
        return self._group

    def flush(self, deadline: float) -> None:
        """See :class:`TensorChannel`."""
        while True:
            with self._lock:
                if not self._leaving:
                    return
                work, _ = self._leaving[0]
            # Without the lock: the wait may take until the deadline, and other threads send and prune meanwhile.
            if not self._is_over(work, deadline):
                raise DeadlineError(f"rank {self._peer} did not take all tensors in time; check that it still runs")
            with self._lock:
                # Another thread may have pruned it meanwhile.
                is_still_first = bool(self._leaving) and self._leaving[0][0] is work
                if is_still_first:
                    self._leaving.popleft()

    def _is_over(self, work: dist.Work, deadline: float) -> bool:
        """Block until a send has ended, and return whether it has."""
        if self._stream is None:  # gloo does not report an end without a wait
            left = deadline - time.monotonic()
            return left > 0 and work.wait(timedelta(seconds=left))
        # NCCL aborts a communicator if a wait with a timeout runs out, and this deadline may be shorter than the job's.
        while not work.is_completed():
            if time.monotonic() >= deadline:
                return False
            time.sleep(_POLL_SECONDS)
        return True

    @property
    def quiet_seconds(self) -> float | None:
        """See :class:`TensorChannel`."""
        group = self._group
        return None if group is None else group.quiet_seconds

    def close(self, seconds: float) -> None:
        """See :class:`TensorChannel`; sends that have not ended keep their memory."""
        group, self._group = self._group, None
        self._is_open.clear()
        if group is not None and not group.end(seconds):
            logger.warning(
                "the process group with rank %d has not ended within %g s; its memory stays in use", self._peer, seconds
            )


def _flat_bytes(tensor: torch.Tensor) -> torch.Tensor:
    """Return a dense tensor as one row of bytes: every backend can send these, whatever the dtype."""
    return tensor.detach().as_strided((tensor.numel(),), (1,)).view(torch.uint8)


#: Makes the one channel to or from a global rank, instead of those below; a rehearsal, which moves no elements, puts its own here.
instead: list[Callable[[int], TensorChannel]] = []


def choose_channels(
    device: torch.device, peer: int, make_group: MakeGroup | None, *, sends: bool
) -> tuple[TensorChannel, ...]:
    """Return the channels of one direction: position 0 for host memory, 1 for tensors of ``device``, 2 while that is closed.

    See :func:`channel_of`.

    Args:
        peer: global rank at the other end.
        make_group: makes the process group for position 1; None sends everything inside the stream.
        sends: whether this rank sends.
    """
    if instead:
        return (instead[-1](peer),)
    host = InlineChannel(_CPU)
    if make_group is not None:
        return host, GroupChannel(make_group, peer, device, sends=sends), InlineChannel(device)
    return (host,) if device.type == "cpu" else (host, InlineChannel(device))


def channel_of(tensor: torch.Tensor, channels: Sequence[TensorChannel], device: torch.device) -> int:
    """Return the position of the channel in ``channels`` that a tensor takes.

    Raises:
        SMPUserError: it is on a device that this rank does not compute on.
    """
    has_device_channels = len(channels) > 1
    if has_device_channels and _is_same(tensor.device, device):
        return 1 if channels[1].is_open else 2
    if tensor.is_cpu:
        return 0
    raise SMPUserError(
        f"a tensor is on {tensor.device}, but this rank computes on {device}; move it with .to({str(device)!r}) before the call",
        code="SMP306",
    )


def _is_same(one: torch.device, other: torch.device) -> bool:
    """Return whether two devices are one; an accelerator without an index is the current one."""
    if one == other or one.type != other.type or one.type != "cuda":
        return one.type == other.type
    first, second = (torch.cuda.current_device() if each.index is None else each.index for each in (one, other))
    return first == second


def use_device(device: torch.device) -> None:
    """Let the calling thread compute on ``device``; in a new thread, the default is the first accelerator of the host."""
    if device.type == "cuda":
        torch.cuda.set_device(device)


def open_channel(channel: GroupChannel, name: str, ends: tuple[int, int], seconds: float) -> None:
    """Open this end of a channel, on a thread that nothing waits for.

    Args:
        name: of the process group, the same at both ends.
        ends: global ranks of source and target.
        seconds: longest wait for the other end.

    Raises:
        DeadlineError: the other rank did not connect in time.
        SMPRuntimeError: the group cannot carry a tensor.
    """
    outcome: queue.SimpleQueue[BaseException | None] = queue.SimpleQueue()
    deadline = time.monotonic() + seconds

    def connect() -> None:
        try:
            use_device(channel.device)
            channel.open(name, deadline)
            outcome.put(None)
        except BaseException as error:  # raised by the thread that waits for the outcome
            outcome.put(error)

    # On its own thread, because a group that is connecting cannot be interrupted at the deadline.
    start_call(connect, "smp-connect")
    error = None
    with contextlib.suppress(queue.Empty):
        error = outcome.get(timeout=seconds)
        if error is None:
            return
    source, target = ends
    if error is None or time.monotonic() >= deadline:  # gloo keeps the deadline by itself, with words of its own
        raise DeadlineError(
            f"the process group from rank {source} to rank {target} was not connected after {seconds:g} s, when the first tensor "
            "was sent that way; check that both still run and that their hosts may reach each other's ports (NCCL_DEBUG=INFO "
            "tells what NCCL tries), or raise SMP_TIMEOUT_SECONDS"
        ) from error
    raise SMPRuntimeError(
        f"the process group from rank {source} to rank {target} did not carry its first element: {type(error).__name__}: "
        f"{error}; check the accelerators of both and the network between them, and NCCL_SOCKET_IFNAME where hosts have several "
        "networks (NCCL_DEBUG=INFO tells what NCCL tries)"
    ) from error
