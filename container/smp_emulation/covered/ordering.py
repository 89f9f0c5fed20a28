"""Streams and events: work on the CPU is done when its call returns, so all of them are always ready."""

from __future__ import annotations

import itertools
import threading
import time
from typing import Any

import torch

from smp_emulation.calls import answer_with
from smp_emulation.devices import count, current_index, index_of
from smp_emulation.errors import refuse

_numbers = itertools.count(1)


class Event:
    """``torch.cuda.Event``: remembers when it was recorded."""

    def __init__(
        self, enable_timing: bool = False, blocking: bool = False, interprocess: bool = False, external: bool = False
    ) -> None:
        self._is_timed = enable_timing
        self._at: float | None = None

    @property
    def device(self) -> torch.device | None:
        """Return the device of the stream on which the event was recorded."""
        return None if self._at is None else torch.device("cuda", current_index())

    @property
    def cuda_event(self) -> int:
        """Return a number in place of CUDA's handle."""
        return 0 if self._at is None else id(self)

    def record(self, stream: Any = None) -> None:
        """Record the current time."""
        self._at = time.perf_counter()

    def wait(self, stream: Any = None) -> None:
        """Return at once: all work is done."""

    def query(self) -> bool:
        """Return True: all work is done."""
        return True

    def synchronize(self) -> None:
        """Return at once: all work is done."""

    def elapsed_time(self, end_event: Event) -> float:
        """Return the milliseconds from this event to another.

        Raises:
            ValueError: an event was made without ``enable_timing``, or was not recorded, as in PyTorch.
        """
        if not (self._is_timed and end_event._is_timed):
            raise ValueError("Both events must be created with argument 'enable_timing=True'.")
        if self._at is None or end_event._at is None:
            raise ValueError("Both events must be recorded before calculating elapsed time.")
        return (end_event._at - self._at) * 1000.0

    def ipc_handle(self) -> bytes:
        """Raise NeedsGpuError: another process cannot see the event."""
        refuse("torch.cuda.Event.ipc_handle", "events are shared between processes by the driver")

    @classmethod
    def from_ipc_handle(cls, device: Any, handle: Any) -> Event:
        """Raise NeedsGpuError, as :meth:`ipc_handle`."""
        refuse("torch.cuda.Event.from_ipc_handle", "events are shared between processes by the driver")

    def __repr__(self) -> str:
        return f"<torch.cuda.Event {'uninitialized' if self._at is None else hex(self.cuda_event)} (emulated)>"


class Stream:
    """``torch.cuda.Stream``: only a name, because work that is queued on it has already run."""

    # PyTorch's compiler compares objects that it has not finished making.
    device = torch.device("cuda", 0)
    stream_id = 0

    def __init__(self, device: Any = None, priority: int = 0, stream_id: int | None = None, **more: Any) -> None:
        self.device = torch.device("cuda", index_of(device))
        self.device_index = self.device.index
        self.device_type = 1
        self.priority = priority
        self.stream_id = next(_numbers) if stream_id is None else stream_id
        self._entered: list[StreamContext] = []

    @property
    def cuda_stream(self) -> int:
        """Return a number in place of CUDA's handle, 0 for the default stream."""
        return self.stream_id

    def query(self) -> bool:
        """Return True: all work is done."""
        return True

    def synchronize(self) -> None:
        """Return at once: all work is done."""

    def is_capturing(self) -> bool:
        """Return False: nothing can be captured in a graph."""
        return False

    def wait_event(self, event: Any) -> None:
        """Return at once: all work is done."""

    def wait_stream(self, stream: Any) -> None:
        """Return at once: all work is done."""

    def record_event(self, event: Event | None = None) -> Event:
        """Record an event now, and return it."""
        event = Event() if event is None else event
        event.record(self)
        return event

    @staticmethod
    def priority_range() -> tuple[int, int]:
        """Return the lowest and highest priority."""
        return 0, -1

    def __enter__(self) -> Stream:
        context = StreamContext(self)
        context.__enter__()
        self._entered.append(context)
        return self

    def __exit__(self, *raised: object) -> None:
        self._entered.pop().__exit__(*raised)

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Stream) and (self.device, self.stream_id) == (other.device, other.stream_id)

    def __hash__(self) -> int:
        return hash((self.device, self.stream_id))

    def __repr__(self) -> str:
        return f"<torch.cuda.Stream device={self.device} cuda_stream={hex(self.cuda_stream)} (emulated)>"


class ExternalStream(Stream):
    """``torch.cuda.ExternalStream``: a stream under a given number."""

    def __init__(self, stream_ptr: int, device: Any = None, **more: Any) -> None:
        super().__init__(device, stream_id=int(stream_ptr))


class _CurrentStreams(threading.local):
    """By device, the thread's stream where it is not the default one."""

    def __init__(self) -> None:
        self.by_device: dict[int, Stream] = {}


_streams = _CurrentStreams()


def default_stream(device: Any = None) -> Stream:
    """Return the default stream of a device."""
    return _defaults[index_of(device)]


class _Defaults(dict[int, Stream]):
    def __missing__(self, index: int) -> Stream:
        return self.setdefault(index, Stream(index, stream_id=0))


#: Each stream is made once: PyTorch's compiler traces code that requests one, and would trace its creation too.
_defaults = _Defaults()


def make_default_streams() -> None:
    """Make those of all devices."""
    for index in range(count()):
        default_stream(index)


def current_stream(device: Any = None) -> Stream:
    """Return the calling thread's current stream on a device."""
    index = index_of(device)
    return _streams.by_device.get(index) or default_stream(index)


def set_stream(stream: Stream | None) -> None:
    """Make a stream the calling thread's."""
    if stream is not None:
        _streams.by_device[stream.device.index] = stream


class StreamContext:
    """``torch.cuda.StreamContext``, the result of ``torch.cuda.stream()``: a stream is the thread's current one inside."""

    def __init__(self, stream: Stream | None) -> None:
        self.stream = stream
        self._before: Stream | None = None

    def __enter__(self) -> None:
        if self.stream is not None:
            self._before = current_stream(self.stream.device)
            set_stream(self.stream)

    def __exit__(self, *raised: object) -> None:
        set_stream(self._before)


CALLS = (
    answer_with("torch.cuda.Stream", "a name: work has run when its call returns", Stream),
    answer_with("torch.cuda.ExternalStream", "a stream under a given number", ExternalStream),
    answer_with("torch.cuda.Event", "remembers the time, for elapsed_time()", Event),
    answer_with("torch.cuda.StreamContext", "a stream is the thread's inside", StreamContext),
    answer_with("torch.cuda.stream", "a stream is the thread's inside", StreamContext),
    answer_with("torch.cuda.set_stream", "the thread's stream", set_stream),
    answer_with("torch.cuda.current_stream", "the thread's stream", current_stream),
    answer_with("torch.cuda.default_stream", "the stream with number 0", default_stream),
    answer_with("torch.cuda.get_stream_from_external", "a stream under a given number", ExternalStream),
)
