"""Trains a small GPT on this machine: two processes, two microbatches, real text, no cloud account.

    python examples/quickstart.py

Writes the text into ./quickstart-data and the model into ./quickstart-output. The last line is
``quickstart: steps=… val_loss=… model=PATH``.
"""

from __future__ import annotations

import argparse
import json
import tarfile
from pathlib import Path

from corpus import make_corpus

from smp_estimator import SMPEstimator

ENTRYPOINTS = Path(__file__).resolve().parent.parent / "entrypoints"


def train(steps: int, megabytes: float) -> tuple[dict[str, float], Path]:
    """Make the text, train, and read what was reached.

    Returns:
        The training script's metrics, and the path of ``model.tar.gz``.
    """
    here = Path.cwd()
    text = make_corpus(here / "quickstart-data", megabytes)
    print(f"text: {text} ({text.stat().st_size / 1e6:.1f} MB)")

    estimator = SMPEstimator(
        entry_point="train_gpt.py",
        source_dir=str(ENTRYPOINTS),
        instance_type="local",
        instance_count=1,
        output_path=f"file://{here / 'quickstart-output'}",
        hyperparameters={
            "steps": steps,
            "batch_size": 32,  # samples of a step, over both processes
            "seq_len": 128,
            "eval_interval": 100,
        },
        distribution={
            "smdistributed": {"modelparallel": {"enabled": True, "parameters": {"ddp": True, "microbatches": 2}}},
            "mpi": {"enabled": True, "processes_per_host": 2},
        },
    )
    estimator.fit({"train": f"file://{text.parent}"})

    model = Path(estimator.model_data.removeprefix("file://"))
    with tarfile.open(model) as archive:
        metrics = archive.extractfile("metrics.json")
        if metrics is None:
            raise RuntimeError(f"{model} holds no metrics.json; the training script writes it at its end")
        return json.load(metrics), model


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=150, help="optimizer steps (default: 150)")
    parser.add_argument("--megabytes", type=float, default=9.0, help="upper bound of the text (default: 9)")
    args = parser.parse_args()
    metrics, model = train(args.steps, args.megabytes)
    print(f"quickstart: steps={metrics['steps']} val_loss={metrics['val_loss']:.4f} model={model}")


if __name__ == "__main__":
    main()
