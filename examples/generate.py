"""Fine-tunes a small T5 or Falcon in a job of two processes, with text that it generates at the end of each epoch.

    pip install transformers
    python examples/generate.py --model t5 --strategy pipeline

The script ``entrypoints/train_generate.py`` is the same for every strategy. Writes into ./generate. The last line is
``generate: model=… strategy=… loss=FIRST→LAST right=FIRST→LAST of WORDS``.
"""

from __future__ import annotations

import argparse
import json
import tarfile
from pathlib import Path
from typing import Any

from smp_estimator import SMPEstimator

ENTRYPOINTS = Path(__file__).resolve().parent.parent / "entrypoints"
#: By name, the number of processes and the parameters.
STRATEGIES: dict[str, tuple[int, dict[str, Any]]] = {
    "alone": (1, {}),
    "pipeline": (2, {"pipeline_parallel_degree": 2, "microbatches": 2}),
    "tensor": (2, {"tensor_parallel_degree": 2, "prescaled_batch": True}),
    "sharded": (2, {"sharded_data_parallel_degree": 2, "sdp_param_persistence_threshold": 1000}),
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", choices=("t5", "falcon"), default="t5", help="default: t5")
    parser.add_argument("--strategy", choices=STRATEGIES, default="pipeline", help="default: pipeline")
    parser.add_argument("--epochs", type=int, default=2, help="default: 2")
    parser.add_argument("--steps", type=int, default=40, help="optimizer steps of an epoch (default: 40)")
    args = parser.parse_args()
    folder = Path.cwd() / "generate"
    processes, parameters = STRATEGIES[args.strategy]
    estimator = SMPEstimator(
        entry_point="train_generate.py",
        source_dir=str(ENTRYPOINTS),
        instance_type="local",
        instance_count=1,
        output_path=f"file://{folder / 'output'}",
        hyperparameters={"model": args.model, "epochs": args.epochs, "steps": args.steps},
        distribution={
            "smdistributed": {"modelparallel": {"enabled": True, "parameters": {"ddp": True, **parameters}}},
            "mpi": {"enabled": True, "processes_per_host": processes},
        },
    )
    estimator.fit()
    with tarfile.open(estimator.model_data.removeprefix("file://")) as archive:
        archive.extractall(folder, filter="data")
    epochs = json.loads((folder / "samples.json").read_text())
    first, last = epochs[0], epochs[-1]
    for word, greedy, sampled in zip(last["wanted"], last["greedy"], last["sampled"], strict=True):
        print(f"wanted {word}, wrote {greedy}, sampled {sampled}")
    print(
        f"generate: model={args.model} strategy={args.strategy} loss={first['loss']:.4f}→{last['loss']:.4f} "
        f"right={first['right']}→{last['right']} of {len(last['wanted'])}"
    )


if __name__ == "__main__":
    main()
