"""Version 2 of the library: a small transformer learns to go on counting; split, sharded, with checkpoints in the background.

Arguments: ``--steps``, ``--batch_size`` of each replica, ``--save_every`` steps. A job that starts again goes on from its newest
checkpoint.
"""

import argparse
import functools
import os
from pathlib import Path

import torch
import torch.distributed as dist
import torch.sagemaker as tsm
from torch import nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import (
    apply_activation_checkpointing,
    checkpoint_wrapper,
    offload_wrapper,
)
from torch.distributed.fsdp import FullStateDictConfig, FullyShardedDataParallel, StateDictType
from torch.distributed.fsdp.wrap import transformer_auto_wrap_policy
from torch.sagemaker.checkpoint.utils import limit_num_subdirs
from torch.sagemaker.distributed.checkpoint.state_dict_loader import load
from torch.sagemaker.distributed.checkpoint.state_dict_saver import async_save, maybe_finalize_async_calls
from torch.sagemaker.grad_norm import clip_grad_norm_
from torch.sagemaker.tensor_parallel.transformer import TransformerLayer

NUMBERS, LENGTH, WIDTH = 32, 16, 64


class Block(nn.Module):
    """A layer of the transformer."""

    def __init__(self):
        super().__init__()
        self.norm_1, self.norm_2 = nn.LayerNorm(WIDTH), nn.LayerNorm(WIDTH)
        self.attention = nn.MultiheadAttention(WIDTH, 4, batch_first=True)
        self.up, self.down = nn.Linear(WIDTH, 4 * WIDTH), nn.Linear(4 * WIDTH, WIDTH)

    def forward(self, x):
        """Return the activations of the next layer."""
        later = torch.ones(x.shape[1], x.shape[1], dtype=torch.bool, device=x.device).triu(1)
        y = self.norm_1(x)
        x = x + self.attention(y, y, y, attn_mask=later, need_weights=False)[0]
        return x + self.down(torch.relu(self.up(self.norm_2(x))))


class Counter(nn.Module):
    """A transformer that predicts the next number."""

    def __init__(self):
        super().__init__()
        self.numbers, self.positions = nn.Embedding(NUMBERS, WIDTH), nn.Embedding(LENGTH, WIDTH)
        self.blocks = nn.ModuleList(Block() for _ in range(2))
        self.head = nn.Linear(WIDTH, NUMBERS)

    def forward(self, ids):
        """Return scores of all numbers for each place."""
        x = self.numbers(ids) + self.positions.weight
        for block in self.blocks:
            x = block(x)
        return self.head(x)


def draw(step, replica, rows):
    """Draw rows of numbers with a common difference; the last column is to be predicted."""
    generator = torch.Generator().manual_seed(1000 * step + replica)
    first, difference = torch.randint(NUMBERS, (2, rows, 1), generator=generator)
    return (first + difference * torch.arange(LENGTH + 1)) % NUMBERS


def sharded_state(model, optimizer):
    with FullyShardedDataParallel.state_dict_type(model, StateDictType.SHARDED_STATE_DICT):
        return {"model": model.state_dict(), "optimizer": FullyShardedDataParallel.optim_state_dict(model, optimizer)}


def resume(folder, model, optimizer):
    """Load the newest checkpoint, and return its step; 0 if there is none."""
    saved = [int(path.parents[1].name.split("-")[1]) for path in folder.glob(f"step-*/{part()}/.metadata")]
    if not saved:
        return 0
    step = max(saved)
    # The optimizer has no state before its first update; this one gives it the tensors that are loaded into.
    model(draw(0, 0, 1)[:, :-1].to(tsm.state.joined.device)).mean().mul(0).backward()
    optimizer.step()
    optimizer.zero_grad()
    state = sharded_state(model, optimizer)
    load(state, checkpoint_id=folder / f"step-{step}" / part(), process_group=model.process_group)
    with FullyShardedDataParallel.state_dict_type(model, StateDictType.SHARDED_STATE_DICT):
        model.load_state_dict(state["model"])
        optimizer.load_state_dict(
            FullyShardedDataParallel.optim_state_dict_to_load(model, optimizer, state["optimizer"])
        )
    return step


def part():
    """Return the name of this rank's folder: tensor parallel ranks have other parts of the model, and save them apart."""
    return f"tp{tsm.state.tp_size}-{tsm.state.tp_rank}"


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=100)
    parser.add_argument("--batch_size", type=int, default=32)
    parser.add_argument("--save_every", type=int, default=50)
    args, _ = parser.parse_known_args()  # the platform adds --mp_parameters

    dist.init_process_group("nccl" if torch.cuda.is_available() else "gloo")
    if torch.cuda.is_available():
        torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
    tsm.init()
    torch.manual_seed(0)
    policy = functools.partial(transformer_auto_wrap_policy, transformer_layer_cls={TransformerLayer})
    model = FullyShardedDataParallel(
        tsm.transform(Counter()),
        auto_wrap_policy=policy,
        use_orig_params=True,
        device_id=tsm.state.joined.device,
    )
    apply_activation_checkpointing(
        model, checkpoint_wrapper_fn=checkpoint_wrapper, check_fn=lambda part: isinstance(part, TransformerLayer)
    )
    offloaded = offload_wrapper(model)
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    folder = Path(os.environ.get("SMP_CHECKPOINT_DIR", "/opt/ml/checkpoints"))
    begun = resume(folder, model, optimizer)
    replica, rank = tsm.state.rank // tsm.state.tp_size, tsm.state.rank
    saves = tsm.state.ranker.get_rep_rank(rank) == 0  # one of the copies

    loss = torch.zeros(())
    for step in range(begun + 1, args.steps + 1):
        rows = draw(step, replica, args.batch_size).to(tsm.state.joined.device)
        logits = offloaded(rows[:, :-1])
        loss = nn.functional.cross_entropy(logits.flatten(0, 1), rows[:, 1:].flatten())
        optimizer.zero_grad()
        loss.backward()
        clip_grad_norm_(model, 1.0)
        optimizer.step()
        if rank == 0 and step % 25 == 0:
            print(f"step {step}: loss {loss.item():.3f}", flush=True)
        if step % args.save_every == 0 and saves:
            state = sharded_state(model, optimizer)
            async_save(state, checkpoint_id=folder / f"step-{step}" / part(), process_group=model.process_group)
            limit_num_subdirs(folder, 2, regex=r"step-\d+", log=rank == 0)
    if saves:
        maybe_finalize_async_calls(blocking=True)

    with FullyShardedDataParallel.state_dict_type(
        model, StateDictType.FULL_STATE_DICT, FullStateDictConfig(rank0_only=True)
    ):
        state = model.state_dict()
    if rank == 0:
        torch.save(state, os.path.join(os.environ.get("SM_MODEL_DIR", "."), "model.pt"))
        print(f"trained from step {begun} to {args.steps}: loss {loss.item():.3f}", flush=True)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
