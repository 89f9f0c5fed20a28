"""Fine-tunes a small T5 or Falcon to write words backwards, and lets it write some at the end of each epoch.

    python entrypoints/train_generate.py --sm-model-dir FOLDER --model t5 --epochs 2

The same script for every strategy: it asks for its replica and for the model's own ``generate()``. It needs no download: the
model is made from a configuration and a seed, and the words are drawn.
"""

from __future__ import annotations

import argparse
import json
import os
from pathlib import Path
from typing import Any

import torch
import transformers as hf

import smdistributed.modelparallel.torch as smp

PAD, END, START, FIRST = 0, 1, 2, 3
LETTERS, LENGTH, HELD_OUT = 12, 5, 8


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument(
        "--sm-model-dir", default=os.environ.get("SM_MODEL_DIR", "model"), help="where samples are written"
    )
    parser.add_argument("--model", choices=("t5", "falcon"), default="t5", help="default: t5")
    parser.add_argument("--epochs", type=int, default=2, help="default: 2")
    parser.add_argument("--steps", type=int, default=40, help="optimizer steps of an epoch (default: 40)")
    parser.add_argument("--batch", type=int, default=16, help="words of a step, over all replicas (default: 16)")
    return parser.parse_known_args()[0]


def t5() -> Any:
    """Make a model like Flan-T5 with smaller first weights: with its own, rounding grows so fast that no two sums agree."""
    sizes = {"d_model": 64, "d_kv": 16, "d_ff": 128, "num_layers": 2, "num_heads": 4, "dropout_rate": 0.0}
    ways = {"feed_forward_proj": "gated-gelu", "tie_word_embeddings": False, "initializer_factor": 0.3}
    tokens = {"pad_token_id": PAD, "eos_token_id": END, "decoder_start_token_id": START}
    return hf.T5ForConditionalGeneration(hf.T5Config(vocab_size=FIRST + LETTERS, **sizes, **ways, **tokens))


def falcon() -> Any:
    sizes = {"hidden_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4, "new_decoder_architecture": True}
    still = {"hidden_dropout": 0.0, "attention_dropout": 0.0, "num_kv_heads": 4}
    tokens = {"pad_token_id": PAD, "eos_token_id": END, "bos_token_id": START}
    return hf.FalconForCausalLM(hf.FalconConfig(vocab_size=FIRST + LETTERS, **sizes, **still, **tokens))


def words(count: int, seed: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Return words, and the same backwards with an end, ``[count, letters]`` each."""
    generator = torch.Generator().manual_seed(seed)
    found = torch.randint(FIRST, FIRST + LETTERS, (count, LENGTH), generator=generator)
    return found, torch.cat([found.flip(1), torch.full((count, 1), END)], 1)


def inputs(name: str, given: torch.Tensor, wanted: torch.Tensor) -> dict[str, torch.Tensor]:
    """Return the training inputs: an encoder's input and labels, or one sequence; only its second half counts."""
    if name == "t5":
        return {"input_ids": given, "labels": wanted}
    prompt = prompts(name, given)
    ignored = torch.full_like(prompt, -100)
    return {"input_ids": torch.cat([prompt, wanted], 1), "labels": torch.cat([ignored, wanted], 1)}


def prompts(name: str, given: torch.Tensor) -> torch.Tensor:
    """Return the prompts that the model continues."""
    return given if name == "t5" else torch.cat([given, torch.full((len(given), 1), START)], 1)


def joined(found: list[dict[str, Any]]) -> dict[str, Any]:
    """Return the results of all replicas in an epoch, and how many words are right."""
    whole = {name: [row for each in found for row in each[name]] for name in ("wanted", "greedy", "sampled")}
    right = sum(text == word for text, word in zip(whole["greedy"], whole["wanted"], strict=True))
    return {"loss": sum(each["loss"] for each in found) / len(found), "right": right, **whole}


@smp.step
def train_step(model: Any, batch: dict[str, torch.Tensor]) -> torch.Tensor:
    loss = model(**batch).loss
    model.backward(loss)
    return loss


def main() -> None:
    args = arguments()
    smp.init()
    device = smp.state.device
    # Ranks of a tensor parallel group with a common batch are one replica.
    common = smp.state.cfg.prescaled_batch
    replica, replicas = (smp.rdp_rank(), smp.rdp_size()) if common else (smp.dp_rank(), smp.dp_size())
    torch.manual_seed(0)
    with smp.model_creation(tensor_parallelism=smp.tp_size() > 1):
        model = t5() if args.model == "t5" else falcon()
    model = smp.DistributedModel(model)
    optimizer = smp.DistributedOptimizer(torch.optim.AdamW(model.parameters(), lr=2e-3))

    epochs = []
    for epoch in range(args.epochs):
        model.train()
        for step in range(args.steps):
            pair = words(args.batch, seed=1000 * epoch + step)
            given, wanted = (part.chunk(replicas)[replica].to(device) for part in pair)
            optimizer.zero_grad()
            loss = train_step(model, inputs(args.model, given, wanted)).reduce_mean()
            optimizer.step()

        model.eval()
        given, wanted = (part.chunk(replicas)[replica].to(device) for part in words(HELD_OUT, seed=10**6))
        prompt = prompts(args.model, given)
        options = {"attention_mask": torch.ones_like(prompt), "max_new_tokens": LENGTH + 1}
        torch.manual_seed(epoch)
        written = {
            "greedy": model.generate(prompt, **options, do_sample=False),
            "sampled": model.generate(prompt, **options, do_sample=True),
        }
        # A decoder's text begins with a mark, or with the prompt.
        skip = 1 if args.model == "t5" else prompt.shape[1]
        mine = {"loss": float(loss), "wanted": wanted.tolist()}
        mine |= {way: tokens[:, skip:].tolist() for way, tokens in written.items()}
        epochs.append(joined(smp.allgather(mine, smp.RDP_GROUP if common else smp.DP_GROUP)))
        if smp.rank() == 0:
            print(f"epoch {epoch + 1}: {epochs[-1]['right']} of {HELD_OUT} words are right", flush=True)
    if smp.rank() == 0:
        folder = Path(args.sm_model_dir)
        folder.mkdir(parents=True, exist_ok=True)
        (folder / "samples.json").write_text(json.dumps(epochs))


if __name__ == "__main__":
    main()
