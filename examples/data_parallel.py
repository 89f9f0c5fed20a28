"""Runs entrypoints/train_ddp.py as a job of the data parallel library: two simulated hosts of two processes.

    python examples/data_parallel.py

The last line is ``model: PATH``.
"""

from __future__ import annotations

import argparse
from pathlib import Path

from smp_estimator import SMPEstimator

ENTRYPOINTS = Path(__file__).resolve().parent.parent / "entrypoints"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=300, help="optimizer steps (default: 300)")
    args = parser.parse_args()
    estimator = SMPEstimator(
        entry_point="train_ddp.py",
        source_dir=str(ENTRYPOINTS),
        instance_type="local",
        instance_count=2,
        hyperparameters={"steps": args.steps},
        distribution={
            "smdistributed": {"dataparallel": {"enabled": True}},
            "mpi": {"enabled": True, "processes_per_host": 2},  # one on each GPU where there are some
        },
    )
    estimator.fit()
    print(f"model: {estimator.model_data}")


if __name__ == "__main__":
    main()
