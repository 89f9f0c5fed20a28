"""Watch a training: curves in TensorBoard or MLflow, what ranks spend their time on, and a profile of three steps.

    python examples/tracking.py [--loggers tensorboard,mlflow] [--steps 60]

The trackers need their packages (`pip install tensorboard mlflow`). While it runs, `smp-estimator top` in another terminal
shows the ranks; afterwards `smp-estimator profile tracking-output --trace trace.json` joins their profiles for ui.perfetto.dev.
"""

from __future__ import annotations

import argparse
from pathlib import Path

from corpus import make_corpus

from smp_estimator import MPI, ModelParallel, SMPEstimator

HERE = Path(__file__).parent


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--loggers", default="", help="some of tensorboard, mlflow and wandb, joined by commas")
    parser.add_argument("--steps", type=int, default=60)
    parser.add_argument("--output", default="tracking-output")
    args = parser.parse_args()
    output = Path(args.output).absolute()
    estimator = SMPEstimator(
        entry_point="train_gpt.py",
        source_dir=str(HERE.parent / "entrypoints"),
        instance_type="local",
        output_path=output.as_uri(),
        distribution=ModelParallel(ddp=True, microbatches=2) | MPI(processes_per_host=2),
        hyperparameters={"steps": args.steps, "hidden": 64, "layers": 2, "seq_len": 64, "batch_size": 8},
        loggers=args.loggers or None,
        profile={"steps": (20, 22), "shapes": True},
        environment={"SMP_RANK_RECORDS": "2"},
    )
    estimator.fit({"train": make_corpus(output / "data", megabytes=1.0).parent.as_uri()})
    print(f"smp-estimator profile {output} --trace trace.json")


if __name__ == "__main__":
    main()
