"""What the scripts of this folder share: a process group, a small language model, samples, and a loader with a sampler."""

import torch
import torch.distributed as dist
from torch import nn
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset


def start(seed=0):
    dist.init_process_group("gloo")
    torch.manual_seed(seed)
    return dist.get_rank(), dist.get_world_size()


class Net(nn.Module):
    def __init__(self, vocabulary=33, width=16, tied=False, norm=False):
        super().__init__()
        self.embed = nn.Embedding(vocabulary, width)
        self.mlp = nn.Sequential(nn.Linear(width, 2 * width), nn.GELU(), nn.Linear(2 * width, width))
        self.norm = nn.BatchNorm1d(width) if norm else nn.LayerNorm(width)
        self.head = nn.Linear(width, vocabulary, bias=False)
        if tied:
            self.head.weight = self.embed.weight

    def forward(self, ids):
        hidden = self.embed(ids)
        hidden = hidden + self.mlp(hidden)
        hidden = self.norm(hidden.flatten(0, 1)).view_as(hidden)
        return self.head(hidden)


def dataset(count=64, length=6, ignored=False):
    generator = torch.Generator().manual_seed(1)
    ids = torch.randint(32, (count, length + 1), generator=generator)
    targets = ids[:, 1:].clone()
    if ignored:  # samples have 1 to 6 tokens
        lengths = torch.randint(1, length + 1, (count, 1), generator=generator)
        targets[torch.arange(length)[None] >= lengths] = -100
    return TensorDataset(ids[:, :-1], targets)


def loader(samples, batch_size=4):
    return DataLoader(samples, batch_size=batch_size, sampler=DistributedSampler(samples), drop_last=True)


def cross_entropy(logits, targets, reduction="mean"):
    return nn.functional.cross_entropy(logits.flatten(0, 1), targets.flatten(), reduction=reduction)
