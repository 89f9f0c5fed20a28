"""What going over to other degrees costs: a job that changes while it runs, beside one that saves, starts again and loads.

    python benchmarks/long_jobs/reshape.py
    python benchmarks/long_jobs/reshape.py --hidden 512

Per change on two ranks: the time in ``smp.reshape`` and what the next step takes more than those after it (a pipeline is traced
there, and tensors move then); bytes that came from the other rank, of both ranks, ÷ what each needs and had not, counted element by
element; the time of ``save_checkpoint``, and of a new job at the other degrees from its start to the end of its first step, less a
step; the ratio of both ways.
"""

from __future__ import annotations

import argparse
import itertools
import json
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

_PLAIN: dict[str, Any] = {
    "ddp": True,
    "pipeline_parallel_degree": 1,
    "microbatches": 1,
    "tensor_parallel_degree": 1,
    "sharded_data_parallel_degree": 1,
}
DEGREES: dict[str, dict[str, Any]] = {
    "data": _PLAIN,
    "pipeline": {**_PLAIN, "pipeline_parallel_degree": 2, "microbatches": 4},
    "tensor": {**_PLAIN, "tensor_parallel_degree": 2},
    "sharded": {**_PLAIN, "sharded_data_parallel_degree": 2},
}
#: Each after each other one, once.
WALK = "data pipeline tensor sharded data tensor pipeline sharded tensor data sharded pipeline data".split()

_STEPS = 4


class _Job:
    """A model that trains."""

    def __init__(self, degrees: str, hidden: int, layers: int) -> None:
        import smdistributed.modelparallel.torch as smp

        smp.init(DEGREES[degrees])
        torch.manual_seed(0)
        with smp.tensor_parallelism():
            module = Gpt(hidden, layers)
        self.model = smp.DistributedModel(module)
        self.optimizer = smp.DistributedOptimizer(torch.optim.AdamW(self.model.parameters(), lr=1e-3))
        self.ids = torch.randint(0, VOCABULARY, (BATCH, SEQ))

        @smp.step
        def train_step(model: Any, ids: torch.Tensor) -> torch.Tensor:
            loss = nn.functional.cross_entropy(model(ids).flatten(0, 1), ids.flatten())
            model.backward(loss)
            return loss

        self._step = train_step

    def step(self) -> float:
        """Run a step and return its seconds."""
        import smdistributed.modelparallel.torch as smp

        smp.barrier()
        began = time.perf_counter()
        self.optimizer.zero_grad()
        self._step(self.model, self.ids)
        self.optimizer.step()
        smp.barrier()
        return time.perf_counter() - began

    def held(self) -> dict[tuple[str, str], tuple[torch.Tensor, int]]:
        """Return, for everything that this rank has, its elements of the whole, and the bytes of one."""
        from smp_runtime.checkpoint.live_state import live_weights, updated_parameters

        found = {}
        kept = [("weight", h.name, h.region, h.tensor.element_size()) for h in live_weights(self.model)]
        for entry in updated_parameters(self.model, self.optimizer):
            values = self.optimizer.state.get(entry.updated, {}) if entry.updated is not None else {}
            kept += [(key, entry.name, entry.region, 4) for key, value in values.items() if value.dim()]
        for key, name, region, size in kept:
            places = torch.arange(torch.Size(region.shape).numel()).view(region.shape)
            mask = torch.zeros(places.numel(), dtype=torch.bool)
            mask[region.cut(places).reshape(-1)[region.first : region.last]] = True
            found[key, name] = mask, size
        return found


def _walk(hidden: int, layers: int, folder: Path) -> None:
    """Run one job through all changes; rank 0 writes its figures down."""
    import smdistributed.modelparallel.torch as smp

    job, rows = _Job(WALK[0], hidden, layers), []
    for _ in range(_STEPS):
        job.step()
    for before, after in itertools.pairwise(WALK):
        began = time.perf_counter()
        smp.save_checkpoint(str(folder), tag=f"{before}-{after}", user_content={})
        smp.barrier()
        saving = time.perf_counter() - began
        had = job.held()
        smp.barrier()
        began = time.perf_counter()
        done = smp.reshape(DEGREES[after])
        smp.barrier()
        changing = time.perf_counter() - began
        first, *others = (job.step() for _ in range(_STEPS))
        needed = sum(
            int((mask & ~had[key][0] if key in had else mask).sum()) * size for key, (mask, size) in job.held().items()
        )
        step = statistics.median(others)
        moved = smp.allgather((done.received_bytes, needed), smp.WORLD)
        rows.append(
            {
                "before": before,
                "after": after,
                "seconds": changing + max(0.0, first - step),
                "saving": saving,
                "step": step,
                "received": sum(received for received, _ in moved),
                "needed": sum(needs for _, needs in moved),
            }
        )
    if smp.rank() == 0:
        (folder / "walk.json").write_text(json.dumps(rows))


def _resume(degrees: str, tag: str, hidden: int, layers: int, folder: Path) -> None:
    """Run a job that begins with a checkpoint."""
    import smdistributed.modelparallel.torch as smp

    job = _Job(degrees, hidden, layers)
    smp.resume_from_checkpoint(str(folder), tag=tag)
    job.step()


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--hidden", type=int, default=256)
    parser.add_argument("--layers", type=int, default=4)
    for name in ("--folder", "--resume", "--tag"):
        parser.add_argument(name, help=argparse.SUPPRESS)
    options = parser.parse_args(arguments)
    if options.resume:
        _resume(options.resume, options.tag, options.hidden, options.layers, Path(options.folder))
        return
    if options.folder:
        _walk(options.hidden, options.layers, Path(options.folder))
        return
    print_machine()
    with tempfile.TemporaryDirectory() as name:
        size = ["--hidden", options.hidden, "--layers", options.layers, "--folder", name]
        run_ranks(__file__, 2, size)
        print(
            "| change | reshape, s | bytes ÷ needed | save, s | start, load and step, s | ratio |\n|---|---|---|---|---|---|"
        )
        for row in json.loads((Path(name) / "walk.json").read_text()):
            began = time.perf_counter()
            run_ranks(__file__, 2, [*size, "--resume", row["after"], "--tag", f"{row['before']}-{row['after']}"])
            starting = time.perf_counter() - began - row["step"]
            share = f"{row['received'] / row['needed']:.3f}" if row["needed"] else f"{row['received']} ÷ 0"
            print(
                f"| {row['before']} → {row['after']} | {row['seconds']:.2f} | {share} | {row['saving']:.2f} | {starting:.1f} | "
                f"{(row['saving'] + starting) / row['seconds']:.0f} |",
                flush=True,
            )


if __name__ == "__main__":
    sys.exit(main())
