"""Fine-tunes a Llama of Transformers in a job of two processes, and reads what it exports in plain Transformers.

    pip install "transformers>=4.57,<6"
    python examples/transformers_finetuning.py --strategy tensor --checkpointing --offload

The script ``entrypoints/train_transformers.py`` is the same for every strategy. A first model, which stands for one that was
downloaded, is written by ``save_pretrained`` and fine-tuned from there. Writes into ./finetuning. The last line is
``finetuning: strategy=… loss=FIRST→LAST exported=LOSS model=FOLDER``, where LOSS is that of the exported model in one process.
"""

from __future__ import annotations

import argparse
import json
import tarfile
from pathlib import Path
from typing import Any

import torch
from corpus import make_corpus

from smp_estimator import SMPEstimator

ENTRYPOINTS = Path(__file__).resolve().parent.parent / "entrypoints"
STRATEGIES: dict[str, dict[str, Any]] = {
    "data": {},
    "pipeline": {"pipeline_parallel_degree": 2},
    "tensor": {"tensor_parallel_degree": 2, "prescaled_batch": True},
    "sharded": {"sharded_data_parallel_degree": 2, "sdp_param_persistence_threshold": 1000},
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--strategy", choices=STRATEGIES, default="tensor", help="default: tensor")
    parser.add_argument("--checkpointing", action="store_true", help="keep only the inputs of each layer")
    parser.add_argument("--offload", action="store_true", help="and these in host memory until they are needed again")
    parser.add_argument("--steps", type=int, default=20, help="optimizer steps (default: 20)")
    args = parser.parse_args()
    folder = Path.cwd() / "finetuning"
    text = make_corpus(folder / "data", 0.2)
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(0)
    sizes = {"hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 4, "max_position_embeddings": 128}
    first = LlamaForCausalLM(LlamaConfig(vocab_size=256, num_attention_heads=4, num_key_value_heads=2, **sizes))
    first.save_pretrained(folder / "pretrained")

    more = {"offload_activations": True, "activation_loading_horizon": 2} if args.offload else {}
    parameters = {"ddp": True, "microbatches": 2, **STRATEGIES[args.strategy], **more}
    estimator = SMPEstimator(
        entry_point="train_transformers.py",
        source_dir=str(ENTRYPOINTS),
        instance_type="local",
        instance_count=1,
        output_path=f"file://{folder / 'output'}",
        hyperparameters={"steps": args.steps, "checkpointing": "each" if args.checkpointing else "none"},
        distribution={
            "smdistributed": {"modelparallel": {"enabled": True, "parameters": parameters}},
            "mpi": {"enabled": True, "processes_per_host": 2},
        },
    )
    estimator.fit({"train": f"file://{text.parent}", "pretrained": f"file://{folder / 'pretrained'}"})
    model = folder / "model"
    with tarfile.open(estimator.model_data.removeprefix("file://")) as archive:
        archive.extractall(model, filter="data")
    losses = json.loads((model / "losses.json").read_text())

    # Where this library is not needed: the same text, and the exported model in one process.
    ids = torch.tensor(list(text.read_bytes()[: 64 * 64])).view(64, 64)
    with torch.no_grad():
        exported = float(LlamaForCausalLM.from_pretrained(model)(input_ids=ids, labels=ids).loss)
    print(
        f"finetuning: strategy={args.strategy} loss={losses[0]:.4f}→{losses[-1]:.4f} exported={exported:.4f} model={model}"
    )


if __name__ == "__main__":
    main()
