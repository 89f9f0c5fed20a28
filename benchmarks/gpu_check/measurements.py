"""Steps of large models in plain PyTorch and with this library, and their measurements."""

from __future__ import annotations

import statistics
import time
import traceback
import warnings
from collections import Counter
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import nn

import smdistributed.modelparallel.torch as smp
from gpu_check import environment
from gpu_check.device import get_device, is_real, synchronize, time_run
from gpu_check.models import MixedPrecision, Shape, compute_loss, draw_batch, make_gpt
from smp_tools.numerics.first_steps import WATCHED_PASSES

#: Dense bf16 FLOP/s of an H100 SXM and of an H200, as NVIDIA states them.
PEAK_FLOPS = 989e12


class Step:
    """A training step: forward, backward and update on one fixed batch.

    Attributes:
        model: the model; with this library the wrapped one.
        optimizer: its optimizer.
    """

    def __init__(self, model: nn.Module, optimizer: Any, run: Callable[[], object]) -> None:
        self.model = model
        self.optimizer = optimizer
        self._run = run

    def __call__(self) -> None:
        self._run()


def make_plain_step(
    shape: Shape,
    batch: int,
    mode: str = "autocast",
    *,
    is_compiled: bool = False,
    change: Callable[[nn.Module], None] | None = None,
    fused: bool = True,
) -> Step:
    """Return a training step in plain PyTorch.

    Args:
        mode: ``autocast`` (float32 weights) or ``bf16`` (bfloat16 weights and float32 master weights).
        change: gets the model before the first step.
        fused: whether AdamW uses PyTorch's fused kernels on a GPU.
    """
    with get_device():
        model = make_gpt(shape)
    if change is not None:
        change(model)
    for block in model.blocks if is_compiled else ():
        block.compile()

    def make(parameters: Any) -> torch.optim.Optimizer:
        return torch.optim.AdamW(parameters, lr=1e-4, fused=(fused and is_real()) or None)

    optimizer: Any = MixedPrecision(model, make, torch.bfloat16) if mode == "bf16" else make(model.parameters())
    ids, targets = draw_batch(0, batch, shape["seq"])

    def run() -> None:
        optimizer.zero_grad()
        with torch.autocast(get_device().type, torch.bfloat16, enabled=mode == "autocast"):
            loss = compute_loss(model, ids, targets)
        loss.backward()
        optimizer.step()

    return Step(model, optimizer, run)


def make_wrapped_step(
    shape: Shape,
    batch: int,
    mode: str = "autocast",
    *,
    is_compiled: bool = False,
    is_checkpointed: bool = False,
    fused: bool | None = None,
) -> Step:
    """Return the same with this library, after ``smp.init``; arguments as for :func:`make_plain_step`."""
    with get_device():
        net = make_gpt(shape)
    for block in net.blocks:
        if is_compiled:
            block.compile()
        if is_checkpointed:
            smp.set_activation_checkpointing(block)
    model = smp.DistributedModel(net)
    optimizer = smp.DistributedOptimizer(torch.optim.AdamW(model.parameters(), lr=1e-4, fused=fused))
    ids, targets = draw_batch(0, batch, shape["seq"])

    @smp.step
    def step(ids: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        with torch.autocast(get_device().type, torch.bfloat16, enabled=mode == "autocast"):
            loss = compute_loss(model, ids, targets)
        model.backward(loss)
        return loss

    def run() -> None:
        optimizer.zero_grad()
        step(ids, targets)
        optimizer.step()

    return Step(model, optimizer, run)


def count_rounds(many: int) -> int:
    """Return how often a step is measured: ``many`` times, or twice in tiny checks."""
    return 2 if environment.is_tiny() else many


def end_first_steps(run: Callable[[], object]) -> float:
    """Run the steps in which this library checks for NaN, so that those that are measured later are ordinary ones.

    Returns:
        Their median milliseconds.
    """
    return to_ms(statistics.median(time_run(run) for _ in range(1 if environment.is_tiny() else WATCHED_PASSES)))


def to_ms(seconds: float, digits: int = 2) -> float:
    """Return seconds as rounded milliseconds."""
    return round(1e3 * seconds, digits)


def time_runs(run: Callable[[], object], many: int, warm_up: int) -> float:
    """Return the median seconds of ``many`` runs without the first ``warm_up`` of them."""
    times = [time_run(run) for _ in range(count_rounds(many))]
    return statistics.median(times if environment.is_tiny() else times[warm_up:])


def compare_times(ours: Callable[[], object], peer: Callable[[], object], many: int) -> dict[str, Any]:
    """Time two steps in turns, ``ours`` after its first steps.

    Returns:
        The median of the ratios of neighbors with the least and the greatest, the median time of each, and that of the first steps
        of ``ours``.
    """
    warm_up = 1 if environment.is_tiny() else 3
    first_steps_ms = end_first_steps(ours)
    times = [(time_run(ours), time_run(peer)) for _ in range(count_rounds(many) + warm_up)][warm_up:]
    ratios = sorted(mine / theirs for mine, theirs in times)
    return {
        "ratio": round(statistics.median(ratios), 3),
        "spread": [round(ratios[0], 3), round(ratios[-1], 3)],
        "ours_ms": to_ms(statistics.median(mine for mine, _ in times)),
        "peer_ms": to_ms(statistics.median(theirs for _, theirs in times)),
        "first_steps_ms": first_steps_ms,
    }


def count_host_waits(run: Callable[[], object], folders: Sequence[str], most: int) -> dict[str, Any]:
    """Return how often the host waits for the GPU in one run, and the lines with the most waits.

    Args:
        folders: of a line's stack, only frames of files with one of these words in their path are shown.
        most: number of lines.
    """
    if not is_real():
        return {}
    lines: Counter[str] = Counter()

    def count(*_: object, **__: object) -> None:
        frames = traceback.extract_stack()[:-1]  # without this function
        stack = [
            f"{Path(frame.filename).name}:{frame.lineno}"
            for frame in frames
            if any(folder in frame.filename for folder in folders)
        ]
        lines[" < ".join(reversed(stack[-3:]))] += 1

    synchronize()
    torch.cuda.set_sync_debug_mode("warn")
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("always")
            warnings.showwarning = count
            run()
    finally:
        torch.cuda.set_sync_debug_mode("default")
    synchronize()
    return {"host_waits": sum(lines.values()), "where": dict(lines.most_common(most))}


def measure_queueing(run: Callable[[], object]) -> dict[str, Any]:
    """Return the milliseconds until a step is queued, and its host waits; empty without a GPU."""
    if not is_real():
        return {}
    run()
    times = []
    for _ in range(5):
        synchronize()
        begin = time.perf_counter()
        run()
        times.append(time.perf_counter() - begin)
    waits = count_host_waits(run, ("smp", "gpu_check"), 4)
    return {"queue_ms": to_ms(statistics.median(times)), **waits}


def profile_step(run: Callable[[], object]) -> dict[str, Any]:
    """Return the kernels and synchronizing calls of one step, and the share of its time in which the GPU computes.

    Empty without a GPU.
    """
    if not is_real():
        return {}
    from torch.profiler import ProfilerActivity, profile

    run()
    synchronize()
    with profile(activities=[ProfilerActivity.CPU, ProfilerActivity.CUDA]) as record:
        wall = time_run(run)
    events = record.events()
    kernels = [event for event in _find_gpu_events(events) if not getattr(event, "is_user_annotation", False)]
    spans = sorted((event.time_range.start, event.time_range.end) for event in kernels)
    first = last = spans[0][0] if spans else 0.0
    busy = 0.0
    for start, end in spans:
        busy += max(0.0, end - max(start, last))
        last = max(last, end)
    prefixes = ("cudaStreamSync", "cudaDeviceSync", "cudaEventSync", "cudaMemcpy", "cudaLaunch")
    calls = Counter(event.name for event in events if event.name.startswith(prefixes))
    return {
        "kernels": len(kernels),
        "gpu_busy": round(busy / max(last - first, 1e-9), 3),
        "profiled_ms": to_ms(wall, 1),
        "calls": dict(calls.most_common(6)),
    }


def count_kernels(run: Callable[[], object], words: Sequence[str], most: int) -> dict[str, int]:
    """Return the most frequent GPU kernels of one run with one of ``words`` in their names."""
    from torch.profiler import ProfilerActivity, profile

    with profile(activities=[ProfilerActivity.CPU, ProfilerActivity.CUDA]) as record:
        run()
        synchronize()
    names = [event.name for event in _find_gpu_events(record.events())]
    found = Counter(name[:60] for name in names if any(word in name.lower() for word in words))
    return dict(found.most_common(most))


def _find_gpu_events(events: Sequence[Any]) -> list[Any]:
    return [event for event in events if event.device_type == torch.autograd.DeviceType.CUDA]


def count_flops(run: Callable[[], object]) -> int:
    """Return the floating point operations of one run, as PyTorch counts them."""
    from torch.utils.flop_counter import FlopCounterMode

    with FlopCounterMode(display=False) as counter:
        run()
    return int(counter.get_total_flops())


def compute_mfu(flops: int, seconds: float) -> float:
    """Return the share of the GPU's peak that a step of ``flops`` reaches."""
    return round(flops / seconds / PEAK_FLOPS, 3)
