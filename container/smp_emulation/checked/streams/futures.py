"""Objects for work of a stream in progress: its point in the stream, works of collectives, futures."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from datetime import timedelta
from typing import TYPE_CHECKING, Any, TypeVar

import torch
import torch.distributed as dist

from smp_emulation.checked.streams.clocks import VectorClock
from smp_emulation.errors import CudaCallError

if TYPE_CHECKING:
    from smp_emulation.checked.streams.device import Devices
    from smp_emulation.checked.streams.execution import Lane, QueuedWork

#: The class of plain futures; an emulated future takes its name.
_Future = torch.futures.Future
T = TypeVar("T")


class StreamPoint:
    """A point of a stream of a device, which others can wait for.

    Args:
        item: the work that comes last before it.
    """

    def __init__(self, devices: Devices, number: int, lane: Lane, item: QueuedWork) -> None:
        self._devices = devices
        self.number = number
        self._clock = VectorClock(lane.clock)
        self.item = item

    def hold_up(self, lane: Lane) -> None:
        """Let all work that is queued on a stream from now on wait for this point."""
        with self._devices.lock:
            lane.clock.join(self._clock)
            if not self.item.done:
                self._devices.queue(lane, None, "waiting for a collective", (self.item,))

    def hold_up_current(self) -> None:
        """Let the current stream of this thread wait for this point."""
        self.hold_up(self._devices.current(self.number))

    def has_passed(self) -> bool:
        """Return whether the stream has passed this point.

        If it has, the host's clock includes all work before the point.
        """
        if not self._devices.executor.look(self.item):
            return False
        with self._devices.lock:
            self._devices.host.join(self._clock)
        return True


class StreamFuture(_Future[T]):
    """A future of results that streams have still to write: to wait for it is to let the current stream wait.

    Callbacks run at once, on a stream of their own that waits for the results.
    """

    devices: Devices

    def __init__(self, *, devices: Sequence[Any] | None = None) -> None:
        super().__init__()
        self._on = [self.devices.index(device) for device in devices or ()]
        self._points: list[StreamPoint] = []

    def set_result(self, result: Any) -> None:
        """Set results that the current streams have yet to write."""
        for number in self._on:
            lane = self.devices.current(number)
            self._points.append(
                StreamPoint(self.devices, number, lane, self.devices.queue(lane, None, "a future's result"))
            )
        super().set_result(result)

    def set_points(self, points: list[StreamPoint], result: Any) -> None:
        """Set results that are ready after ``points``."""
        self._points = points
        super().set_result(result)

    def wait(self) -> Any:
        """Return the results, and let the current streams wait until they are written."""
        result = super().wait()
        for point in self._points:
            point.hold_up_current()
        return result

    def then(self, callback: Callable[[Any], Any]) -> StreamFuture[Any]:
        """Return a future of the callback's result."""
        made: StreamFuture[Any] = StreamFuture(devices=self._on)

        def run(_: Any) -> None:
            # On streams of its own, as in PyTorch: behind the results, and not behind other work of the current streams.
            lanes = {number: self.devices.new_lane(number) for number in self._on}
            before = dict(self.devices.thread.current)
            for point in self._points:
                point.hold_up(lanes[point.number])
            self.devices.thread.current.update(lanes)
            try:
                made.set_result(callback(self))
            except Exception as error:
                made.set_exception(error)
            finally:
                self.devices.thread.current = before

        self.add_done_callback(run)
        return made


class StreamCollective(dist.Work):
    """A collective in progress on the stream of a communicator; it keeps its tensors until ``wait`` is called."""

    def __init__(self, point: StreamPoint, tensors: Sequence[torch.Tensor], result: Any) -> None:
        super().__init__()
        self._point = point
        self._tensors: Sequence[torch.Tensor] = tensors
        self._result = result

    def wait(self, timeout: timedelta = timedelta(0)) -> bool:
        """Let the current stream wait; with a timeout, the host too."""
        self._point.hold_up_current()
        deadline = time.monotonic() + timeout.total_seconds()
        while timeout > timedelta(0) and not self.is_completed():
            if time.monotonic() > deadline:
                raise CudaCallError(f"the collective has not ended {timeout.total_seconds()} s after wait() was called")
            time.sleep(0.001)  # a host that waits only asks
        self._tensors = ()
        return True

    def synchronize(self) -> None:
        """Let the current stream wait, without a timeout."""
        self.wait()

    def is_completed(self) -> bool:
        """Return whether the collective is done."""
        return self._point.has_passed()

    is_success = is_completed

    def exception(self) -> None:
        """Return None: an error on the device is raised when the host waits for it."""

    def result(self) -> Any:
        """Return the results of the collective."""
        return self._result

    def get_future(self) -> StreamFuture[Any]:
        """Return a future that is already completed, with the point that its stream has yet to reach."""
        made: StreamFuture[Any] = StreamFuture(devices=[self._point.number])
        made.set_points([self._point], self._result)
        return made
