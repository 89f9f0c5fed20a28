"""What a rank's record of where it is costs, per step and strategy; steps with and without it take turns in one job.

    python benchmarks/long_jobs/watch_cost.py
    python benchmarks/long_jobs/watch_cost.py --steps 4000 --width 256

Two figures: the time inside the calls that write the record, each timed (so that it is too high by the timing), and the
difference between the median steps of blocks with and without it. The bound is 0.5 % of a step of 10 ms: 50 µs.
"""

from __future__ import annotations

import argparse
import os
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # modules that benchmarks share
from launching import print_machine, run_ranks
from torch import nn

STRATEGIES: dict[str, dict[str, Any]] = {
    "data parallelism": {"ddp": True},
    "pipeline, 2 stages, 4 microbatches": {"partitions": 2, "microbatches": 4, "ddp": True},
    "tensor parallelism": {"tensor_parallel_degree": 2, "ddp": True},
    "sharded data parallelism": {"sharded_data_parallel_degree": 2, "ddp": True},
}

#: Steps of a block.
_BLOCK = 20

#: What writes the record.
_CALLS = (
    "begin_step",
    "update",
    "enter",
    "call",
    "text",
    "ranks",
    "collective",
    "begin_wait",
    "end_wait",
    "open_wait",
    "close_wait",
)


def _timed(notes: Any, spent: list[float]) -> None:
    """Time each call that writes; calls inside calls count once."""
    inside = [False]

    def wrap(call: Callable[..., Any]) -> Callable[..., Any]:
        def timed(*args: Any) -> Any:
            if inside[0]:
                return call(*args)
            inside[0], began = True, time.perf_counter()
            try:
                return call(*args)
            finally:
                spent[0] += time.perf_counter() - began
                spent[1] += notes._map is not None
                inside[0] = False

        return timed

    for name in _CALLS:
        setattr(notes, name, wrap(getattr(notes, name)))


def _rank(strategy: str, steps: int, width: int) -> None:
    import smdistributed.modelparallel.torch as smp
    from smp_records import rank_record

    notes = rank_record.begin(os.environ, int(os.environ["RANK"]))
    spent = [0.0, 0.0]
    _timed(notes, spent)
    smp.init(STRATEGIES[strategy])
    torch.manual_seed(0)
    layers = [layer for _ in range(6) for layer in (nn.Linear(width, width), nn.Tanh())]
    with smp.tensor_parallelism():
        model = smp.DistributedModel(nn.Sequential(*layers))
    optimizer = smp.DistributedOptimizer(torch.optim.SGD(model.parameters(), lr=0.01))
    x = torch.randn(64, width)

    @smp.step
    def train_step(model: Any, x: torch.Tensor) -> torch.Tensor:
        loss = model(x).square().mean()
        model.backward(loss)
        return loss

    kept, durations, inside = notes._map, {True: [], False: []}, []  # type: ignore[var-annotated]
    for step in range(steps):
        on = step // _BLOCK % 2 == 0
        notes._map = kept if on else None
        before, began = spent[0], time.perf_counter()
        train_step(model, x)
        optimizer.step()
        optimizer.zero_grad()
        if step == 2 * _BLOCK:
            spent[1] = 0.0
        if step >= 2 * _BLOCK:
            durations[on].append(time.perf_counter() - began)
            if on:
                inside.append(spent[0] - before)
    notes._map = kept
    if smp.rank() == 0:
        with_it, without = (statistics.median(durations[on]) for on in (True, False))
        cost = statistics.median(inside)
        print(
            f"| {strategy} | {without * 1e3:.2f} | {spent[1] / len(inside):.0f} | {cost * 1e6:.0f} | {cost / 0.01:.2%} | "
            f"{with_it / without - 1:+.1%} |",
            flush=True,
        )


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=1000)
    parser.add_argument("--width", type=int, default=512)
    parser.add_argument("--strategy", help=argparse.SUPPRESS)
    options = parser.parse_args(arguments)
    if options.strategy:
        _rank(options.strategy, options.steps, options.width)
        return
    print_machine()
    print("| | step, ms | calls | in its calls, µs | of 10 ms | median step |\n|---|---|---|---|---|---|", flush=True)
    for strategy in STRATEGIES:
        with tempfile.TemporaryDirectory() as folder:
            words = ["--strategy", strategy, "--steps", options.steps, "--width", options.width]
            run_ranks(__file__, 2, words, {"SMP_WHEREABOUTS": folder})


if __name__ == "__main__":
    sys.exit(main())
