"""Runs entrypoints/train_version2.py as a job of version 2 of the library, split and sharded; a second job resumes from it.

    python examples/version2.py

Writes into ./version2. The last line is ``model: PATH``.
"""

from __future__ import annotations

import argparse
from pathlib import Path

from smp_estimator import SMPEstimator

ENTRYPOINTS = Path(__file__).resolve().parent.parent / "entrypoints"
PARAMETERS = {"tensor_parallel_degree": 2, "hybrid_shard_degree": 2}


def train(folder: Path, steps: int) -> str:
    """Train with four processes up to a step; return the place of the model."""
    estimator = SMPEstimator(
        entry_point="train_version2.py",
        source_dir=str(ENTRYPOINTS),
        instance_type="local",
        output_path=f"file://{folder / 'output'}",
        checkpoint_s3_uri=f"file://{folder / 'checkpoints'}",
        hyperparameters={"steps": steps, "save_every": steps // 2},
        distribution={
            "torch_distributed": {"enabled": True, "processes_per_host": 4},
            "smdistributed": {"modelparallel": {"enabled": True, "parameters": PARAMETERS}},
        },
    )
    estimator.fit()
    return str(estimator.model_data)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=60, help="optimizer steps of each job (default: 60)")
    args = parser.parse_args()
    folder = Path("version2").absolute()
    train(folder, args.steps)
    print(f"model: {train(folder, 2 * args.steps)}")


if __name__ == "__main__":
    main()
