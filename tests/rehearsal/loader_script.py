"""Trains on files of a channel, which are not on the machine where it is rehearsed."""

import argparse
import os

import torch
from torch import nn
from torch.utils.data import DataLoader, Dataset
from torch.utils.data.distributed import DistributedSampler

import smdistributed.modelparallel.torch as smp


class Images(Dataset):
    def __init__(self, folder):
        with open(os.path.join(folder, "index.txt")) as file:
            self.names = file.read().split()

    def __len__(self):
        return len(self.names)

    def __getitem__(self, index):
        return torch.load(self.names[index])


@smp.step
def train_step(model, images, labels):
    loss = nn.functional.cross_entropy(model(images), labels)
    model.backward(loss)
    return loss


def main():
    options = argparse.ArgumentParser()
    options.add_argument("--batch", type=int, default=4)
    options.add_argument("--data", default=os.environ["SM_CHANNEL_TRAIN"])
    given = options.parse_args()
    smp.init()
    images = Images(given.data)
    sampler = DistributedSampler(images, num_replicas=smp.dp_size(), rank=smp.dp_rank(), drop_last=True)
    loader = DataLoader(images, batch_size=given.batch, sampler=sampler, drop_last=True)
    parts = [nn.Conv2d(3, 8, 3), nn.ReLU(), nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(8, 10)]
    model = smp.DistributedModel(nn.Sequential(*parts))
    optimizer = smp.DistributedOptimizer(torch.optim.SGD(model.parameters(), lr=1e-2))
    for batch in loader:
        optimizer.zero_grad()
        loss = train_step(model, batch["image"], batch["label"])
        optimizer.step()
        print(f"loss {loss.reduce_mean().item():.3f}", flush=True)


if __name__ == "__main__":
    main()
