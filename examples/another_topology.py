"""Stops a job, goes on with the same checkpoints at another topology, and takes plain weights out of them.

    python examples/another_topology.py

First two pipeline stages, stopped as soon as there is a checkpoint; then two processes that share parameters, gradients
and optimizer state out among them (sharded data parallelism). Writes into ./another-topology. The last line is
``another topology: stopped_at=… steps=… val_loss=… weights=PATH``.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import tarfile
import time
from pathlib import Path
from typing import Any

from corpus import make_corpus

from smp_estimator import SMPEstimator

ENTRYPOINTS = Path(__file__).resolve().parent.parent / "entrypoints"


def job(folder: Path, steps: int, parameters: dict[str, Any]) -> SMPEstimator:
    """Return a job of two processes that saves into, and resumes from, the checkpoints of ``folder``; only the strategy differs."""
    return SMPEstimator(
        entry_point="train_gpt.py",
        source_dir=str(ENTRYPOINTS),
        instance_type="local",
        instance_count=1,
        output_path=f"file://{folder / 'output'}",
        checkpoint_s3_uri=f"file://{folder / 'checkpoints'}",
        hyperparameters={
            "steps": steps,
            "seq_len": 64,
            "checkpoint_interval": 20,
            "eval_interval": 0,
            "sample_bytes": 0,
        },
        distribution={
            "smdistributed": {"modelparallel": {"enabled": True, "parameters": {"ddp": True, **parameters}}},
            "mpi": {"enabled": True, "processes_per_host": 2},
        },
    )


def stopped_at(estimator: SMPEstimator, channels: dict[str, str], checkpoints: Path, patience: float = 300) -> str:
    """Start a job, stop it once it has saved, and say what it has saved last."""
    estimator.fit(channels, wait=False)
    until = time.monotonic() + patience
    while not (checkpoints / "newest").exists():
        if time.monotonic() > until:
            raise RuntimeError(f"the job saved nothing into {checkpoints} within {patience} s; look at its log")
        time.sleep(0.2)
    estimator.latest_training_job.stop()
    estimator.latest_training_job.wait(logs=False)
    return (checkpoints / "newest").read_text().strip()


def command(*arguments: str) -> None:
    """Run ``smp-estimator checkpoint`` with these arguments."""
    print("$ smp-estimator checkpoint", *arguments, flush=True)
    subprocess.run(["smp-estimator", "checkpoint", *arguments], check=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=100, help="optimizer steps of both jobs together (default: 100)")
    parser.add_argument("--megabytes", type=float, default=2.0, help="upper bound of the text (default: 2)")
    args = parser.parse_args()
    folder = Path.cwd() / "another-topology"
    checkpoints = folder / "checkpoints"
    if (checkpoints / "newest").exists():
        raise SystemExit(f"{checkpoints} has checkpoints of an earlier run, which would be continued: remove {folder}")
    channels = {"train": f"file://{make_corpus(folder / 'data', args.megabytes).parent}"}

    stages = job(folder, 1_000_000, {"partitions": 2, "microbatches": 2})  # it would never end by itself
    saved = stopped_at(stages, channels, checkpoints)
    step = int(saved.removeprefix("step").removesuffix("_partial"))
    command("inspect", str(checkpoints))
    command("verify", str(checkpoints))

    shards = job(folder, step + args.steps, {"sharded_data_parallel_degree": 2})
    shards.fit(channels)
    with tarfile.open(shards.model_data.removeprefix("file://")) as archive:
        metrics = archive.extractfile("metrics.json")
        if metrics is None:
            raise RuntimeError(f"{shards.model_data} holds no metrics.json; the training script writes it at its end")
        reached = json.load(metrics)

    weights = folder / "weights.safetensors"
    weights.unlink(missing_ok=True)
    command("convert", str(checkpoints), str(weights), "--to", "safetensors")
    print(
        f"another topology: stopped_at={step} steps={reached['steps']} val_loss={reached['val_loss']:.4f} weights={weights}"
    )


if __name__ == "__main__":
    main()
