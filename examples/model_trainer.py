"""Trains a small GPT on this machine with ``ModelTrainer`` of SDK v3: two stages of a pipeline, no cloud account.

    pip install "smp-estimator[local3]"
    python examples/model_trainer.py

Writes the text into ./quickstart-data and the model into ./quickstart-output. The last line is
``model_trainer: steps=… val_loss=… model=PATH``.
"""

from __future__ import annotations

import argparse
import json
import tarfile
from pathlib import Path

from corpus import make_corpus
from sagemaker.core.training.configs import Compute, OutputDataConfig, SourceCode

from smp_estimator.model_trainer import ModelParallel, ModelTrainer

ENTRYPOINTS = Path(__file__).resolve().parent.parent / "entrypoints"


def train(steps: int, megabytes: float) -> tuple[dict[str, float], Path]:
    """Make the text, train, and read what was reached.

    Returns:
        The training script's metrics, and the path of ``model.tar.gz``.
    """
    here = Path.cwd()
    text = make_corpus(here / "quickstart-data", megabytes)

    trainer = ModelTrainer(
        source_code=SourceCode(source_dir=str(ENTRYPOINTS), entry_script="train_gpt.py"),
        compute=Compute(instance_type="local", instance_count=1),
        distributed=ModelParallel(
            parameters={"pipeline_parallel_degree": 2, "microbatches": 4, "ddp": True}, processes_per_host=2
        ),
        output_data_config=OutputDataConfig(s3_output_path=f"file://{here / 'quickstart-output'}"),
        hyperparameters={"steps": steps, "batch_size": 32, "seq_len": 128, "eval_interval": 100},
    )
    trainer.train({"train": str(text.parent)})

    model = Path(str(trainer.model_data).removeprefix("file://"))
    with tarfile.open(model) as archive:
        metrics = archive.extractfile("metrics.json")
        if metrics is None:
            raise RuntimeError(f"{model} holds no metrics.json; the training script writes it at its end")
        return json.load(metrics), model


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=300, help="optimizer steps (default: 300)")
    parser.add_argument("--megabytes", type=float, default=9.0, help="upper bound of the text (default: 9)")
    args = parser.parse_args()
    metrics, model = train(args.steps, args.megabytes)
    print(f"model_trainer: steps={metrics['steps']} val_loss={metrics['val_loss']:.4f} model={model}")


if __name__ == "__main__":
    main()
