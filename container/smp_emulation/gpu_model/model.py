"""The model of a process's devices: memory, contexts and steps together, and its report."""

from __future__ import annotations

import atexit
import os
import sys
import threading
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from torch.optim.optimizer import register_optimizer_step_post_hook

from smp_config.machine import emulation
from smp_config.machine.launchers import rank_text
from smp_emulation.gpu_model.allocator import CachingAllocator, sum_by_stream
from smp_emulation.gpu_model.contexts import Contexts
from smp_emulation.gpu_model.launches import StepWork
from smp_emulation.gpu_model.steps import HEADING, StepFigures, find_host_bound, find_pool_growth

if TYPE_CHECKING:
    import torch

#: Memory of a device if the environment sets none.
CAPACITY = 80 * 2**30
#: PyTorch has so many streams per device; those that a script creates beyond it are the same ones again.
_STREAMS = 32
#: Steps that are kept; of a longer run, the first ones are dropped.
_MOST_STEPS = 1000
_SHOWN_STEPS = 20


class GpuModel:
    """All that is modelled of the devices of a process.

    A step ends when an optimizer's ``step`` returns.

    Args:
        count: number of devices.
        capacity: bytes of each.

    Attributes:
        allocators: memory, by device.
        contexts: devices that the process uses.
        steps: figures of the steps that have ended.
    """

    def __init__(self, count: int, capacity: int = CAPACITY) -> None:
        self.capacity = capacity
        self.allocators = [CachingAllocator(device, capacity) for device in range(count)]
        self.contexts = Contexts(count)
        self.steps: list[StepFigures] = []
        self._work = StepWork()
        self._number = 0
        # Operations run on threads of autograd and of the pipeline, too.
        self._lock = threading.Lock()
        self._hook = register_optimizer_step_post_hook(lambda *_: self.end_step())

    @classmethod
    def from_environment(cls, count: int, environ: Mapping[str, str] = os.environ) -> GpuModel:
        """Return a model with the memory that the environment sets."""
        return cls(count, emulation.memory_limit(environ) or CAPACITY)

    def close(self) -> None:
        """Count no more."""
        self._hook.remove()
        self.contexts.close()

    def allocator(self, device: int) -> CachingAllocator:
        """Return the allocator of a device."""
        return self.allocators[device]

    def count_work(
        self, function: Any, args: Any, kwargs: Any, given: Sequence[torch.Tensor], made: Sequence[torch.Tensor]
    ) -> None:
        """Count an operation on a device."""
        # Backward counts its operations on autograd's threads.
        with self._lock:
            self._work.add(function, args, kwargs, given, made)

    def count_copy(self, on_one_device: bool, bytes_moved: int) -> None:
        """Count a copy: on one device it is a kernel; between host and device it is none."""
        with self._lock:
            if on_one_device:
                self._work.add_kernel(bytes_moved)
            else:
                self._work.copies += 1

    def end_step(self) -> None:
        """End the current step."""
        with self._lock:
            work, self._work = self._work, StepWork()
            self._number += 1
        amounts = [allocator.statistics() for allocator in self.allocators]
        figures = StepFigures(
            self._number,
            work,
            sum(each.allocated.now for each in amounts),
            sum(each.reserved.now for each in amounts),
            sum_by_stream(self.allocators),
        )
        self.steps.append(figures)
        del self.steps[:-_MOST_STEPS]

    def findings(self) -> list[str]:
        """Return a sentence for each fault that the model has seen."""
        found = self.contexts.findings()
        for allocator in self.allocators:
            statistics = allocator.statistics()
            if statistics.out_of_memory:
                found.append(
                    f"out of memory: cuda:{allocator.device} had no room for {statistics.out_of_memory} "
                    f"request{'s' * (statistics.out_of_memory != 1)}, and freed its cache {statistics.retries} times"
                )
        return [*found, *filter(None, (find_pool_growth(self.steps), find_host_bound(self.steps)))]

    def report(self) -> str:
        """Return the figures of the last steps as a table, and the faults."""
        lines = [HEADING, *map(str, self.steps[-_SHOWN_STEPS:])] if self.steps else []
        return "\n".join([*lines, *self.findings()])

    def report_at_exit(self) -> None:
        """Print the report when the process ends, and contexts of processes that a rank has started at once."""
        self.contexts.heard = _print
        atexit.register(lambda: _print(self.report()))


def _print(text: str) -> None:
    rank = rank_text(os.environ)
    for line in text.splitlines():
        print(f"[smp] emulated GPU, rank {rank}: {line}", file=sys.stderr)
    sys.stderr.flush()


def stream_of_pool(number: int) -> int:
    """Return the stream of PyTorch's pool that the ``number``-th stream of a device is; 0 is the default stream."""
    return 0 if number <= 0 else 1 + (number - 1) % _STREAMS
