"""Trains a small GPT, MLP or CNN for some steps, as users write it; what is rehearsed and run."""

import argparse
import os

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn

import smdistributed.modelparallel.torch as smp

VOCABULARY, SEQUENCE, BATCH = 512, 64, 8


class Attention(nn.Module):
    def __init__(self, hidden, heads):
        super().__init__()
        self.heads = heads
        self.qkv = nn.Linear(hidden, 3 * hidden)
        self.out = nn.Linear(hidden, hidden)

    def forward(self, x):
        batch, seq, hidden = x.shape
        q, k, v = self.qkv(x).view(batch, seq, 3, self.heads, hidden // self.heads).permute(2, 0, 3, 1, 4)
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        return self.out(y.transpose(1, 2).reshape(batch, seq, hidden))


class Block(nn.Module):
    def __init__(self, hidden, heads):
        super().__init__()
        self.norm_1, self.norm_2 = nn.LayerNorm(hidden), nn.LayerNorm(hidden)
        self.attention = Attention(hidden, heads)
        self.mlp = nn.Sequential(nn.Linear(hidden, 4 * hidden), nn.GELU(), nn.Linear(4 * hidden, hidden))

    def forward(self, x):
        x = x + self.attention(self.norm_1(x))
        return x + self.mlp(self.norm_2(x))


class GPT(nn.Module):
    def __init__(self, layers, hidden, heads):
        super().__init__()
        self.tokens, self.positions = nn.Embedding(VOCABULARY, hidden), nn.Embedding(SEQUENCE, hidden)
        self.blocks = nn.Sequential(*[Block(hidden, heads) for _ in range(layers)])
        self.norm = nn.LayerNorm(hidden)
        self.head = nn.Linear(hidden, VOCABULARY, bias=False)

    def forward(self, ids):
        x = self.tokens(ids) + self.positions(torch.arange(ids.shape[1], device=ids.device))
        return self.head(self.norm(self.blocks(x)))


class MLP(nn.Module):
    def __init__(self, layers, hidden):
        super().__init__()
        self.tokens = nn.Embedding(VOCABULARY, hidden)
        self.blocks = nn.Sequential(*[nn.Sequential(nn.Linear(hidden, hidden), nn.ReLU()) for _ in range(layers)])
        self.head = nn.Linear(hidden, VOCABULARY)

    def forward(self, ids):
        return self.head(self.blocks(self.tokens(ids)))


class CNN(nn.Module):
    """Convolutions over the embedded tokens, with skips and running statistics."""

    def __init__(self, layers, hidden):
        super().__init__()
        self.tokens = nn.Embedding(VOCABULARY, hidden)
        self.blocks = nn.ModuleList(
            nn.Sequential(nn.Conv1d(hidden, hidden, 3, padding=1), nn.BatchNorm1d(hidden), nn.ReLU())
            for _ in range(layers)
        )
        self.head = nn.Linear(hidden, VOCABULARY)

    def forward(self, ids):
        x = self.tokens(ids).transpose(1, 2)
        for block in self.blocks:
            x = x + block(x)
        return self.head(x.transpose(1, 2))


@smp.step
def train_step(model, ids, targets):
    loss = F.cross_entropy(model(ids).flatten(0, 1).float(), targets.flatten())
    model.backward(loss)
    return loss


def main():
    options = argparse.ArgumentParser()
    options.add_argument("--model", default="gpt")
    options.add_argument("--layers", type=int, default=4)
    options.add_argument("--hidden", type=int, default=128)
    options.add_argument("--checkpoint", action="store_true")
    options.add_argument("--tensor", action="store_true")
    options.add_argument("--wrong", default="")
    given = options.parse_args()
    smp.init({"pipeline_parallel_degree": 2, "ddp": True} if given.wrong == "degree" else {})
    device = torch.device("cuda", smp.local_rank())
    torch.manual_seed(1)
    made = {
        "gpt": lambda: GPT(given.layers, given.hidden, 4),
        "mlp": lambda: MLP(given.layers, given.hidden),
        "cnn": lambda: CNN(given.layers, given.hidden),
    }
    with smp.tensor_parallelism(enabled=given.tensor):
        module = made[given.model]()
    model = smp.DistributedModel(module)
    if given.checkpoint:
        for block in model.module.blocks:
            smp.set_activation_checkpointing(block)
    optimizer = smp.DistributedOptimizer(torch.optim.AdamW(model.parameters(), lr=1e-3))
    data = torch.randint(0, VOCABULARY, (64, SEQUENCE + 1))
    for step in range(10):
        rows = torch.randperm(len(data))[: BATCH if given.wrong != "batch" else BATCH - 1]
        ids = data[rows].to(device)
        optimizer.zero_grad()
        loss = train_step(model, ids[:, :-1], ids[:, 1:])
        if given.wrong == "values":
            model.module.head.weight.nonzero()
        optimizer.step()
        if given.wrong == "barrier" and smp.rank() == 0:
            smp.barrier()
        if given.wrong == "sum" and smp.rank() == 0:
            dist.all_reduce(torch.ones(1))
        if given.wrong == "save" and smp.dp_rank() == 0:
            smp.save_checkpoint(os.environ["SMP_CHECKPOINT_DIR"], tag="last", model=model, optimizer=optimizer)
        value = loss.reduce_mean().item()
        if smp.rank() == 0:
            print(f"step {step}: {value:.3f}", flush=True)


if __name__ == "__main__":
    main()
