"""A model of one billion parameters, created in shards and trained for two steps by four processes.

    python benchmarks/strategies/one_billion.py             # needs about 20 GB of memory in all
    python benchmarks/strategies/one_billion.py --layers 2  # the same, smaller

Every rank draws all weights but keeps a quarter of each, so the model never exists as a whole; printed are the peaks of
resident memory after creation and after two updates with AdamW in float32, and what theory needs.
"""

from __future__ import annotations

import argparse
import json
import resource
import sys
import time
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # modules that benchmarks share
from launching import run_ranks

ROOT = Path(__file__).resolve().parents[2]
RANKS = 4
#: Elements that may be gathered at once, and that a gradient bucket may have.
MOST = 50_000_000
#: Bytes that libraries and connections take while the model is created, whatever its size.
OVERHEAD = 128 * 2**20


def run_rank(layers: int, hidden: int) -> None:
    """Run one rank."""
    import torch
    import torch.nn.functional as F

    torch.set_num_threads(1)
    sys.path.insert(0, str(ROOT / "entrypoints"))
    import train_gpt

    import smdistributed.modelparallel.torch as smp

    smp.init(
        {
            "ddp": True,
            "sharded_data_parallel_degree": RANKS,
            "delayed_parameter_initialization": True,
            "sdp_param_persistence_threshold": 10_000,
            "sdp_max_live_parameters": MOST,
            "sdp_reduce_bucket_size": MOST,
        }
    )
    torch.manual_seed(0)
    before, start = _peak(), time.perf_counter()
    with smp.model_creation():
        module = train_gpt.GPT(train_gpt.GPTConfig(layers=layers, hidden=hidden, heads=16, seq_len=16))
    elements = sum(p.numel() for p in module.parameters())
    model = smp.DistributedModel(module)
    created, created_at = _peak(), time.perf_counter()
    if created - before > 0.75 * 4 * elements + OVERHEAD:
        raise AssertionError(f"creation held {created - before:,} bytes of {4 * elements:,}: not a shard")
    optimizer = smp.DistributedOptimizer(torch.optim.AdamW(model.parameters(), lr=1e-4, foreach=False))
    ids = torch.randint(256, (1, 17), generator=torch.Generator().manual_seed(smp.rank()))

    @smp.step
    def step(tokens):
        loss = F.cross_entropy(model(tokens[:, :-1]).flatten(0, 1), tokens[:, 1:].flatten())
        model.backward(loss)
        return loss

    losses = []
    for _ in range(2):
        optimizer.zero_grad()
        losses.append(round(float(step(ids).reduce_mean()), 4))
        optimizer.step()
    trained = _peak()
    found = smp.allgather(
        {
            "rank": smp.rank(),
            "losses": losses,
            "created_bytes": created - before,
            "trained_bytes": trained - before,
            "created_over_shard": round((created - before) / (4 * elements / RANKS), 3),
            "trained_over_bound": round((trained - before) / (16 * elements / RANKS + 4 * MOST + 4 * MOST), 3),
            "most_gathered": model.shards.scheduler.peak,
            "seconds": [round(created_at - start, 1), round(time.perf_counter() - created_at, 1)],
        },
        smp.WORLD,
    )
    if smp.rank() == 0:
        print(json.dumps({"parameters": elements, "model_bytes": 4 * elements}), flush=True)
        for line in found:
            print(json.dumps(line), flush=True)
    smp.shutdown()


def _peak() -> int:
    """Return the most memory that this process has held so far, in bytes."""
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--layers", type=int, default=20)
    parser.add_argument("--hidden", type=int, default=2048)
    parser.add_argument("--rank-of", action="store_true", help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.rank_of:
        run_rank(args.layers, args.hidden)
        return
    # A fixed threshold gives large buffers back when they are freed; otherwise the heap keeps their holes.
    words = ["--rank-of", "--layers", args.layers, "--hidden", args.hidden]
    run_ranks(__file__, RANKS, words, {"MALLOC_MMAP_THRESHOLD_": str(2**20)})


if __name__ == "__main__":
    main()
