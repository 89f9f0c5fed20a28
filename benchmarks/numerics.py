"""What recording numbers costs: step times of a small GPT in one process without it, with every step, and with every tenth.

    python benchmarks/numerics.py [--hidden 256] [--steps 60]

Blocks of steps alternate, so that what else the machine does meets all kinds alike; the medians of blocks are compared.
"""

from __future__ import annotations

import argparse
import sys
import tempfile
import time
from pathlib import Path
from statistics import median

import torch
import torch.nn.functional as F

import smdistributed.modelparallel.torch as smp
from smp_runtime.job.session import current
from smp_runtime.numerics.recorder import Recorder

sys.path.insert(0, str(Path(__file__).parent.parent / "entrypoints"))
from train_gpt import GPT, GPTConfig

BLOCK = 10


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--hidden", type=int, default=256)
    parser.add_argument("--layers", type=int, default=4)
    parser.add_argument("--seq_len", type=int, default=128)
    parser.add_argument("--batch_size", type=int, default=16)
    parser.add_argument("--steps", type=int, default=120)
    args = parser.parse_args()
    torch.set_num_threads(1)
    smp.init()
    torch.manual_seed(0)
    model = smp.DistributedModel(GPT(GPTConfig(args.layers, args.hidden, 4, args.seq_len)))
    optimizer = smp.DistributedOptimizer(torch.optim.AdamW(model.parameters(), lr=1e-3))

    @smp.step
    def step(ids: torch.Tensor) -> torch.Tensor:
        loss = F.cross_entropy(model(ids).flatten(0, 1), ids.flatten())
        model.backward(loss)
        return loss

    with tempfile.TemporaryDirectory() as folder:
        smp.record_numerics(folder, every=1)
        recorder = current().ranks.kept(Recorder)
        assert recorder is not None
        times: dict[str, list[float]] = {"off": [], "every step": [], "every tenth": []}
        every = {"off": 10**9, "every step": 1, "every tenth": BLOCK}
        ids = torch.randint(256, (args.batch_size, args.seq_len))
        for number in range(args.steps // BLOCK):
            for kind, found in times.items():
                recorder._every = every[kind]
                begin = time.perf_counter()
                for _ in range(BLOCK):
                    optimizer.zero_grad()
                    step(ids)
                    optimizer.step()
                if number:  # the first makes buffers
                    found.append((time.perf_counter() - begin) / BLOCK)
        size = sum(file.stat().st_size for file in Path(folder).iterdir())
        recorded = (args.steps // BLOCK) * (BLOCK + 1)
    off = median(times["off"])
    print(
        f"{sum(p.numel() for p in model.parameters()):,} parameters, {args.batch_size} × {args.seq_len} tokens, one thread"
    )
    for kind, found in times.items():
        print(f"{kind:12} {median(found) * 1e3:8.1f} ms  {median(found) / off - 1:+.1%}")
    print(f"{size / recorded / 1024:.0f} KiB a recorded step")


if __name__ == "__main__":
    main()
