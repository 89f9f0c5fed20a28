"""What it costs to watch a training: steps of a small GPT in one process with and without each way, in turns.

    python benchmarks/long_jobs/tracking.py [--hidden 256] [--steps 300] [--ways points,lines,tensorboard,mlflow]

Blocks of steps alternate, so that what else the machine does meets all kinds alike; the medians of blocks are compared. `points` is
what is done for any tracker, with one that drops them; `tensorboard` and `mlflow` need their packages.
`lines` is a line of the rank after each update, and `profile` PyTorch's profiler.
"""

from __future__ import annotations

import argparse
import contextlib
import io
import os
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from statistics import median
from typing import Any

import torch
import torch.nn.functional as F

import smdistributed.modelparallel.torch as smp
from smp_runtime.job.session import Session, current_session
from smp_tools.tracking.loggers.making import KINDS
from smp_tools.tracking.rank_times import RankTimes
from smp_tools.tracking.run import TrackedRun
from smp_tools.tracking.tracker import UpdateTracker
from smp_tools.tracking.writer import Writer

sys.path.insert(0, str(Path(__file__).parents[2] / "entrypoints"))
from train_gpt import GPT, GPTConfig

BLOCK = 10


class _Drops:
    name = "drops"

    def write(self, points: Sequence[Any]) -> None: ...

    def flush(self) -> None: ...

    def close(self, *, failed: bool) -> None: ...


@contextlib.contextmanager
def _tracked(session: Session, tracker: Any) -> Iterator[None]:
    writer = Writer([tracker])
    made = UpdateTracker(session, writer, 1, peak=1.0)
    try:
        yield
    finally:
        session.progress.heard.remove(made.heard)
        session.arguments.remove(made._look_at)
        session.at_close.remove(made.close)
        made.close()


@contextlib.contextmanager
def _with_lines(session: Session) -> Iterator[None]:
    times = RankTimes(session, 1e-9)
    with contextlib.redirect_stdout(io.StringIO()):
        yield
    session.after_update.remove(times.updated)
    session.at_close.remove(times.close)


@contextlib.contextmanager
def _profiled() -> Iterator[None]:
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]):
        yield


def _way(name: str, session: Session, folder: str) -> Callable[[], contextlib.AbstractContextManager[None]]:
    if name == "lines":
        return lambda: _with_lines(session)
    if name == "profile":
        return _profiled
    if name == "points":
        return lambda: _tracked(session, _Drops())
    return lambda: _tracked(session, KINDS[name](TrackedRun(Path(folder), "benchmark", "smp", {})))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--hidden", type=int, default=256)
    parser.add_argument("--layers", type=int, default=4)
    parser.add_argument("--seq_len", type=int, default=128)
    parser.add_argument("--batch_size", type=int, default=8)
    parser.add_argument("--steps", type=int, default=160, help="of each way")
    parser.add_argument("--ways", default="points,lines,profile")
    args = parser.parse_args()
    torch.set_num_threads(1)
    smp.init()
    torch.manual_seed(0)
    model = smp.DistributedModel(GPT(GPTConfig(args.layers, args.hidden, 4, args.seq_len)))
    optimizer = smp.DistributedOptimizer(torch.optim.AdamW(model.parameters(), lr=1e-3))
    ids = torch.randint(256, (args.batch_size, args.seq_len))

    @smp.step
    def step(ids: torch.Tensor) -> torch.Tensor:
        loss = F.cross_entropy(model(ids).flatten(0, 1), ids.flatten())
        model.backward(loss)
        return loss

    def block() -> float:
        begin = time.perf_counter()
        for _ in range(BLOCK):
            optimizer.zero_grad()
            step(ids)
            optimizer.step()
        return (time.perf_counter() - begin) / BLOCK

    with tempfile.TemporaryDirectory() as folder:
        ways = {name: _way(name, current_session(), folder) for name in args.ways.split(",")}
        ratios: dict[str, list[float]] = {name: [] for name in ways}
        bare = []
        for number in range(args.steps // BLOCK):
            for name, begin in ways.items():
                before = block()
                with begin():
                    watched = block()
                after = block()
                if number:  # the first makes buffers
                    bare += [before, after]
                    ratios[name].append(2 * watched / (before + after))
    print(
        f"{args.batch_size} × {args.seq_len} tokens, one thread, {os.cpu_count()} cores: {median(bare) * 1e3:.1f} ms a step"
    )
    for name, found in ratios.items():
        print(
            f"{name:12} {median(found) - 1:+.1%}  (of {len(found)} blocks, from {min(found) - 1:+.1%} to {max(found) - 1:+.1%})"
        )


if __name__ == "__main__":
    main()
