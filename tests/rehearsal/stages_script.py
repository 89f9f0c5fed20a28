"""Trains a model whose four stages are set by hand; one may be wide, without parameters, or left out of the forward pass."""

import argparse

import torch
from torch import nn

import smdistributed.modelparallel.torch as smp

HIDDEN, BATCH = 64, 8


class Model(nn.Module):
    def __init__(self, given):
        super().__init__()
        self.left_out = given.left_out
        self.parts = nn.ModuleList()
        for stage in range(4):
            wide = HIDDEN * (64 if stage == given.wide else 1)
            with smp.partition(stage):
                if stage == given.empty:
                    self.parts.append(nn.Sequential(nn.ReLU(), nn.Dropout(0.1)))
                else:
                    self.parts.append(nn.Sequential(nn.Linear(HIDDEN, wide), nn.ReLU(), nn.Linear(wide, HIDDEN)))

    def forward(self, x):
        for stage, part in enumerate(self.parts):
            if stage != self.left_out:
                x = part(x)
        return x


@smp.step
def train_step(model, x):
    loss = model(x).square().mean()
    model.backward(loss)
    return loss


def main():
    options = argparse.ArgumentParser()
    for name in ("wide", "empty", "left-out"):
        options.add_argument(f"--{name}", type=int)
    given = options.parse_args()
    smp.init()
    model = smp.DistributedModel(Model(given))
    optimizer = smp.DistributedOptimizer(torch.optim.AdamW(model.parameters(), lr=1e-3))
    for _ in range(10):
        x = torch.randn(BATCH, HIDDEN, device=torch.device("cuda", smp.local_rank()))
        optimizer.zero_grad()
        train_step(model, x)
        optimizer.step()


if __name__ == "__main__":
    main()
