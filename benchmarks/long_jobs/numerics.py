"""What recording numbers and guards cost: steps of a small GPT with every step recorded, with every tenth, and guarded, in turns.

    python benchmarks/long_jobs/numerics.py [--hidden 128] [--steps 60]
    smp-launch run --processes 2 --parameters '{"pipeline_parallel_degree": 2, "microbatches": 4}' benchmarks/long_jobs/numerics.py

Blocks of ten steps alternate with bare ones, so that what else the machine does meets both alike. The medians of ratios are
printed, of times and of the seconds that all ranks' processors have computed.
"""

from __future__ import annotations

import argparse
import contextlib
import os
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from statistics import median

import torch
import torch.nn.functional as F

import smdistributed.modelparallel.torch as smp
from smp_records.numerics import MOST_EVERY, Guards
from smp_runtime.job.session import Session, current_session
from smp_tools.numerics.guard import UpdateGuard
from smp_tools.numerics.recorder import NumericsRecorder

sys.path.insert(0, str(Path(__file__).parents[2] / "entrypoints"))
from train_gpt import GPT, GPTConfig

BLOCK = 10
_OFF = MOST_EVERY


@contextlib.contextmanager
def _recorded(recorder: NumericsRecorder, every: int) -> Iterator[None]:
    recorder._every = every
    yield
    recorder._every = _OFF


@contextlib.contextmanager
def _guarded(session: Session, folder: str) -> Iterator[None]:
    guard = UpdateGuard(session, Guards.of("finite,spike=1e9,replicas=10"), Path(folder))
    yield
    session.before_step.remove(guard.begin)
    session.after_step.remove(guard.end)
    session.before_update.remove(guard.before_update)
    session.after_update.remove(guard.compare_replicas)
    for handle in guard._handles:
        handle.remove()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--hidden", type=int, default=128)
    parser.add_argument("--layers", type=int, default=4)
    parser.add_argument("--seq_len", type=int, default=128)
    parser.add_argument("--batch_size", type=int, default=8, help="of each replica")
    parser.add_argument("--steps", type=int, default=60, help="of each way")
    parser.add_argument("--ways", default="every step,every tenth,guards")
    args = parser.parse_args()
    torch.set_num_threads(1)
    smp.init()
    torch.manual_seed(0)
    module = GPT(GPTConfig(args.layers, args.hidden, 4, args.seq_len))
    smp.set_tensor_parallelism(module.blocks, smp.tp_size() > 1)
    model = smp.DistributedModel(module)
    optimizer = smp.DistributedOptimizer(torch.optim.AdamW(model.parameters(), lr=1e-3))
    ids = torch.randint(256, (args.batch_size, args.seq_len))

    @smp.step
    def step(ids: torch.Tensor) -> torch.Tensor:
        loss = F.cross_entropy(model(ids).flatten(0, 1), ids.flatten())
        model.backward(loss)
        return loss

    def block() -> tuple[float, float]:
        """Return the seconds, and those of all ranks' processors."""
        begin, computed = time.perf_counter(), time.process_time()
        for _ in range(BLOCK):
            optimizer.zero_grad()
            step(ids)
            optimizer.step()
        smp.barrier()
        return time.perf_counter() - begin, sum(smp.allgather(time.process_time() - computed, smp.WORLD))

    with tempfile.TemporaryDirectory() as folder:
        smp.record_numerics(folder, every=_OFF)
        session = current_session()
        recorder = session.ranks.kept(NumericsRecorder)
        assert recorder is not None
        kinds: dict[str, Callable[[], contextlib.AbstractContextManager[None]]] = {
            "every step": lambda: _recorded(recorder, 1),
            "every tenth": lambda: _recorded(recorder, BLOCK),
            "guards": lambda: _guarded(session, folder),
        }
        block()  # traces, plans, and records the first step
        ratios: dict[str, list[tuple[float, float]]] = {name: [] for name in args.ways.split(",")}
        bare = []
        for number in range(args.steps // BLOCK):
            for name, found in ratios.items():
                before = block()
                with kinds[name]():
                    watched = block()
                after = block()
                if number:  # the first makes buffers
                    bare += [before[0], after[0]]
                    found.append(tuple(2 * w / (b + a) for w, b, a in zip(watched, before, after, strict=True)))  # type: ignore[arg-type]
        sizes = [file.stat().st_size for file in Path(folder).iterdir()]
    if smp.rank():
        return
    print(
        f"{smp.size()} rank(s), {sum(p.numel() for p in module.parameters()):,} parameters on the first, {args.batch_size} × "
        f"{args.seq_len} tokens, {os.cpu_count()} cores: {median(bare) / BLOCK * 1e3:.1f} ms a step"
    )
    for name, found in ratios.items():
        times, computed = (sorted(ratio - 1 for ratio in column) for column in zip(*found, strict=True))
        print(
            f"{name:12} time {median(times):+.1%} ({times[0]:+.1%} to {times[-1]:+.1%}), computing {median(computed):+.1%} "
            f"({computed[0]:+.1%} to {computed[-1]:+.1%})"
        )
    if sizes:
        print(f"{sum(sizes) / 1024 / (args.steps // BLOCK) / (BLOCK + 1):.0f} KiB a recorded step")


if __name__ == "__main__":
    main()
