"""What an update costs: processor time of ``optimizer.step()`` with the wrapper and in plain PyTorch, in turns, and operations.

    python benchmarks/strategies/optimizer_step.py --rounds 25

One process and one thread train the GPT of the other benchmarks (8 layers, hidden 256) in float32. Both sides update copies of it
by the same optimizer, made without ``fused`` or ``foreach``. It is processor time, so that other programs change little.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import time
from pathlib import Path
from typing import Any

from data_parallel import make_gpt

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # modules that benchmarks share
from launching import print_machine

OPTIMIZERS: dict[str, dict[str, Any]] = {"AdamW": {}, "Adam": {}, "SGD": {"lr": 0.1, "momentum": 0.9}, "Adagrad": {}}


def _operations(update: Any) -> int:
    import torch

    with torch.profiler.profile() as profile:
        update()
    return sum(event.count for event in profile.key_averages() if event.key.startswith("aten::"))


def measured(name: str, rounds: int) -> dict[str, Any]:
    """Return the medians and quartiles of one optimizer."""
    import torch

    import smdistributed.modelparallel.torch as smp

    sides = {}
    for side, wrap in (("ours", smp.DistributedOptimizer), ("peer", lambda optimizer: optimizer)):
        model = make_gpt()
        for parameter in model.parameters():
            parameter.grad = torch.randn_like(parameter) * 1e-3
        sides[side] = wrap(getattr(torch.optim, name)(model.parameters(), **OPTIMIZERS[name]))
    times: dict[str, list[float]] = {side: [] for side in sides}
    for _ in range(rounds + 3):
        for side, optimizer in sides.items():
            start = time.thread_time()
            optimizer.step()
            times[side].append(time.thread_time() - start)
    ours, peer = times["ours"][3:], times["peer"][3:]
    ratios = [a / b for a, b in zip(ours, peer, strict=True)]
    return {
        "optimizer": name,
        "tensors": len(list(model.parameters())),
        "time_ratio": round(statistics.median(ratios), 3),
        "ratio_quartiles": [round(quartile, 3) for quartile in statistics.quantiles(ratios, n=4)[::2]],
        "ours_ms": round(1e3 * statistics.median(ours), 2),
        "peer_ms": round(1e3 * statistics.median(peer), 2),
        "operations": {side: _operations(optimizer.step) for side, optimizer in sides.items()},
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=25)
    options = parser.parse_args()
    import torch

    import smdistributed.modelparallel.torch as smp

    torch.set_num_threads(1)
    print_machine()
    smp.init({})
    for name in OPTIMIZERS:
        print(json.dumps(measured(name, options.rounds)), flush=True)
    smp.shutdown()


if __name__ == "__main__":
    main()
