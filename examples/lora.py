"""Trains LoRA adapters with TRL in a job of two processes, and loads them into plain PEFT.

    pip install trl peft datasets
    python examples/lora.py --objective sft --strategy pipeline

The script ``entrypoints/train_lora.py`` is the same for every strategy. Writes into ./lora. The last line is
``lora: objective=… strategy=… loss=FIRST→LAST adapters=BYTES of MODEL``.
"""

from __future__ import annotations

import argparse
import json
import sys
import tarfile
from pathlib import Path

from corpus import make_corpus

from smp_estimator import SMPEstimator

ENTRYPOINTS = Path(__file__).resolve().parent.parent / "entrypoints"
#: What Transformers asks for before it takes a job for one of this library: ``partitions``, and MPI.
STRATEGIES = {
    "data": {"partitions": 1},
    "pipeline": {"partitions": 2, "microbatches": 2},
    "tensor": {"partitions": 1, "tensor_parallel_degree": 2, "prescaled_batch": True},
    "sharded": {"partitions": 1, "sharded_data_parallel_degree": 2, "sdp_param_persistence_threshold": 1000},
    "context": {"partitions": 1, "context_parallel_degree": 2},
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--objective", choices=("sft", "dpo"), default="sft", help="default: sft")
    parser.add_argument("--strategy", choices=STRATEGIES, default="pipeline", help="default: pipeline")
    parser.add_argument("--packed", type=int, default=0, help="words in a row of packed samples, for sft (default: 0)")
    parser.add_argument("--steps", type=int, default=20, help="optimizer steps (default: 20)")
    args = parser.parse_args()
    folder = Path.cwd() / "lora"
    estimator = SMPEstimator(
        entry_point="train_lora.py",
        source_dir=str(ENTRYPOINTS),
        instance_type="local",
        instance_count=1,
        output_path=f"file://{folder / 'output'}",
        hyperparameters={"objective": args.objective, "steps": args.steps, "packed": args.packed},
        distribution={
            "smdistributed": {
                "modelparallel": {"enabled": True, "parameters": {"ddp": True, **STRATEGIES[args.strategy]}}
            },
            "mpi": {"enabled": True, "processes_per_host": 2},
        },
    )
    estimator.fit({"train": f"file://{make_corpus(folder / 'data', 0.2).parent}"})
    adapters = folder / "adapters"
    with tarfile.open(estimator.model_data.removeprefix("file://")) as archive:
        archive.extractall(adapters, filter="data")
    losses = json.loads((adapters / "metrics.json").read_text())["losses"]

    # Where this library is not needed: the same base, and the adapters by PEFT.
    sys.path.insert(0, str(ENTRYPOINTS))
    from peft import PeftModel
    from train_lora import base_model
    from transformers import AutoTokenizer

    model = PeftModel.from_pretrained(base_model(len(AutoTokenizer.from_pretrained(adapters))), adapters)
    size = (adapters / "adapter_model.safetensors").stat().st_size
    whole = sum(parameter.numel() * parameter.element_size() for parameter in model.get_base_model().parameters())
    print(
        f"lora: objective={args.objective} strategy={args.strategy} loss={losses[0]:.4f}→{losses[-1]:.4f} "
        f"adapters={size} of {whole}"
    )


if __name__ == "__main__":
    main()
