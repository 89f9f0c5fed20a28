import numpy as np
import torch
from common import Net, cross_entropy, start
from torch.nn.parallel import DistributedDataParallel
from torch.optim import AdamW

rank, world = start()
tokens = np.random.default_rng(1).integers(32, size=4096)
model = DistributedDataParallel(Net())
optimizer = AdamW(model.parameters(), lr=1e-2)
torch.manual_seed(7)


def get_batch(split="train", size=4, length=6):
    places = torch.randint(len(tokens) - length - 1, (size,))
    rows = torch.stack([torch.from_numpy(tokens[place : place + length + 1]) for place in places.tolist()])
    return rows[:, :-1], rows[:, 1:]


@torch.no_grad()
def evaluate():
    return float(cross_entropy(model.module(get_batch("val")[0]), get_batch("val")[1]))


ids, targets = get_batch()
for _ in range(9):
    optimizer.zero_grad()
    cross_entropy(model(ids), targets).backward()
    ids, targets = get_batch()  # the next one, while a GPU would be busy
    optimizer.step()
