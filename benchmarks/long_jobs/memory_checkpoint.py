"""What copies of the state in shared memory cost: per step and strategy, steps with and without one take turns in one job.

    python benchmarks/long_jobs/memory_checkpoint.py
    python benchmarks/long_jobs/memory_checkpoint.py --hidden 512 --steps 200
    python benchmarks/long_jobs/memory_checkpoint.py --hosts 2

Figures per strategy: the median step; the time inside ``smp.memory_checkpoint`` when it copies after every step, on the slowest
rank, and its share of the step; the difference between median steps with and without it; the bytes of a copy over all ranks ÷ the
bytes that there are to keep (float32 weights and two states of Adam, each once); the time of copying them once from one buffer to
another (the bound) ÷ the time taken; the interval that is chosen where none is set. With ``--hosts 2`` (one rank each, simulated on
this machine): the bytes that go to the next host, words of heads included, ÷ those of tensors that only one host has. ``--steps``
counts training steps.
"""

from __future__ import annotations

import argparse
import os
import statistics
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # modules that benchmarks share
from decoder import BATCH, SEQ, VOCABULARY, Gpt
from launching import print_machine, run_ranks
from torch import nn

from smp_config.recovery import COUNT_VARIABLE, FOLDER_VARIABLE, INTERVAL_VARIABLE, MEMORY_VARIABLE

STRATEGIES: dict[str, dict[str, Any]] = {
    "data parallelism": {"ddp": True},
    "pipeline, 2 stages, 4 microbatches": {"partitions": 2, "microbatches": 4, "ddp": True},
    "tensor parallelism": {"tensor_parallel_degree": 2, "ddp": True},
    "sharded data parallelism": {"sharded_data_parallel_degree": 2, "ddp": True},
}

#: Steps of a block, and the blocks that are not counted.
_BLOCK, _WARM_UP = 5, 2


def _rank(strategy: str, steps: int, hidden: int, layers: int, hosts: int) -> None:
    if hosts > 1:
        folder = Path(os.environ[FOLDER_VARIABLE], os.environ["RANK"])
        folder.mkdir()
        os.environ[FOLDER_VARIABLE] = str(folder)
    import smdistributed.modelparallel.torch as smp
    from smp_runtime.checkpoint.memory.copying import Copier, Interval
    from smp_runtime.job import session

    whole = {"sdp_param_persistence_threshold": 0} if hosts > 1 and strategy.startswith("sharded") else {}
    smp.init({**STRATEGIES[strategy], **whole})
    torch.manual_seed(0)
    with smp.tensor_parallelism(enabled=smp.tp_size() > 1):
        module = Gpt(hidden, layers)
    parameters = sum(p.numel() for p in module.parameters())
    model = smp.DistributedModel(module)
    optimizer = smp.DistributedOptimizer(torch.optim.AdamW(model.parameters(), lr=1e-3))

    @smp.step
    def train_step(model: Any, ids: torch.Tensor) -> torch.Tensor:
        loss = nn.functional.cross_entropy(model(ids).flatten(0, 1), ids.flatten())
        model.backward(loss)
        return loss

    ids = torch.randint(0, VOCABULARY, (BATCH, SEQ))
    durations: dict[bool, list[float]] = {True: [], False: []}
    inside: list[float] = []
    for step in range(steps):
        on, counts = step // _BLOCK % 2 == 0, step >= 2 * _WARM_UP * _BLOCK
        began = time.perf_counter()
        optimizer.zero_grad()
        train_step(model, ids)
        optimizer.step()
        before = time.perf_counter()
        if on and not smp.memory_checkpoint(model, optimizer, {"step": step}):
            raise AssertionError("there is no copy of this step")
        ended = time.perf_counter()
        if counts:
            durations[on].append(ended - began)
            inside += [ended - before] if on else []
    control, everyone = session.current_session().ranks.control, list(range(smp.size()))
    folder = Path(os.environ[FOLDER_VARIABLE])
    mine = [path.stat().st_size for path in folder.glob(f"0.{smp.rank()}.*.data")]
    copied = control.allgather((statistics.median(inside), mine[0] if mine else 0), everyone)
    copier = Copier.of(session.current_session())
    if copier is None:
        raise AssertionError("nothing was copied")
    sent = control.allgather(copier.sent(), everyone)
    # Of data parallel replicas, the other host has everything.
    bound = 0 if strategy == "data parallelism" else 12 * parameters
    if smp.rank() == 0:
        with_it, without = (statistics.median(durations[on]) for on in (True, False))
        cost, largest = max(seconds for seconds, _ in copied), max(size for _, size in copied)
        interval = Interval(None)
        interval.step_ended(0.0)
        interval.call_ended(0.0, cost)
        interval.call_ended(0.0, cost)
        interval.step_ended(without)
        interval.agree([interval.measured()])
        least = _copy_seconds(largest)
        there = "–" if hosts == 1 else f"{sum(sent) / bound:.3f}" if bound else f"{sum(sent):,} bytes, of 0"
        print(
            f"| {strategy} | {without * 1e3:.0f} | {cost * 1e3:.1f} | {cost / without:.1%} | {with_it / without - 1:+.1%} | "
            f"{sum(size for _, size in copied) / (12 * parameters):.3f} | {least / cost:.2f} | {interval.steps} | {there} |",
            flush=True,
        )
    smp.barrier()


def _copy_seconds(size: int) -> float:
    """Return the seconds of a copy of that many bytes between two reused buffers."""
    source, target = torch.ones(size, dtype=torch.uint8), torch.ones(size, dtype=torch.uint8)
    found = []
    for _ in range(7):
        began = time.perf_counter()
        target.copy_(source)
        found.append(time.perf_counter() - began)
    return statistics.median(found)


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=80)
    parser.add_argument("--hidden", type=int, default=256)
    parser.add_argument("--layers", type=int, default=4)
    parser.add_argument("--hosts", type=int, choices=(1, 2), default=1)
    parser.add_argument("--strategy", help=argparse.SUPPRESS)
    options = parser.parse_args(arguments)
    if options.strategy:
        _rank(options.strategy, options.steps, options.hidden, options.layers, options.hosts)
        return
    print_machine()
    print(
        "| | step, ms | copy, ms | of a step | median step | bytes ÷ bound | bound ÷ time | chosen interval | sent ÷ bound |\n"
        "|---|---|---|---|---|---|---|---|---|",
        flush=True,
    )
    for strategy in STRATEGIES:
        with tempfile.TemporaryDirectory(dir="/dev/shm") as folder:
            words = ["--strategy", strategy, "--steps", options.steps, "--hidden", options.hidden]
            told = {MEMORY_VARIABLE: "1", INTERVAL_VARIABLE: "1", FOLDER_VARIABLE: folder, COUNT_VARIABLE: "0"}
            run_ranks(__file__, 2, [*words, "--layers", options.layers, "--hosts", options.hosts], told)


if __name__ == "__main__":
    sys.exit(main())
