"""Trains with Transformers' ``Trainer`` in a job of two processes, divided as you choose; the script does not know.

    pip install "transformers>=4.57,<6" accelerate
    python examples/trainer.py --strategy pipeline

The script is ``entrypoints/train_trainer.py``. Writes into ./trainer. The last line is
``trainer: strategy=… loss=FIRST→LAST eval_loss=LOSS``.
"""

from __future__ import annotations

import argparse
import json
import tarfile
from pathlib import Path
from typing import Any

from corpus import make_corpus

from smp_estimator import SMPEstimator

ENTRYPOINTS = Path(__file__).resolve().parent.parent / "entrypoints"
#: By name, the processes and the parameters.
STRATEGIES: dict[str, tuple[int, dict[str, Any]]] = {
    "alone": (1, {}),
    "data": (2, {}),
    "pipeline": (2, {"pipeline_parallel_degree": 2, "microbatches": 2}),
    "tensor": (2, {"tensor_parallel_degree": 2, "prescaled_batch": True}),
    "sharded": (2, {"sharded_data_parallel_degree": 2, "sdp_param_persistence_threshold": 1000}),
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--strategy", choices=STRATEGIES, default="pipeline", help="default: pipeline")
    parser.add_argument("--steps", type=int, default=20, help="optimizer steps (default: 20)")
    args = parser.parse_args()
    folder = Path.cwd() / "trainer"
    processes, parameters = STRATEGIES[args.strategy]
    estimator = SMPEstimator(
        entry_point="train_trainer.py",
        source_dir=str(ENTRYPOINTS),
        instance_type="local",
        instance_count=1,
        output_path=f"file://{folder / 'output'}",
        hyperparameters={
            "output_dir": "trainer-state",
            "max_steps": args.steps,
            "per_device_train_batch_size": 8,
            "learning_rate": 3e-3,
            "logging_steps": 1,
            "save_strategy": "no",
            "report_to": "none",
            "disable_tqdm": True,
        },
        distribution={
            "smdistributed": {"modelparallel": {"enabled": True, "parameters": {"ddp": True, **parameters}}},
            "mpi": {"enabled": True, "processes_per_host": processes},
        },
    )
    estimator.fit({"train": f"file://{make_corpus(folder / 'data', 0.2).parent}"})
    with tarfile.open(estimator.model_data.removeprefix("file://")) as archive:
        archive.extractall(folder / "model", filter="data")
    found = json.loads((folder / "model" / "metrics.json").read_text())
    losses = found["losses"]
    print(f"trainer: strategy={args.strategy} loss={losses[0]:.4f}→{losses[-1]:.4f} eval_loss={found['eval_loss']:.4f}")


if __name__ == "__main__":
    main()
