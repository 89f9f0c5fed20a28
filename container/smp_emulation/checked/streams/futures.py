"""What stands for work of a stream that is under way: its point in the stream, works of collectives, futures."""

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

#: The class of plain futures, whose name an emulated one takes.
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
        """What is queued on a stream from now on comes behind it."""
        with self._devices.lock:
            lane.clock.join(self._clock)
            if not self.item.done:
                self._devices.queue(lane, None, "waiting for a collective", (self.item,))

    def hold_up_current(self) -> None:
        """The same, of the stream that this thread uses."""
        self.hold_up(self._devices.current(self.number))

    def has_passed(self) -> bool:
        """Whether the stream has come past it; the host then knows of what lies before."""
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
        """The results are in the queues of the current streams."""
        for number in self._on:
            lane = self.devices.current(number)
            self._points.append(
                StreamPoint(self.devices, number, lane, self.devices.queue(lane, None, "a future's result"))
            )
        super().set_result(result)

    def set_points(self, points: list[StreamPoint], result: Any) -> None:
        """The results are there behind these points."""
        self._points = points
        super().set_result(result)

    def wait(self) -> Any:
        """The results; the current streams wait until they are written."""
        result = super().wait()
        for point in self._points:
            point.hold_up_current()
        return result

    def then(self, callback: Callable[[Any], Any]) -> StreamFuture[Any]:
        """A future of what a callback makes of this one."""
        made: StreamFuture[Any] = StreamFuture(devices=self._on)

        def run(_: Any) -> None:
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
    """A collective under way on the stream of a communicator; keeps its tensors until somebody has waited for it."""

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
        """The same, without a timeout."""
        self.wait()

    def is_completed(self) -> bool:
        """Whether it is over."""
        return self._point.has_passed()

    is_success = is_completed

    def exception(self) -> None:
        """None: what went wrong on the device is raised where somebody waits for it."""

    def result(self) -> Any:
        """Its results."""
        return self._result

    def get_future(self) -> StreamFuture[Any]:
        """Completed already, as one that knows what its stream has yet to do."""
        made: StreamFuture[Any] = StreamFuture(devices=[self._point.number])
        made.set_points([self._point], self._result)
        return made
