"""Fine-tunes a language model of Transformers on the text in the channel ``train``, and exports it as Transformers writes it.

    python entrypoints/train_transformers.py --train FOLDER --model_dir FOLDER --steps 20

The same script for every strategy: with tensor parallelism supported modules are replaced and keep their weights, with a
pipeline the layers lie on its stages, and ``--checkpointing`` keeps only the inputs of each layer, which
``offload_activations`` in the job's parameters moves to host memory. It resumes from its checkpoints at any degrees. The channel
``pretrained`` has a model that ``save_pretrained`` has written, with a tokenizer or for bytes; without that channel a small
Llama for bytes begins anew.
"""

from __future__ import annotations

import argparse
import json
import os
from pathlib import Path
from typing import Any

import torch
from torch import nn
from transformers import AutoModelForCausalLM, AutoTokenizer, LlamaConfig, LlamaForCausalLM

import smdistributed.modelparallel.torch as smp

BYTES = 256


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    environ = os.environ
    parser.add_argument("--train", type=Path, default=environ.get("SM_CHANNEL_TRAIN"), help="folder with .txt files")
    parser.add_argument("--pretrained", default=environ.get("SM_CHANNEL_PRETRAINED"), help="folder of save_pretrained")
    parser.add_argument("--model_dir", type=Path, default=environ.get("SM_MODEL_DIR", "model"))
    parser.add_argument("--checkpoint_dir", type=Path, default=environ.get("SMP_CHECKPOINT_DIR", "checkpoints"))
    parser.add_argument("--steps", type=int, default=20, help="optimizer steps (default: 20)")
    parser.add_argument("--batch_size", type=int, default=8, help="samples of each rank that reads (default: 8)")
    parser.add_argument("--seq_len", type=int, default=64, help="tokens of a sample (default: 64)")
    parser.add_argument("--learning_rate", type=float, default=3e-3)
    parser.add_argument("--save_every", type=int, default=0, help="steps between checkpoints; 0: only when stopped")
    parser.add_argument("--checkpointing", choices=("none", "each"), default="none", help="of activations")
    args, _ = parser.parse_known_args()
    if args.train is None:
        parser.error("no training text: give fit() a channel named 'train', or pass --train FOLDER")
    return args


def make_model(args: argparse.Namespace) -> nn.Module:
    """Make the model to train on every rank; its weights are kept where its modules are divided."""
    if args.pretrained:
        return AutoModelForCausalLM.from_pretrained(args.pretrained)
    sizes = {"hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 4, "max_position_embeddings": 128}
    return LlamaForCausalLM(LlamaConfig(vocab_size=BYTES, num_attention_heads=4, num_key_value_heads=2, **sizes))


def samples(args: argparse.Namespace) -> torch.Tensor:
    """Return token ids of the text, ``[samples, seq]``: the tokenizer's beside the model, or bytes if there is none."""
    texts = [file.read_text(errors="replace") for file in sorted(args.train.rglob("*.txt"))]
    if args.pretrained and Path(args.pretrained, "tokenizer_config.json").is_file():
        ids = AutoTokenizer.from_pretrained(args.pretrained)("\n".join(texts))["input_ids"]
    else:
        ids = list("\n".join(texts).encode())
    count = len(ids) // args.seq_len
    if count < 1:
        raise ValueError(
            f"the train channel {args.train} has {len(ids)} tokens in {len(texts)} .txt files, and one sample takes "
            f"{args.seq_len}; give more text, or a smaller seq_len"
        )
    return torch.tensor(ids[: count * args.seq_len]).view(count, args.seq_len)


@smp.step
def train_step(model: nn.Module, ids: torch.Tensor) -> torch.Tensor:
    loss = model(input_ids=ids, labels=ids)["loss"]
    model.backward(loss)
    return loss


def main() -> None:
    args = arguments()
    smp.init()
    torch.manual_seed(0)  # the same weights on every rank, where they are not read
    module = make_model(args)
    smp.set_tensor_parallelism(module, smp.tp_size() > 1)
    model = smp.DistributedModel(module)
    if args.checkpointing == "each":
        model.gradient_checkpointing_enable()
    optimizer = smp.DistributedOptimizer(torch.optim.AdamW(model.parameters(), lr=args.learning_rate))
    loader = smp.data.DataLoader(
        torch.utils.data.TensorDataset(samples(args)), batch_size=args.batch_size, shuffle=True, drop_last=True
    )

    kept: dict[str, list[float]] = {"losses": []}
    progress = smp.auto_resume(
        model, optimizer, folder=args.checkpoint_dir, every=args.save_every or None, user_content=kept
    )
    batches = endless(loader)
    model.train()
    for step in progress.steps(args.steps):
        (ids,) = next(batches)
        optimizer.zero_grad()
        loss = train_step(model, ids.to(smp.state.device))
        optimizer.step()
        mine = float(loss.reduce_mean())
        kept["losses"].append(sum(smp.allgather(mine, smp.DP_GROUP)) / smp.dp_size())
        if smp.rank() == 0:
            print(f"step {step + 1}: loss {kept['losses'][-1]:.4f}", flush=True)

    model.save_pretrained(args.model_dir)  # on every rank; whole, for from_pretrained anywhere
    if smp.rank() == 0:
        Path(args.model_dir, "losses.json").write_text(json.dumps(kept["losses"]))
    smp.barrier()


def endless(loader: Any) -> Any:
    """Yield the batches of one epoch after the other, beginning where the loader is."""
    while True:
        yield from loader
        loader.set_epoch(loader.epoch + 1)


if __name__ == "__main__":
    main()
