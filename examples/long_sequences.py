"""Trains on samples of twice the length with two ranks a sample, in the memory of one, and compares with one rank.

    python examples/long_sequences.py

The script ``entrypoints/train_long.py`` is the same for both. The last lines are ``length=… ranks=… loss=FIRST→LAST
kept=BYTES``: what the forward pass of a step keeps for backward on a rank.
"""

from __future__ import annotations

import argparse
import json
import tarfile
from pathlib import Path

from corpus import make_corpus

from smp_estimator import SMPEstimator

ENTRYPOINTS = Path(__file__).resolve().parent.parent / "entrypoints"


def train(folder: Path, length: int, ranks: int, steps: int) -> dict[str, object]:
    """Train in a job of its own, and return the content of its ``metrics.json``."""
    estimator = SMPEstimator(
        entry_point="train_long.py",
        source_dir=str(ENTRYPOINTS),
        instance_type="local",
        instance_count=1,
        output_path=f"file://{folder / f'output-{length}-{ranks}'}",
        hyperparameters={"seq_len": length, "steps": steps},
        distribution={
            "smdistributed": {
                "modelparallel": {
                    "enabled": True,
                    "parameters": {
                        "ddp": True,
                        "context_parallel_degree": ranks,
                        "context_parallel": "ring",
                    },
                }
            },
            "mpi": {"enabled": True, "processes_per_host": ranks},
        },
    )
    estimator.fit({"train": f"file://{make_corpus(folder / 'data', 0.2).parent}"})
    with tarfile.open(estimator.model_data.removeprefix("file://")) as archive:
        metrics = archive.extractfile("metrics.json")
        if metrics is None:
            raise AssertionError("the job has written no metrics.json")
        facts: dict[str, object] = json.load(metrics)
        return facts


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--length", type=int, default=512, help="tokens of a sample on one rank (default: 512)")
    parser.add_argument("--steps", type=int, default=10, help="optimizer steps (default: 10)")
    args = parser.parse_args()
    folder = Path.cwd() / "long-sequences"
    found = {(args.length * ranks, ranks): train(folder, args.length * ranks, ranks, args.steps) for ranks in (1, 2)}
    for (length, ranks), facts in found.items():
        losses = facts["losses"]
        print(f"length={length} ranks={ranks} loss={losses[0]:.2f}→{losses[-1]:.2f} kept={facts['kept_bytes']:,}")
    kept = [facts["kept_bytes"] for facts in found.values()]
    print(f"twice the length on two ranks: {kept[1] / kept[0]:.3f} of the memory")


if __name__ == "__main__":
    main()
