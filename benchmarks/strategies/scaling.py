"""Strong and weak scaling as shapes: what a rank sends, holds and computes with 1 to 64 ranks, counted by rehearsals.

    python benchmarks/strategies/scaling.py
    python benchmarks/strategies/scaling.py --ranks 8 64 --case replicas

The GPT of the main job, larger (24 layers, hidden 1,024), as the script ``entrypoints/train_gpt.py`` trains it, on
ml.p4d.24xlarge (8 ranks on each): no cluster is there, the ranks' own code runs on tensors without memory (docs/rehearsal.md).
*Strong*: 64 samples a step, whatever the ranks; *weak*: 4 per data parallel rank. Bytes are those of the last step and of
bandwidth-optimal algorithms; the bound is what no algorithm can stay below for that strategy. Times are by stated rates: they say
how the shape changes, not what a cluster takes.
"""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # modules that benchmarks share
from launching import print_machine

from smp_estimator.rehearsal import rehearse

if TYPE_CHECKING:
    from smp_estimator.rehearsal.result import Rehearsed

SCRIPT = Path(__file__).resolve().parents[2] / "entrypoints" / "train_gpt.py"
LAYERS, HIDDEN, SEQ = 24, 1024, 512
STRONG, WEAK = 64, 4

#: By name: parameters of a job of so many ranks, and the least bytes that a rank sends for so many of parameters and ranks.
CASES: dict[str, tuple[Callable[[int], dict[str, Any]], Callable[[float, int], float]]] = {
    "replicas": (lambda ranks: {"ddp": True}, lambda size, n: 2 * (n - 1) / n * size),
    "sharded state": (
        lambda ranks: {"ddp": True, "shard_optimizer_state": True},
        lambda size, n: 2 * (n - 1) / n * size,
    ),
    "sharded, all ranks": (
        lambda ranks: {"ddp": True, "sharded_data_parallel_degree": ranks, "sdp_param_persistence_threshold": 0},
        lambda size, n: 3 * (n - 1) / n * size,
    ),
    "sharded, 8 ranks": (
        lambda ranks: {"ddp": True, "sharded_data_parallel_degree": 8, "sdp_param_persistence_threshold": 0},
        lambda size, n: 3 * 7 / 8 * size + 2 * (n // 8 - 1) / (n // 8) * size / 8,
    ),
}


def rehearsed(parameters: dict[str, Any], ranks: int, batch: int, text: Path) -> Rehearsed:
    """Rehearse the script on that many ranks, with that many samples of a step over all of them."""
    words = ["--layers", LAYERS, "--hidden", HIDDEN, "--heads", 16, "--seq_len", SEQ, "--batch_size", batch]
    words += ["--steps", 10, "--eval_interval", 0, "--eval_batches", 0, "--checkpoint_interval", 0]
    return rehearse(
        str(SCRIPT),
        [str(word) for word in words],
        instance_type="ml.p4d.24xlarge",
        instance_count=max(1, ranks // 8),
        processes_per_host=min(ranks, 8),
        parameters=parameters,
        channels={"train": text},
    )


def line(case: str, scaling: str, ranks: int, alone_flops: float, text: Path) -> dict[str, Any]:
    """Return the figures of one shape; ``alone_flops``: of one rank that has a sample of each step."""
    make, bound = CASES[case]
    batch = STRONG if scaling == "strong" else WEAK * ranks
    found = rehearsed(make(ranks), ranks, batch, text)
    kind = found.rehearsal.kinds[0]
    last = max(count.step for count in kind.collectives) if kind.collectives else 0
    sent = sum(count.sent_bytes for count in kind.collectives if count.step == last)
    least = bound(4 * elements(), ranks)
    return {
        "case": case,
        "scaling": scaling,
        "ranks": ranks,
        "samples": batch,
        "sent_MB": round(sent / 1e6, 2),
        "bytes_over_bound": round(sent / least, 4) if least else None,
        "peak_MB": round(kind.peak_bytes / 1e6, 1),
        "flops_share": round(sum(work.flops for work in kind.work) / (alone_flops * batch), 5),
        "step_ms": round(1e3 * found.rehearsal.step_seconds, 3),
    }


def elements() -> int:
    """Return the parameters of the model, whose output layer is tied to the embedding."""
    import sys

    sys.path.insert(0, str(SCRIPT.parent))
    import torch
    import train_gpt

    with torch.device("meta"):
        model = train_gpt.GPT(train_gpt.GPTConfig(layers=LAYERS, hidden=HIDDEN, heads=16, seq_len=SEQ))
    return sum(parameter.numel() for parameter in model.parameters())


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--case", choices=list(CASES), action="append", help="default: all")
    parser.add_argument("--ranks", type=int, nargs="*", default=[8, 16, 32, 64])
    args = parser.parse_args()
    print_machine()
    with tempfile.TemporaryDirectory() as folder:
        text = Path(folder)
        (text / "text.txt").write_bytes(bytes(range(97, 123)) * 4000)
        alone = rehearsed({}, 1, WEAK, text).rehearsal.kinds[0]
        of_sample = sum(work.flops for work in alone.work) / WEAK
        for case in args.case or CASES:
            for scaling in ("strong", "weak"):
                for ranks in args.ranks:
                    print(json.dumps(line(case, scaling, ranks, of_sample, text)), flush=True)


if __name__ == "__main__":
    main()
