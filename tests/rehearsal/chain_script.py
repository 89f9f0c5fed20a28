"""A chain of equal modules, one on each stage; how long they take is said by a timeline."""

import torch
from torch import nn

import smdistributed.modelparallel.torch as smp

MICROBATCHES = 8


class Link(nn.Module):
    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(torch.ones(4))

    def forward(self, x):
        return torch.tanh(x * self.weight)


class Chain(nn.Module):
    def __init__(self, stages):
        super().__init__()
        self.links = nn.ModuleList()
        for stage in range(stages):
            with smp.partition(stage):
                self.links.append(Link())

    def forward(self, x):
        for link in self.links:
            x = link(x)
        return x


@smp.step
def train_step(model, x):
    loss = model(x).sum()
    model.backward(loss)
    return loss


@smp.step
def evaluate(model, x):
    return model(x).sum()


smp.init()
model = smp.DistributedModel(Chain(smp.pp_size()))
optimizer = smp.DistributedOptimizer(torch.optim.SGD(model.parameters(), lr=0.1))
for _ in range(10):
    optimizer.zero_grad()
    train_step(model, torch.ones(MICROBATCHES, 4))
    optimizer.step()
    with torch.no_grad():
        evaluate(model, torch.ones(MICROBATCHES, 4))
