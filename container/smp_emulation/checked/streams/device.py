"""The emulated devices of a process: streams, events, what the host knows of them, and what it has waited for."""

from __future__ import annotations

import itertools
import os
import threading
import uuid
from collections import Counter
from collections.abc import Callable, Iterable
from typing import Any

import torch

from smp_emulation.checked.streams.clocks import HOST, Access, VectorClock
from smp_emulation.checked.streams.execution import Executor, Lane, QueuedWork
from smp_emulation.checked.streams.memory import Memory, StoragePlace, span_of
from smp_emulation.checked.streams.sites import find_site
from smp_emulation.errors import CudaCallError
from smp_emulation.gpu_model.model import GpuModel

#: Attribute of tensors of subclasses that have no elements: the number of their device.
ON_DEVICE = "_emulated_device"


# Per thread, as in CUDA: each thread has a current device, and a current stream on each device.
class _HostThread(threading.local):
    """The state of one thread of the host."""

    device = 0

    def __init__(self) -> None:
        #: By device, the stream that work goes to; none means the default one.
        self.current: dict[int, Lane] = {}


class Devices:
    """Several emulated devices.

    All threads of the host count as one actor: what one of them has waited for, the others know of.

    Args:
        seed: of the order in which work is executed.
        count: how many devices the process sees.

    Attributes:
        waits: how often the host has waited for a device, by kind and line.
        model: memory, contexts and launches, as a GPU shows them.
    """

    def __init__(self, seed: int, count: int) -> None:
        self.seed = seed
        self.count = count
        #: Distinguishes these devices from those of other hosts; all ranks of one host see the same devices.
        self.identity = f"{uuid.getnode()}/{os.environ.get('SM_CURRENT_HOST', '')}"
        self.executor = Executor(seed)
        self.model = GpuModel.from_environment(count)
        self.memory = Memory(self.model, default_streams=count)
        self.host = VectorClock({HOST: 0})
        self.waits: Counter[tuple[str, str]] = Counter()
        self.generators = [torch.Generator() for _ in range(count)]
        self.thread = _HostThread()
        #: Guards clocks and histories: threads of the host queue work at the same time.
        self.lock = threading.RLock()
        self._numbers = itertools.count(1)
        self.lanes: dict[int, list[Lane]] = {number: [] for number in range(count)}
        self.default = [self.new_lane(number, f"the default stream of cuda:{number}") for number in range(count)]

    def new_lane(self, device: int, name: str = "") -> Lane:
        """Create another stream of a device."""
        actor = next(self._numbers)
        lane = Lane(actor, name or f"stream {actor} of cuda:{device}, made at {find_site()}")
        self.executor.add(lane)
        self.lanes[device].append(lane)
        return lane

    def index(self, device: Any = None) -> int:
        """Return the index of a device in any form that PyTorch accepts; None means the thread's current device."""
        number = device
        if device is not None and not isinstance(device, int):
            known = torch.device(device)
            if known.type != "cuda":
                raise ValueError(f"expected a cuda device, but got: {device}")
            number = known.index
        if number is None or number < 0:
            number = self.thread.device
        if not 0 <= number < self.count:
            raise CudaCallError(f"CUDA error: invalid device ordinal ({number}; {self.count} emulated devices)")
        return number

    def current(self, device: int) -> Lane:
        """Return the current stream of this thread on a device."""
        return self.thread.current.get(device) or self.default[device]

    # -- work ------------------------------------------------------------------------------------------------------

    def touch(
        self,
        lane: Lane,
        what: str,
        reads: Iterable[tuple[torch.Tensor, StoragePlace]],
        writes: Iterable[tuple[torch.Tensor, StoragePlace]],
    ) -> None:
        """Record the tensors that a stream's next work reads and writes; call it before the work is queued.

        Raises:
            StreamFault: the work would race with another access.
        """
        # Several threads of the host may queue work, and the executor's thread ends some.
        with self.lock:
            self.host[HOST] += 1
            # Work comes after all that the host has done, or waited for, before it was queued.
            lane.clock.join(self.host)
            time = lane.clock.get(lane.actor, 0) + 1
            lane.clock[lane.actor] = time
            line = find_site()
            for is_write, touched in ((False, reads), (True, writes)):
                for tensor, place in touched:
                    history = place.history if place.block is None else place.block.history
                    start, stop = span_of(tensor)
                    span = start + place.base, stop + place.base
                    access = Access(lane.actor, time, lane.name, what, line, is_write, *span)
                    history.note(access, lane.clock, str(place))

    def follow(self, lane: Lane, other: Lane) -> None:
        """Record that the next work of ``lane`` comes after all work that ``other`` has so far."""
        other.clock.join(self.host)
        lane.clock.join(other.clock)

    def queue(
        self, lane: Lane, run: Callable[[], None] | None, what: str, needs: tuple[QueuedWork, ...] = ()
    ) -> QueuedWork:
        """Put work behind all that the stream has."""
        return self.executor.queue(lane, QueuedWork(run, needs, f"{what}, asked for at {find_site()}"))

    def host_touches(self, tensor: torch.Tensor, place: StoragePlace, what: str, *, writes: bool) -> None:
        """Record that the host reads or writes memory that streams use.

        Raises:
            StreamFault: the host has not waited for the work of streams on that memory.
        """
        with self.lock:
            self.host[HOST] += 1
            start, stop = span_of(tensor)
            span = start + place.base, stop + place.base
            access = Access(HOST, self.host[HOST], "the host", what, find_site(), writes, *span)
            place.history.note(access, self.host, str(place))

    def wait_on_host(self, kind: str, lanes: Iterable[Lane]) -> None:
        """Block the host until streams have finished all their queued work."""
        with self.lock:
            lanes = list(lanes)
            items = [lane.last for lane in lanes]
            self.waits[kind, find_site()] += 1
            # Copies: of work that other threads queue meanwhile, the host knows nothing afterwards.
            reached = [VectorClock(lane.clock) for lane in lanes]
        # Without the lock, which other threads need to queue what this work may wait for.
        self.executor.finish(items)
        with self.lock:
            for clock in reached:
                self.host.join(clock)

    # -- tensors ---------------------------------------------------------------------------------------------------

    def device_of(self, tensor: torch.Tensor) -> int | None:
        """Return the index of the tensor's device, or None for the host."""
        place = self.memory.place_of(tensor)
        if place is None:
            return tensor.__dict__.get(ON_DEVICE)
        return place.device

    def new_tensor(self, like: torch.Tensor, device: int, lane: Lane) -> torch.Tensor:
        """Return a tensor on a device with the shape, strides and data type of ``like``, and undefined elements."""
        start, stop = span_of(like)
        self.model.allocator(device).raise_if_hopeless(stop - start)  # before the host has to find room for it, too
        made = torch.empty_strided(like.size(), like.stride(), dtype=like.dtype, device="cpu")
        self.adopt(made, device, lane)
        return made

    def adopt(self, made: torch.Tensor, device: int, lane: Lane) -> StoragePlace:
        """Turn a new host tensor into a device tensor."""
        place = StoragePlace(device)
        size = made.untyped_storage().nbytes()
        with self.lock:
            lane.clock.join(self.host)
            if size:
                place.block = self.memory.allocate(device, size, lane)
            self.memory.register(made, place)
        return place

    def close(self) -> None:
        """End the thread that executes."""
        self.executor.close()
        self.memory.clear()
        self.model.close()
