"""Trains a model of Transformers with random tokens, as a script of a cluster does; ``rehearsals.py`` rehearses it."""

from __future__ import annotations

import argparse

import torch
from transformers import AutoModelForCausalLM, GPT2Config, GPTNeoXConfig

import smdistributed.modelparallel.torch as smp


def config_of(given: argparse.Namespace) -> GPT2Config | GPTNeoXConfig:
    """Return the configuration of a family, in a size."""
    if given.family == "gpt2":
        return GPT2Config(
            vocab_size=given.vocabulary,
            n_positions=given.sequence,
            n_embd=given.hidden,
            n_layer=given.layers,
            n_head=given.heads,
            use_cache=False,
        )
    return GPTNeoXConfig(
        vocab_size=given.vocabulary,
        max_position_embeddings=given.sequence,
        hidden_size=given.hidden,
        intermediate_size=4 * given.hidden,
        num_hidden_layers=given.layers,
        num_attention_heads=given.heads,
        use_cache=False,
    )


@smp.step
def train_step(model: torch.nn.Module, ids: torch.Tensor) -> torch.Tensor:
    """Run forward and backward of a microbatch of tokens, ``[batch, sequence]``."""
    loss = model(input_ids=ids, labels=ids)["loss"]
    model.backward(loss)
    return loss


def main() -> None:
    """Train until the process is stopped."""
    options = argparse.ArgumentParser()
    options.add_argument("--family", choices=("gpt2", "gpt_neox"), default="gpt2")
    for name in ("layers", "hidden", "heads", "vocabulary", "sequence", "batch"):
        options.add_argument(f"--{name}", type=int, required=True)
    given = options.parse_args()
    smp.init()
    with smp.tensor_parallelism(enabled=smp.tp_size() > 1):
        module = AutoModelForCausalLM.from_config(config_of(given))
    model = smp.DistributedModel(module)
    for module in model.get_module().modules():
        if type(module).__name__ in ("GPT2Block", "GPTNeoXLayer", "DistributedTransformerLayer"):
            smp.set_activation_checkpointing(module)
    optimizer = smp.DistributedOptimizer(torch.optim.AdamW(model.parameters(), lr=1e-4))
    device = torch.device("cuda", smp.local_rank())
    while True:
        ids = torch.randint(given.vocabulary, (given.batch, given.sequence), device=device)
        optimizer.zero_grad()
        train_step(model, ids)
        optimizer.step()


if __name__ == "__main__":
    main()
