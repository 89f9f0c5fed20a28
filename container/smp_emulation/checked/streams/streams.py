"""``torch.cuda.Stream`` and ``Event`` of emulated devices."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING, Any

import torch

from smp_emulation.checked.streams.clocks import VectorClock
from smp_emulation.checked.streams.sites import find_site

if TYPE_CHECKING:
    from smp_emulation.checked.streams.device import Devices
    from smp_emulation.checked.streams.execution import Lane, QueuedWork


class EmulatedStream:
    """A stream. See ``torch.cuda.Stream``; ``priority`` changes nothing, as no order may depend on it."""

    devices: Devices

    def __init__(self, device: Any = None, priority: int = 0, *, lane: Lane | None = None) -> None:
        number = self.devices.index(device)
        self.device = torch.device("cuda", number)
        self.device_index = number
        self.priority = priority
        self.lane = lane or self.devices.new_lane(number)

    @property
    def cuda_stream(self) -> int:
        """Return the unique number of the stream."""
        return self.lane.actor

    stream_id = cuda_stream

    def wait_stream(self, stream: EmulatedStream) -> None:
        """Let all work that is queued here from now on wait for all current work of ``stream``."""
        self.wait_event(stream.record_event())

    def wait_event(self, event: EmulatedEvent) -> None:
        """Let all work that is queued here from now on wait for the event."""
        event.wait(self)

    def record_event(self, event: EmulatedEvent | None = None) -> EmulatedEvent:
        """Record an event after all current work of the stream, and return it."""
        event = event or EmulatedEvent()
        event.record(self)
        return event

    def synchronize(self) -> None:
        """Block the host until all work of the stream is done."""
        self.devices.wait_on_host("Stream.synchronize", [self.lane])

    def query(self) -> bool:
        """Return whether all work of the stream is done."""
        event = self.record_event()
        return event.query()

    def __enter__(self) -> EmulatedStream:
        self._entered = self.devices.thread.current.get(self.device_index), self.devices.thread.device
        self.devices.thread.current[self.device_index] = self.lane
        self.devices.thread.device = self.device_index
        return self

    def __exit__(self, *_: object) -> None:
        before, self.devices.thread.device = self._entered
        if before is None:
            self.devices.thread.current.pop(self.device_index, None)
        else:
            self.devices.thread.current[self.device_index] = before

    def __eq__(self, other: object) -> bool:
        return isinstance(other, EmulatedStream) and self.lane is other.lane

    def __hash__(self) -> int:
        return hash(self.lane.actor)

    def __repr__(self) -> str:
        return f"<emulated torch.cuda.Stream: {self.lane.name}>"


class EmulatedEvent:
    """A point of a stream. See ``torch.cuda.Event``; one that was never recorded has happened."""

    devices: Devices

    def __init__(
        self, enable_timing: bool = False, blocking: bool = False, interprocess: bool = False, external: bool = False
    ) -> None:
        self._clock = VectorClock()
        self._item: QueuedWork | None = None
        self._timed = enable_timing
        self._seconds = 0.0
        self._recorded = False

    def record(self, stream: EmulatedStream | None = None) -> None:
        """Record the event after all current work of the stream."""
        stream = stream or current_stream(self.devices)
        with self.devices.lock:
            stream.lane.clock.join(self.devices.host)
            # A copy: the stream goes on, and the event stays at this point.
            self._clock = VectorClock(stream.lane.clock)
            run = self._note_time if self._timed else None
            self._item = self.devices.queue(stream.lane, run, "Event.record")
            self._recorded = True

    def _note_time(self) -> None:
        self._seconds = time.perf_counter()

    def wait(self, stream: EmulatedStream | None = None) -> None:
        """Let all work that is queued on a stream from now on wait for the event."""
        stream = stream or current_stream(self.devices)
        # The event may be recorded again, and its work may end, in other threads.
        with self.devices.lock:
            stream.lane.clock.join(self._clock)
            recorded = self._item
            # An event that was never recorded holds nothing up, as in CUDA.
            if recorded is not None and not recorded.done:
                self.devices.queue(stream.lane, None, "Event.wait", (recorded,))

    def query(self) -> bool:
        """Return whether the event has happened."""
        with self.devices.lock:
            clock, item = VectorClock(self._clock), self._item
        if not self.devices.executor.look(item):
            return False
        with self.devices.lock:
            self.devices.host.join(clock)
        return True

    def synchronize(self) -> None:
        """Block the host until the event has happened."""
        with self.devices.lock:
            clock, item = VectorClock(self._clock), self._item
            self.devices.waits["Event.synchronize", find_site()] += 1
        self.devices.executor.finish([item])
        with self.devices.lock:
            self.devices.host.join(clock)

    def elapsed_time(self, end_event: EmulatedEvent) -> float:
        """Return the milliseconds from this event to another."""
        for event in (self, end_event):
            if not event._timed or not event._recorded:
                raise ValueError("Both events must be created with enable_timing=True and recorded")
        return (end_event._seconds - self._seconds) * 1000

    def __repr__(self) -> str:
        return f"<emulated torch.cuda.Event: {'recorded' if self._recorded else 'not recorded'}>"


def current_stream(devices: Devices, device: Any = None) -> EmulatedStream:
    """Return the current stream of this thread on a device."""
    number = devices.index(device)
    return EmulatedStream(number, lane=devices.current(number))
