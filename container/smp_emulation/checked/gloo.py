"""gloo's collectives for tensors of emulated devices, as ranks that share a device use them.

PyTorch's gloo copies such a tensor to host memory on a stream of its own, exchanges it there, and copies the result back. Its
``wait()`` blocks the host until the copy back is queued, and lets the current stream wait for it.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from datetime import timedelta
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist

from smp_emulation.checked.communicators import CollectiveThread, Communicator, keep_alive
from smp_emulation.checked.streams.clocks import VectorClock
from smp_emulation.checked.streams.execution import QueuedWork
from smp_emulation.checked.streams.futures import StreamCollective, StreamPoint
from smp_emulation.checked.streams.sites import find_site
from smp_emulation.errors import CudaCallError

if TYPE_CHECKING:
    from smp_emulation.checked.patches import Patches
    from smp_emulation.checked.streams.device import Devices
    from smp_emulation.checked.streams.execution import Lane

#: Streams of a group that take turns; PyTorch has 32.
_STREAMS = 4


def install(patches: Patches) -> None:
    """Let gloo's groups take tensors of the devices."""
    for module in (dist, dist.distributed_c10d):
        patches.set(module, "ProcessGroupGloo", GlooBackend)
    own = dist.ProcessGroup._register_backend

    def register(group: dist.ProcessGroup, device: Any, kind: Any, backend: Any = None) -> None:
        own(group, device, kind, backend)
        # All members are here, in one order; a group of host tensors alone needs no second one.
        if torch.device(device).type == "cuda" and isinstance(backend, GlooBackend):
            backend.serve_devices()

    patches.set(dist.ProcessGroup, "_register_backend", register)


class GlooBackend(dist.ProcessGroupGloo):
    """PyTorch's gloo, which takes host tensors, with a second group for tensors of devices.

    The second one has an order of its own: its work begins when a stream gets there, not when it is asked for.
    """

    on_devices: GlooOnDevices | None = None

    def __init__(self, store: Any, rank: int, size: int, *args: Any, **kwargs: Any) -> None:
        super().__init__(store, rank, size, *args, **kwargs)
        self._arguments = dist.PrefixStore("devices/", store), rank, size, kwargs.get("timeout")
        keep_alive(self)

    def serve_devices(self) -> None:
        """Make the group for tensors of devices; all members call it."""
        if self.on_devices is None:
            store, rank, size, timeout = self._arguments
            self.on_devices = GlooOnDevices(store, rank, size, timeout=timeout)

    def close(self) -> None:
        """Do nothing; the group for devices closes on its own."""


class GlooOnDevices(Communicator):
    """gloo for tensors of devices; several ranks may use one device."""

    library = "gloo"

    def __init__(self, store: Any, rank: int, size: int, timeout: Any = None) -> None:
        super().__init__(store, rank, size, timeout=timeout)
        self._lanes: dict[int, list[Lane]] = {}
        self._last: QueuedWork | None = None

    def send(self, tensors: Sequence[torch.Tensor], peer: int, tag: int = 0) -> Any:
        """Refuse a message, as gloo does."""
        raise CudaCallError("gloo sends no tensors of a device; copy them to host memory first")

    recv = send

    def identity_of(self, number: int) -> str:
        """Return another device for each rank: gloo does not look at devices."""
        return f"rank {self.rank()}"

    def start(
        self,
        what: str,
        channel: Any,
        tensors: tuple[Sequence[torch.Tensor], Sequence[torch.Tensor]],
        job: Callable[[], None],
        result: Any,
    ) -> StreamCollective:
        """Queue the copies and the exchange on a stream of gloo's, behind what the current stream has so far."""
        devices = self.devices
        number = self.device_of([*tensors[0], *tensors[1]])
        current, lane = devices.current(number), self._next_lane(number)
        with devices.lock:
            devices.follow(lane, current)
            reads, writes = map(devices.memory.placed, tensors)
            for _, place in (*reads, *writes):
                if place.block is not None:
                    place.block.users.add(lane.actor)
            devices.touch(lane, f"{what} (gloo's copy to host memory)", reads, ())
            copied_out = VectorClock(lane.clock)
            devices.touch(lane, f"{what} (gloo's copy from host memory)", (), writes)
            needs = [current.last, self._last]
            before = tuple(item for item in needs if item is not None and not item.done)
            said = f"{what} over {self.label}, asked for at {find_site()}"
            item = self._last = QueuedWork(None, before, said, channel.begin(job))
            devices.executor.queue(lane, item)
            return GlooWork(StreamPoint(devices, number, lane, item), copied_out, devices, tensors, result)

    def _next_lane(self, number: int) -> Lane:
        lanes = self._lanes.setdefault(number, [])
        if len(lanes) < _STREAMS:
            lane = self.devices.new_lane(number, f"gloo's stream {len(lanes)} of {self.label} on cuda:{number}")
        else:
            lane = lanes.pop(0)
        lanes.append(lane)
        return lane

    def channel(self, number: int, pair: tuple[int, ...]) -> CollectiveThread:
        """Return the one thread of the group; its streams are drawn apart."""
        if () not in self.channels:
            self.channels[()] = CollectiveThread()
        return self.channels[()]


class GlooWork(StreamCollective):
    """A collective of gloo in progress; it keeps its tensors until ``wait`` is called.

    Args:
        copied_out: what has happened before the exchange; the host knows of it once the exchange is over.
    """

    def __init__(
        self,
        point: StreamPoint,
        copied_out: VectorClock,
        devices: Devices,
        tensors: tuple[Sequence[torch.Tensor], Sequence[torch.Tensor]],
        result: Any,
    ) -> None:
        super().__init__(point, [*tensors[0], *tensors[1]], result)
        self._copied_out = copied_out
        self._devices = devices

    def wait(self, timeout: timedelta = timedelta(0)) -> bool:
        """Block the host until the exchange is over, and let the current stream wait for the result."""
        devices = self._devices
        with devices.lock:
            devices.waits["wait for a collective of gloo", find_site()] += 1
        devices.executor.finish([self._point.item])
        with devices.lock:
            devices.host.join(self._copied_out)
        self._point.hold_up_current()
        self._tensors = ()
        return True

    def is_completed(self) -> bool:
        """Return whether the exchange is over."""
        if not self._devices.executor.look(self._point.item):
            return False
        with self._devices.lock:
            self._devices.host.join(self._copied_out)
        return True

    is_success = is_completed
