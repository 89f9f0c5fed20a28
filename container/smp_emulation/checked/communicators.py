"""Communicators between the emulated devices of several processes, with NCCL's rules, over gloo."""

from __future__ import annotations

import os
import queue
import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist

from smp_emulation.checked.streams.execution import QueuedWork
from smp_emulation.checked.streams.faults import StreamFault
from smp_emulation.checked.streams.futures import StreamCollective, StreamPoint
from smp_emulation.checked.streams.memory import view_of
from smp_emulation.checked.streams.sites import find_site
from smp_emulation.errors import CudaCallError

if TYPE_CHECKING:
    from smp_emulation.checked.streams.device import Devices

#: What carries the bytes; the stubs lack the methods of its base.
_gloo: Any = dist.ProcessGroupGloo
#: Bytes of the header in which a rank describes its next operation to the others.
_HEADER = 512


@dataclass(frozen=True)
class Asked:
    """A rank's request to a communicator, as the other ranks receive it.

    Attributes:
        what: the operation with the arguments that all ranks must agree on.
        device: identity of the rank's device, unique among all hosts.
        line: the line of code that made the request.
    """

    what: str
    device: str
    line: str

    def packed(self) -> torch.Tensor:
        """Return the request as a fixed number of bytes."""
        rest = f"\n{self.device}\n{self.line}".encode()
        text = self.what.encode()[: _HEADER - len(rest)] + rest  # an operation over many tensors is long
        return torch.frombuffer(bytearray(text.ljust(_HEADER)), dtype=torch.uint8)

    @classmethod
    def unpacked(cls, header: torch.Tensor) -> Asked:
        """Return the request that ``header`` contains."""
        return cls(*bytes(header.tolist()).decode(errors="replace").rstrip().split("\n"))


class CollectiveThread:
    """A thread that runs the jobs of streams in their order."""

    def __init__(self) -> None:
        self._jobs: queue.SimpleQueue[tuple[Callable[[], None], Callable[..., None]] | None] = queue.SimpleQueue()
        # A daemon: a collective that never ends must not keep the process alive.
        threading.Thread(target=self._serve, name="emulated-collectives", daemon=True).start()

    def begin(self, job: Callable[[], None]) -> Callable[[Callable[..., None]], None]:
        """Return what starts a job; it gets the function to call when the job is over."""
        return lambda over: self._jobs.put((job, over))

    def close(self) -> None:
        """End the thread, behind what it has to do."""
        self._jobs.put(None)

    def _serve(self) -> None:
        while (given := self._jobs.get()) is not None:
            job, over = given
            try:
                job()
            except BaseException as error:  # raised when the host waits for the device
                over(error)
            else:
                over()
            # They hold tensors, which would live until the next job.
            del given, job, over


class _StreamChannel(CollectiveThread):
    """A communicator's own stream, with a thread that does what gets to its front."""

    def __init__(self, devices: Devices, number: int, name: str) -> None:
        self.lane = devices.new_lane(number, name)
        super().__init__()


class Communicator(dist.ProcessGroupGloo):
    """NCCL for a group of ranks: what a rank asks for is work of a stream, and all must ask for the same in one order.

    Stands where PyTorch looks for ``ProcessGroupNCCL``.
    """

    devices: Devices
    library = "NCCL"

    class Options:
        """Options that PyTorch and scripts set."""

        def __init__(self, is_high_priority_stream: bool = False) -> None:
            self.is_high_priority_stream = is_high_priority_stream
            self._timeout = dist.distributed_c10d.default_pg_timeout
            self.group_name = ""
            self.global_ranks_in_group: list[int] = []
            self.split_from = None
            self.split_color = -1

    def __init__(self, store: Any, rank: int, size: int, options: Any = None, timeout: Any = None) -> None:
        options = options if isinstance(options, Communicator.Options) else Communicator.Options()
        super().__init__(dist.PrefixStore("emulated/", store), rank, size, timeout=timeout or options._timeout)
        self._mine, self._count = rank, size
        self.label = options.group_name or "a group"
        self.channels: dict[tuple[int, ...], CollectiveThread] = {}
        keep_alive(self)

    # -- operations ----------------------------------------------------------------------------------------------------

    def exchange(
        self,
        what: str,
        sent: Sequence[torch.Tensor],
        received: Sequence[torch.Tensor],
        take: Callable[[list[list[torch.Tensor]]], None],
        result: Any,
    ) -> StreamCollective:
        """Start a collective in which all ranks exchange ``sent``, and each rank takes the part that it needs.

        Args:
            what: operation and arguments that must be the same on all ranks.
            take: receives a list with the tensors that each rank sent, and writes the elements of ``received``.
            result: of the work's future.
        """
        number = self.device_of([*sent, *received])
        give = self.elements(sent)
        asked = Asked(f"{what} of {_described(sent)}", self.identity_of(number), find_site())

        def job() -> None:
            # Before any element moves: ranks with different calls would wait for bytes that no rank sends.
            headers = self._gathered(asked.packed())
            self._compare([Asked.unpacked(header) for header in headers])
            flat = _joined_bytes(give)
            # Without elements there is nothing to send, but the ranks' calls have been compared.
            everyone = self._gathered(flat) if flat.numel() else [flat] * self._count
            take([_cut(each, give) for each in everyone])

        return self.start(what, self.channel(number, ()), (sent, received), job, result)

    def exchange_parts(self, received: torch.Tensor, sent: torch.Tensor, given: Sequence[int]) -> StreamCollective:
        """Start an all-to-all in parts of different sizes: rows of ``sent`` for each rank, and of ``received`` from each."""
        number = self.device_of([sent, received])
        (give,), (into,) = self.elements([sent]), self.elements([received])
        asked = Asked(f"all_to_all_single in parts of {sent.dtype}", self.identity_of(number), find_site())
        counts = list(given) or [len(give) // self._count] * self._count

        def job() -> None:
            headers = self._gathered(asked.packed())
            self._compare([Asked.unpacked(header) for header in headers])
            sizes = [each.tolist() for each in self._gathered(torch.tensor(counts))]
            # All ranks gather tensors of one size, that of the longest.
            flat = give.new_zeros(max(map(sum, sizes)), *give.shape[1:])
            flat[: len(give)] = give
            if not flat.numel():
                return
            everyone = self._gathered(flat.reshape(-1).view(torch.uint8))
            parts = [
                each.view(flat.dtype).view(flat.shape).split([*size, len(flat) - sum(size)])[self._mine]
                for each, size in zip(everyone, sizes, strict=True)
            ]
            into.copy_(torch.cat(parts))

        return self.start("all_to_all_single", self.channel(number, ()), ([sent], [received]), job, [received])

    def send(self, tensors: Sequence[torch.Tensor], peer: int, tag: int = 0) -> Any:
        """Start sending a message to one rank."""
        number = self.device_of(tensors)
        (give,) = self.elements(tensors)
        asked = Asked(f"send of {_described(tensors)}", self.identity_of(number), find_site())

        def job() -> None:
            _gloo.send(self, [asked.packed()], peer, tag).wait()
            _gloo.send(self, [give.reshape(-1).view(torch.uint8)], peer, tag).wait()

        return self.start(f"send to {peer}", self.channel(number, _pair(self._mine, peer)), (tensors, ()), job, None)

    def recv(self, tensors: Sequence[torch.Tensor], peer: int, tag: int = 0) -> Any:
        """Start receiving a message from one rank."""
        number = self.device_of(tensors)
        (take,) = self.elements(tensors)
        mine = Asked(f"send of {_described(tensors)}", self.identity_of(number), find_site())

        def job() -> None:
            header = torch.empty(_HEADER, dtype=torch.uint8)
            _gloo.recv(self, [header], peer, tag).wait()
            asked = Asked.unpacked(header)
            if asked.what != mine.what:
                raise StreamFault(
                    f"{self.label}: rank {peer} sends what rank {self._mine} does not expect: {asked.what} at {asked.line}, "
                    f"against {mine.what} at {mine.line}. NCCL would hang or mix up bytes; let both ranks send and receive in "
                    "one order"
                )
            came = torch.empty(take.nbytes, dtype=torch.uint8)
            _gloo.recv(self, [came], peer, tag).wait()
            take.copy_(came.view(take.dtype).view(take.shape))

        return self.start(
            f"receive from {peer}", self.channel(number, _pair(self._mine, peer)), ((), tensors), job, None
        )

    def close(self) -> None:
        """End its threads."""
        for channel in self.channels.values():
            channel.close()

    # -- how it is done --------------------------------------------------------------------------------------------------

    def start(
        self,
        what: str,
        channel: Any,
        tensors: tuple[Sequence[torch.Tensor], Sequence[torch.Tensor]],
        job: Callable[[], None],
        result: Any,
    ) -> StreamCollective:
        """Queue it behind what the current stream has so far."""
        devices = self.devices
        sent, received = tensors
        number = self.device_of([*sent, *received])
        current = devices.current(number)
        with devices.lock:
            devices.follow(channel.lane, current)
            devices.touch(channel.lane, what, devices.memory.placed(sent), devices.memory.placed(received))
            before = (current.last,) if current.last is not None and not current.last.done else ()
            item = QueuedWork(None, before, f"{what} over {self.label}, asked for at {find_site()}", channel.begin(job))
            devices.executor.queue(channel.lane, item)
            point = StreamPoint(devices, number, channel.lane, item)
        return StreamCollective(point, [*sent, *received], result)

    def channel(self, number: int, pair: tuple[int, ...]) -> CollectiveThread:
        """Return the thread, and the stream, of collectives or of messages between two ranks."""
        if pair not in self.channels:
            kind = f"messages between ranks {pair[0]} and {pair[1]}" if pair else "collectives"
            self.channels[pair] = _StreamChannel(self.devices, number, f"NCCL's stream for {kind} of {self.label}")
        return self.channels[pair]

    def device_of(self, tensors: Sequence[torch.Tensor]) -> int:
        """Return the one device that the tensors are on."""
        numbers = {self.devices.device_of(tensor) for tensor in tensors}
        if None in numbers:
            raise CudaCallError(
                f"{self.library} takes no tensors in host memory here: No backend type associated with device type cpu"
            )
        if len(numbers) != 1:
            raise CudaCallError(f"{self.library} takes tensors of one device, not of {sorted(map(str, numbers))}")
        for tensor in tensors:
            if not tensor.is_contiguous():
                raise ValueError("Tensors must be contiguous")
        return next(number for number in numbers if number is not None)

    def elements(self, tensors: Sequence[torch.Tensor]) -> list[torch.Tensor]:
        """Return views of the device memory behind the tensors, for the work of the stream."""
        views = []
        for tensor in tensors:
            place = self.devices.memory.place_of(tensor)
            if place is None or place.block is None:
                views.append(tensor.detach())
            else:
                views.append(view_of(place.block, tensor))
        return views

    def identity_of(self, number: int) -> str:
        """Return a device's identity among those of all ranks; NCCL takes ``NCCL_HOSTID`` for the host."""
        return f"{os.environ.get('NCCL_HOSTID') or self.devices.identity}/{number}"

    def _gathered(self, mine: torch.Tensor) -> list[torch.Tensor]:
        parts = [torch.empty_like(mine) for _ in range(self._count)]
        _gloo.allgather(self, [parts], [mine]).wait()
        return parts

    def _compare(self, asked: Sequence[Asked]) -> None:
        """Check that all ranks made the same request, each on its own device.

        Raises:
            StreamFault: the requests differ, or two ranks use the same device.
        """
        fault = self._unlike(asked) or self._twice(asked)
        if fault is not None:
            self._gathered(torch.zeros(1))  # a barrier: all ranks must have the headers before the first one leaves
            raise StreamFault(f"{self.label}: {fault}")

    def _unlike(self, asked: Sequence[Asked]) -> str | None:
        for rank, other in enumerate(asked):
            if other.what != asked[0].what:
                return (
                    f"ranks ask for different collectives at the same place of the order: rank 0 for {asked[0].what} at "
                    f"{asked[0].line}, rank {rank} for {other.what} at {other.line}. {self.library} would hang or mix up bytes; "
                    "let all ranks ask for the same in one order"
                )
        return None

    @staticmethod
    def _twice(asked: Sequence[Asked]) -> str | None:
        first: dict[str, int] = {}
        for rank, other in enumerate(asked):
            if first.setdefault(other.device, rank) != rank:
                return (
                    f"Duplicate GPU detected: ranks {first[other.device]} and {rank} both use {other.device}; NCCL takes one "
                    "rank per device, so choose another by torch.cuda.set_device"
                )
        return None


#: PyTorch holds the part of them that is not Python's.
_alive: list[Any] = []


def keep_alive(backend: Any) -> None:
    """Keep a backend until the emulation ends, which calls its ``close()``."""
    _alive.append(backend)


def forget() -> None:
    """Close and release all communicators."""
    for communicator in _alive:
        communicator.close()
    _alive.clear()


def _pair(one: int, other: int) -> tuple[int, int]:
    return min(one, other), max(one, other)


def _described(tensors: Sequence[torch.Tensor]) -> str:
    return ", ".join(f"{tensor.numel()} {str(tensor.dtype).removeprefix('torch.')}" for tensor in tensors)


def _joined_bytes(tensors: Sequence[torch.Tensor]) -> torch.Tensor:
    if not tensors:
        return torch.empty(0)
    return torch.cat([tensor.reshape(-1).view(torch.uint8) for tensor in tensors])


def _cut(flat: torch.Tensor, like: Sequence[torch.Tensor]) -> list[torch.Tensor]:
    """Return bytes as tensors with the shapes and data types that were sent."""
    parts, start = [], 0
    for tensor in like:
        piece = flat[start : start + tensor.nbytes].clone()
        parts.append(piece.view(tensor.dtype).view(tensor.shape))
        start += tensor.nbytes
    return parts
