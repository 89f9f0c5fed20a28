"""Figures of each step of a process on emulated devices, and the faults that they show."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import dataclass

from smp_emulation.gpu_model.launches import EAGER_SECONDS, LAUNCH_SECONDS, StepWork

#: The first steps create optimizer state and fill the cache.
_WARM_UP = 2
#: Memory grows if it has grown in so many steps at least.
_GROWING_STEPS = 3
_MIB = 2**20


@dataclass(frozen=True)
class StepFigures:
    """What a step did, and the memory at its end.

    Attributes:
        number: from 1.
        allocated, reserved: bytes of all devices of the process.
        by_stream: reserved bytes by device and stream.
    """

    number: int
    work: StepWork
    allocated: int
    reserved: int
    by_stream: dict[tuple[int, int], int]

    def __str__(self) -> str:
        work = self.work
        return (
            f"{self.number:5} {work.launches:9,} {work.copies:7,} {work.launch_seconds * 1e3:10.2f} "
            f"{work.eager_seconds * 1e3:9.2f} "
            f"{work.device_seconds * 1e3:10.3f} {self.allocated / _MIB:13,.1f} {self.reserved / _MIB:12,.1f}  {work.bound}"
        )


#: The columns of a step's line.
HEADING = " step  launches  copies  launch ms  eager ms  device ms  allocated MiB  reserved MiB  bound by"


def find_pool_growth(steps: Sequence[StepFigures]) -> str:
    """Return a sentence if reserved memory grows from step to step while allocated memory does not, else an empty string."""
    steady = steps[_WARM_UP:]
    if len(steady) <= _GROWING_STEPS:
        return ""
    first, last = steady[0], steady[-1]
    rises = sum(after.reserved > before.reserved for before, after in itertools.pairwise(steady))
    grown = last.reserved - first.reserved
    if rises < _GROWING_STEPS or rises * 2 < len(steady) - 1 or last.allocated - first.allocated > grown // 4:
        return ""
    more = {key: size - first.by_stream.get(key, 0) for key, size in last.by_stream.items()}
    growing = sorted((key for key, size in more.items() if size > 0), key=lambda key: -more[key])
    streams = ", ".join(f"stream {stream} of cuda:{device}" for device, stream in growing[:4])
    others = f" and {len(growing) - 4} more" if len(growing) > 4 else ""
    return (
        f"growing pools: reserved memory grows from {first.reserved / _MIB:,.1f} MiB in step {first.number} to "
        f"{last.reserved / _MIB:,.1f} MiB in step {last.number}, while allocated memory is "
        f"{first.allocated / _MIB:,.1f} and {last.allocated / _MIB:,.1f} MiB. It grows on {streams}{others}: memory "
        "that is freed on a stream is reused on that stream only. Allocate on one stream, or use the same side stream in each step"
    )


def find_host_bound(steps: Sequence[StepFigures]) -> str:
    """Return a sentence if most steps after the first ones wait for the host, else an empty string."""
    work_of_steps = [figures.work for figures in steps]
    steady = work_of_steps[_WARM_UP:] or work_of_steps
    for bound, seconds in (("host", LAUNCH_SECONDS), ("host in eager mode", EAGER_SECONDS)):
        slow = [work for work in steady if work.launches * seconds > work.device_seconds]
        if len(slow) * 2 > len(steady):
            launches = sum(work.launches for work in slow) / len(slow)
            device = sum(work.device_seconds for work in slow) / len(slow)
            return (
                f"bound by the {bound}: a step launches {launches:,.0f} kernels, {launches * seconds * 1e3:.2f} ms of the host at "
                f"{seconds * 1e6:.0f} µs each, for {device * 1e3:.3f} ms of the device. Use larger batches, a fused optimizer or "
                "torch.compile"
            )
    return ""
