"""Transfer of a tensor's bytes to another rank, once the stream between the two has announced its shape.

Tensors in host memory travel inside the stream itself; those of an accelerator go from device to device through
``torch.distributed``. :func:`choose_channels` is the one place that decides.
"""

from __future__ import annotations

import contextlib
import ctypes
import math
import queue
import threading
import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from datetime import timedelta
from itertools import permutations
from typing import NamedTuple, Protocol

import torch
import torch.distributed as dist

from smp_runtime.comm.control import timeout_seconds
from smp_runtime.errors import DeadlineError, SMPRuntimeError, SMPUserError

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

    def allocate(self, device: torch.device) -> torch.Tensor:
        """Return uninitialized memory for the announced tensor."""
        dtype = _DTYPES[self.dtype]
        if self.stride is None:
            return torch.empty(self.shape, dtype=dtype, device=device)
        return torch.empty_strided(self.shape, self.stride, dtype=dtype, device=device)

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
        if (name := getattr(tensor, "absent_name", None)) is not None:
            raise SMPUserError(
                f"{name}, of shape {tuple(tensor.shape)}, is handed to a module of another stage or returned from one here, but "
                f"its elements are on pipeline stage {getattr(tensor, 'absent_stage', '?')}; put both on one stage with "
                "smp.set_partition, or use it inside a module of that stage"
            )
        what = "meta" if tensor.is_meta else "quantized" if dtype in _QUANTIZED else str(tensor.layout)
        raise SMPUserError(
            f"a {what} tensor of shape {tuple(tensor.shape)} cannot travel between stages, because only dense memory "
            "does; convert it first (to_dense(), dequantize(), or make it on a real device)"
        )
    if tensor.is_neg() or (dtype.is_complex and tensor.is_conj()):  # flags that stand for a change of the elements
        tensor = tensor.detach().resolve_conj().resolve_neg()
    return tensor if tensor.is_contiguous() or _fills_memory(tensor) else tensor.detach().clone()


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

    def inline(self, tensor: torch.Tensor) -> torch.Tensor | None:
        """Return the CPU tensor to write as bytes after the announcement in the stream; None if nothing follows it."""

    def post(self, tensor: torch.Tensor) -> None:
        """Start to send a tensor that :meth:`inline` left out; its memory must not change any more."""

    def receive(self, announced: Announcement, read: Reader) -> torch.Tensor:
        """Return the next tensor when it is complete: every stream of the device may use it."""

    def flush(self, deadline: float) -> None:
        """Block until everything posted has been sent, at the latest until ``deadline`` of ``time.monotonic()``."""

    def prune(self) -> None:
        """Free the memory of tensors that have been sent."""


class InlineChannel(TensorChannel):
    """A channel inside the stream. Tensors of an accelerator are copied to host memory and back on the way.

    Args:
        device: where received tensors shall be.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._staged = device.type != "cpu"

    def inline(self, tensor: torch.Tensor) -> torch.Tensor | None:
        """See :class:`TensorChannel`."""
        return tensor.detach().cpu() if self._staged else tensor

    def post(self, tensor: torch.Tensor) -> None:
        """Do nothing; it is not called, since all tensors are inline."""

    def receive(self, announced: Announcement, read: Reader) -> torch.Tensor:
        """See :class:`TensorChannel`."""
        tensor = announced.allocate(_CPU)
        if size := announced.nbytes:
            read(bytes_of(tensor, size, writable=True))
        return tensor.to(self._device) if self._staged else tensor

    def flush(self, deadline: float) -> None:
        """Return at once, since nothing waits."""

    def prune(self) -> None:
        """Do nothing, since nothing is kept."""


class CollectiveChannel(TensorChannel):
    """``torch.distributed`` messages in a process group that only this direction between two ranks uses.

    On CUDA a receiver thread allocates and receives on a stream of its own and waits for it on the host, so that a
    tensor that is handed on is complete for every stream; the memory is also marked as used by the device's default
    stream, which computes with it, so that it is not reused too early. The sender's message is ordered behind what its
    current stream has queued.

    Args:
        group: two ranks; see :func:`directed_groups`.
        peer: the other global rank.
        device: of the tensors.
    """

    def __init__(self, group: dist.ProcessGroup, peer: int, device: torch.device) -> None:
        self._group = group
        self._peer = peer
        self._device = device
        self._stream = torch.cuda.Stream(device) if device.type == "cuda" else None
        # A tensor must live until its message has left.
        self._leaving: deque[tuple[dist.Work, torch.Tensor]] = deque()
        self._lock = threading.Lock()

    def inline(self, tensor: torch.Tensor) -> torch.Tensor | None:
        """Return None, since no tensor is inline."""

    def post(self, tensor: torch.Tensor) -> None:
        """See :class:`TensorChannel`."""
        if not tensor.numel():
            return
        flat = _flat_bytes(tensor)
        work = dist.isend(flat, dst=self._peer, group=self._group)
        if work is None:
            raise AssertionError("a group without this rank")
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
        if self._stream is None:
            return self._receive(announced)
        with torch.cuda.stream(self._stream):
            tensor = self._receive(announced)
        self._stream.synchronize()
        tensor.record_stream(torch.cuda.default_stream(self._device))
        return tensor

    def _receive(self, announced: Announcement) -> torch.Tensor:
        tensor = announced.allocate(self._device)
        if tensor.numel():
            work = dist.irecv(_flat_bytes(tensor), src=self._peer, group=self._group)
            if work is None:
                raise AssertionError("a group without this rank")
            work.wait()
        return tensor

    def flush(self, deadline: float) -> None:
        """See :class:`TensorChannel`."""
        while True:
            with self._lock:
                if not self._leaving:
                    return
                work, _ = self._leaving[0]
            left = deadline - time.monotonic()
            if left <= 0 or not work.wait(timedelta(seconds=left)):
                raise DeadlineError(f"rank {self._peer} did not take all tensors in time; check that it still runs")
            with self._lock:
                if self._leaving and self._leaving[0][0] is work:
                    self._leaving.popleft()


def _flat_bytes(tensor: torch.Tensor) -> torch.Tensor:
    """Return a dense tensor as one row of bytes: every backend can send these, whatever the dtype."""
    return tensor.detach().as_strided((tensor.numel(),), (1,)).view(torch.uint8)


#: Makes the one channel to or from a global rank, instead of those below; a rehearsal, which moves no elements, puts its own here.
instead: list[Callable[[int], TensorChannel]] = []


def choose_channels(device: torch.device, peer: int, group: dist.ProcessGroup | None) -> tuple[TensorChannel, ...]:
    """Return the channels of one direction: position 0 for host memory, 1 for tensors of ``device``.

    See :func:`channel_of`.

    Args:
        group: for this direction alone; None sends everything inside the stream.
    """
    if instead:
        return (instead[-1](peer),)
    host = InlineChannel(_CPU)
    if group is not None:
        return host, CollectiveChannel(group, peer, device)
    return (host,) if device.type == "cpu" else (host, InlineChannel(device))


def channel_of(tensor: torch.Tensor, channels: Sequence[TensorChannel], device: torch.device) -> int:
    """Return the position of the channel in ``channels`` that a tensor takes.

    Raises:
        SMPUserError: it is on a device that this rank does not compute on.
    """
    if len(channels) > 1 and _is_same(tensor.device, device):
        return 1
    if tensor.is_cpu:
        return 0
    raise SMPUserError(
        f"a tensor is on {tensor.device}, but this rank computes on {device}; move it with .to({str(device)!r}) before the call"
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


def meet(
    mine: int,
    ranks: Sequence[int],
    channels: Mapping[int, tuple[TensorChannel, TensorChannel]],
    device: torch.device,
    seconds: float,
) -> None:
    """Send one element through the process group of every direction, before anything else is sent; collective.

    A group connects at its first message, and NCCL blocks both sides until it has. If two ranks each answered
    the other's question on the thread that receives from it, they would wait forever. Here all ranks go through
    the directions in one order, the order in which :func:`directed_groups` makes the groups. A broken group is
    found here too.

    Args:
        mine: global rank of the caller.
        ranks: of the pipeline group, in the same order everywhere.
        channels: to and from each other rank.

    Raises:
        DeadlineError: a rank did not take part in time.
        SMPRuntimeError: a group cannot carry a tensor.
    """
    deadline = time.monotonic() + seconds
    outcome: queue.SimpleQueue[BaseException | None] = queue.SimpleQueue()
    tried = (mine, mine)

    def go_through() -> None:
        nonlocal tried
        try:
            use_device(device)
            for source, target in permutations(ranks, 2):
                if mine not in (source, target):
                    continue
                tried = source, target
                element = torch.zeros((1,), dtype=torch.uint8, device=device)
                if mine == source:
                    out, _ = channels[target]
                    out.post(element)
                    out.flush(deadline)
                else:
                    _, back = channels[source]
                    back.receive(announce(element, 1), lambda memory: None)
            outcome.put(None)
        except BaseException as error:
            outcome.put(error)

    # On its own thread, because a group that is connecting cannot be interrupted at the deadline.
    threading.Thread(target=go_through, name="smp-meet", daemon=True).start()
    error = None
    with contextlib.suppress(queue.Empty):
        error = outcome.get(timeout=max(0.0, deadline - time.monotonic()))
        if error is None:
            return
    if error is None or time.monotonic() >= deadline:  # gloo keeps the deadline by itself, with words of its own
        raise DeadlineError(
            f"the process group from rank {tried[0]} to rank {tried[1]} was not connected after {seconds:g} s, when the pipeline "
            "began; check that both still run and that their hosts may reach each other's ports (NCCL_DEBUG=INFO tells what "
            "NCCL tries), or raise SMP_TIMEOUT_SECONDS"
        ) from error
    raise SMPRuntimeError(
        f"the process group from rank {tried[0]} to rank {tried[1]} did not carry its first element, when the pipeline began: "
        f"{type(error).__name__}: {error}; check the accelerators of both and the network between them, and "
        "NCCL_SOCKET_IFNAME where hosts have several networks (NCCL_DEBUG=INFO tells what NCCL tries)"
    ) from error


def directed_groups(
    groups_of_ranks: Sequence[Sequence[int]], backend: str
) -> Callable[[tuple[int, int]], dist.ProcessGroup]:
    """Create a process group for every ordered pair inside each of ``groups_of_ranks``, for the transport.

    Every rank of the job calls this with the same list, since all ranks must make all groups in one order. (With
    ``use_local_synchronization`` only the two members would have to, but it derives a group's name from the number
    of groups that a rank has made so far, which differs between them.) A rank waits only for groups it is in.

    Args:
        backend: ``"nccl"`` or ``"gloo"``.

    Returns:
        ``make_group(pair)`` with ``pair`` the global ranks (source, destination), one of them this rank.
    """
    timeout = timedelta(seconds=timeout_seconds())
    made: dict[tuple[int, int], dist.ProcessGroup] = {}
    for ranks in groups_of_ranks:
        for pair in permutations(ranks, 2):
            group = dist.new_group(pair, backend=backend, timeout=timeout)
            if dist.get_rank() in pair:
                made[pair] = group
    return made.__getitem__
